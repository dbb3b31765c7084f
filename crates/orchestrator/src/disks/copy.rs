//! Makes a file that has the content of another one: sharing its blocks, or in full where that is allowed and needed.
//!
//! Owns nothing.

use crate::settings::DiskCopies;
use aenv_storage::{Disk, StorageError};
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Makes `to` a disk that shares the blocks of `base`, or a full copy where that is allowed and needed. Blocks.
pub(crate) fn clone_blocking(base: &Path, to: &Path, copies: DiskCopies) -> Result<Disk, StorageError> {
    match Disk::clone_from_base(base, to) {
        Err(StorageError::ReflinkUnsupported { .. }) if copies == DiskCopies::FullCopyAllowed => {
            if let Err(error) = copy_data(base, to) {
                // Its absence is what is wanted; the first error is the one to report.
                drop(std::fs::remove_file(to));
                return Err(failed("copy to", to, error));
            }
            Disk::open(to)
        }
        other => other,
    }
}

/// Copies a file in full, but for its holes.
fn copy_data(base: &Path, to: &Path) -> std::io::Result<()> {
    let from = File::open(base)?;
    let to = File::options().write(true).create_new(true).open(to)?;
    to.set_len(from.metadata()?.len())?;
    copy_extents(&from, &to).map(drop)
}

/// Writes the data of one file, at the same places, into another; tells how much that was.
pub(super) fn copy_extents(from: &File, to: &File) -> std::io::Result<u64> {
    let mut copied = 0;
    let mut buffer = vec![0; 1 << 18];
    for extent in data_extents(from)? {
        let mut offset = extent.start;
        while offset < extent.end {
            let length = usize::try_from(extent.end - offset).unwrap_or(usize::MAX).min(buffer.len());
            let part = &mut buffer[..length];
            from.read_exact_at(part, offset)?;
            to.write_all_at(part, offset)?;
            offset += length as u64;
        }
        copied += extent.end - extent.start;
    }
    Ok(copied)
}

/// An error on a file.
pub(super) fn failed(action: &'static str, path: &Path, source: std::io::Error) -> StorageError {
    let path = path.to_owned();
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StorageError::NoSpace { path },
        _ => StorageError::Io { action, path, source },
    }
}

/// Where a sparse file has data, in order.
fn data_extents(file: &File) -> std::io::Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    let mut offset = 0;
    loop {
        let start = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
            Err(rustix::io::Errno::NXIO) => return Ok(extents),
            start => start?,
        };
        offset = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        extents.push(start..offset);
    }
}
