//! Starting a program as another user, in a session of its own, with pipes.
//!
//! ```text
//! parent: fork ─▶ child: oom score ─▶ control group ─▶ umask ─▶ setsid ─▶ groups, gid, uid ─▶ chdir ─▶ exec
//! ```
//! What runs between fork and exec allocates nothing and takes no lock. The directory is entered as the user, so that
//! nobody stands where he could not have walked. Signal mask and dispositions of the child are the default ones (the
//! standard library resets the mask and SIGPIPE; this process is expected to ignore no other signal). Descriptors
//! other than 0, 1 and 2 are closed by exec, as all of this process are opened close-on-exec.

use std::ffi::{CString, OsString};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What to run and as whom.
#[derive(Debug, Clone)]
pub struct Program {
    /// A path, or a name to be found in the `PATH` of `environment`.
    pub command: OsString,
    /// Arguments after the program's name.
    pub arguments: Vec<OsString>,
    /// The whole environment: nothing is inherited.
    pub environment: Vec<(OsString, OsString)>,
    /// Absolute directory to start in.
    pub directory: PathBuf,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// All supplementary group ids.
    pub groups: Vec<u32>,
    /// Added to the kernel's badness score when memory runs out, -1000 to 1000.
    pub oom_score_adjustment: i16,
    /// Directory of the control group to run in; that of the starter when there is none, or the kernel does not have it.
    pub control_group: Option<PathBuf>,
    /// Where standard input comes from.
    pub input: StandardInput,
}

/// Where a program's standard input comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandardInput {
    /// From a pipe that the starter holds.
    Pipe,
    /// From `/dev/null`.
    Null,
}

/// A program that runs. Its process and session id are the same number.
#[derive(Debug)]
pub struct Spawned {
    /// Process id; to be reaped by whoever started it.
    pub pid: i32,
    /// Writing end of standard input, when it is a pipe.
    pub input: Option<OwnedFd>,
    /// Reading end of standard output.
    pub output: OwnedFd,
    /// Reading end of standard error.
    pub errors: OwnedFd,
}

/// Why a program did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// A text that the kernel takes contains a zero byte.
    #[error("the directory contains a zero byte")]
    ZeroByte,
    /// The kernel refused: the program is missing or not executable, or the user may not enter the directory.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

/// Starts `program`.
///
/// The caller must hold off any `waitpid(-1)` of this process meanwhile: when exec fails, the child is reaped in here.
///
/// # Errors
/// When the program cannot be found, run, or given to the user.
pub fn spawn(program: &Program) -> Result<Spawned, SpawnError> {
    let directory =
        CString::new(program.directory.as_os_str().as_bytes()).map_err(|_| SpawnError::ZeroByte)?;
    let oom_score = program.oom_score_adjustment.to_string();
    let group = program.control_group.as_ref().map(|group| group.join("cgroup.procs"));
    let (uid, gid, groups) = (program.uid, program.gid, program.groups.clone());
    let mut command = Command::new(&program.command);
    command
        .args(&program.arguments)
        .env_clear()
        .envs(program.environment.iter().map(|(key, value)| (key, value)))
        .stdin(match program.input {
            StandardInput::Pipe => Stdio::piped(),
            StandardInput::Null => Stdio::null(),
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let enter = move || -> io::Result<()> {
        // A kernel without this file has no such score to set.
        if let Ok(mut file) = std::fs::OpenOptions::new().write(true).open("/proc/self/oom_score_adj") {
            file.write_all(oom_score.as_bytes())?;
        }
        // A kernel without control groups has no such file either. `0` means whoever writes it.
        if let Some(group) = &group
            && let Ok(mut file) = std::fs::OpenOptions::new().write(true).open(group)
        {
            file.write_all(b"0")?;
        }
        become_user(uid, gid, &groups)?;
        rustix::process::chdir(&*directory)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only system calls on memory prepared before the fork: the path
    // of the files is short enough for the standard library's stack buffer, an `io::Error` made from an errno does not
    // allocate, and the closure captures no lock.
    unsafe { command.pre_exec(enter) };
    let mut child = command.spawn()?;
    let missing = || SpawnError::Kernel(io::Error::other("a pipe that was asked for is missing"));
    Ok(Spawned {
        pid: child.id().cast_signed(),
        input: child.stdin.take().map(OwnedFd::from),
        output: child.stdout.take().map(OwnedFd::from).ok_or_else(missing)?,
        errors: child.stderr.take().map(OwnedFd::from).ok_or_else(missing)?,
    })
}

/// Gives the calling process, which has one thread, a session of its own and the user's ids. Allocates nothing.
fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let check = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: changes only the calling process.
    unsafe { libc::umask(0o022) };
    // SAFETY: as above.
    check(unsafe { libc::setsid() })?;
    // The plain system calls, not the C library's: those signal all threads that the library believes to exist.
    // SAFETY: the pointer and the length describe the slice.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    check(result as libc::c_int)?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setgid, gid) } as libc::c_int)?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setuid, uid) } as libc::c_int)
}

#[cfg(test)]
mod tests;
