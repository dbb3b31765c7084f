//! The directory that is a VM's whole world, and the command line of the jailer that locks Firecracker into it.
//!
//! Owns the directory `jail` of a VM's run directory, which is made anew for every start: the jailer refuses what an
//! earlier one left. The VM's files are neither copied nor linked into it: they are shown there by mounts that only the
//! process and its descendants see, and that end with them.
//!
//! ```text
//! run_dir/jail/firecracker/NAME/root     becomes /, owned by the VM's user
//!   disk memory state kernel initramfs   empty files; in the jail the VM's files lie over them
//!                                        (a disk that is a block device: a node of that device)
//!   capture/                             of root: the user can write the files we put there, but not exchange them
//!   api.socket                           made by Firecracker
//!   firecracker firecracker.pid dev run  made by the jailer
//! ```

use super::requests::name;
use crate::driver::{CaptureFiles, Placement};
use crate::host_disk::{DiskKind, HostDisk};
use aenv_sys::process::{Access, DeviceKind, JailStep};
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

const JAIL: &str = "jail";
/// The API's socket, as the jailed process sees it and below the jail's root.
const API_SOCKET: &str = "api.socket";
/// Open files: what a VM with one disk and one network card needs, several times over.
const OPEN_FILES: u64 = 256;
/// In the capture directory only names that we put there can be opened.
const CAPTURE_MODE: u32 = 0o711;

/// Where things are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Jail {
    base: PathBuf,
    root: PathBuf,
}

/// What a VM is started from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Origin<'a> {
    /// Kernel and initramfs of the placement.
    Boot,
    /// A capture.
    Capture(&'a CaptureFiles),
}

impl Jail {
    /// Of the VM of `placement`, whose VMM is `program`.
    pub(super) fn new(placement: &Placement, program: &Path) -> Self {
        let base = placement.run_dir.join(JAIL);
        let executable = program.file_name().unwrap_or_default();
        let root = base.join(executable).join(&placement.name).join("root");
        Self { base, root }
    }

    /// Whether an earlier start left one.
    pub(super) fn exists(&self) -> io::Result<bool> {
        self.base.try_exists()
    }

    /// Its root directory, as the host sees it.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The API's socket, as the host sees it.
    pub(super) fn socket(&self) -> PathBuf {
        self.root.join(API_SOCKET)
    }

    /// Where captures are written, as the host sees it.
    pub(super) fn capture_directory(&self) -> PathBuf {
        self.root.join(name::CAPTURE)
    }

    /// Makes the directory anew and returns what is to be mounted into it. The disk is given to the VM's user.
    pub(super) fn build(
        &self,
        placement: &Placement,
        disk: &HostDisk,
        origin: Origin<'_>,
    ) -> io::Result<Vec<JailStep>> {
        self.remove()?;
        // Fails when the run directory is gone: a start that was given up must not bring it back.
        std::fs::create_dir(&self.base).map_err(|error| on_path(&self.base, &error))?;
        std::fs::create_dir_all(&self.root).map_err(|error| on_path(&self.root, &error))?;
        let capture = self.capture_directory();
        std::fs::create_dir(&capture)?;
        std::fs::set_permissions(&capture, Permissions::from_mode(CAPTURE_MODE))?;
        disk.give(&placement.disk, placement.user)?;
        let boot = &placement.boot;
        let (mut shown, mut steps) = (Vec::new(), Vec::new());
        match disk.kind {
            DiskKind::File | DiskKind::ExportedFile => {
                shown.push((&placement.disk, name::DISK, Access::ReadWrite));
            }
            // A bound device would not work: nothing that is bound may be used as one.
            DiskKind::Device { major, minor } => steps.push(JailStep::Device {
                path: self.root.join(name::DISK),
                kind: DeviceKind::Block,
                major,
                minor,
                owner: placement.user,
            }),
        }
        match origin {
            Origin::Boot => shown.extend([
                (&boot.kernel, name::KERNEL, Access::ReadOnly),
                (&boot.initramfs, name::INITRAMFS, Access::ReadOnly),
            ]),
            Origin::Capture(files) => shown.extend([
                (&files.memory, name::MEMORY, Access::ReadOnly),
                (&files.state, name::STATE, Access::ReadOnly),
            ]),
        }
        for (source, name, access) in shown {
            let target = self.root.join(name);
            File::create(&target).map_err(|error| on_path(&target, &error))?;
            let source = std::fs::canonicalize(source).map_err(|error| on_path(source, &error))?;
            steps.push(JailStep::Bind { source, target, access });
        }
        Ok(steps)
    }

    /// The jailer's arguments. Namespaces and control group are those it is born in; it makes neither.
    pub(super) fn arguments(&self, placement: &Placement, program: &Path, largest_file: u64) -> Vec<String> {
        let user = placement.user.to_string();
        let mut arguments = Vec::new();
        let mut add = |option: &str, value: String| arguments.extend([option.to_owned(), value]);
        add("--id", placement.name.clone());
        add("--exec-file", program.display().to_string());
        add("--uid", user.clone());
        add("--gid", user);
        add("--chroot-base-dir", self.base.display().to_string());
        add("--resource-limit", format!("no-file={OPEN_FILES}"));
        add("--resource-limit", format!("fsize={largest_file}"));
        arguments.push("--".to_owned());
        arguments.extend(["--api-sock".to_owned(), format!("/{API_SOCKET}")]);
        arguments
    }

    /// Takes from the VM's user what the jailer gave it: directories in which it could make files without number. Only for
    /// a process that answers and has no guest yet: whatever it needs it has made by then, and nobody hostile is in it.
    pub(super) fn close(&self) -> io::Result<()> {
        let owner = rustix::process::geteuid().as_raw();
        for name in ["", "dev", "dev/net", "run"] {
            let path = self.root.join(name);
            let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
            let directory = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(&path);
            let directory = match directory {
                // A jailer that does not make it gives nothing away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                directory => directory.map_err(|error| on_path(&path, &error))?,
            };
            std::os::unix::fs::fchown(&directory, Some(owner), Some(owner))
                .and_then(|()| directory.set_permissions(Permissions::from_mode(0o755)))
                .map_err(|error| on_path(&path, &error))?;
        }
        Ok(())
    }

    /// Removes it; the process in it has ended.
    pub(super) fn remove(&self) -> io::Result<()> {
        match std::fs::remove_dir_all(&self.base) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(on_path(&self.base, &error)),
            _ => Ok(()),
        }
    }
}

/// An error that says on what.
pub(super) fn on_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::BootSource;

    fn placement(directory: &Path) -> Placement {
        for name in ["disk", "kernel", "initramfs"] {
            File::create(directory.join(name)).unwrap();
        }
        Placement {
            name: "a-1".to_owned(),
            run_dir: directory.to_owned(),
            netns: PathBuf::from("/n"),
            tap: "tap0".to_owned(),
            disk: directory.join("disk"),
            boot: BootSource {
                kernel: directory.join("kernel"),
                initramfs: directory.join("initramfs"),
                guest_arguments: Vec::new(),
            },
            user: rustix::process::getuid().as_raw(),
        }
    }

    #[test]
    fn a_jail_is_built_anew_and_shows_the_vm_s_files() {
        let directory = tempfile::tempdir().unwrap();
        let placement = placement(directory.path());
        let jail = Jail::new(&placement, Path::new("/bin/firecracker-1.12"));
        let root = directory.path().join("jail/firecracker-1.12/a-1/root");
        assert_eq!(jail.root(), root);
        for _ in 0..2 {
            let disk = HostDisk::examine(&placement.disk).unwrap();
            let steps = jail.build(&placement, &disk, Origin::Boot).unwrap();
            let target = |step: &JailStep| match step {
                JailStep::Bind { target, access, .. } => (target.clone(), *access),
                other => panic!("{other:?}"),
            };
            let expected = [
                (root.join("disk"), Access::ReadWrite),
                (root.join("kernel"), Access::ReadOnly),
                (root.join("initramfs"), Access::ReadOnly),
            ];
            assert_eq!(steps.iter().map(target).collect::<Vec<_>>(), expected);
            File::create_new(root.join("left over")).unwrap();
        }
        jail.remove().unwrap();
        jail.remove().unwrap();
        assert!(!directory.path().join("jail").exists() && placement.disk.exists());
    }

    #[test]
    fn a_device_gets_a_node_in_the_jail_that_only_the_vm_may_use() {
        let directory = tempfile::tempdir().unwrap();
        let placement = placement(directory.path());
        let jail = Jail::new(&placement, Path::new("firecracker"));
        let disk = HostDisk { kind: DiskKind::Device { major: 259, minor: 7 }, bytes: 1 << 30 };
        let steps = jail.build(&placement, &disk, Origin::Boot).unwrap();
        let path = jail.root().join("disk");
        assert!(!path.exists() && placement.disk.exists());
        let (kind, owner) = (DeviceKind::Block, placement.user);
        assert_eq!(steps[0], JailStep::Device { path, kind, major: 259, minor: 7, owner });
        assert_eq!(steps.len(), 3);
    }

    #[test]
    fn a_missing_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let placement = placement(directory.path());
        let jail = Jail::new(&placement, Path::new("firecracker"));
        let capture =
            CaptureFiles { memory: directory.path().join("no-memory"), state: directory.path().join("s") };
        let disk = HostDisk::examine(&placement.disk).unwrap();
        let error = jail.build(&placement, &disk, Origin::Capture(&capture)).unwrap_err();
        assert!(error.to_string().contains("no-memory"), "{error}");
    }

    #[test]
    fn the_jailer_is_told_the_user_the_limits_and_nothing_of_namespaces() {
        let directory = tempfile::tempdir().unwrap();
        let placement = Placement { user: 700, ..placement(directory.path()) };
        let program = Path::new("/bin/firecracker");
        let arguments = Jail::new(&placement, program).arguments(&placement, program, 7).join(" ");
        let base = directory.path().join("jail");
        let expected = format!(
            "--id a-1 --exec-file /bin/firecracker --uid 700 --gid 700 --chroot-base-dir {} --resource-limit \
             no-file=256 --resource-limit fsize=7 -- --api-sock /api.socket",
            base.display()
        );
        assert_eq!(arguments, expected);
    }
}
