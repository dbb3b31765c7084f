//! What the holder does: mount, answer INIT, lend.
//!
//! ```text
//! bind ─▶ mount ─▶ INIT ─▶ descriptors, memory ─▶ listen ─▶ { free ◀─▶ lent } ─▶ stop ─▶ unmount, remove the socket
//!   └──────┴────────┴──────────┴─ fails: what was made is undone
//! ```
//! Owns the mount for as long as it runs. Allocates nothing that grows, answers no request but the first, starts nothing.

use super::{Action, Answer, MAX_WORKERS, Question, VERSION, failed, is_nobody, unavailable};
use crate::ExportError;
use aenv_sys::fuse::abi::{self, InitIn, InitOut, ReplyHeader, RequestHeader, init_flags, opcode};
use aenv_sys::fuse::{device, pressure, slots};
use aenv_sys::pages;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use zerocopy::{FromBytes, IntoBytes};

/// Requests that can be in flight or parked at once. Each takes memory only for the data it has.
const SLOTS: u32 = 1024;
/// Requests of the kernel that nobody waits for (read-ahead, asynchronous I/O), at once.
const MAX_BACKGROUND: u16 = 256;
/// What we agree to when the kernel can do it.
const WANTED: u64 = init_flags::ASYNC_READ
    | init_flags::BIG_WRITES
    | init_flags::DO_READDIRPLUS
    | init_flags::READDIRPLUS_AUTO
    | init_flags::ASYNC_DIO
    | init_flags::PARALLEL_DIROPS
    | init_flags::MAX_PAGES
    | init_flags::EXPLICIT_INVAL_DATA
    | init_flags::INIT_EXT
    | init_flags::DIRECT_IO_ALLOW_MMAP;
/// Without these it does not work.
const NEEDED: u64 = init_flags::BIG_WRITES | init_flags::MAX_PAGES;

/// What a holder is started with.
#[derive(Debug, Clone)]
pub struct HolderOptions {
    /// Where daemons reach it; a path of at most 107 bytes.
    pub socket: PathBuf,
    /// Directory that becomes the mount; it exists and nothing is mounted there.
    pub mount: PathBuf,
    /// Descriptors of the connection: the number of threads a daemon serves it with, 2 to [`MAX_WORKERS`].
    pub workers: usize,
}

/// Is the holder, until it is told to stop. To be called by a process of its own, which does nothing else: it begins a
/// session of its own, so that signals to its starter's group do not reach it.
///
/// # Errors
/// [`ExportError::Unavailable`] when the kernel has no FUSE, too old a one, or another holder listens at the socket.
/// Nothing is left behind.
pub fn run(options: &HolderOptions) -> Result<(), ExportError> {
    if !(2..=MAX_WORKERS).contains(&options.workers) {
        return Err(unavailable(format!("{} workers: there must be 2 to {MAX_WORKERS}", options.workers)));
    }
    match rustix::process::setsid() {
        // It leads a session already.
        Err(Errno::PERM) | Ok(_) => {}
        Err(error) => return Err(failed("begin a session", error.into())),
    }
    if let Err(error) = pressure::become_io_flusher().and_then(|()| pressure::set_oom_score(-900)) {
        tracing::warn!("the holder is not protected when memory is short: {error}");
    }
    let listener = Listener::bind(&options.socket)?;
    let lent = Lent::make(options)?;
    rustix::net::listen(&listener.socket, 16)
        .map_err(|error| failed(format!("listen at {}", options.socket.display()), error.into()))?;
    lend(&listener, lent)
}

/// The socket and its file.
struct Listener {
    socket: OwnedFd,
    path: PathBuf,
}

impl Listener {
    fn bind(path: &Path) -> Result<Self, ExportError> {
        let error = |source: io::Error| failed(format!("bind {}", path.display()), source);
        let address = SocketAddrUnix::new(path).map_err(|errno| error(errno.into()))?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|errno| error(errno.into()))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                match super::connect(path) {
                    Err(refused) if is_nobody(&refused) => {}
                    Err(source) => return Err(error(source)),
                    Ok(_) => {
                        return Err(unavailable(format!("another holder listens at {}", path.display())));
                    }
                }
                std::fs::remove_file(path).map_err(error)?;
                rustix::net::bind(&socket, &address).map_err(|errno| error(errno.into()))?;
            }
            bound => bound.map_err(|errno| error(errno.into()))?,
        }
        let listener = Self { socket, path: path.to_owned() };
        // Nobody can connect before it listens.
        rustix::fs::chmodat(CWD, path, Mode::RUSR | Mode::WUSR, rustix::fs::AtFlags::empty())
            .map_err(|errno| error(errno.into()))?;
        Ok(listener)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// What is lent.
struct Lent {
    mount: Mount,
    memory: OwnedFd,
    devices: Vec<OwnedFd>,
    attached_before: bool,
}

/// A mount that ends with this.
struct Mount {
    path: PathBuf,
    mounted: bool,
}

impl Mount {
    fn end(&mut self, force: bool) -> io::Result<()> {
        if self.mounted {
            match device::unmount(&self.path, force) {
                // Somebody else has unmounted it.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
                ended => ended?,
            }
            self.mounted = false;
        }
        Ok(())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = self.end(true) {
            tracing::error!("cannot unmount {}: {error}", self.path.display());
        }
    }
}

impl Lent {
    fn make(options: &HolderOptions) -> Result<Self, ExportError> {
        let path = std::path::absolute(&options.mount)
            .map_err(|source| failed(format!("find {}", options.mount.display()), source))?;
        let place = path.display();
        device::unmount_dead(&path)
            .map_err(|source| failed(format!("unmount what is dead at {place}"), source))?;
        refuse_mounted(&path)?;
        let connection = match device::open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let reason = format!("there is no {}: load the kernel's module fuse", device::DEVICE);
                return Err(unavailable(reason));
            }
            opened => opened.map_err(|source| failed(format!("open {}", device::DEVICE), source))?,
        };
        device::mount(connection.as_fd(), &path, "aenv")
            .map_err(|source| failed(format!("mount FUSE at {place}"), source))?;
        let mount = Mount { path: path.clone(), mounted: true };
        agree(connection.as_fd())?;
        let mut devices = vec![connection];
        while devices.len() < options.workers {
            let another = device::open_another(devices[0].as_fd());
            devices.push(
                another.map_err(|source| failed("open a further descriptor of the FUSE mount", source))?,
            );
        }
        let memory = slots::create(SLOTS).map_err(|source| failed("make memory for requests", source))?;
        Ok(Self { mount, memory, devices, attached_before: false })
    }
}

fn refuse_mounted(path: &Path) -> Result<(), ExportError> {
    let device_of = |path: &Path| {
        rustix::fs::stat(path).map_err(|errno| failed(format!("look at {}", path.display()), errno.into()))
    };
    let parent = path.parent().unwrap_or(path);
    if device_of(path)?.st_dev != device_of(parent)?.st_dev {
        return Err(unavailable(format!("something is mounted at {} already", path.display())));
    }
    Ok(())
}

/// Answers the first request of the connection.
fn agree(connection: BorrowedFd<'_>) -> Result<(), ExportError> {
    let mut buffer =
        pages::Pages::new(2 * slots::DATA_BYTES).map_err(|source| failed("make a buffer", source))?;
    let length = rustix::io::read(connection, &mut buffer[..])
        .map_err(|errno| failed("read the FUSE mount's INIT", errno.into()))?;
    let (header, rest) = RequestHeader::read_from_prefix(&buffer[..length])
        .map_err(|_| unavailable(format!("the kernel's first request has {length} bytes")))?;
    let (offer, _) = InitIn::read_from_prefix(rest)
        .map_err(|_| unavailable(format!("the kernel's INIT has {length} bytes: it is too old")))?;
    let out = answer_init(&header, &offer)?;
    let size = size_of::<ReplyHeader>() + size_of::<InitOut>();
    let mut reply = Vec::with_capacity(size);
    reply.extend(ReplyHeader { length: size as u32, error: 0, unique: header.unique }.as_bytes());
    reply.extend(out.as_bytes());
    rustix::io::write(connection, &reply)
        .map_err(|errno| failed("answer the FUSE mount's INIT", errno.into()))?;
    Ok(())
}

fn answer_init(header: &RequestHeader, offer: &InitIn) -> Result<InitOut, ExportError> {
    if header.opcode != opcode::INIT {
        return Err(unavailable(format!("the kernel began with request {}, not with INIT", header.opcode)));
    }
    if offer.major != abi::KERNEL_VERSION || offer.minor < abi::OLDEST_MINOR_VERSION {
        return Err(unavailable(format!(
            "the kernel speaks FUSE {}.{}: 7.{} or later (Linux 5.4) is needed",
            offer.major,
            offer.minor,
            abi::OLDEST_MINOR_VERSION
        )));
    }
    let offered = u64::from(offer.flags) | u64::from(offer.flags2) << 32;
    let agreed = offered & WANTED;
    if agreed & NEEDED != NEEDED {
        return Err(unavailable(format!("the kernel's FUSE offers {offered:#x}, but {NEEDED:#x} is needed")));
    }
    Ok(InitOut {
        major: abi::KERNEL_VERSION,
        minor: abi::KERNEL_MINOR_VERSION,
        max_readahead: offer.max_readahead,
        flags: agreed as u32,
        flags2: (agreed >> 32) as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND / 4 * 3,
        max_write: slots::DATA_BYTES as u32,
        time_granularity: 1,
        max_pages: (slots::DATA_BYTES / pages::PAGE_BYTES) as u16,
        ..InitOut::default()
    })
}

/// The daemon that serves the mount.
struct Borrower {
    socket: OwnedFd,
    pid: i32,
}

fn lend(listener: &Listener, mut lent: Lent) -> Result<(), ExportError> {
    let mut borrower: Option<Borrower> = None;
    loop {
        let mut watched = vec![PollFd::new(&listener.socket, PollFlags::IN)];
        if let Some(borrower) = &borrower {
            watched.push(PollFd::new(&borrower.socket, PollFlags::IN));
        }
        match poll(&mut watched, None) {
            Err(Errno::INTR) => continue,
            polled => polled.map_err(|errno| failed("wait for daemons", errno.into()))?,
        };
        let called = !watched[0].revents().is_empty();
        // A borrower has nothing more to say: what is to be read is its end.
        if watched.get(1).is_some_and(|socket| !socket.revents().is_empty()) {
            borrower = None;
        }
        if called {
            match serve_one(listener, &mut lent, &mut borrower) {
                Ok(Served::Stopped) => return Ok(()),
                Ok(Served::Answered) => {}
                // One peer that fails does not concern the others.
                Err(error) => tracing::warn!("a daemon could not be answered: {error}"),
            }
        }
    }
}

enum Served {
    Answered,
    Stopped,
}

fn serve_one(listener: &Listener, lent: &mut Lent, borrower: &mut Option<Borrower>) -> io::Result<Served> {
    let peer = rustix::net::accept_with(&listener.socket, SocketFlags::CLOEXEC)?;
    let credentials = rustix::net::sockopt::socket_peercred(&peer)?;
    if !credentials.uid.is_root() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("user {} is not root", credentials.uid.as_raw()),
        ));
    }
    super::set_patience(peer.as_fd())?;
    let (Some(question), _) = super::receive::<Question>(peer.as_fd())? else {
        return Ok(Served::Answered);
    };
    if question.version != VERSION {
        let reason = format!("the holder speaks version {VERSION}, not {}", question.version);
        super::send(peer.as_fd(), &Answer::Refused { reason }, &[])?;
        return Ok(Served::Answered);
    }
    match question.action {
        Action::Attach => {
            if let Some(other) = borrower {
                super::send(peer.as_fd(), &Answer::Busy { pid: other.pid }, &[])?;
                return Ok(Served::Answered);
            }
            let answer = Answer::Attached {
                mount: lent.mount.path.clone(),
                slots: SLOTS,
                devices: lent.devices.len(),
                fresh: !lent.attached_before,
            };
            let descriptors: Vec<_> =
                std::iter::once(lent.memory.as_fd()).chain(lent.devices.iter().map(AsFd::as_fd)).collect();
            super::send(peer.as_fd(), &answer, &descriptors)?;
            lent.attached_before = true;
            *borrower = Some(Borrower { socket: peer, pid: credentials.pid.as_raw_nonzero().get() });
            Ok(Served::Answered)
        }
        Action::Stop { force } => stop(lent, &peer, force),
    }
}

fn stop(lent: &mut Lent, peer: &OwnedFd, force: bool) -> io::Result<Served> {
    if let Err(error) = lent.mount.end(force) {
        let reason = format!("cannot unmount {}: {error}", lent.mount.path.display());
        super::send(peer.as_fd(), &Answer::Refused { reason }, &[])?;
        return Ok(Served::Answered);
    }
    super::send(peer.as_fd(), &Answer::Stopped, &[])?;
    Ok(Served::Stopped)
}

#[cfg(test)]
mod tests;
