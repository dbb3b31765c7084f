//! Control groups, version 2: find the hierarchy, make, fill, read, kill and remove groups.
//!
//! Owns the descriptor of each open [`Directory`]. Chooses no group, limit or name, and never writes to a control file
//! that it was not told to write. Version 1 hierarchies are seen, so that they can be reported, and never touched.
//!
//! ```text
//!  create ──▶ empty ──process moved or cloned in──▶ populated ──the last one exits──▶ empty ──remove──▶ (gone)
//!                                                       └── kill: SIGKILL to all that are in it, forks included
//! ```
//!
//! A group that has controllers enabled for its children holds no processes itself, except for the root of the hierarchy
//! (the kernel's "no internal processes" rule); the kernel answers attempts with EBUSY.
//!
//! The files and their formats: the kernel's Documentation/admin-guide/cgroup-v2.rst.

mod hierarchy;

pub use hierarchy::{Hierarchy, group_of};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long [`Directory::remove`] waits for processes that are just exiting. A killed VMM of many gigabytes needs a moment
/// to give them back.
const REMOVE_PATIENCE: Duration = Duration::from_secs(10);
/// The longest pause between two attempts to remove.
const REMOVE_PAUSE: Duration = Duration::from_millis(50);

/// What was asked of the kernel, and what it answered.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}{}", path.display(), hint(*errno, path))]
pub struct CgroupError {
    action: String,
    path: PathBuf,
    errno: Option<Errno>,
    source: io::Error,
}

impl CgroupError {
    fn new(action: impl Into<String>, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        let errno = Errno::from_io_error(&source);
        Self { action: action.into(), path: path.into(), errno, source }
    }

    /// The file or directory it is about.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of the system's error.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

/// What to do about an error number, where the kernel's words alone mislead.
fn hint(errno: Option<Errno>, path: &Path) -> &'static str {
    let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match (errno, file) {
        (Some(Errno::BUSY), "cgroup.subtree_control" | "cgroup.procs") => {
            " (a group with controllers for its children holds no processes itself: move them into a child group)"
        }
        (Some(Errno::BUSY), _) => " (processes or groups are still in it)",
        (Some(Errno::NOENT), "cgroup.subtree_control") => " (the parent group does not offer the controller)",
        (Some(Errno::NOENT), "cgroup.kill") => " (needs Linux 5.14 or newer)",
        (Some(Errno::NOENT), _) => " (the group was removed, or its controller is not enabled in the parent)",
        (Some(Errno::INVAL), "cgroup.subtree_control") => {
            " (the controller cannot be used here; cpu is refused while real-time processes are in the group)"
        }
        (Some(Errno::NODEV), "io.max") => " (there is no such block device)",
        (Some(Errno::OPNOTSUPP), _) => " (the group is threaded: use a group of type domain)",
        (Some(Errno::ROFS), _) => " (the hierarchy is mounted read-only: mount it read-write)",
        (Some(Errno::ACCESS | Errno::PERM), _) => {
            " (run as root, or in a group that was delegated to this user)"
        }
        (Some(Errno::AGAIN), _) => " (raise cgroup.max.descendants or cgroup.max.depth of the groups above)",
        _ => "",
    }
}

/// One open group. Its descriptor names this very group, even if another one is made under the same name later.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    fd: OwnedFd,
}

impl AsFd for Directory {
    /// The directory, as `clone3` with `CLONE_INTO_CGROUP` takes it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Directory {
    /// Opens the group at `path`.
    ///
    /// # Errors
    /// `NotFound` when there is none; the system's error otherwise.
    pub fn open(path: &Path) -> Result<Self, CgroupError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| CgroupError::new("open the group", path, errno))?;
        Ok(Self { path: path.to_owned(), fd })
    }

    /// Makes the group at `path` and opens it.
    ///
    /// # Errors
    /// `AlreadyExists`, or the system's error.
    pub fn create(path: &Path) -> Result<Self, CgroupError> {
        rustix::fs::mkdir(path, Mode::from_raw_mode(0o755))
            .map_err(|errno| CgroupError::new("make the group", path, errno))?;
        Self::open(path)
    }

    /// Opens the group at `path`, which is made if needed.
    ///
    /// # Errors
    /// The system's error.
    pub fn ensure(path: &Path) -> Result<Self, CgroupError> {
        match Self::create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Self::open(path),
            made => made,
        }
    }

    /// Its path on this host, from the root directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The content of a control file.
    ///
    /// # Errors
    /// The system's error, `NotFound` above all when the controller is not enabled for this group.
    pub fn read(&self, file: &str) -> Result<String, CgroupError> {
        let read = || {
            let fd = rustix::fs::openat(&self.fd, file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
            let mut text = String::new();
            File::from(fd).read_to_string(&mut text)?;
            Ok::<_, io::Error>(text)
        };
        read().map_err(|error| CgroupError::new("read", self.path.join(file), error))
    }

    /// Writes `value` to a control file, in one write as the kernel wants it.
    ///
    /// # Errors
    /// The system's error; nothing was set then.
    pub fn write(&self, file: &str, value: &str) -> Result<(), CgroupError> {
        let write = || {
            let fd = rustix::fs::openat(&self.fd, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
            match File::from(fd).write(value.as_bytes())? {
                count if count == value.len() => Ok(()),
                _ => Err(io::Error::from(io::ErrorKind::WriteZero)),
            }
        };
        write().map_err(|error| CgroupError::new(format!("write {value:?} to"), self.path.join(file), error))
    }

    /// Whether the group has the control file.
    ///
    /// # Errors
    /// The system's error, other than that there is no such file.
    pub fn has(&self, file: &str) -> Result<bool, CgroupError> {
        match rustix::fs::statat(&self.fd, file, AtFlags::empty()) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(CgroupError::new("look at", self.path.join(file), errno)),
        }
    }

    /// The values of `keys` in a file of lines `KEY VALUE`. A key the kernel does not write counts 0: events that an older
    /// kernel does not know did not happen.
    ///
    /// # Errors
    /// The system's error, and `InvalidData` when a value is no number.
    pub fn counters<const N: usize>(&self, file: &str, keys: [&str; N]) -> Result<[u64; N], CgroupError> {
        parse_counters(&self.read(file)?, keys).ok_or_else(|| self.malformed(file))
    }

    /// The number in a file that holds one.
    ///
    /// # Errors
    /// The system's error, and `InvalidData` when it is no number.
    pub fn number(&self, file: &str) -> Result<u64, CgroupError> {
        self.read(file)?.trim().parse().map_err(|_| self.malformed(file))
    }

    fn malformed(&self, file: &str) -> CgroupError {
        CgroupError::new("understand", self.path.join(file), io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Controllers that the parent offers to this group.
    ///
    /// # Errors
    /// The system's error.
    pub fn controllers(&self) -> Result<Vec<String>, CgroupError> {
        Ok(words(&self.read("cgroup.controllers")?))
    }

    /// Controllers that this group enables for its children.
    ///
    /// # Errors
    /// The system's error.
    pub fn enabled(&self) -> Result<Vec<String>, CgroupError> {
        Ok(words(&self.read("cgroup.subtree_control")?))
    }

    /// Enables controllers for the children; those that are enabled already are left alone. All or none.
    ///
    /// # Errors
    /// The system's error, for example EBUSY while processes are in the group itself.
    pub fn enable(&self, controllers: &[impl AsRef<str>]) -> Result<(), CgroupError> {
        let enabled = self.enabled()?;
        let absent =
            controllers.iter().map(AsRef::as_ref).filter(|name| !enabled.iter().any(|on| on == name));
        let change = absent.map(|name| format!("+{name}")).collect::<Vec<_>>().join(" ");
        if change.is_empty() { Ok(()) } else { self.write("cgroup.subtree_control", &change) }
    }

    /// The processes in the group itself; 0 stands for one that our PID namespace does not show.
    ///
    /// # Errors
    /// The system's error.
    pub fn processes(&self) -> Result<Vec<u32>, CgroupError> {
        let text = self.read("cgroup.procs")?;
        let parsed: Result<_, _> = text.split_whitespace().map(str::parse).collect();
        parsed.map_err(|_| self.malformed("cgroup.procs"))
    }

    /// Moves a process with all its threads into the group. What it was charged for before stays where it was.
    ///
    /// # Errors
    /// The system's error.
    pub fn add(&self, pid: u32) -> Result<(), CgroupError> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Names of the groups directly below, in order.
    ///
    /// # Errors
    /// The system's error.
    pub fn children(&self) -> Result<Vec<String>, CgroupError> {
        let list = || {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(&self.path)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    names.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
            names.sort_unstable();
            Ok::<_, io::Error>(names)
        };
        list().map_err(|error| CgroupError::new("list", &self.path, error))
    }

    /// Whether systemd marked the group as delegated to whoever runs in it (`Delegate=` of a unit).
    ///
    /// systemd writes both attributes; `trusted.` ones are visible to privileged processes only.
    ///
    /// # Errors
    /// The system's error.
    pub fn is_delegated(&self) -> Result<bool, CgroupError> {
        for name in ["user.delegate", "trusted.delegate"] {
            let mut value = [0_u8; 8];
            match rustix::fs::fgetxattr(&self.fd, name, &mut value[..]) {
                Ok(length) if value.get(..length) == Some(b"1") => return Ok(true),
                // Longer than any value systemd writes, absent, or not kept by this kernel.
                Ok(_) | Err(Errno::RANGE | Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM) => {}
                Err(errno) => {
                    return Err(CgroupError::new(format!("read the attribute {name} of"), &self.path, errno));
                }
            }
        }
        Ok(false)
    }

    /// Whether groups can be made in it by this process.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check_writable(&self) -> Result<(), CgroupError> {
        let access = rustix::fs::Access::WRITE_OK;
        rustix::fs::accessat(rustix::fs::CWD, &self.path, access, AtFlags::EACCESS)
            .map_err(|errno| CgroupError::new("make groups in", &self.path, errno))
    }

    /// Ends all processes in the group and below it with SIGKILL, such that none escapes by forking. They exit a little
    /// later. No error when the group was removed already.
    ///
    /// # Errors
    /// The system's error; before Linux 5.14 there is no such file.
    pub fn kill(&self) -> Result<(), CgroupError> {
        match self.write("cgroup.kill", "1") {
            // Not there while the group is: an old kernel.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.path.exists() => Ok(()),
            written => written,
        }
    }

    /// Removes the group, and waits up to ten seconds for processes in it that are just exiting. No error when it was
    /// removed already. Zombies do not hinder it.
    ///
    /// # Errors
    /// EBUSY when processes or groups stay in it; the system's error otherwise. Panics outside of a tokio runtime.
    pub async fn remove(&self) -> Result<(), CgroupError> {
        let began = tokio::time::Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            match rustix::fs::rmdir(&self.path) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::BUSY) if began.elapsed() < REMOVE_PATIENCE => tokio::time::sleep(pause).await,
                Err(errno) => return Err(CgroupError::new("remove the group", &self.path, errno)),
            }
            pause = (pause * 2).min(REMOVE_PAUSE);
        }
    }

    /// Removes a group in which no process ever was.
    ///
    /// # Errors
    /// The system's error; no error when it was removed already.
    pub fn remove_empty(&self) -> Result<(), CgroupError> {
        match rustix::fs::rmdir(&self.path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(CgroupError::new("remove the group", &self.path, errno)),
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn parse_counters<const N: usize>(text: &str, keys: [&str; N]) -> Option<[u64; N]> {
    let mut values = [0; N];
    for line in text.lines() {
        let (key, value) = line.split_once(' ')?;
        if let Some(at) = keys.iter().position(|wanted| *wanted == key) {
            values[at] = value.trim().parse().ok()?;
        }
    }
    Some(values)
}

#[cfg(test)]
mod tests;
