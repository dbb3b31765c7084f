//! Starts a detached process: born in its control group and namespaces, and a child of ours all the same, so that its exit
//! status can be read.
//!
//! ```text
//! parent: prepare texts ─▶ clone3 ─▶ read pipe: closed by exec ─▶ done
//!                             │         └───── step and error ──▶ reap, tell
//! child:  session ─▶ network ─▶ oom score, page size ─▶ streams ─▶ mounts ─▶ directory ─▶ limits, user, capabilities ─▶ exec
//! ```
//!
//! Owns nothing. Between clone and exec the child only makes system calls on memory prepared before: other threads of the
//! parent may hold any lock at that moment, the allocator's included.

use super::isolation::{Isolation, PreparedIsolation, c_path};
use super::{PidFd, SEARCH_PATH};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, FdFlags};
use rustix::process::{WaitId, WaitIdOptions};
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

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
    /// Whether its memory may lie in transparent huge pages, whatever else the host is set to.
    pub huge_pages: bool,
    /// Directory of the version 2 control group it is born in; the caller's when absent.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// What it is cut off from.
    pub isolation: Isolation,
}

/// What the child was doing when it failed, as the byte it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    Session = 1,
    Network,
    OomScore,
    PageSize,
    Streams,
    Mounts,
    Directory,
    Privileges,
    Execute,
}

impl Stage {
    fn describe(byte: u8) -> &'static str {
        const ALL: [(Stage, &str); 9] = [
            (Stage::Session, "make a session"),
            (Stage::Network, "enter the network namespace"),
            (Stage::OomScore, "set the OOM score"),
            (Stage::PageSize, "keep it out of huge pages"),
            (Stage::Streams, "set up the standard streams"),
            (Stage::Mounts, "set up the jail's mounts"),
            (Stage::Directory, "enter the working directory"),
            (Stage::Privileges, "give up privileges"),
            (Stage::Execute, "execute the program"),
        ];
        ALL.iter().find(|(stage, _)| *stage as u8 == byte).map_or("start", |(_, text)| text)
    }
}

impl Detached<'_> {
    /// Starts the process. Its standard input is `/dev/null`; of the environment it gets [`SEARCH_PATH`] alone, so that
    /// secrets of ours stay with us.
    ///
    /// # Errors
    /// When the program cannot be executed, the namespace not be entered, or a step of the isolation fails, with what
    /// failed in the text; nothing is left behind. Panics outside of a tokio runtime.
    pub fn spawn(self) -> io::Result<PidFd> {
        let child = Child::prepare(&self)?;
        let (report, reporter) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (pid, process) = child.clone_self(self.cgroup, reporter.as_raw_fd())?;
        drop(reporter);
        let mut failure = Vec::new();
        // Ends when the child has executed its program or has ended.
        File::from(report).read_to_end(&mut failure)?;
        match failure.as_slice() {
            [] => PidFd::from_descriptor(pid, process),
            [stage, error @ ..] => {
                reap(&process)?;
                let number = error.try_into().map_or(0, i32::from_ne_bytes);
                let error = io::Error::from_raw_os_error(number);
                let what = Stage::describe(*stage);
                Err(io::Error::new(
                    error.kind(),
                    format!("cannot {what}: {}: {error}", self.program.display()),
                ))
            }
        }
    }
}

/// Stays so across the execution of a program, and for what that starts (`prctl(2)`).
fn refuse_huge_pages() -> Result<(), Errno> {
    // SAFETY: sets an attribute of this process, without any memory of it.
    let set = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
    if set == 0 { Ok(()) } else { Err(last_errno()) }
}

fn reap(process: &OwnedFd) -> io::Result<()> {
    loop {
        match rustix::process::waitid(WaitId::PidFd(process.as_fd()), WaitIdOptions::EXITED) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Everything the child needs, allocated by the parent.
struct Child {
    program: CString,
    arguments: Pointers,
    environment: Pointers,
    directory: CString,
    netns: Option<RawFd>,
    log: RawFd,
    input: File,
    inherit: Vec<RawFd>,
    oom_score: Option<String>,
    huge_pages: bool,
    isolation: PreparedIsolation,
    pid_namespace: bool,
}

/// Texts and the list of pointers to them that the kernel wants.
struct Pointers {
    _texts: Vec<CString>,
    list: Vec<*const libc::c_char>,
}

impl Pointers {
    fn new(texts: Vec<CString>) -> Self {
        let list = texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect();
        Self { _texts: texts, list }
    }
}

impl Child {
    fn prepare(what: &Detached<'_>) -> io::Result<Self> {
        let texts = |list: &mut dyn Iterator<Item = &str>| -> io::Result<Vec<CString>> {
            list.map(|text| Ok(CString::new(text)?)).collect()
        };
        let path = format!("PATH={SEARCH_PATH}");
        let program =
            if what.isolation.root.is_some() { what.program.to_owned() } else { find_program(what.program)? };
        Ok(Self {
            program: c_path(&program)?,
            arguments: Pointers::new(texts(
                &mut std::iter::once(what.arg0).chain(what.args.iter().map(String::as_str)),
            )?),
            environment: Pointers::new(texts(&mut std::iter::once(path.as_str()))?),
            directory: c_path(what.directory)?,
            netns: what.netns.map(|fd| fd.as_raw_fd()),
            log: what.log.as_raw_fd(),
            input: File::open("/dev/null")?,
            inherit: what.inherit.iter().map(AsRawFd::as_raw_fd).collect(),
            oom_score: what.oom_score_adj.map(|score| score.to_string()),
            huge_pages: what.huge_pages,
            isolation: PreparedIsolation::new(&what.isolation)?,
            pid_namespace: what.isolation.pid_namespace,
        })
    }

    /// Starts the child; returns its process id and its pidfd. In the child this does not return.
    fn clone_self(&self, cgroup: Option<BorrowedFd<'_>>, reporter: RawFd) -> io::Result<(u32, OwnedFd)> {
        let mut flags = libc::CLONE_PIDFD as u64;
        if self.isolation.has_own_mounts() {
            flags |= libc::CLONE_NEWNS as u64;
        }
        if self.pid_namespace {
            // What it shares with processes it cannot see would outlive it: memory segments and queues of System V.
            flags |= libc::CLONE_NEWPID as u64 | libc::CLONE_NEWIPC as u64;
        }
        let mut process: RawFd = -1;
        // SAFETY: a structure of integers, for which zero is valid.
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        if let Some(cgroup) = cgroup {
            flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = cgroup.as_raw_fd() as u64;
        }
        arguments.flags = flags;
        arguments.pidfd = (&raw mut process) as u64;
        arguments.exit_signal = libc::SIGCHLD as u64;
        // SAFETY: without CLONE_VM the child has a copy of this memory and runs on with this thread's stack alone; it
        // makes system calls only and never returns. `arguments` and `process` outlive the call.
        let pid = unsafe {
            libc::syscall(libc::SYS_clone3, &raw const arguments, std::mem::size_of::<libc::clone_args>())
        };
        match pid {
            0 => self.run(reporter),
            pid if pid < 0 => Err(io::Error::last_os_error()),
            pid => {
                // SAFETY: the kernel has just made this descriptor for us.
                let process = unsafe { OwnedFd::from_raw_fd(process) };
                Ok((u32::try_from(pid).map_err(io::Error::other)?, process))
            }
        }
    }

    /// The life of the child: executes the program, or says why not.
    fn run(&self, reporter: RawFd) -> ! {
        let (stage, error) = self.execute();
        let mut message = [0; 5];
        message[0] = stage as u8;
        message[1..].copy_from_slice(&error.raw_os_error().to_ne_bytes());
        // SAFETY: the parent's descriptor was copied with everything else and is still open here.
        let reporter = unsafe { BorrowedFd::borrow_raw(reporter) };
        // A parent that is gone has nobody to tell.
        _ = rustix::io::write(reporter, &message);
        // SAFETY: ends the process at once, without anything of the parent's that would run at an exit.
        unsafe { libc::_exit(127) }
    }

    fn execute(&self) -> (Stage, Errno) {
        match self.prepare_self() {
            Err(failure) => failure,
            Ok(()) => {
                let (arguments, environment) = (self.arguments.list.as_ptr(), self.environment.list.as_ptr());
                // SAFETY: the texts are terminated, both lists end with a null pointer, all of it is still there.
                unsafe { libc::execve(self.program.as_ptr(), arguments, environment) };
                (Stage::Execute, last_errno())
            }
        }
    }

    fn prepare_self(&self) -> Result<(), (Stage, Errno)> {
        let at = |stage: Stage| move |error: Errno| (stage, error);
        default_signals().map_err(at(Stage::Session))?;
        rustix::process::setsid().map_err(at(Stage::Session))?;
        if let Some(netns) = self.netns {
            // SAFETY: moves the one thread of the child; the descriptor is a copy of one that the parent holds.
            let entered = unsafe { libc::setns(netns, libc::CLONE_NEWNET) };
            if entered != 0 {
                return Err((Stage::Network, last_errno()));
            }
        }
        if let Some(score) = &self.oom_score {
            set_oom_score(score).map_err(at(Stage::OomScore))?;
        }
        if !self.huge_pages {
            refuse_huge_pages().map_err(at(Stage::PageSize))?;
        }
        self.connect_streams().map_err(at(Stage::Streams))?;
        self.isolation.change_mounts().map_err(at(Stage::Mounts))?;
        rustix::process::chdir(&*self.directory).map_err(at(Stage::Directory))?;
        self.isolation.drop_privileges().map_err(at(Stage::Privileges))
    }

    fn connect_streams(&self) -> Result<(), Errno> {
        for (from, to) in [(self.input.as_raw_fd(), 0), (self.log, 1), (self.log, 2)] {
            // SAFETY: replaces a descriptor of this process, which has no owner here: the parent's are copies.
            if unsafe { libc::dup2(from, to) } < 0 {
                return Err(last_errno());
            }
        }
        for fd in &self.inherit {
            // SAFETY: a copy of a descriptor that the parent holds open.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok(())
    }
}

/// Since Linux 5.7; the value is beyond what the C library's integers hold.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// No signal blocked, and a closed pipe ends the process: what programs expect, and what a runtime of ours may have changed.
fn default_signals() -> Result<(), Errno> {
    // SAFETY: a set of bits, for which zero is valid and means empty.
    let none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: reads one set of signals.
    if unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) } != 0 {
        return Err(last_errno());
    }
    // SAFETY: installs no function of ours.
    if unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) } == libc::SIG_ERR {
        return Err(last_errno());
    }
    Ok(())
}

fn set_oom_score(score: &str) -> Result<(), Errno> {
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, rustix::fs::Mode::empty())?;
    rustix::io::write(&file, score.as_bytes()).map(drop)
}

/// Whether a program is there to be started by [`Detached`]: a path that is a file, or a name found in [`SEARCH_PATH`].
#[must_use]
pub fn is_installed(program: &Path) -> bool {
    find_program(program).is_ok_and(|path| path.is_file())
}

/// The file of a program: a name without a slash is searched for as a shell would, in [`SEARCH_PATH`].
///
/// # Errors
/// `NotFound` for a name that is in none of these directories. A path is taken as it is.
pub fn find_program(program: &Path) -> io::Result<PathBuf> {
    if program.components().count() != 1 || program.is_absolute() {
        return Ok(program.to_owned());
    }
    let candidates = SEARCH_PATH.split(':').map(|directory| Path::new(directory).join(program));
    let found = candidates.into_iter().find(|candidate| candidate.is_file());
    found.ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("{} is not in {SEARCH_PATH}", program.display()))
    })
}

#[cfg(test)]
mod tests;
