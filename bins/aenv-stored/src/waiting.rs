//! Stands for a disk or an image that cannot be opened before the host has room again: every request is told that there is no
//! room, so it waits, as a write does that finds none. Once it is opened, it is what was opened.
//!
//! Owns nothing but what was opened. Does not open anything itself.

use aenv_storage::{BlockDevice, Image, StorageError};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// A disk or an image that is opened later.
#[derive(Debug)]
pub(crate) struct Waiting<T: ?Sized> {
    size: u64,
    /// What there is no room for, as its askers are told.
    path: PathBuf,
    opened: OnceLock<Arc<T>>,
}

impl<T: ?Sized> Waiting<T> {
    pub(crate) fn new(size: u64, path: PathBuf) -> Arc<Self> {
        Arc::new(Self { size, path, opened: OnceLock::new() })
    }

    /// Ends the wait; the first to do so decides.
    pub(crate) fn open(&self, opened: Arc<T>) {
        self.opened.get_or_init(|| opened);
    }

    fn opened(&self) -> Result<&T, StorageError> {
        match self.opened.get() {
            Some(opened) => Ok(opened),
            None => Err(StorageError::NoSpace { path: self.path.clone() }),
        }
    }
}

impl BlockDevice for Waiting<dyn BlockDevice> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.opened()?.read_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.opened()?.write_at(data, offset)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.opened()?.discard(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.opened()?.write_zeroes(offset, length)
    }

    fn flush(&self) -> Result<(), StorageError> {
        self.opened()?.flush()
    }
}

impl Image for Waiting<dyn Image> {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.opened()?.read_at(buffer, offset)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.opened()?.next_data(offset)
    }

    fn make_durable(&self) -> Result<(), StorageError> {
        self.opened()?.make_durable()
    }
}
