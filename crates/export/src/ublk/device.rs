//! One export: its content, and what the kernel is told of its shape. Owns whether it is being removed.

use super::MAX_IO_BYTES;
use crate::{Content, Export, ExportError};
use aenv_storage::StorageError;
use aenv_sys::ublk::Parameters;
use std::sync::atomic::{AtomicBool, Ordering};

/// Block size that guests see; also of those that know no other.
const LOGICAL_SHIFT: u8 = 9;
/// Blocks of storage have 4 KiB.
const PHYSICAL_SHIFT: u8 = 12;
/// Largest discard: bytes.
const MAX_DISCARD_BYTES: u64 = 1 << 30;
/// Largest writing of zeros, which storage may have to do in full: bytes.
const MAX_ZEROES_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(super) struct Device {
    number: u32,
    name: String,
    content: Content,
    size: u64,
    ending: AtomicBool,
    complained: AtomicBool,
}

impl Device {
    /// Of whole sectors, and of some.
    pub(super) fn new(export: &Export, content: Content) -> Result<Self, ExportError> {
        let size = match &content {
            Content::Disk(disk) => disk.size(),
            Content::Image(image) => image.size(),
        };
        if size == 0 || !size.is_multiple_of(1 << LOGICAL_SHIFT) {
            let reason = format!("{size} bytes are no whole number of sectors, 1 or more");
            return Err(StorageError::Unsupported { name: export.name.clone(), reason }.into());
        }
        Ok(Self {
            number: export.number,
            name: export.name.clone(),
            content,
            size,
            ending: AtomicBool::new(false),
            complained: AtomicBool::new(false),
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn content(&self) -> &Content {
        &self.content
    }

    pub(super) fn read_only(&self) -> bool {
        matches!(self.content, Content::Image(_))
    }

    /// Which of so many I/O threads serves it.
    pub(super) fn thread(&self, threads: usize) -> usize {
        usize::try_from(self.number).unwrap_or(0) % threads
    }

    pub(super) fn parameters(&self) -> Parameters {
        let writable = |bytes: u64| if self.read_only() { 0 } else { bytes };
        Parameters {
            bytes: self.size,
            read_only: self.read_only(),
            logical_shift: LOGICAL_SHIFT,
            physical_shift: PHYSICAL_SHIFT,
            max_io_bytes: MAX_IO_BYTES,
            max_discard_bytes: writable(MAX_DISCARD_BYTES),
            max_zeroes_bytes: writable(MAX_ZEROES_BYTES),
        }
    }

    /// From now on no request is held.
    pub(super) fn end(&self) {
        self.ending.store(true, Ordering::Release);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Whether this is its first failed request.
    pub(super) fn complains_first(&self) -> bool {
        !self.complained.swap(true, Ordering::Relaxed)
    }
}
