//! What disks and memory images have in common: one regular file known by its path.
//!
//! Owns the path only. Must not know what the bytes mean.

use crate::StorageError;
use aenv_sys::file::{ReflinkError, reflink};
use std::fs::{File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawFile {
    path: PathBuf,
}

impl RawFile {
    pub(crate) fn open(path: &Path) -> Result<Self, StorageError> {
        let file = Self { path: path.to_owned() };
        if !file.metadata()?.is_file() {
            return Err(failed("open", path, io::Error::other("not a regular file")));
        }
        Ok(file)
    }

    pub(crate) fn clone_from_base(base: &Path, path: &Path) -> Result<Self, StorageError> {
        let source = File::open(base).map_err(|error| failed("open", base, error))?;
        let target = OpenOptions::new().write(true).create_new(true).open(path);
        let target = target.map_err(|error| failed("make", path, error))?;
        match reflink(&source, &target, path) {
            Ok(()) => Ok(Self { path: path.to_owned() }),
            Err(error) => {
                after_failure(remove(path));
                Err(match error {
                    ReflinkError::Unsupported { .. } => {
                        StorageError::ReflinkUnsupported { base: base.to_owned(), path: path.to_owned() }
                    }
                    ReflinkError::Io(error) => failed("make", path, error),
                })
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn size(&self) -> Result<u64, StorageError> {
        Ok(self.metadata()?.len())
    }

    pub(crate) fn stored_bytes(&self) -> Result<u64, StorageError> {
        // POSIX counts in units of 512 bytes, whatever the filesystem's block size.
        Ok(self.metadata()?.blocks() * 512)
    }

    pub(crate) fn make_read_only(&self) -> Result<(), StorageError> {
        std::fs::set_permissions(&self.path, Permissions::from_mode(0o444))
            .map_err(|error| failed("seal", &self.path, error))
    }

    pub(crate) fn remove(self) -> Result<(), StorageError> {
        remove(&self.path)
    }

    fn metadata(&self) -> Result<Metadata, StorageError> {
        std::fs::metadata(&self.path).map_err(|error| failed("open", &self.path, error))
    }
}

fn remove(path: &Path) -> Result<(), StorageError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

pub(crate) fn failed(action: &'static str, path: &Path, source: io::Error) -> StorageError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StorageError::NoSpace { path },
        _ => StorageError::Io { action, path, source },
    }
}

/// Tells that cleaning up after a failure failed, too: the failure itself is what the caller is told.
pub(crate) fn after_failure(cleaned: Result<(), StorageError>) {
    if let Err(error) = cleaned {
        tracing::warn!(%error, "what failed before could not be cleaned up");
    }
}

#[cfg(test)]
mod tests {
    use crate::{Disk, MemoryImage, StorageError};
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_clone_shares_or_says_why_not_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (base, path) = (directory.path().join("base"), directory.path().join("clone"));
        std::fs::write(&base, [7; 8192]).unwrap();
        match Disk::clone_from_base(&base, &path) {
            Ok(disk) => {
                File::options().write(true).open(&path).unwrap().write_all_at(&[1], 0).unwrap();
                assert_eq!(disk.size().unwrap(), 8192);
                assert_eq!(std::fs::read(&base).unwrap(), [7; 8192]);
                assert!(matches!(Disk::clone_from_base(&base, &path), Err(StorageError::Io { .. })));
                disk.clone().remove().unwrap();
                disk.remove().unwrap();
            }
            Err(error) => assert!(matches!(error, StorageError::ReflinkUnsupported { .. }), "{error}"),
        }
        assert!(!path.exists());
        assert!(Disk::clone_from_base(&directory.path().join("none"), &path).is_err());
        assert!(Disk::open(directory.path()).is_err());
    }

    #[test]
    fn holes_are_not_stored_and_a_sealed_image_is_read_only() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        file.write_all_at(&[1; 4096], 4096).unwrap();
        let image = MemoryImage::open(&path).unwrap();
        image.seal().unwrap();
        assert_eq!(image.size().unwrap(), 1 << 30);
        assert!(image.stored_bytes().unwrap() < 1 << 20);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o444);
        image.remove().unwrap();
        assert!(MemoryImage::open(&path).is_err());
    }
}
