//! The few things tops ask of files and directories, as traits: the tests' simulation of power cuts stands in for them.
//!
//! Owns descriptors only. Must not know what the bytes mean. What each operation promises about power cuts:
//!
//! | operation | durable after |
//! |---|---|
//! | bytes, holes and length of a file | its `sync_data` |
//! | names: create, rename, exchange, remove | the directory's `sync`, in the order they were done |

use aenv_sys::file::{data_extents, punch_hole};
use rustix::fs::RenameFlags;
use std::fmt::Debug;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One file of a top.
pub(crate) trait StoredFile: Debug + Send + Sync {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()>;
    fn punch_hole(&self, range: Range<u64>) -> io::Result<()>;
    fn sync_data(&self) -> io::Result<()>;
    fn set_length(&self, length: u64) -> io::Result<()>;
    fn length(&self) -> io::Result<u64>;
    /// Parts that may be stored, in order. Only for a file that nobody else uses.
    fn data_extents(&self) -> io::Result<Vec<Range<u64>>>;
    /// Holds the file against processes that want it for themselves; `false` when another holds it. Ends with the handle.
    fn lock(&self, lock: Lock) -> io::Result<bool>;
}

/// How a file is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lock {
    /// Together with others.
    Shared,
    /// Alone.
    Exclusive,
}

/// The directory of a disk.
pub(crate) trait Directory: Debug + Send + Sync {
    /// Makes a new file; fails when the name is taken.
    fn create(&self, name: &str) -> io::Result<Arc<dyn StoredFile>>;
    fn open(&self, name: &str) -> io::Result<Arc<dyn StoredFile>>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Swaps two names that are both there.
    fn exchange(&self, one: &str, other: &str) -> io::Result<()>;
    fn remove(&self, name: &str) -> io::Result<()>;
    fn names(&self) -> io::Result<Vec<String>>;
    fn sync(&self) -> io::Result<()>;
    /// Where it is, for messages.
    fn path(&self) -> &Path;
}

/// Removes a file that may be gone already.
pub(crate) fn remove_if_there(directory: &dyn Directory, name: &str) -> io::Result<()> {
    match directory.remove(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// A directory of the host.
#[derive(Debug)]
pub(crate) struct HostDirectory {
    path: PathBuf,
}

impl HostDirectory {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }
}

impl Directory for HostDirectory {
    fn create(&self, name: &str) -> io::Result<Arc<dyn StoredFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(self.path.join(name))?;
        Ok(Arc::new(HostFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn StoredFile>> {
        let file = OpenOptions::new().read(true).write(true).open(self.path.join(name))?;
        Ok(Arc::new(HostFile(file)))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.path.join(from), self.path.join(to))
    }

    fn exchange(&self, one: &str, other: &str) -> io::Result<()> {
        let (one, other) = (self.path.join(one), self.path.join(other));
        Ok(rustix::fs::renameat_with(rustix::fs::CWD, one, rustix::fs::CWD, other, RenameFlags::EXCHANGE)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let names = std::fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().into_string()));
        // A name that is not UTF-8 is none of ours.
        Ok(names.collect::<io::Result<Vec<_>>>()?.into_iter().filter_map(Result::ok).collect())
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        // Its own name may be new.
        match self.path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => File::open(parent)?.sync_all(),
            None => File::open(".")?.sync_all(),
        }
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

#[derive(Debug)]
struct HostFile(File);

impl StoredFile for HostFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(data, offset)
    }

    fn punch_hole(&self, range: Range<u64>) -> io::Result<()> {
        punch_hole(&self.0, range)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn data_extents(&self) -> io::Result<Vec<Range<u64>>> {
        data_extents(&self.0)
    }

    fn lock(&self, lock: Lock) -> io::Result<bool> {
        let locked = match lock {
            Lock::Shared => self.0.try_lock_shared(),
            Lock::Exclusive => self.0.try_lock(),
        };
        match locked {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}
