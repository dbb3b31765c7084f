//! A disk whose first flush also makes durable that there is the disk: a guest whose fsync returned must find its disk
//! after a power cut. To do it at once would cost every disk that is made the time of several journal commits.
//!
//! Owns nothing but the fact that it was done.

use crate::directories::{Directories, make_durable};
use aenv_storage::block_service::Name;
use aenv_storage::{BlockDevice, Image, StorageError};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A disk and its record.
#[derive(Debug)]
pub(crate) struct DurableDisk {
    disk: Arc<dyn BlockDevice>,
    traces: [PathBuf; 3],
    done: AtomicBool,
}

impl DurableDisk {
    pub(crate) fn new(disk: Arc<dyn BlockDevice>, directories: &Directories, name: &Name) -> Self {
        Self { disk, traces: directories.traces_of_disk(name), done: AtomicBool::new(false) }
    }
}

impl BlockDevice for DurableDisk {
    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.disk.read_at(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.disk.write_at(data, offset)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.disk.discard(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.disk.write_zeroes(offset, length)
    }

    fn flush(&self) -> Result<(), StorageError> {
        if !self.done.load(Ordering::Acquire) {
            for path in &self.traces {
                make_durable(path).map_err(|source| StorageError::Io {
                    action: "make durable",
                    path: path.clone(),
                    source,
                })?;
            }
            // Two first flushes at once both do it; no flush returns before it was done.
            self.done.store(true, Ordering::Release);
        }
        self.disk.flush()
    }
}

/// Stands for a disk that cannot be read: every access fails, so that its guest is told and no other disk suffers.
#[derive(Debug)]
pub(crate) struct FailedDisk {
    pub(crate) size: u64,
    pub(crate) name: String,
    pub(crate) reason: String,
}

impl FailedDisk {
    fn error(&self) -> StorageError {
        StorageError::Damaged { name: self.name.clone(), reason: self.reason.clone() }
    }
}

impl BlockDevice for FailedDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, _buffer: &mut [u8], _offset: u64) -> Result<(), StorageError> {
        Err(self.error())
    }

    fn write_at(&self, _data: &[u8], _offset: u64) -> Result<(), StorageError> {
        Err(self.error())
    }

    fn discard(&self, _offset: u64, _length: u64) -> Result<(), StorageError> {
        Err(self.error())
    }

    fn write_zeroes(&self, _offset: u64, _length: u64) -> Result<(), StorageError> {
        Err(self.error())
    }

    fn flush(&self) -> Result<(), StorageError> {
        Err(self.error())
    }
}

/// Stands for an image that cannot be read.
#[derive(Debug)]
pub(crate) struct FailedImage {
    pub(crate) size: u64,
    pub(crate) name: String,
    pub(crate) reason: String,
}

impl Image for FailedImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, _buffer: &mut [u8], _offset: u64) -> Result<(), StorageError> {
        Err(StorageError::Damaged { name: self.name.clone(), reason: self.reason.clone() })
    }

    fn next_data(&self, _offset: u64) -> Result<Option<std::ops::Range<u64>>, StorageError> {
        Err(StorageError::Damaged { name: self.name.clone(), reason: self.reason.clone() })
    }
}
