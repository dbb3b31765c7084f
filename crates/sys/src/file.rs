//! What files can do on Linux beyond reading and writing: share blocks, have holes, tell where data is.
//!
//! Owns nothing.

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

/// Why a file could not be cloned.
#[derive(Debug, thiserror::Error)]
pub enum ReflinkError {
    /// The filesystem cannot share blocks between files, or the two files are on different filesystems.
    #[error("the filesystem of {path} cannot share blocks between files (reflink): put it on XFS or btrfs")]
    Unsupported {
        /// The file that was to be made.
        path: PathBuf,
    },
    /// Something else failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Makes `target` share all blocks of `source`; what either writes later is its own. `target`'s content is replaced.
///
/// # Errors
/// [`ReflinkError::Unsupported`] when the filesystem cannot; `path` is only shown.
pub fn reflink(source: &File, target: &File, path: &Path) -> Result<(), ReflinkError> {
    match rustix::fs::ioctl_ficlone(target, source) {
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV | Errno::INVAL | Errno::NOSYS) => {
            Err(ReflinkError::Unsupported { path: path.to_owned() })
        }
        cloned => Ok(cloned.map_err(io::Error::from)?),
    }
}

/// Whether files in `directory` can share blocks: tried with two small files that are removed again.
///
/// # Errors
/// When files cannot be made there.
pub fn supports_reflink(directory: &Path) -> io::Result<bool> {
    let path = |number: u8| directory.join(format!(".reflink-probe-{}-{number}", std::process::id()));
    let (source_path, target_path) = (path(0), path(1));
    let open = |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path);
    let probed = (|| {
        let source = open(&source_path)?;
        rustix::io::write(&source, &[1; 4096])?;
        match reflink(&source, &open(&target_path)?, &target_path) {
            Ok(()) => Ok(true),
            Err(ReflinkError::Unsupported { .. }) => Ok(false),
            Err(ReflinkError::Io(error)) => Err(error),
        }
    })();
    for path in [source_path, target_path] {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    probed
}

/// Gives the blocks of a range back to the filesystem; it reads as zeros from then on.
///
/// # Errors
/// When the filesystem cannot, or the file is not writable.
pub fn punch_hole(file: &File, range: Range<u64>) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, range.start, range.end - range.start)?)
}

/// The parts of a file that are not holes, in order. Filesystems may count zeros as data, never data as a hole.
///
/// # Errors
/// The system's error. Moves the file's offset.
pub fn data_extents(file: &File) -> io::Result<Vec<Range<u64>>> {
    let mut extents: Vec<Range<u64>> = Vec::new();
    while let Some(extent) = next_extent(file, extents.last().map_or(0, |last| last.end))? {
        extents.push(extent);
    }
    Ok(extents)
}

/// The first byte at or after `offset` that is not in a hole, with the end of its extent; `None` when all that follows is
/// a hole.
///
/// # Errors
/// The system's error. Moves the file's offset.
pub fn next_extent(file: &File, offset: u64) -> io::Result<Option<Range<u64>>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Err(Errno::NXIO) => return Ok(None),
        found => found?,
    };
    Ok(Some(start..rustix::fs::seek(file, SeekFrom::Hole(start))?))
}

/// Writes what the kernel has cached of a file or block device to where it is stored, and waits for it. Unlike an fsync it asks
/// nobody to make it durable.
///
/// # Errors
/// When it could not be written, now or since the last time that somebody asked.
pub fn write_back(file: &File) -> io::Result<()> {
    let flags =
        libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: only numbers are passed, and the descriptor is open as long as `file` is borrowed.
    let written = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) };
    if written == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes that an unprivileged process can still store on the filesystem of `path`.
///
/// # Errors
/// When the path does not exist.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_is_written_back_is_stored() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 128 << 10], 0).unwrap();
        write_back(&file).unwrap();
        // Delayed allocation has ended.
        assert!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) > 0);
        let (reader, _writer) = io::pipe().unwrap();
        assert!(write_back(&File::from(std::os::fd::OwnedFd::from(reader))).is_err());
    }

    #[test]
    fn holes_are_found_and_made() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(data_extents(&file).unwrap().is_empty());
        file.write_all_at(&[7; 128 << 10], 256 << 10).unwrap();
        assert_eq!(data_extents(&file).unwrap().first(), Some(&(256 << 10..384 << 10)));
        punch_hole(&file, 300 << 10..320 << 10).unwrap();
        assert_eq!(data_extents(&file).unwrap(), [256 << 10..300 << 10, 320 << 10..384 << 10]);
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    }

    #[test]
    fn reflink_works_or_says_that_it_cannot() {
        let directory = tempfile::tempdir().unwrap();
        let supported = supports_reflink(directory.path()).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let source = tempfile::tempfile_in(directory.path()).unwrap();
        source.write_all_at(b"shared", 0).unwrap();
        let target = tempfile::tempfile_in(directory.path()).unwrap();
        match reflink(&source, &target, directory.path()) {
            Ok(()) => assert!(supported),
            Err(error) => assert!(!supported && matches!(error, ReflinkError::Unsupported { .. }), "{error}"),
        }
    }

    #[test]
    fn free_space_is_told() {
        assert!(free_bytes(Path::new("/")).unwrap() > 0);
        assert!(free_bytes(Path::new("/does-not-exist")).is_err());
    }
}
