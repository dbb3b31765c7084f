//! What can be read and written here, as contracts that all else is built from.
//!
//! ```text
//! Blob          stored bytes: a local file, later a remote object           who: layer readers
//!   └─ Image    an immutable virtual disk or memory: layers, chains          who: tops, memory exports
//!        ├─ Delta         an image that knows what it changed of the one below it   who: the writer of layers
//!        └─ BlockDevice   a writable disk: a chain with a private top        who: FUSE and ublk exports
//! ```
//! Owns nothing. All calls block, may be made from any number of threads at once, and never panic on what they read.

use crate::StorageError;
use std::fmt::Debug;

/// Granularity of tops, of our own layers and of everything the kernel asks of us: bytes.
pub const BLOCK_BYTES: u64 = 4096;

/// Bytes that are stored somewhere and do not change.
pub trait Blob: Debug + Send + Sync + 'static {
    /// Number of bytes.
    fn stored_size(&self) -> u64;

    /// Fills `buffer` from byte `offset` on.
    ///
    /// # Errors
    /// When the range does not lie in the blob, or it cannot be read.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError>;

    /// What it is called in messages: a path or a digest.
    fn name(&self) -> String;
}

/// An immutable image of a disk or of a guest's memory.
pub trait Image: Debug + Send + Sync + 'static {
    /// Virtual size in bytes.
    fn size(&self) -> u64;

    /// Fills `buffer` from byte `offset` on; what nothing was ever written to reads as zeros.
    ///
    /// # Errors
    /// When the range does not lie in the image, a layer is damaged, or it cannot be read. The buffer's content is
    /// undefined then.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError>;

    /// The first byte at or after `offset` that may not be zero, with the end of the run of such bytes; `None` when all
    /// that follows is zeros. Runs are as exact as the index is: a run may contain zeros.
    ///
    /// # Errors
    /// As [`Image::read_at`].
    fn next_data(&self, offset: u64) -> Result<Option<std::ops::Range<u64>>, StorageError>;

    /// As [`Image::next_data`], but of `range` alone, which may reach over the end. Where runs are put together from many
    /// parts this costs what the range is long, and not what the run is.
    ///
    /// # Errors
    /// As [`Image::read_at`].
    fn next_data_in(
        &self,
        range: std::ops::Range<u64>,
    ) -> Result<Option<std::ops::Range<u64>>, StorageError> {
        if range.start >= range.end.min(self.size()) {
            return Ok(None);
        }
        let found = self.next_data(range.start)?.filter(|found| found.start < range.end);
        Ok(found.map(|found| found.start..found.end.min(range.end)))
    }

    /// Returns when the image survives the loss of power. Layers do from the moment they are published, so only what is
    /// made of sealed tops has something to do here. A disk above calls it before its first flush returns.
    ///
    /// # Errors
    /// When the host cannot store it: then the image may be lost with the power.
    fn make_durable(&self) -> Result<(), StorageError> {
        Ok(())
    }
}

/// What a change made of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// Something was written there.
    Data,
    /// It was made to read as zeros.
    Zeros,
}

/// A range that hides what lies below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// In bytes.
    pub range: std::ops::Range<u64>,
    /// What is there now.
    pub kind: ChangeKind,
}

/// An image that stands on another one and knows what it changed. It reads as the whole: its changes, and what lies below
/// everywhere else.
pub trait Delta: Image {
    /// The first change at or after `offset`: a change that begins before and reaches over `offset` is cut there.
    ///
    /// # Errors
    /// As [`Image::read_at`].
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError>;
}

/// A writable disk. After [`BlockDevice::flush`] has returned, everything whose write had returned before the flush began
/// survives the loss of power; without it, the death of this process but not of the host.
pub trait BlockDevice: Debug + Send + Sync + 'static {
    /// Virtual size in bytes, a multiple of [`BLOCK_BYTES`].
    fn size(&self) -> u64;

    /// As [`Image::read_at`].
    ///
    /// # Errors
    /// As [`Image::read_at`].
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError>;

    /// Writes all of `data`; any offset and length. May be delivered twice.
    ///
    /// # Errors
    /// [`StorageError::NoSpace`] when the host has no room: the same write may be tried again later.
    /// [`StorageError::QuotaExceeded`] when the disk has used up what it may. Nothing of the range is lost, but it may
    /// be partly new.
    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError>;

    /// Forgets whole blocks inside of the range, which read as zeros from then on, and frees their room.
    ///
    /// # Errors
    /// As [`BlockDevice::write_at`].
    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError>;

    /// Makes the range read as zeros, parts of blocks included.
    ///
    /// # Errors
    /// As [`BlockDevice::write_at`].
    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError>;

    /// Returns when everything written before is durable.
    ///
    /// # Errors
    /// When the host cannot store it: then nothing can be said of what was written since the last flush.
    fn flush(&self) -> Result<(), StorageError>;
}
