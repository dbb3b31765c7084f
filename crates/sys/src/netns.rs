//! Network namespaces: make and pin, open, remove, list, run something inside, open sockets inside.
//!
//! A namespace lives as long as a process, a descriptor or a *pin* holds it. A pin is a file on which the namespace is
//! bind-mounted, as iproute2 makes them, so that its tools see ours. Being "inside" is a property of one thread. Threads
//! are entered only if nothing else can run on them afterwards: each is made for the purpose and ends with it, so a
//! worker of an async runtime never finds itself in a foreign namespace.
//!
//! ```text
//!  create_pinned: file ──unshare, bind mount──▶ pinned ──remove_pinned──▶ (gone once nobody is inside)
//!                   └── anything fails: file removed
//! ```
//!
//! A pin needs no shared mount to go everywhere: the kernel detaches the mounts on a file in *all* mount namespaces when
//! the file is unlinked.

mod sockets;

pub use sockets::SocketOpener;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::{io, thread};

/// An open network namespace; it exists for as long as this does.
#[derive(Debug)]
pub struct NetworkNamespace {
    file: File,
}

impl NetworkNamespace {
    /// Opens the namespace that is pinned at `path`.
    ///
    /// # Errors
    /// `NotFound` when there is no file or nothing is pinned on it; the system's error otherwise.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !is_namespace(&file)? {
            let message = format!("no namespace is pinned at {}", path.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        Ok(Self { file })
    }

    /// Opens the namespace of the calling thread.
    ///
    /// # Errors
    /// The system's error, for example without /proc.
    pub fn of_this_thread() -> io::Result<Self> {
        Ok(Self { file: File::open(THIS_THREAD)? })
    }

    /// Makes a new namespace and pins it at `path`, which must not exist; its folder is made if needed.
    ///
    /// # Errors
    /// `AlreadyExists`, or the system's error; then nothing stays.
    pub fn create_pinned(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::RDONLY;
        rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let pinned = run_in_new(|| rustix::mount::mount_bind(THIS_THREAD, path)).and_then(|mounted| {
            mounted?;
            Self::open(path)
        });
        match pinned {
            Ok(namespace) => Ok(namespace),
            Err(error) => {
                remove_pinned(path)?;
                Err(error)
            }
        }
    }

    /// Runs `work` inside, on a thread made for it, and waits. Threads and processes that `work` starts are inside too.
    ///
    /// # Errors
    /// When the namespace cannot be entered; then `work` did not run. A panic of `work` goes on in the caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        on_a_thread(|| {
            enter(self.as_fd())?;
            Ok(work())
        })
    }
}

impl AsFd for NetworkNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Runs `work` in a new namespace without a pin, on a thread made for it, and waits. Threads and processes that `work`
/// starts are inside too.
///
/// # Errors
/// When no namespace can be made; then `work` did not run. A panic of `work` goes on in the caller.
pub fn run_in_new<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_a_thread(|| {
        // SAFETY: only NEWNET is unshared, no descriptor table; the thread ends with `work`, so nobody else ever runs here.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        Ok(work())
    })
}

/// Removes the pin at `path`. The namespace goes away when nobody is inside any more. One that is gone is no error.
///
/// # Errors
/// The system's error, for example without the right to unmount.
pub fn remove_pinned(path: &Path) -> io::Result<()> {
    // Several mounts may lie on one another when a pin was made twice.
    loop {
        match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not a mount point (any more), or no file.
            Err(Errno::INVAL | Errno::NOENT) => break,
            Err(error) => return Err(error.into()),
        }
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Names of the files in `folder` that begin with `prefix`, sorted: pins, and what half-made ones left.
///
/// # Errors
/// The system's error; a folder that does not exist is empty.
pub fn list_pinned(folder: &Path, prefix: &str) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // A name that is not text was not made by us.
        if let Some(name) = entry?.file_name().to_str()
            && name.starts_with(prefix)
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Number of the network interface `name` in the calling thread's namespace.
///
/// # Errors
/// `NotFound` when there is none, else the system's error.
pub fn interface_index(name: &str) -> io::Result<u32> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    match rustix::net::netdevice::name_to_index(&socket, name) {
        Err(Errno::NODEV) => {
            Err(io::Error::new(io::ErrorKind::NotFound, format!("no network interface {name}")))
        }
        index => Ok(index?),
    }
}

/// The calling thread's own namespace, as a file.
const THIS_THREAD: &str = "/proc/thread-self/ns/net";

/// Is this file a namespace, and not the empty file that a pin lies on?
fn is_namespace(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == libc::NSFS_MAGIC)
}

/// Moves the calling thread; only for threads that end afterwards, or that go back.
fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(rustix::thread::move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(THREAD_NAME.to_owned()).spawn_scoped(scope, work)?;
        match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Shown by tools; at most 15 bytes.
const THREAD_NAME: &str = "in-netns";

/// The last part of a path, for messages.
fn pin_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or(path.as_os_str())
}

#[cfg(test)]
mod tests;
