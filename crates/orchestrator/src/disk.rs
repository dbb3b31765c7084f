//! Makes the private disk of a VM from the disk of a capture or a template.
//!
//! Owns nothing. The blocking calls run on the runtime's threads for such calls.

use crate::settings::DiskCopies;
use aenv_storage::{Disk, StorageError};
use std::io::ErrorKind;
use std::path::Path;

/// Makes `to` a disk that shares the blocks of `base`, or a full copy where that is allowed and needed.
pub(crate) async fn clone_disk(base: &Path, to: &Path, copies: DiskCopies) -> Result<Disk, StorageError> {
    let (base, target) = (base.to_owned(), to.to_owned());
    match tokio::task::spawn_blocking(move || clone_blocking(&base, &target, copies)).await {
        Ok(result) => result,
        Err(error) => Err(failed(to, std::io::Error::other(error))),
    }
}

/// As [`clone_disk`], for callers that may block.
pub(crate) fn clone_blocking(base: &Path, to: &Path, copies: DiskCopies) -> Result<Disk, StorageError> {
    match Disk::clone_from_base(base, to) {
        Err(StorageError::ReflinkUnsupported { .. }) if copies == DiskCopies::FullCopyAllowed => {
            if let Err(error) = std::fs::copy(base, to) {
                // Its absence is what is wanted; the first error is the one to report.
                drop(std::fs::remove_file(to));
                return Err(failed(to, error));
            }
            Disk::open(to)
        }
        other => other,
    }
}

fn failed(path: &Path, source: std::io::Error) -> StorageError {
    let path = path.to_owned();
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => StorageError::NoSpace { path },
        _ => StorageError::Io { action: "copy to", path, source },
    }
}
