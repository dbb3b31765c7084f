//! Processes: a handle that cannot name the wrong one, start times, detached spawning, finding by arguments.
//!
//! Owns nothing beyond the descriptors of [`PidFd`]. A spawned process is *detached*: it has a session of its own, no
//! signal of ours reaches it unless sent through its handle, and it goes on when we end. Nothing here polls.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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

/// Field 22; counted from behind the name, which may hold spaces and parentheses.
fn parse_start_time(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// What a detached process is started with.
#[derive(Debug)]
pub struct Detached<'a> {
    /// Program file; a name without a slash is searched for in [`SEARCH_PATH`].
    pub program: &'a Path,
    /// First element of its argument list, as the process list shows it.
    pub arg0: &'a str,
    /// The other arguments.
    pub args: &'a [String],
    /// Working directory.
    pub directory: &'a Path,
    /// Network namespace it is placed in before it starts; the caller's when absent.
    pub netns: Option<BorrowedFd<'a>>,
    /// Where its standard output and error go.
    pub log: File,
    /// Descriptors it inherits under the numbers they have here; all others are closed.
    pub inherit: &'a [BorrowedFd<'a>],
    /// Preference of the host's OOM killer, -1000 to 1000; the caller's when absent.
    pub oom_score_adj: Option<i16>,
}

impl Detached<'_> {
    /// Starts the process. Its standard input is `/dev/null`; of the environment it gets [`SEARCH_PATH`] alone, so that
    /// secrets of ours stay with us.
    ///
    /// # Errors
    /// When the program cannot be executed or the namespace not be entered; nothing is left behind.
    pub fn spawn(self) -> io::Result<PidFd> {
        let log = self.log.try_clone()?;
        let mut command = Command::new(self.program);
        command.arg0(self.arg0).args(self.args).current_dir(self.directory);
        command.stdin(Stdio::null()).stdout(self.log).stderr(log).env_clear().env("PATH", SEARCH_PATH);
        let inherit: Vec<RawFd> = self.inherit.iter().map(AsRawFd::as_raw_fd).collect();
        let netns = self.netns.map(|fd| fd.as_raw_fd());
        let oom_score = self.oom_score_adj.map(|score| score.to_string());
        let prepare = move || prepare_child(&inherit, netns, oom_score.as_deref());
        // SAFETY: `prepare_child` makes system calls only; it neither allocates nor takes locks, as must be between fork
        // and exec. The raw descriptors it gets are borrowed for longer than this function.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn()?;
        // Its handle is opened before anybody could reap it, so the number is still its own.
        let opened = PidFd::open(child.id(), None);
        if opened.is_err() {
            let mut child = child;
            child.kill()?;
            child.wait()?;
        }
        opened
    }
}

fn prepare_child(inherit: &[RawFd], netns: Option<RawFd>, oom_score: Option<&str>) -> io::Result<()> {
    rustix::process::setsid()?;
    if let Some(netns) = netns {
        // SAFETY: moves the one thread of the child; the descriptor is borrowed for longer than the spawn.
        if unsafe { libc::setns(netns, libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if let Some(score) = oom_score {
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
        let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, rustix::fs::Mode::empty())?;
        rustix::io::write(&file, score.as_bytes())?;
    }
    for fd in inherit {
        // SAFETY: borrowed by `Detached::inherit`, which outlives the spawn.
        let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
        rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
    }
    Ok(())
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

/// All processes whose first argument (the name they were started under) satisfies `matches`.
///
/// # Errors
/// When `/proc` cannot be listed. Processes that end meanwhile are left out.
pub fn find(matches: impl Fn(&str) -> bool) -> io::Result<Vec<Found>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(raw) = std::fs::read(format!("/proc/{pid}/cmdline")) else { continue };
        let args = split_args(&raw);
        if !args.first().is_some_and(|name| matches(name)) {
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
