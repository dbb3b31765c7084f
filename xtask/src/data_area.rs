//! A directory whose file system can share blocks between files: as it is, or as a mounted XFS image.
//!
//! Owns the mount and the loop device behind it; both are found again by the image's path, so nothing is remembered.

use crate::process::output_of;
use anyhow::{Context, Result, bail};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A directory and the image that is mounted there if need be.
#[derive(Debug, Clone)]
pub(crate) struct Area {
    pub(crate) directory: PathBuf,
    pub(crate) image: PathBuf,
}

/// What lies below a data directory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// The file system of the directory shares blocks.
    Itself,
    /// An XFS image is mounted there; true when that was done just now.
    Image { mounted_now: bool },
}

impl Area {
    /// With the image beside the directory, so that it outlives a mount.
    pub(crate) fn beside(directory: &Path) -> Result<Self> {
        let name =
            directory.file_name().with_context(|| format!("{} names no directory", directory.display()))?;
        let image = directory.with_file_name(format!("{}.xfs", name.to_string_lossy()));
        Ok(Self { directory: directory.to_owned(), image })
    }

    /// Makes the directory ready: mounts an image of at most `image_bytes` there unless its file system shares blocks.
    pub(crate) fn prepare(&self, image_bytes: u64) -> Result<Ground> {
        let directory = self.directory.display();
        std::fs::create_dir_all(&self.directory).with_context(|| format!("cannot make {directory}"))?;
        if is_mounted(&self.directory)? {
            return Ok(Ground::Image { mounted_now: false });
        }
        if !self.image.exists() {
            // The image's own directory decides: the mount point may lie elsewhere only to have a short name.
            if self.image.parent() == self.directory.parent() && shares_blocks(&self.directory)? {
                return Ok(Ground::Itself);
            }
            if std::fs::read_dir(&self.directory)?.next().is_some() {
                bail!(
                    "{directory} holds files, but its file system cannot share blocks between files: empty it, or set \
                     AENV_DATA_DIR"
                );
            }
            make_image(&self.image, image_bytes)?;
        }
        self.mount()?;
        Ok(Ground::Image { mounted_now: true })
    }

    /// Mounts an existing image again, so that what lies in it can be cleared; makes nothing.
    pub(crate) fn prepare_again(&self) -> Result<()> {
        if self.image.exists() && self.directory.exists() && !is_mounted(&self.directory)? {
            self.mount()?;
        }
        Ok(())
    }

    fn mount(&self) -> Result<()> {
        let mut command = Command::new("mount");
        output_of(command.args(["-o", "loop,discard,noatime"]).arg(&self.image).arg(&self.directory))?;
        Ok(())
    }

    /// Unmounts and detaches its loop devices. Tells what was ended; nothing to do is no error.
    pub(crate) fn release(&self) -> Result<Vec<String>> {
        let mut ended = Vec::new();
        if !self.directory.exists() {
            return Ok(ended);
        }
        // Later mounts lie inside of earlier ones, or over them.
        for point in mounts_at(&self.directory)?.into_iter().rev() {
            output_of(Command::new("umount").arg(&point))?;
            ended.push(format!("mount {}", point.display()));
        }
        if self.image.exists() {
            for device in loop_devices(&self.image)? {
                output_of(Command::new("losetup").args(["-d", &device]))?;
                ended.push(format!("loop device {device}"));
            }
        }
        Ok(ended)
    }
}

/// A sparse XFS image of at most `bytes`, and never more than the file system below could hold.
fn make_image(image: &Path, bytes: u64) -> Result<()> {
    let below = image.parent().unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(below).with_context(|| format!("cannot measure {}", below.display()))?;
    let size = bytes.min(stat.f_bavail.saturating_mul(stat.f_frsize) / 10 * 9);
    // The smallest that mkfs.xfs of today makes, with room for one template.
    if size < 4 << 30 {
        bail!("{} has room for {} MiB only: a data directory needs 4 GiB", below.display(), size >> 20);
    }
    let unfinished = image.with_extension("new");
    let file = File::create(&unfinished).with_context(|| format!("cannot write {}", unfinished.display()))?;
    file.set_len(size).with_context(|| format!("cannot make {} sparse", unfinished.display()))?;
    drop(file);
    output_of(Command::new("mkfs.xfs").args(["-q", "-f", "-m", "reflink=1"]).arg(&unfinished))?;
    std::fs::rename(&unfinished, image).with_context(|| format!("cannot rename to {}", image.display()))
}

/// Whether files in the directory can share blocks: tried with two files of its own.
fn shares_blocks(directory: &Path) -> Result<bool> {
    let (from, to) = (directory.join(".probe-from"), directory.join(".probe-to"));
    let probe = || -> Result<bool> {
        std::fs::write(&from, [1_u8; 4096])?;
        let (source, target) = (File::open(&from)?, File::create(&to)?);
        Ok(rustix::fs::ioctl_ficlone(&target, &source).is_ok())
    };
    let result = probe().with_context(|| format!("cannot write in {}", directory.display()));
    for path in [from, to] {
        if path.exists() {
            std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    result
}

fn is_mounted(directory: &Path) -> Result<bool> {
    let resolved =
        directory.canonicalize().with_context(|| format!("cannot resolve {}", directory.display()))?;
    Ok(mounts_at(directory)?.contains(&resolved))
}

/// What is mounted at the directory or below it, in the order of mounting.
fn mounts_at(directory: &Path) -> Result<Vec<PathBuf>> {
    let directory =
        directory.canonicalize().with_context(|| format!("cannot resolve {}", directory.display()))?;
    let table = std::fs::read_to_string("/proc/self/mounts").context("cannot read the list of mounts")?;
    Ok(mount_points(&table).map(PathBuf::from).filter(|point| point.starts_with(&directory)).collect())
}

/// Second column of a mount table, with its octal escapes undone.
fn mount_points(table: &str) -> impl Iterator<Item = String> {
    table.lines().filter_map(|line| line.split(' ').nth(1)).map(|point| {
        [("\\040", " "), ("\\011", "\t"), ("\\134", "\\")]
            .iter()
            .fold(point.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
    })
}

fn loop_devices(image: &Path) -> Result<Vec<String>> {
    let listing =
        output_of(Command::new("losetup").args(["--noheadings", "--output", "NAME", "-j"]).arg(image))?;
    Ok(listing.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_image_lies_beside_its_directory() {
        assert_eq!(Area::beside(Path::new("/a/data")).unwrap().image, Path::new("/a/data.xfs"));
        assert!(Area::beside(Path::new("/")).is_err());
    }

    #[test]
    fn mount_points_are_read_with_escapes() {
        let table = "/dev/loop0 /a\\040b xfs rw 0 0\nproc /proc proc rw 0 0\n";
        assert_eq!(mount_points(table).collect::<Vec<_>>(), ["/a b", "/proc"]);
    }

    #[test]
    fn a_directory_without_a_mount_releases_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let area = Area::beside(&directory.path().join("absent")).unwrap();
        assert_eq!(area.release().unwrap(), Vec::<String>::new());
        assert!(!is_mounted(directory.path()).unwrap());
    }
}
