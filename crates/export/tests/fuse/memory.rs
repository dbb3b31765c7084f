//! A disk and an image in memory or in a plain file, that can be made slow, full or broken.

use aenv_storage::{BlockDevice, Image, StorageError};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A disk whose content is a plain file, so that it outlives a killed process.
#[derive(Debug)]
pub(crate) struct FileDisk {
    file: File,
    size: u64,
    pub(crate) full: AtomicBool,
    pub(crate) over_quota: AtomicBool,
    pub(crate) broken: AtomicBool,
    pub(crate) flushes: AtomicU64,
    pub(crate) discarded: AtomicU64,
    /// Every write takes this long when the file exists that is named here.
    pub(crate) slow: Option<(PathBuf, Duration)>,
}

impl FileDisk {
    pub(crate) fn new(path: &Path, size: u64) -> Self {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap();
        file.set_len(size).unwrap();
        Self {
            file,
            size,
            full: AtomicBool::default(),
            over_quota: AtomicBool::default(),
            broken: AtomicBool::default(),
            flushes: AtomicU64::default(),
            discarded: AtomicU64::default(),
            slow: None,
        }
    }

    fn check(&self) -> Result<(), StorageError> {
        let path = PathBuf::from("disk");
        if self.full.load(Ordering::SeqCst) {
            return Err(StorageError::NoSpace { path });
        }
        if self.over_quota.load(Ordering::SeqCst) {
            return Err(StorageError::QuotaExceeded { path, quota: 1 });
        }
        if self.broken.load(Ordering::SeqCst) {
            return Err(failed("write", std::io::Error::other("broken for a test")));
        }
        Ok(())
    }
}

fn failed(action: &'static str, source: std::io::Error) -> StorageError {
    StorageError::Io { action, path: PathBuf::from("disk"), source }
}

impl BlockDevice for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.file.read_exact_at(buffer, offset).map_err(|error| failed("read", error))
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.check()?;
        if let Some((marker, time)) = &self.slow
            && marker.exists()
        {
            std::thread::sleep(*time);
        }
        self.file.write_all_at(data, offset).map_err(|error| failed("write", error))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        assert!(offset.is_multiple_of(4096) && length.is_multiple_of(4096), "{offset} {length}");
        self.discarded.fetch_add(length, Ordering::SeqCst);
        self.write_zeroes(offset, length)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.check()?;
        let zeros = vec![0; usize::try_from(length).unwrap()];
        self.file.write_all_at(&zeros, offset).map_err(|error| failed("zero", error))
    }

    fn flush(&self) -> Result<(), StorageError> {
        self.check()?;
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// An image whose byte at `n` follows from `n`, with holes.
#[derive(Debug)]
pub(crate) struct PatternImage {
    pub(crate) size: u64,
    pub(crate) holes: Vec<Range<u64>>,
}

impl PatternImage {
    pub(crate) fn byte(&self, offset: u64) -> u8 {
        if self.holes.iter().any(|hole| hole.contains(&offset)) {
            return 0;
        }
        pattern(offset)
    }
}

/// Never zero.
pub(crate) fn pattern(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 | 1
}

impl Image for PatternImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        for (byte, at) in buffer.iter_mut().zip(offset..) {
            *byte = self.byte(at);
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let mut start = offset;
        for hole in &self.holes {
            if hole.contains(&start) {
                start = hole.end;
            }
        }
        let end = self.holes.iter().map(|hole| hole.start).filter(|hole| *hole > start).min();
        Ok((start < self.size).then(|| start..end.unwrap_or(self.size)))
    }
}
