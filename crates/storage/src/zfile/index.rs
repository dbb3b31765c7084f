//! Where each record of a zfile lies, in four and a quarter bytes of memory per record.
//!
//! Owns the sums of the lengths: in full for every group of records, relative to it inside. Memory grows only as
//! entries are read and found possible, so that no number in a header makes it huge.

use super::HEADER_BYTES;
use super::codec::raw_crc;
use super::header::Layout;
use crate::{Blob, StorageError};
use std::ops::Range;

/// Records whose ends are relative to the same start. The longest records together are far below 4 GiB.
const GROUP: usize = 32;
/// Entries read at once.
const ENTRIES_AT_ONCE: usize = 64 << 10;
/// Bytes of a record's checksum.
pub(super) const CRC_BYTES: usize = 4;

/// The places of all records.
#[derive(Debug)]
pub(super) struct Index {
    /// Where each group starts.
    starts: Vec<u64>,
    /// Where each record ends, from the start of its group.
    ends: Vec<u32>,
}

impl Index {
    /// Reads and checks the index.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when its checksum is wrong, a length is impossible, or the records do not end before
    /// the index.
    pub(super) fn read(blob: &dyn Blob, layout: &Layout) -> Result<Self, StorageError> {
        let damaged = |reason: String| StorageError::Damaged { name: blob.name(), reason };
        let allowed = allowed_lengths(layout);
        let mut index = Self { starts: Vec::new(), ends: Vec::new() };
        let mut chunk = Vec::new();
        let (mut place, mut crc, mut done) = (HEADER_BYTES as u64, 0, 0_u64);
        while done < layout.blocks {
            let count = (layout.blocks - done).min(ENTRIES_AT_ONCE as u64);
            // At most a quarter of a mebibyte.
            chunk.resize(usize::try_from(count * 4).unwrap_or(usize::MAX), 0);
            blob.read_exact_at(&mut chunk, layout.index_offset + done * 4)?;
            crc = raw_crc(&chunk, crc);
            for entry in chunk.as_chunks::<4>().0 {
                let length = u32::from_le_bytes(*entry);
                if !allowed.contains(&length) {
                    return Err(damaged(format!(
                        "the zfile index says that record {} has {length} bytes; {} to {} are possible",
                        index.ends.len(),
                        allowed.start,
                        allowed.end - 1
                    )));
                }
                place += u64::from(length);
                index.push(place, length);
            }
            if place > layout.index_offset {
                return Err(damaged(format!(
                    "the records of the zfile end at {place} or later, but its index starts at {}",
                    layout.index_offset
                )));
            }
            done += count;
        }
        if crc != layout.index_crc {
            return Err(damaged(format!(
                "the zfile index has checksum {crc:08x} instead of {:08x}",
                layout.index_crc
            )));
        }
        index.ends.shrink_to_fit();
        Ok(index)
    }

    fn push(&mut self, end: u64, length: u32) {
        let relative = if self.ends.len().is_multiple_of(GROUP) {
            self.starts.push(end - u64::from(length));
            length
        } else {
            self.ends.last().copied().unwrap_or(0) + length
        };
        self.ends.push(relative);
    }

    /// First byte and length of a record.
    pub(super) fn record(&self, block: usize) -> Option<(u64, usize)> {
        let start = *self.starts.get(block / GROUP)?;
        let end = *self.ends.get(block)?;
        let before = if block.is_multiple_of(GROUP) { 0 } else { *self.ends.get(block - 1)? };
        Some((start + u64::from(before), (end - before) as usize))
    }
}

/// Lengths that a record can have: more than its checksum, and no more than a poor compressor makes of random bytes.
fn allowed_lengths(layout: &Layout) -> Range<u32> {
    let crc = if layout.records_have_crc { CRC_BYTES as u32 } else { 0 };
    let block = layout.block_bytes;
    (crc + 1)..(block + block / 16 + 1024 + crc + 1)
}
