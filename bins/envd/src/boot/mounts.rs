//! Filesystems of a guest, and the way from the initramfs to the root disk.

use super::on;
use crate::freezer::PROGRAMS;
use anyhow::Context as _;
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};
use std::ffi::CStr;
use std::path::Path;

const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Mounts a kernel filesystem on a directory, which is made when it is missing. One that is mounted already is fine.
fn kernel(kind: &str, target: &Path, flags: MountFlags, data: Option<&CStr>) -> anyhow::Result<()> {
    on(std::fs::create_dir_all(target), "make", target)?;
    match mount(kind, target, kind, flags, data) {
        Ok(()) | Err(Errno::BUSY) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot mount {kind} on {}", target.display())),
    }
}

/// Mounts the device filesystem.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn device_filesystem(target: &Path) -> anyhow::Result<()> {
    kernel("devtmpfs", target, MountFlags::NOSUID, Some(c"mode=0755"))
}

/// Mounts the filesystems that booting itself needs, below `root`.
///
/// # Errors
/// When the kernel refuses one.
pub(crate) fn kernel_filesystems(root: &Path) -> anyhow::Result<()> {
    device_filesystem(&root.join("dev"))?;
    kernel("proc", &root.join("proc"), PLAIN, None)?;
    kernel("sysfs", &root.join("sys"), PLAIN, None)
}

/// Mounts the root disk. Access times are not kept: each would make a page and a block differ from the template.
///
/// # Errors
/// When it holds no filesystem that the kernel knows.
pub(crate) fn root_disk(disk: &Path, target: &Path) -> anyhow::Result<()> {
    on(std::fs::create_dir_all(target), "make", target)?;
    let mounted = mount(disk, target, "ext4", MountFlags::NOATIME, None);
    mounted.with_context(|| format!("cannot mount {} as ext4", disk.display()))
}

/// Makes `root` the root directory and gives back the memory of what the initramfs held.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn switch_root(root: &Path) -> anyhow::Result<()> {
    for name in ["dev", "proc", "sys"] {
        let (from, to) = (Path::new("/").join(name), root.join(name));
        on(std::fs::create_dir_all(&to), "make", &to)?;
        on(mount_move(&from, &to), "move a filesystem to", &to)?;
    }
    // The file of this very program goes too; its memory stays for as long as it runs.
    for leftover in ["/modules", "/init"] {
        let path = Path::new(leftover);
        let removed = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        if let Err(error) = removed {
            tracing::warn!(path = leftover, %error, "cannot free memory of the initramfs");
        }
    }
    on(std::env::set_current_dir(root), "enter", root)?;
    on(mount_move(".", "/"), "move the root to /", root)?;
    on(rustix::process::chroot("."), "make the root", root)?;
    std::env::set_current_dir("/").context("cannot enter /")
}

/// Mounts what programs expect beside the kernel's filesystems. Each is best effort: a guest without one still works.
pub(crate) fn runtime_filesystems() {
    let private = MountFlags::NOSUID | MountFlags::NODEV;
    for (kind, target, flags, data) in [
        (
            "devpts",
            "/dev/pts",
            MountFlags::NOSUID | MountFlags::NOEXEC,
            Some(c"gid=5,mode=0620,ptmxmode=0666"),
        ),
        ("tmpfs", "/dev/shm", private, Some(c"mode=1777")),
        ("mqueue", "/dev/mqueue", PLAIN, None),
        ("tmpfs", "/run", private, Some(c"mode=0755")),
        ("cgroup2", "/sys/fs/cgroup", PLAIN, Some(c"nsdelegate")),
    ] {
        if let Err(error) = kernel(kind, Path::new(target), flags, data) {
            tracing::warn!("{error:#}");
        }
    }
    // Programs are held still by it. Without it they are not.
    if let Err(error) = on(std::fs::create_dir_all(PROGRAMS), "make", Path::new(PROGRAMS)) {
        tracing::warn!("{error:#}");
    }
    for (name, target) in [("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")]
    {
        let link = Path::new("/dev").join(name);
        if let Err(error) = std::os::unix::fs::symlink(target, &link)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            tracing::warn!(link = %link.display(), %error, "cannot link");
        }
    }
    if let Err(error) = make_temporary_directory(Path::new("/tmp")) {
        tracing::warn!(%error, "cannot make /tmp");
    }
}

/// Makes a directory for all in an image that has none.
fn make_temporary_directory(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    match std::fs::create_dir(path) {
        Ok(()) => std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o1777)),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
