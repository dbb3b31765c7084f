//! What the disk of a VM is on this host, and so how its VMM gets at it. Owns nothing.
//!
//! | `Placement::disk` is | in the jail | host's page cache |
//! |---|---|---|
//! | a regular file | bound | used |
//! | a file that a FUSE server exports | bound | passed by: the server has a cache of its own |
//! | a block device, for example of ublk | a new node of the same number | passed by, for the same reason |

use rustix::fs::FsWord;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, chown};
use std::path::Path;

/// `FUSE_SUPER_MAGIC` of the kernel's `magic.h`.
const FUSE: FsWord = 0x6573_5546;

/// A disk that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostDisk {
    pub(crate) kind: DiskKind,
    /// Its virtual size.
    pub(crate) bytes: u64,
}

/// How a VMM gets at a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskKind {
    /// A regular file of an ordinary filesystem.
    File,
    /// A regular file that a process exports through FUSE.
    ExportedFile,
    /// A block device.
    Device {
        /// Device number.
        major: u32,
        /// Device number.
        minor: u32,
    },
}

impl HostDisk {
    /// Looks at a disk. Blocks, for as long as who exports it does not answer.
    ///
    /// # Errors
    /// When it cannot be opened, or is neither a regular file nor a block device.
    pub(crate) fn examine(path: &Path) -> io::Result<Self> {
        let named = |error: &io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let metadata = std::fs::metadata(path).map_err(|error| named(&error))?;
        if metadata.file_type().is_block_device() {
            let mut device = File::open(path).map_err(|error| named(&error))?;
            let bytes = io::Seek::seek(&mut device, io::SeekFrom::End(0)).map_err(|error| named(&error))?;
            let number = metadata.rdev();
            let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
            return Ok(Self { kind: DiskKind::Device { major, minor }, bytes });
        }
        if !metadata.is_file() {
            let what = format!("{} is neither a regular file nor a block device", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let filesystem = rustix::fs::statfs(path).map_err(|error| named(&error.into()))?;
        let kind = if filesystem.f_type == FUSE { DiskKind::ExportedFile } else { DiskKind::File };
        Ok(Self { kind, bytes: metadata.len() })
    }

    /// Makes it usable by the user of its VM. A device's node is not touched: the VM gets one of its own.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn give(&self, path: &Path, user: u32) -> io::Result<()> {
        match self.kind {
            DiskKind::Device { .. } => Ok(()),
            DiskKind::File | DiskKind::ExportedFile => chown(path, Some(user), Some(user))
                .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_told_from_what_is_no_disk() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        File::create(&path).unwrap().set_len(1 << 30).unwrap();
        let disk = HostDisk::examine(&path).unwrap();
        assert_eq!(disk, HostDisk { kind: DiskKind::File, bytes: 1 << 30 });
        for no_disk in [directory.path(), Path::new("/dev/null"), Path::new("/no-such-disk")] {
            let error = HostDisk::examine(no_disk).unwrap_err().to_string();
            assert!(error.contains(no_disk.to_str().unwrap()), "{error}");
        }
    }
}
