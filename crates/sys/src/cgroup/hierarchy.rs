//! Where the version 2 hierarchy is mounted, and which group a process is in.
//!
//! Owns no state. Reads `/proc` only.

use super::CgroupError;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::{ffi::OsString, io};

/// The mounted version 2 hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its mount point: `/sys/fs/cgroup`, or `/sys/fs/cgroup/unified` beside version 1.
    pub mount: PathBuf,
    /// Version 1 hierarchies with controllers are mounted too. A controller is in one version only.
    pub hybrid: bool,
}

impl Hierarchy {
    /// Finds it. `None` when no version 2 hierarchy is mounted.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn find() -> Result<Option<Self>, CgroupError> {
        let path = Path::new("/proc/self/mountinfo");
        let text = std::fs::read(path).map_err(|error| CgroupError::new("read", path, error))?;
        Ok(parse_mounts(&text))
    }
}

/// A line is `ID PARENT MAJOR:MINOR ROOT MOUNTPOINT OPTIONS [TAGS…] - TYPE SOURCE OPTIONS` (proc_pid_mountinfo(5)). Of
/// several mounts the usual place wins, then the first.
pub(super) fn parse_mounts(mountinfo: &[u8]) -> Option<Hierarchy> {
    let mut mounts = Vec::new();
    let mut hybrid = false;
    for line in mountinfo.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let Some(dash) = fields.iter().position(|field| *field == b"-") else { continue };
        match (fields.get(dash + 1).copied(), fields.get(dash + 3).copied()) {
            (Some(b"cgroup2"), _) => mounts.extend(fields.get(4).map(|field| unescape(field))),
            // A named hierarchy has no controllers: systemd keeps one of those even where it uses version 2.
            (Some(b"cgroup"), Some(options)) => {
                hybrid |= !options.split(|byte| *byte == b',').any(|option| option.starts_with(b"name="));
            }
            _ => {}
        }
    }
    let usual = mounts.iter().position(|mount| mount == Path::new("/sys/fs/cgroup"));
    let at = usual.unwrap_or(0);
    (at < mounts.len()).then(|| Hierarchy { mount: mounts.swap_remove(at), hybrid })
}

/// The kernel writes space, tab, newline and backslash as `\` and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let digits = tail.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let octal = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// The group of a process, as a path below the mount point; empty for the root. `None` when the process is outside of what
/// our cgroup namespace shows, or no version 2 hierarchy exists.
///
/// # Errors
/// `NotFound` when there is no such process; the system's error otherwise.
pub fn group_of(pid: u32) -> Result<Option<PathBuf>, CgroupError> {
    let path = PathBuf::from(format!("/proc/{pid}/cgroup"));
    match std::fs::read(&path) {
        Ok(text) => Ok(parse_group(&text)),
        // The process ended between open and read.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
            Err(CgroupError::new("read", path, io::Error::from(io::ErrorKind::NotFound)))
        }
        Err(error) => Err(CgroupError::new("read", path, error)),
    }
}

/// Lines are `ID:CONTROLLERS:PATH`; the one of version 2 is `0::PATH`.
pub(super) fn parse_group(text: &[u8]) -> Option<PathBuf> {
    let mut lines = text.split(|byte| *byte == b'\n');
    let path = lines.find_map(|line| line.strip_prefix(b"0::/"))?;
    let outside = path == b".." || path.starts_with(b"../");
    (!outside).then(|| PathBuf::from(OsString::from_vec(path.to_vec())))
}
