//! Processes: a handle that cannot name the wrong one, start times, detached spawning, finding by arguments.
//!
//! Owns nothing beyond the descriptors of [`PidFd`]. A spawned process is *detached*: it has a session of its own, no
//! signal of ours reaches it unless sent through its handle, and it goes on when we end. Nothing here polls.

mod detached;
mod isolation;

pub use detached::{Detached, find_program, is_installed};
pub use isolation::{Access, DeviceKind, Isolation, JailStep};
pub use rustix::process::Resource;

use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use std::io;
use std::path::PathBuf;
use tokio::io::unix::AsyncFd;

/// Where a program without a slash in its name is searched for.
pub const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a child of ours ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By itself, with this exit status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
}

/// A process that cannot be mistaken for another one, even when its number is used again.
#[derive(Debug)]
pub struct PidFd {
    pid: u32,
    fd: AsyncFd<OwnedFd>,
}

impl PidFd {
    /// Opens the process `pid`, and, when `started` is given, only if it started at that time (see [`start_time`]).
    ///
    /// # Errors
    /// `NotFound` when there is no such process or it is another one; the system's error otherwise. Panics outside of a
    /// tokio runtime.
    pub fn open(pid: u32, started: Option<u64>) -> io::Result<Self> {
        let fd = match rustix::process::pidfd_open(to_pid(pid)?, PidfdFlags::NONBLOCK) {
            Err(Errno::SRCH) => return Err(gone(pid)),
            opened => opened?,
        };
        // Read after the open: from here on the number cannot pass to another process unseen.
        if let Some(expected) = started
            && start_time(pid)? != expected
        {
            return Err(gone(pid));
        }
        Self::from_descriptor(pid, fd)
    }

    fn from_descriptor(pid: u32, fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` stays open, under the same number, until the `AsyncFd` that owns it is dropped.
        let fd = unsafe { AsyncFd::register_with_interest(fd, tokio::io::Interest::READABLE) }?;
        Ok(Self { pid, fd })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits until the process has ended. Any number of tasks may wait.
    ///
    /// # Errors
    /// When the runtime's event loop is gone.
    pub async fn exited(&self) -> io::Result<()> {
        // The guard's readiness is never cleared: an ended process stays ended.
        self.fd.readable().await.map(drop)
    }

    /// Whether the process has ended.
    ///
    /// # Errors
    /// The system's error.
    pub fn has_exited(&self) -> io::Result<bool> {
        let mut poll = [rustix::event::PollFd::new(self.fd.get_ref(), rustix::event::PollFlags::IN)];
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(rustix::event::poll(&mut poll, Some(&none))? > 0)
    }

    /// Takes the exit status of an ended child and frees its entry in the process table. `None` when it is not a child of
    /// ours, was reaped before, or still runs.
    ///
    /// # Errors
    /// The system's error.
    pub fn reap(&self) -> io::Result<Option<Ended>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        let status = match rustix::process::waitid(WaitId::PidFd(self.fd.get_ref().as_fd()), options) {
            Err(Errno::CHILD) => return Ok(None),
            status => status?,
        };
        Ok(status.and_then(|status| {
            let exited = status.exit_status().map(Ended::Exited);
            exited.or_else(|| status.terminating_signal().map(Ended::Signalled))
        }))
    }

    /// Ends the process with SIGKILL. No error when it has ended already.
    ///
    /// # Errors
    /// The system's error.
    pub fn kill(&self) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(self.fd.get_ref(), Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn to_pid(pid: u32) -> io::Result<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| gone(pid))
}

fn gone(pid: u32) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("process {pid} has ended"))
}

/// When the process started, in clock ticks since boot: with the pid it names a process for good.
///
/// # Errors
/// `NotFound` when there is no such process.
pub fn start_time(pid: u32) -> io::Result<u64> {
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
            return Err(gone(pid));
        }
        read => read?,
    };
    parse_start_time(&stat).ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has no start time"))
    })
}

/// Whether a thread has been sent SIGKILL and waits for something before it can end. One that is gone is not.
#[must_use]
pub fn is_being_killed(thread: u32) -> bool {
    if thread == 0 {
        return false;
    }
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{thread}/{name}"));
    // What cannot be read is gone.
    read("status").is_ok_and(|status| has_kill_pending(&status))
        || read("stat").is_ok_and(|stat| is_exiting(&stat))
}

fn has_kill_pending(status: &str) -> bool {
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let signals = pending.and_then(|signals| u64::from_str_radix(signals.trim(), 16).ok());
    signals.is_some_and(|signals| signals & 1 << (libc::SIGKILL - 1) != 0)
}

/// Field 9 has the flag PF_EXITING; counted from behind the name. A zombie waits for its parent, not for us.
fn is_exiting(stat: &str) -> bool {
    let Some((_, rest)) = stat.rsplit_once(')') else { return false };
    let mut fields = rest.split_whitespace();
    let waits = fields.next().is_some_and(|state| state == "D");
    waits && fields.nth(5).and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|flags| flags & 4 != 0)
}

/// Field 22; counted from behind the name, which may hold spaces and parentheses.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// One process as [`find`] saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Process id.
    pub pid: u32,
    /// See [`start_time`].
    pub start_time: u64,
    /// Its program file; ends in ` (deleted)` when the file was replaced since.
    pub program: PathBuf,
    /// Its argument list, the name it was started under first.
    pub args: Vec<String>,
}

/// All processes whose argument list, the name they were started under first, satisfies `matches`.
///
/// # Errors
/// When `/proc` cannot be listed. Processes that end meanwhile are left out.
pub fn find(matches: impl Fn(&[String]) -> bool) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(raw) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let args = split_args(&raw);
        if args.is_empty() || !matches(&args) {
            continue;
        }
        // An error here means that the process ended since, or is a zombie, which has no program any more.
        let (Ok(start_time), Ok(program)) = (start_time(pid), std::fs::read_link(format!("/proc/{pid}/exe")))
        else {
            continue;
        };
        found.push(Found { pid, start_time, program, args });
    }
    Ok(found)
}

/// The argument list of a process.
///
/// # Errors
/// When there is no such process. A zombie has no arguments.
pub fn args(pid: u32) -> io::Result<Vec<String>> {
    Ok(split_args(&std::fs::read(format!("/proc/{pid}/cmdline"))?))
}

fn split_args(raw: &[u8]) -> Vec<String> {
    let raw = raw.strip_suffix(b"\0").unwrap_or(raw);
    if raw.is_empty() {
        return Vec::new();
    }
    raw.split(|byte| *byte == 0).map(|arg| String::from_utf8_lossy(arg).into_owned()).collect()
}

#[cfg(test)]
mod tests;
