//! The jail of a QEMU process: what it sees of the host, which is its own program and its own guest's files.
//!
//! ```text
//! /                          the program tree, read-only, the same for every VM (see `program_tree`)
//! /vm/disk                   the guest's disk, if it is a file
//! /vm/memory                 what its memory is a private mapping of; read-only where QEMU can open it so
//! /vm/kernel /vm/initramfs   for a boot
//! /vm/state                  written by a capture
//! /dev                       in memory: null, urandom, net/tun, kvm where it is used, and the disk if it is a device
//! ```
//!
//! Owns nothing: all mounts end with the process. Must not name a path of the host in what QEMU is told.

use super::program_tree::ProgramTree;
use crate::driver::Placement;
use crate::host_disk::DiskKind;
use crate::probe::Accelerator;
use aenv_sys::process::{Access, DeviceKind, Isolation, JailStep, Resource};
use std::path::{Path, PathBuf};

/// The guest's disk, inside, if it is a file.
const DISK_FILE: &str = "/vm/disk";
/// The guest's disk, inside, if it is a device.
const DISK_DEVICE: &str = "/dev/disk";
/// The file behind the guest's memory, inside.
pub(super) const MEMORY: &str = "/vm/memory";
/// The kernel to boot, inside.
pub(super) const KERNEL: &str = "/vm/kernel";
/// The initial RAM filesystem to boot, inside.
pub(super) const INITRAMFS: &str = "/vm/initramfs";
/// The file that device state is written to, inside.
pub(super) const STATE: &str = "/vm/state";
/// Where the device nodes are, inside.
const DEVICES: &str = "/dev";
/// Files that are bound over in every jail; empty in the tree.
pub(super) const MOUNT_POINTS: [&str; 5] = [DISK_FILE, MEMORY, KERNEL, INITRAMFS, STATE];
/// The same for directories.
pub(super) const MOUNT_DIRECTORIES: [&str; 1] = [DEVICES];

/// Name of the file for device state in the run directory.
const STATE_FILE: &str = "device-state";
/// Descriptors that a VMM may have open: it needs some 30.
const DESCRIPTORS: u64 = 256;

/// Where the host finds what a capture wrote to [`STATE`].
pub(super) fn state_file(placement: &Placement) -> PathBuf {
    placement.run_dir.join(STATE_FILE)
}

/// The guest's disk, inside.
pub(super) fn disk(kind: DiskKind) -> &'static str {
    match kind {
        DiskKind::File | DiskKind::ExportedFile => DISK_FILE,
        DiskKind::Device { .. } => DISK_DEVICE,
    }
}

/// What one process is to see.
#[derive(Debug)]
pub(super) struct Jail<'a> {
    pub(super) tree: &'a ProgramTree,
    pub(super) placement: &'a Placement,
    pub(super) accelerator: Accelerator,
    pub(super) disk: DiskKind,
    /// On the host.
    pub(super) memory: &'a Path,
    pub(super) memory_access: Access,
    /// Whether the guest is booted, for which the kernel is needed.
    pub(super) boots: bool,
    /// The largest file the process may write.
    pub(super) largest_file: u64,
}

impl Jail<'_> {
    pub(super) fn isolation(&self) -> Isolation {
        let placement = self.placement;
        let mut steps = vec![
            self.bind(self.memory, MEMORY, self.memory_access),
            self.bind(&state_file(placement), STATE, Access::ReadWrite),
        ];
        // A bound device would not work: nothing that is bound may be used as one.
        let disk = match self.disk {
            DiskKind::File | DiskKind::ExportedFile => {
                steps.push(self.bind(&placement.disk, DISK_FILE, Access::ReadWrite));
                None
            }
            DiskKind::Device { major, minor } => Some((DISK_DEVICE, DeviceKind::Block, major, minor)),
        };
        if self.boots {
            steps.push(self.bind(&placement.boot.kernel, KERNEL, Access::ReadOnly));
            steps.push(self.bind(&placement.boot.initramfs, INITRAMFS, Access::ReadOnly));
        }
        steps.push(JailStep::Memory { target: self.tree.inside(DEVICES), bytes: 4096 });
        steps.push(JailStep::Directory(self.tree.inside("/dev/net")));
        // Numbers from the kernel's list of devices (Documentation/admin-guide/devices.txt).
        let character = |(path, major, minor)| (path, DeviceKind::Character, major, minor);
        let kvm = (self.accelerator == Accelerator::Kvm).then_some(("/dev/kvm", 10, 232));
        let devices = [("/dev/null", 1, 3), ("/dev/urandom", 1, 9), ("/dev/net/tun", 10, 200)];
        let devices = devices.into_iter().chain(kvm).map(character).chain(disk);
        steps.extend(devices.map(|(path, kind, major, minor)| JailStep::Device {
            path: self.tree.inside(path),
            kind,
            major,
            minor,
            owner: placement.user,
        }));
        Isolation {
            pid_namespace: true,
            steps,
            root: Some(self.tree.directory().to_owned()),
            user: Some(placement.user),
            no_new_privileges: true,
            limits: vec![
                (Resource::Core, 0),
                (Resource::Nofile, DESCRIPTORS),
                (Resource::Fsize, self.largest_file),
            ],
        }
    }

    fn bind(&self, source: &Path, target: &str, access: Access) -> JailStep {
        JailStep::Bind { source: source.to_owned(), target: self.tree.inside(target), access }
    }
}
