//! Where things lie, who may use them, and how small files are written.
//!
//! ```text
//! <data>/storage/lock               held by the one process that works on the directory
//! <data>/storage/layers/            immutable layer files, named by whoever put them there
//! <data>/storage/disks/<name>/      record.json, and tops/: the tops of one disk
//! <data>/storage/images/<name>.json
//! <run>/stored.sock                 control interface
//! <run>/holder.sock, holder.log     the process that keeps the FUSE mount
//! <run>/exports/                    the FUSE mount
//! <run>/numbers.json                which export numbers were given away since the host started
//! ```
//! Owns the lock. Knows nothing of what the files contain.

use crate::failure::Failure;
use aenv_storage::block_service::Name;
use std::fs::{File, Permissions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// For the lock of a process that is gone to be free.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// Between two looks at it.
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// A file of at most so many bytes is in one page, which one write changes as a whole.
const SMALL: usize = 4096;

/// Paths of one service.
#[derive(Debug, Clone)]
pub(crate) struct Directories {
    data: PathBuf,
    run: PathBuf,
}

impl Directories {
    /// Makes what is missing and resolves both paths.
    pub(crate) fn open(data: &Path, run: &Path) -> io::Result<Self> {
        for path in [data, run] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        }
        // It may have been there, and be somebody else's as well (`/run`), so it is not changed.
        if std::fs::metadata(run)?.permissions().mode() & 0o011 != 0 {
            tracing::warn!(directory = %run.display(), "other users can enter the run directory, and read the memory images in it: chmod 700");
        }
        let directories = Self { data: data.canonicalize()?, run: run.canonicalize()? };
        let storage = directories.storage();
        for path in [&storage, &directories.layers(), &directories.disks(), &directories.images()] {
            std::fs::create_dir_all(path)?;
        }
        // Disks hold whatever users wrote.
        std::fs::set_permissions(&storage, Permissions::from_mode(0o700))?;
        Ok(directories)
    }

    /// Takes the data directory for this process; freed when the result is dropped. A process that was just killed may
    /// leave a child that has the lock for a moment, until it has become the holder: that is waited for.
    pub(crate) fn lock(&self) -> Result<File, Failure> {
        let path = self.storage().join("lock");
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(Failure::io("open", &path))?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
                Err(TryLockError::WouldBlock) => {
                    return Err(Failure::conflict(format!(
                        "another aenv-stored works on {}: stop it, or choose another directory with --data-dir",
                        self.data.display()
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(Failure::io("lock", &path)(error)),
            }
        }
    }

    /// The data directory, without links.
    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    pub(crate) fn storage(&self) -> PathBuf {
        self.data.join("storage")
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.storage().join("layers")
    }

    pub(crate) fn disks(&self) -> PathBuf {
        self.storage().join("disks")
    }

    pub(crate) fn disk(&self, name: &Name) -> PathBuf {
        self.disks().join(name.as_str())
    }

    pub(crate) fn tops(&self, name: &Name) -> PathBuf {
        self.disk(name).join("tops")
    }

    pub(crate) fn disk_record(&self, name: &Name) -> PathBuf {
        self.disk(name).join("record.json")
    }

    /// What has to survive a power cut for a disk to be there after it, innermost first: the record, the directory that names
    /// it, the directory that names that.
    pub(crate) fn traces_of_disk(&self, name: &Name) -> [PathBuf; 3] {
        [self.disk_record(name), self.disk(name), self.disks()]
    }

    /// The same for an image.
    pub(crate) fn traces_of_image(&self, name: &Name) -> [PathBuf; 2] {
        [self.image_record(name), self.images()]
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.storage().join("images")
    }

    pub(crate) fn image_record(&self, name: &Name) -> PathBuf {
        self.images().join(format!("{name}.json"))
    }

    pub(crate) fn run(&self) -> &Path {
        &self.run
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.run.join("stored.sock")
    }

    pub(crate) fn holder_socket(&self) -> PathBuf {
        self.run.join("holder.sock")
    }

    pub(crate) fn holder_log(&self) -> PathBuf {
        self.run.join("holder.log")
    }

    pub(crate) fn mount_point(&self) -> PathBuf {
        self.run.join("exports")
    }

    pub(crate) fn numbers(&self) -> PathBuf {
        self.run.join("numbers.json")
    }

    /// The file that a client means, without links; it must lie in the data directory.
    pub(crate) fn resolve(&self, path: &Path) -> Result<PathBuf, Failure> {
        if !path.is_absolute() {
            return Err(Failure::invalid(format!("{} is not an absolute path", path.display())));
        }
        let resolved = path.canonicalize().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::not_found(format!("there is no file {}", path.display())),
            _ => Failure::io("resolve", path)(error),
        })?;
        if !resolved.starts_with(&self.data) {
            let data = self.data.display();
            return Err(Failure::invalid(format!(
                "{} does not lie in the data directory {data}",
                path.display()
            )));
        }
        if !resolved.is_file() {
            return Err(Failure::invalid(format!("{} is not a regular file", path.display())));
        }
        Ok(resolved)
    }
}

/// Replaces a small file: after the death of this process it is the old or the new one. Nothing is said of a power cut,
/// see [`make_durable`].
pub(crate) fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let replaced = write_new(&temporary, content).and_then(|()| std::fs::rename(&temporary, path));
    match replaced {
        // A host without room must be able to note that something is removed, or it would never have any.
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            // It has no content; that it stays as well changes nothing.
            drop(std::fs::remove_file(&temporary));
            overwrite(path, content).map_err(|_| error)
        }
        other => other,
    }
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    File::create(path)?.write_all(content)
}

/// Writes over a text of less than a page in the page that it has: one call, which the death of this process does not divide.
/// What was longer ends in blanks.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX).max(content.len());
    if length > SMALL {
        return Err(io::ErrorKind::StorageFull.into());
    }
    let mut padded = content.to_vec();
    padded.resize(length, b' ');
    match file.write_at(&padded, 0)? {
        written if written == length => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// Returns when the file or directory, as it is named now, survives a power cut.
pub(crate) fn make_durable(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Removes a tree. No error when it is gone already.
pub(crate) fn remove_tree(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Removes a file. No error when it is gone already.
pub(crate) fn remove_file(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Failure::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// What the file system stores for a file, or for all files below a directory; nothing for what is gone.
pub(crate) fn stored_bytes(path: &Path) -> io::Result<u64> {
    let measure = || -> io::Result<u64> {
        let metadata = std::fs::symlink_metadata(path)?;
        // POSIX counts in units of 512 bytes, whatever the filesystem's block size.
        let mut bytes = metadata.blocks().saturating_mul(512);
        if metadata.is_dir() {
            for entry in std::fs::read_dir(path)? {
                bytes = bytes.saturating_add(stored_bytes(&entry?.path())?);
            }
        }
        Ok(bytes)
    };
    match measure() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        measured => measured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_storage::block_service::ErrorCode;

    #[test]
    fn a_data_directory_has_one_user() {
        let temporary = tempfile::tempdir().unwrap();
        let directories =
            Directories::open(&temporary.path().join("d"), &temporary.path().join("r")).unwrap();
        let lock = directories.lock().unwrap();
        assert_eq!(directories.lock().unwrap_err().code, ErrorCode::Conflict);
        drop(lock);
        directories.lock().unwrap();
    }

    #[test]
    fn files_elsewhere_are_refused_however_they_are_named() {
        let temporary = tempfile::tempdir().unwrap();
        let directories =
            Directories::open(&temporary.path().join("d"), &temporary.path().join("r")).unwrap();
        let (inside, outside) = (directories.layers().join("l"), temporary.path().join("o"));
        for path in [&inside, &outside] {
            std::fs::write(path, "x").unwrap();
        }
        std::os::unix::fs::symlink(&outside, directories.layers().join("link")).unwrap();
        assert_eq!(directories.resolve(&inside).unwrap(), inside);
        let refused = |path: PathBuf| directories.resolve(&path).unwrap_err().code;
        assert_eq!(refused(outside), ErrorCode::Invalid);
        assert_eq!(refused(directories.layers().join("link")), ErrorCode::Invalid);
        assert_eq!(refused(directories.layers().join("../../../o")), ErrorCode::Invalid);
        assert_eq!(refused(directories.layers()), ErrorCode::Invalid);
        assert_eq!(refused("storage/layers/l".into()), ErrorCode::Invalid);
        assert_eq!(refused(directories.layers().join("none")), ErrorCode::NotFound);
    }
}
