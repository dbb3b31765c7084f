//! Makes a file that has the content of another one: sharing its blocks, or in full where that is allowed and needed.
//!
//! Owns nothing.

use crate::settings::DiskCopies;
use aenv_storage::{Disk, StorageError};
use rustix::fs::SeekFrom;
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;

/// Makes `to` a disk that shares the blocks of `base`, or a full copy where that is allowed and needed. Blocks.
pub(crate) fn clone_blocking(base: &Path, to: &Path, copies: DiskCopies) -> Result<Disk, StorageError> {
    match Disk::clone_from_base(base, to) {
        Err(StorageError::ReflinkUnsupported { .. }) if copies == DiskCopies::FullCopyAllowed => {
            if let Err(error) = std::fs::copy(base, to) {
                // Its absence is what is wanted; the first error is the one to report.
                drop(std::fs::remove_file(to));
                return Err(failed("copy to", to, error));
            }
            Disk::open(to)
        }
        other => other,
    }
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
pub(super) fn data_extents(file: &File) -> std::io::Result<Vec<Range<u64>>> {
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
