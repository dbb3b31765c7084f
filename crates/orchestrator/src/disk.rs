//! Makes the private disk of a VM from the disk of a capture or a template.
//!
//! Owns nothing. The blocking calls run on the runtime's threads for such calls.

use crate::settings::DiskCopies;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Why a disk was not made; nothing of it is left.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum DiskError {
    /// The filesystem is full.
    #[error("no space left for disk {0}")]
    NoSpace(PathBuf),
    /// The filesystem cannot share blocks between these files.
    #[error(
        "{0} cannot share blocks with its base: put the data directory on XFS (with reflink) or btrfs, all of it on one \
         filesystem"
    )]
    ReflinkUnsupported(PathBuf),
    /// Anything else.
    #[error("cannot make disk {path}: {reason}")]
    Failed {
        /// The disk that was to be made.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

/// Makes `to` a copy of `base` that shares its blocks, or a full one where that is allowed and needed.
pub(crate) async fn clone_disk(base: &Path, to: &Path, copies: DiskCopies) -> Result<(), DiskError> {
    let (base, to) = (base.to_owned(), to.to_owned());
    let path = to.clone();
    match tokio::task::spawn_blocking(move || clone_blocking(&base, &to, copies)).await {
        Ok(result) => result,
        Err(error) => Err(DiskError::Failed { path, reason: error.to_string() }),
    }
}

/// As [`clone_disk`], for callers that may block.
pub(crate) fn clone_blocking(base: &Path, to: &Path, copies: DiskCopies) -> Result<(), DiskError> {
    let result = reflink(base, to).or_else(|error| match error.kind() {
        ErrorKind::Unsupported | ErrorKind::CrossesDevices | ErrorKind::InvalidInput
            if copies == DiskCopies::FullCopyAllowed =>
        {
            std::fs::copy(base, to).map(drop)
        }
        _ => Err(error),
    });
    result.map_err(|error| {
        // Its absence is what is wanted; the first error is the one to report.
        drop(std::fs::remove_file(to));
        match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => DiskError::NoSpace(to.to_owned()),
            ErrorKind::Unsupported | ErrorKind::CrossesDevices | ErrorKind::InvalidInput => {
                DiskError::ReflinkUnsupported(to.to_owned())
            }
            _ => {
                DiskError::Failed { path: to.to_owned(), reason: format!("from {}: {error}", base.display()) }
            }
        }
    })
}

fn reflink(base: &Path, to: &Path) -> std::io::Result<()> {
    let source = File::open(base)?;
    let target = File::options().write(true).create_new(true).open(to)?;
    rustix::fs::ioctl_ficlone(&target, &source).map_err(|errno| {
        // Filesystems without reflinks say this in several ways.
        if errno == rustix::io::Errno::NOTTY { ErrorKind::Unsupported.into() } else { errno.into() }
    })
}
