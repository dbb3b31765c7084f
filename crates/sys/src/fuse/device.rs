//! `/dev/fuse`: a connection, its mount, and further descriptors of it.
//!
//! ```text
//! open ─▶ mount ─▶ INIT is answered ─▶ further descriptors, one per thread ─▶ requests
//!                                            last descriptor closed, or unmounted by force ─▶ aborted: every request fails
//! ```
//! Owns nothing. A request is answered through the descriptor it was read from. **A request fails when that descriptor is
//! closed by everyone**: who wants requests to outlive a process keeps *every* descriptor of the connection.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// `_IOR(229, 0, uint32_t)`.
const FUSE_DEV_IOC_CLONE: libc::c_ulong = 0x8004_e500;
/// How long a mount may take to show that it is dead, which takes the kernel no time.
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// The device.
pub const DEVICE: &str = "/dev/fuse";

/// Opens the device: a connection once it is mounted.
///
/// # Errors
/// The system's error, for example without the device.
pub fn open() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Mounts a connection at the directory `path`, for all users, whose rights the kernel checks. `name` is what the list of
/// mounts shows.
///
/// # Errors
/// The system's error, for example without the right to mount.
pub fn mount(device: BorrowedFd<'_>, path: &Path, name: &str) -> io::Result<()> {
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    rustix::mount::mount(name, path, "fuse.aenv", flags, CString::new(options)?.as_c_str())?;
    Ok(())
}

/// Unmounts what is mounted at `path`. With `force` requests that wait fail, and so do open files, though the mount is in
/// use.
///
/// # Errors
/// `ResourceBusy` when it is in use; `InvalidInput` when nothing is mounted there.
pub fn unmount(path: &Path, force: bool) -> io::Result<()> {
    let flags = if force { UnmountFlags::FORCE | UnmountFlags::DETACH } else { UnmountFlags::empty() };
    rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW)?;
    Ok(())
}

/// Unmounts connections at `path` that are aborted. Returns how many there were.
///
/// # Errors
/// The system's error, other than that there is nothing.
pub fn unmount_dead(path: &Path) -> io::Result<u32> {
    let mut count = 0;
    while is_dead(path)? {
        rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        count += 1;
    }
    Ok(count)
}

/// Whether an aborted connection is mounted at `path`. Attributes may be cached, so it is asked for what never is; one that
/// lives may take as long as it likes to answer.
fn is_dead(path: &Path) -> io::Result<bool> {
    let path = path.to_owned();
    let (answer, answered) = std::sync::mpsc::channel();
    std::thread::Builder::new().name("fuse-probe".to_owned()).spawn(move || {
        // Nobody listens any more when it took too long.
        let _ = answer.send(rustix::fs::statfs(&path).map(drop));
    })?;
    match answered.recv_timeout(PROBE_PATIENCE) {
        Ok(Err(Errno::NOTCONN | Errno::CONNABORTED)) => Ok(true),
        Ok(Err(Errno::NOENT) | Ok(())) | Err(_) => Ok(false),
        Ok(Err(error)) => Err(error.into()),
    }
}

/// Opens a further descriptor of a connection whose INIT was answered. It has requests of its own in flight.
///
/// # Errors
/// The system's error.
pub fn open_another(connection: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let device = open()?;
    let number = u32::try_from(connection.as_raw_fd()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads one u32 through the pointer, which lives until the call returns.
    let done = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), FUSE_DEV_IOC_CLONE, &raw const number) };
    if done == 0 { Ok(device) } else { Err(io::Error::last_os_error()) }
}
