//! Opening sockets inside namespaces, many times a second, on one thread.
//!
//! Owns that thread. It visits the namespace of each request and goes back home; if it cannot go back it ends, and the
//! next request starts another one, so no socket is ever opened in a namespace that was not asked for.

use super::{NetworkNamespace, THREAD_NAME, enter, pin_name};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::{io, thread};
use tokio::sync::oneshot;

/// Opens sockets inside pinned namespaces, without moving the caller.
#[derive(Debug, Default)]
pub struct SocketOpener {
    /// To the thread, once there is one.
    requests: Mutex<Option<Sender<Request>>>,
}

#[derive(Debug)]
struct Request {
    pin: PathBuf,
    family: AddressFamily,
    reply: oneshot::Sender<io::Result<TcpStream>>,
}

impl SocketOpener {
    /// An opener; its thread starts with the first request and ends with the opener.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A TCP socket inside the namespace pinned at `pin`: not connected, non-blocking, for the address family of `to`.
    ///
    /// # Errors
    /// `NotFound` when nothing is pinned there (any more), else the system's error.
    pub async fn open_tcp(&self, pin: &Path, to: &std::net::SocketAddr) -> io::Result<TcpStream> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let (reply, answer) = oneshot::channel();
        self.send(Request { pin: pin.to_owned(), family, reply })?;
        answer.await.unwrap_or_else(|_| {
            let message = format!("the thread that opens sockets ended while in {}", pin_name(pin).display());
            Err(io::Error::other(message))
        })
    }

    fn send(&self, request: Request) -> io::Result<()> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let request = match requests.as_ref() {
            None => request,
            Some(thread) => match thread.send(request) {
                Ok(()) => return Ok(()),
                // That thread could not go back home and has ended.
                Err(unsent) => unsent.0,
            },
        };
        let (sender, receiver) = channel();
        let home = NetworkNamespace::of_this_thread()?;
        thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || serve(&home, &receiver))?;
        sender.send(request).map_err(|_| io::Error::other("the thread that opens sockets did not start"))?;
        *requests = Some(sender);
        Ok(())
    }
}

fn serve(home: &NetworkNamespace, requests: &Receiver<Request>) {
    while let Ok(Request { pin, family, reply }) = requests.recv() {
        let opened = NetworkNamespace::open(&pin).and_then(|namespace| {
            enter(namespace.as_fd())?;
            tcp_socket(family)
        });
        // Also after a failure, which may have come after the entry.
        let back = enter(home.as_fd());
        // A caller that no longer waits drops its receiver; the socket is closed with the answer.
        drop(reply.send(opened));
        if back.is_err() {
            return;
        }
    }
}

fn tcp_socket(family: AddressFamily) -> io::Result<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(TcpStream::from(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?))
}
