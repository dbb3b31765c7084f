//! What a detached process is cut off from, and the steps that do it in the child between clone and exec.
//!
//! ```text
//! mount namespace: all of the host's mounts, cut off from it ─▶ steps, in order ─▶ root bound read-only ─▶ pivot_root ─▶ old root detached
//! ```
//!
//! Owns nothing: the mounts live in the namespace of the process and end with it. What runs in the child only makes
//! system calls on memory that [`PreparedIsolation`] holds.

use rustix::fs::{CWD, FileType, Mode};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// What a process is cut off from. The default is nothing.
#[derive(Debug, Clone, Default)]
pub struct Isolation {
    /// It is process 1 of a namespace of its own, and sees no other process, nor their memory segments and queues.
    pub pid_namespace: bool,
    /// Done in this order in a mount namespace of its own. Paths are those of the host, also below `root`.
    pub steps: Vec<JailStep>,
    /// Becomes its root directory, read-only; nothing else stays reachable. Its program and directory are looked up in it.
    pub root: Option<PathBuf>,
    /// User and group id; without supplementary groups and without any capability.
    pub user: Option<u32>,
    /// It and its descendants can never gain privileges by executing a program.
    pub no_new_privileges: bool,
    /// Limits that it cannot raise.
    pub limits: Vec<(Resource, u64)>,
}

/// One change in the process's own view of the file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JailStep {
    /// Shows the file or directory `source` at `target`, which exists.
    Bind {
        /// What is shown.
        source: PathBuf,
        /// Where.
        target: PathBuf,
        /// What can be done with it there.
        access: Access,
    },
    /// An empty file system in memory.
    Memory {
        /// Where; the directory exists.
        target: PathBuf,
        /// The most it can hold.
        bytes: u64,
    },
    /// A new directory.
    Directory(PathBuf),
    /// A new device node that only one user may use.
    Device {
        /// Where.
        path: PathBuf,
        /// Which kind of device has that number.
        kind: DeviceKind,
        /// Device number.
        major: u32,
        /// Device number.
        minor: u32,
        /// User and group id it belongs to.
        owner: u32,
    },
}

/// Character and block devices are numbered apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    /// Read and written as a stream, or by its own calls.
    Character,
    /// A disk.
    Block,
}

/// What can be done with a bound file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read and execute. No device in it works.
    ReadOnly,
    /// Whatever its mode allows, but no device and no set-user-id program in it works.
    ReadWrite,
}

/// Texts and numbers ready to be used by a child that must not allocate.
#[derive(Debug)]
pub(super) struct PreparedIsolation {
    steps: Vec<PreparedStep>,
    own_mounts: bool,
    root: Option<CString>,
    user: Option<u32>,
    no_new_privileges: bool,
    limits: Vec<(Resource, u64)>,
}

#[derive(Debug)]
enum PreparedStep {
    Bind { source: CString, target: CString, flags: MountFlags },
    Memory { target: CString, options: CString },
    Directory(CString),
    Device { path: CString, kind: FileType, device: u64, owner: u32 },
}

impl PreparedIsolation {
    pub(super) fn new(isolation: &Isolation) -> io::Result<Self> {
        Ok(Self {
            steps: isolation.steps.iter().map(PreparedStep::new).collect::<io::Result<_>>()?,
            own_mounts: !isolation.steps.is_empty() || isolation.root.is_some(),
            root: isolation.root.as_deref().map(c_path).transpose()?,
            user: isolation.user,
            no_new_privileges: isolation.no_new_privileges,
            limits: isolation.limits.clone(),
        })
    }

    /// Whether the child needs a mount namespace.
    pub(super) fn has_own_mounts(&self) -> bool {
        self.own_mounts
    }

    /// In the child, as root: builds its view of the file system.
    pub(super) fn change_mounts(&self) -> Result<(), Errno> {
        if !self.own_mounts {
            return Ok(());
        }
        // What is mounted here stays here; what the host unmounts is not held.
        let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        rustix::mount::mount_change(c"/", propagation)?;
        if let Some(root) = &self.root {
            rustix::mount::mount_bind(&**root, &**root)?;
        }
        for step in &self.steps {
            step.carry_out()?;
        }
        let Some(root) = &self.root else { return Ok(()) };
        let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount_remount(&**root, flags, c"")?;
        rustix::process::chdir(&**root)?;
        rustix::process::pivot_root(c".", c".")?;
        // The old root lies over the new one now.
        rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
        rustix::process::chdir(c"/")
    }

    /// In the child, last: gives up every privilege.
    pub(super) fn drop_privileges(&self) -> Result<(), Errno> {
        for (resource, limit) in &self.limits {
            let limit = Rlimit { current: Some(*limit), maximum: Some(*limit) };
            rustix::process::setrlimit(*resource, limit)?;
        }
        if let Some(user) = self.user {
            change_user(user)?;
            rustix::thread::clear_ambient_capability_set()?;
            let none = CapabilitySet::empty();
            let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
            rustix::thread::set_capabilities(None, sets)?;
        }
        if self.no_new_privileges {
            rustix::thread::set_no_new_privs(true)?;
        }
        Ok(())
    }
}

/// By the plain system calls: the C library's would signal all threads that it believes to exist.
fn change_user(user: u32) -> Result<(), Errno> {
    let check = |result: libc::c_long| if result < 0 { Err(last_error()) } else { Ok(()) };
    // SAFETY: no groups are passed, so no memory is read.
    check(unsafe { libc::syscall(libc::SYS_setgroups, 0_usize, std::ptr::null::<libc::gid_t>()) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setresgid, user, user, user) })?;
    // SAFETY: takes numbers only.
    check(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) })
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

impl PreparedStep {
    fn new(step: &JailStep) -> io::Result<Self> {
        Ok(match step {
            JailStep::Bind { source, target, access } => {
                let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
                if *access == Access::ReadOnly {
                    flags |= MountFlags::RDONLY;
                }
                Self::Bind { source: c_path(source)?, target: c_path(target)?, flags }
            }
            JailStep::Memory { target, bytes } => {
                let options = CString::new(format!("size={bytes},nr_inodes=64,mode=755"))?;
                Self::Memory { target: c_path(target)?, options }
            }
            JailStep::Directory(path) => Self::Directory(c_path(path)?),
            JailStep::Device { path, kind, major, minor, owner } => {
                let device = rustix::fs::makedev(*major, *minor);
                let kind = match kind {
                    DeviceKind::Character => FileType::CharacterDevice,
                    DeviceKind::Block => FileType::BlockDevice,
                };
                Self::Device { path: c_path(path)?, kind, device, owner: *owner }
            }
        })
    }

    fn carry_out(&self) -> Result<(), Errno> {
        match self {
            Self::Bind { source, target, flags } => {
                rustix::mount::mount_bind(&**source, &**target)?;
                // The flags of a bind mount are set by a second call only.
                rustix::mount::mount_remount(&**target, *flags, c"")
            }
            Self::Memory { target, options } => {
                let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
                rustix::mount::mount(c"tmpfs", &**target, c"tmpfs", flags, &**options)
            }
            Self::Directory(path) => rustix::fs::mkdirat(CWD, &**path, Mode::from_raw_mode(0o755)),
            Self::Device { path, kind, device, owner } => {
                let mode = Mode::from_raw_mode(0o600);
                rustix::fs::mknodat(CWD, &**path, *kind, mode, *device)?;
                let (user, group) = (rustix::fs::Uid::from_raw(*owner), rustix::fs::Gid::from_raw(*owner));
                rustix::fs::chownat(
                    CWD,
                    &**path,
                    Some(user),
                    Some(group),
                    rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
                )
            }
        }
    }
}

/// A path as the kernel takes it.
pub(super) fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}
