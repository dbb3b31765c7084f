//! What the rig boots from: kernel, initramfs, root disk, blank data area, and a disk with the guest's files. Made once, by
//! the scripts in `rig/`, and again when what they are made of changes. Owns `.aenv/cache/rig`.

use crate::process::{output_of, run_quietly};
use crate::project::Project;
use crate::stages::{Stages, Voice};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Size of the data area; sparse, so it takes what is written.
const AREA_BYTES: u64 = 16 << 30;
/// Size of the disk with the guest's files; sparse like the root file systems in it.
const GUEST_BYTES: u64 = 8 << 30;

/// Files the machine is started with. None of them is ever written by a run.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    pub(super) root: PathBuf,
    pub(super) area: PathBuf,
    pub(super) guest: PathBuf,
    /// On the same file system: room for what a run writes to its disks.
    pub(super) scratch: PathBuf,
}

/// Makes what is missing or out of date.
pub(super) fn make(project: &Project, stages: &mut Stages) -> Result<Image> {
    let directory = project.rig_dir();
    std::fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let kernel = directory.join("kernel");
    let image = Image {
        kernel: kernel.join("vmlinuz"),
        initramfs: directory.join("initramfs.cpio"),
        root: directory.join("root.ext4"),
        area: directory.join("area.xfs"),
        guest: directory.join("guest.ext4"),
        scratch: directory,
    };
    stages.run("rig: kernel", |voice| script(project, voice, "fetch-kernel.sh", &[&kernel]))?;
    stages.run("rig: initramfs", |voice| {
        script(project, voice, "build-initramfs.sh", &[&kernel, &image.initramfs])
    })?;
    stages.run("rig: root disk", |voice| script(project, voice, "build-root.sh", &[&kernel, &image.root]))?;
    stages.run("rig: guest files and data area", |_| {
        guest_disk(&project.guest_dir(), &image.guest)?;
        blank_area(&image.area)
    })?;
    Ok(image)
}

fn script(project: &Project, voice: &Voice, name: &str, arguments: &[&Path]) -> Result<()> {
    let mut command = Command::new(project.root().join("rig").join(name));
    command.current_dir(project.root()).args(arguments);
    let log = project.log_dir().join(format!("rig-{name}")).with_extension("log");
    run_quietly(&mut command, &log, |line| voice.doing(line))
}

/// A disk with a copy of the guest's files: reading the few blocks that are needed from it takes less time in an emulated
/// machine than unpacking them all.
fn guest_disk(guest: &Path, disk: &Path) -> Result<()> {
    let wanted = fingerprint(guest)?;
    let stamp = disk.with_extension("stamp");
    if disk.exists() && std::fs::read_to_string(&stamp).is_ok_and(|present| present == wanted) {
        return Ok(());
    }
    let unfinished = sparse_file(disk, GUEST_BYTES)?;
    let mut command = Command::new("mke2fs");
    command.args([
        "-q",
        "-t",
        "ext4",
        "-F",
        "-m",
        "0",
        "-O",
        "^has_journal",
        "-E",
        "lazy_itable_init=0,nodiscard",
        "-d",
    ]);
    output_of(command.arg(guest).arg(&unfinished))?;
    std::fs::rename(&unfinished, disk).with_context(|| format!("cannot rename to {}", disk.display()))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}

fn blank_area(disk: &Path) -> Result<()> {
    if disk.exists() {
        return Ok(());
    }
    let unfinished = sparse_file(disk, AREA_BYTES)?;
    output_of(Command::new("mkfs.xfs").args(["-q", "-f", "-m", "reflink=1"]).arg(&unfinished))?;
    std::fs::rename(&unfinished, disk).with_context(|| format!("cannot rename to {}", disk.display()))
}

fn sparse_file(disk: &Path, bytes: u64) -> Result<PathBuf> {
    let path = disk.with_extension("new");
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    file.set_len(bytes).with_context(|| format!("cannot make {} sparse", path.display()))?;
    Ok(path)
}

/// Changes when any file below a directory is replaced or written.
fn fingerprint(directory: &Path) -> Result<String> {
    let mut lines = Vec::new();
    let mut pending = vec![directory.to_owned()];
    while let Some(next) = pending.pop() {
        let entries = std::fs::read_dir(&next).with_context(|| format!("cannot list {}", next.display()))?;
        for entry in entries {
            let path = entry.with_context(|| format!("cannot list {}", next.display()))?.path();
            let data =
                path.symlink_metadata().with_context(|| format!("cannot look at {}", path.display()))?;
            lines.push(format!("{} {} {} {}", path.display(), data.len(), data.mtime(), data.mtime_nsec()));
            if data.is_dir() {
                pending.push(path);
            }
        }
    }
    lines.sort();
    Ok(hex::encode(Sha256::digest(lines.join("\n"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_follows_every_file() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("kernel")).unwrap();
        let file = directory.path().join("kernel/vmlinux");
        std::fs::write(&file, "one").unwrap();
        let before = fingerprint(directory.path()).unwrap();
        assert_eq!(fingerprint(directory.path()).unwrap(), before);
        std::fs::write(&file, "three").unwrap();
        assert_ne!(fingerprint(directory.path()).unwrap(), before);
    }
}
