//! Storage for tests: a plain file, with switches for what storage may do. Owns the file's descriptor.

use aenv_storage::{BLOCK_BYTES, BlockDevice, Image, StorageError};
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

#[derive(Debug)]
pub(crate) struct Backing {
    file: File,
    path: PathBuf,
    size: u64,
    pub(crate) flushes: AtomicU64,
    pub(crate) discarded_bytes: AtomicU64,
    /// No write finds room.
    pub(crate) full: AtomicBool,
    /// No write is allowed.
    pub(crate) over_quota: AtomicBool,
    /// Every read panics.
    pub(crate) panics: AtomicBool,
    /// Reads wait for it to open.
    pub(crate) gate: Gate,
}

/// Lets all pass, or none.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    waiting: AtomicU64,
}

impl Gate {
    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap() = true;
    }

    pub(crate) fn open(&self) {
        *self.closed.lock().unwrap() = false;
        self.opened.notify_all();
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::SeqCst)
    }

    fn pass(&self) {
        let mut closed = self.closed.lock().unwrap();
        while *closed {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            closed = self.opened.wait(closed).unwrap();
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Backing {
    /// A file of that size, made if it is missing.
    pub(crate) fn open(path: &Path, size: u64) -> Self {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(size).unwrap();
        Self {
            file,
            path: path.to_owned(),
            size,
            flushes: AtomicU64::new(0),
            discarded_bytes: AtomicU64::new(0),
            full: AtomicBool::new(false),
            over_quota: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            gate: Gate::default(),
        }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    fn error(&self, action: &'static str) -> impl FnOnce(std::io::Error) -> StorageError {
        let path = self.path.clone();
        move |source| StorageError::Io { action, path, source }
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(StorageError::OutOfRange { name: self.name(), offset, length, size: self.size }),
        }
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn check_room(&self) -> Result<(), StorageError> {
        if self.full.load(Ordering::SeqCst) {
            return Err(StorageError::NoSpace { path: self.path.clone() });
        }
        if self.over_quota.load(Ordering::SeqCst) {
            return Err(StorageError::QuotaExceeded { path: self.path.clone(), quota: 0 });
        }
        Ok(())
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        assert!(!self.panics.load(Ordering::SeqCst), "as the test asked");
        self.check(offset, buffer.len() as u64)?;
        self.gate.pass();
        self.file.read_exact_at(buffer, offset).map_err(self.error("read"))
    }
}

impl BlockDevice for Backing {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.read(buffer, offset)
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.check(offset, data.len() as u64)?;
        self.check_room()?;
        self.file.write_all_at(data, offset).map_err(self.error("write"))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.check(offset, length)?;
        let blocks = offset.next_multiple_of(BLOCK_BYTES)..(offset + length) / BLOCK_BYTES * BLOCK_BYTES;
        if !blocks.is_empty() {
            self.discarded_bytes.fetch_add(blocks.end - blocks.start, Ordering::SeqCst);
            aenv_sys::file::punch_hole(&self.file, blocks).map_err(self.error("discard"))?;
        }
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.check(offset, length)?;
        aenv_sys::file::punch_hole(&self.file, offset..offset + length).map_err(self.error("zero"))
    }

    fn flush(&self) -> Result<(), StorageError> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        self.file.sync_data().map_err(self.error("flush"))
    }
}

impl Image for Backing {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.read(buffer, offset)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok((offset < self.size).then_some(offset..self.size))
    }
}
