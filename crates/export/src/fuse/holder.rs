//! The holder: a process that keeps a mount while the daemon that serves it is killed and started again.
//!
//! ```text
//! holder:  mount, answer INIT ─▶ listen ─▶ lent to one daemon ──its socket closes──▶ free ─▶ lent again ... ─▶ stop: unmounted
//! daemon:            attach ◀── descriptors of the connection, memory of the requests, what INIT agreed on
//! ```
//! It keeps *every* descriptor of the connection: requests that were read through a descriptor fail once all copies of
//! it are closed. It reads none of them after INIT, and touches no request.
//!
//! On the socket (sequenced packets, one JSON object each, at most 8 KiB) the daemon asks once and is answered
//! once; descriptors come with the answer. Only root is answered.
//!
//! Owns: the mount, the socket's file.

mod process;

pub use process::{HolderOptions, run};

use crate::ExportError;
use aenv_sys::fuse::slots;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Most descriptors of one connection, and so most workers.
pub const MAX_WORKERS: usize = 64;
/// Longest message.
const MESSAGE_BYTES: usize = 8192;
/// Version of the messages and of what the memory holds.
const VERSION: u32 = 1;
/// How long a peer may take for its message.
const PEER_PATIENCE: Duration = Duration::from_secs(2);

/// What a daemon asks for.
#[derive(Debug, Serialize, Deserialize)]
struct Question {
    version: u32,
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Action {
    /// To serve the mount.
    Attach,
    /// To unmount and end.
    Stop {
        /// Though it is in use: whoever uses it gets errors.
        force: bool,
    },
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    /// Comes with the memory and then the descriptors of the connection.
    Attached {
        mount: PathBuf,
        slots: u32,
        devices: usize,
        /// Nobody was attached before.
        fresh: bool,
    },
    Stopped,
    /// Another daemon is attached.
    Busy {
        pid: i32,
    },
    Refused {
        reason: String,
    },
}

/// What a daemon holds while it serves a mount.
#[derive(Debug)]
pub(super) struct Attachment {
    mount: PathBuf,
    slots: u32,
    fresh: bool,
    memory: Option<OwnedFd>,
    devices: Vec<OwnedFd>,
    /// Tells the holder, by being closed, that this process is gone.
    socket: OwnedFd,
}

impl Attachment {
    pub(super) fn mount(&self) -> &Path {
        &self.mount
    }

    pub(super) fn slots(&self) -> u32 {
        self.slots
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// A descriptor for notifications.
    pub(super) fn connection(&self) -> Result<OwnedFd, ExportError> {
        self.devices[0].try_clone().map_err(|source| failed("copy a descriptor of the FUSE mount", source))
    }

    /// Closed by the other side when the holder is gone.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// The memory of the requests, locked for this process; once.
    pub(super) fn take_memory(&mut self) -> Result<OwnedFd, ExportError> {
        let missing = || unavailable("the memory of its requests was taken already".to_owned());
        self.memory.take().ok_or_else(missing)
    }

    /// The descriptors of the connection, at least one, and the socket, to be closed when they are not used any more.
    pub(super) fn into_parts(self) -> (Vec<OwnedFd>, OwnedFd) {
        (self.devices, self.socket)
    }
}

/// Attaches to the holder that listens at `socket`.
pub(super) fn attach(socket: &Path, patience: Duration) -> Result<Attachment, ExportError> {
    let deadline = Instant::now() + patience;
    loop {
        let attached = try_attach(socket);
        match attached {
            Err(Refusal::Later(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(Refusal::Later(reason)) => return Err(unavailable(reason)),
            Err(Refusal::Final(error)) => return Err(error),
            Ok(attachment) => return Ok(attachment),
        }
    }
}

/// Ends the holder that listens at `socket`, and its mount. With `force` also when the mount is in use: whoever uses it
/// gets errors. One that does not run is no error.
///
/// # Errors
/// When the mount is in use, or the holder does not answer.
pub fn stop(socket: &Path, force: bool) -> Result<(), ExportError> {
    let connection = match connect(socket) {
        Err(error) if is_nobody(&error) => return Ok(()),
        connected => {
            connected.map_err(|source| failed(format!("reach the holder at {}", socket.display()), source))?
        }
    };
    match ask(&connection, Action::Stop { force }) {
        Ok((Answer::Stopped, _)) => Ok(()),
        Ok((Answer::Refused { reason }, _)) => Err(unavailable(reason)),
        Ok((other, _)) => {
            Err(unavailable(format!("the holder gave an answer to another question: {other:?}")))
        }
        Err(source) => Err(failed(format!("stop the holder at {}", socket.display()), source)),
    }
}

enum Refusal {
    Later(String),
    Final(ExportError),
}

fn try_attach(socket: &Path) -> Result<Attachment, Refusal> {
    let place = socket.display();
    let connection = match connect(socket) {
        Err(error) if is_nobody(&error) => {
            return Err(Refusal::Later(format!("no holder listens at {place}: start it first")));
        }
        connected => connected
            .map_err(|source| Refusal::Final(failed(format!("reach the holder at {place}"), source)))?,
    };
    let (answer, descriptors) = ask(&connection, Action::Attach)
        .map_err(|source| Refusal::Final(failed(format!("attach to the holder at {place}"), source)))?;
    match answer {
        Answer::Attached { mount, slots, devices, fresh } => {
            let mut descriptors = descriptors.into_iter();
            let memory = descriptors.next();
            let found: Vec<_> = descriptors.collect();
            if found.is_empty() || found.len() != devices {
                let reason = format!("the holder at {place} sent {} of {devices} descriptors", found.len());
                return Err(Refusal::Final(unavailable(reason)));
            }
            let attachment = Attachment { mount, slots, fresh, memory, devices: found, socket: connection };
            wait_for_memory(attachment)
        }
        Answer::Busy { pid } => {
            Err(Refusal::Later(format!("process {pid} serves the mount of the holder at {place}")))
        }
        Answer::Refused { reason } => Err(Refusal::Final(unavailable(reason))),
        Answer::Stopped => Err(Refusal::Final(unavailable(format!("the holder at {place} was stopped")))),
    }
}

/// The earlier daemon's socket may be closed a moment before its lock of the memory is gone.
fn wait_for_memory(attachment: Attachment) -> Result<Attachment, Refusal> {
    if let Some(memory) = &attachment.memory {
        let deadline = Instant::now() + PEER_PATIENCE;
        while let Err(source) = slots::lock(memory.as_fd()) {
            if source.kind() != io::ErrorKind::WouldBlock {
                return Err(Refusal::Final(failed("lock the memory of requests", source)));
            }
            if Instant::now() > deadline {
                return Err(Refusal::Later("another process uses the memory of requests".to_owned()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(attachment)
}

fn connect(socket: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let connection = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&connection, &SocketAddrUnix::new(socket)?)?;
    set_patience(connection.as_fd())?;
    Ok(connection)
}

fn set_patience(socket: BorrowedFd<'_>) -> io::Result<()> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(socket, Timeout::Recv, Some(PEER_PATIENCE))?;
    set_socket_timeout(socket, Timeout::Send, Some(PEER_PATIENCE))?;
    Ok(())
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn ask(connection: &OwnedFd, action: Action) -> io::Result<(Answer, Vec<OwnedFd>)> {
    send(connection.as_fd(), &Question { version: VERSION, action }, &[])?;
    let (answer, descriptors) = receive(connection.as_fd())?;
    let answer = answer.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    Ok((answer, descriptors))
}

/// Sends one message.
fn send(socket: BorrowedFd<'_>, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MESSAGE_BYTES {
        return Err(io::Error::other(format!(
            "a message of {} bytes is longer than {MESSAGE_BYTES}",
            text.len()
        )));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_WORKERS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!(
            "{} descriptors are too many for a message",
            descriptors.len()
        )));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one message; none when the peer has closed.
fn receive<T: for<'de> Deserialize<'de>>(socket: BorrowedFd<'_>) -> io::Result<(Option<T>, Vec<OwnedFd>)> {
    let mut text = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_WORKERS + 1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok((None, descriptors));
    }
    Ok((Some(serde_json::from_slice(&text[..received.bytes])?), descriptors))
}

/// Whether the holder at the other end of an attachment's socket is gone.
pub(super) fn is_gone(socket: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut watched = [PollFd::new(socket, PollFlags::IN)];
    // It has nothing more to say: what can be read is its end. A call that fails tells nothing.
    poll(&mut watched, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

fn unavailable(reason: String) -> ExportError {
    ExportError::Unavailable { way: "FUSE", reason }
}

fn failed(action: impl Into<String>, source: io::Error) -> ExportError {
    ExportError::Io { action: action.into(), source }
}
