//! Random access to the uncompressed bytes of a zfile.
//!
//! ```text
//! open: header ─▶ (trailer) ─▶ index, all checked
//! read: block ─▶ cache ─miss─▶ read record ─▶ check CRC ─▶ decompress ─▶ exactly one block
//! ```
//! Owns the index; the blocks belong to the cache, so a read of a cached block copies once. Trusts nothing it reads.

use super::HEADER_BYTES;
use super::codec::{Algorithm, decompress, record_crc};
use super::header::{Layout, Parsed, Role};
use super::index::{CRC_BYTES, Index};
use crate::cache::{BlobId, BlockCache, Scratch, new_block};
use crate::{Blob, StorageError};
use std::fmt;
use std::sync::Arc;

/// A zfile that was opened; as a [`Blob`] it is the uncompressed bytes.
pub struct ZFile {
    blob: Arc<dyn Blob>,
    layout: Layout,
    index: Index,
    cache: Arc<BlockCache>,
    id: BlobId,
}

/// What a zfile says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZFileInfo {
    /// How its blocks are compressed.
    pub algorithm: Algorithm,
    /// Uncompressed size of a block in bytes.
    pub block_bytes: u32,
    /// Level it was compressed with; 0 where its writer did not tell.
    pub level: u8,
    /// Uncompressed size in bytes.
    pub original_bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Whether each block has a checksum.
    pub has_checksums: bool,
}

impl ZFile {
    /// Reads header, trailer and index.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when it is no zfile, is incomplete, or anything in it is wrong;
    /// [`StorageError::Unsupported`] for a compression, block size or option that is not known; else the blob's errors.
    pub fn open(blob: Arc<dyn Blob>, cache: &Arc<BlockCache>) -> Result<Self, StorageError> {
        let name = blob.name();
        let stored_size = blob.stored_size();
        let trailer_offset = stored_size.checked_sub(HEADER_BYTES as u64);
        let Some(trailer_offset) = trailer_offset.filter(|offset| *offset >= HEADER_BYTES as u64) else {
            return Err(StorageError::Damaged {
                name,
                reason: format!("{stored_size} bytes are too few for a zfile"),
            });
        };
        let (mut header, mut trailer) = ([0; HEADER_BYTES], [0; HEADER_BYTES]);
        blob.read_exact_at(&mut header, 0)?;
        blob.read_exact_at(&mut trailer, trailer_offset)?;
        let header = Parsed::new(&header, Role::Header, &name)?;
        let layout = Parsed::new(&trailer, Role::Trailer, &name)?.layout(stored_size)?;
        if header.is_overwritten() && header.layout(stored_size)? != layout {
            return Err(StorageError::Damaged {
                name,
                reason: "header and trailer of the zfile contradict each other".to_owned(),
            });
        }
        let index = Index::read(&*blob, &layout)?;
        Ok(Self { blob, layout, index, cache: cache.clone(), id: cache.new_blob_id() })
    }

    /// What it says of itself.
    #[must_use]
    pub fn info(&self) -> ZFileInfo {
        ZFileInfo {
            algorithm: self.layout.algorithm,
            block_bytes: self.layout.block_bytes,
            level: self.layout.level,
            original_bytes: self.layout.original_size,
            blocks: self.layout.blocks,
            has_checksums: self.layout.records_have_crc,
        }
    }

    /// Decompresses every block, past the cache, and throws it away; `progress` is told the uncompressed bytes of each.
    ///
    /// # Errors
    /// The first damage found, or the blob's error.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<(), StorageError> {
        let mut block = vec![0; self.layout.block_bytes as usize];
        for number in 0..self.layout.blocks {
            let length = self.block_length(number);
            self.cache.with_scratch(|scratch| self.decode(number, scratch, &mut block[..length]))?;
            progress(length as u64);
        }
        Ok(())
    }

    /// Uncompressed bytes of a block: the last may be shorter.
    fn block_length(&self, block: u64) -> usize {
        let block_bytes = u64::from(self.layout.block_bytes);
        let rest = self.layout.original_size.saturating_sub(block.saturating_mul(block_bytes));
        // No more than 64 KiB.
        rest.min(block_bytes) as usize
    }

    fn cached(&self, block: u64) -> Result<Arc<[u8]>, StorageError> {
        self.cache.get_or_decode(self.id, block, || {
            let mut decoded = new_block(self.block_length(block));
            let Some(bytes) = Arc::get_mut(&mut decoded) else {
                return Err(self.damaged(block, "is shared before it is decoded"));
            };
            self.cache.with_scratch(|scratch| self.decode(block, scratch, bytes))?;
            Ok(decoded)
        })
    }

    fn decode(&self, block: u64, scratch: &mut Scratch, output: &mut [u8]) -> Result<(), StorageError> {
        let place = usize::try_from(block).ok().and_then(|block| self.index.record(block));
        let Some((offset, length)) = place else { return Err(self.damaged(block, "is not in the index")) };
        let (record, zstd) = scratch.parts(length);
        self.blob.read_exact_at(record, offset)?;
        let compressed = if self.layout.records_have_crc {
            let Some((compressed, stored)) = record.split_last_chunk::<CRC_BYTES>() else {
                return Err(self.damaged(block, "is shorter than its checksum"));
            };
            let (stored, found) = (u32::from_le_bytes(*stored), record_crc(compressed));
            if stored != found {
                let what = format!("at {offset} has checksum {found:08x} instead of {stored:08x}");
                return Err(self.damaged(block, &what));
            }
            compressed
        } else {
            &*record
        };
        decompress(self.layout.algorithm, compressed, output, zstd)
            .map_err(|why| self.damaged(block, &format!("at {offset} cannot be decompressed: {why}")))
    }

    fn damaged(&self, block: u64, what: &str) -> StorageError {
        StorageError::Damaged {
            name: self.blob.name(),
            reason: format!("record {block} of the zfile {what}"),
        }
    }
}

impl Blob for ZFile {
    fn stored_size(&self) -> u64 {
        self.layout.original_size
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.layout.original_size) {
            return Err(StorageError::OutOfRange {
                name: self.name(),
                offset,
                length: buffer.len() as u64,
                size: self.layout.original_size,
            });
        }
        let block_bytes = u64::from(self.layout.block_bytes);
        let (mut rest, mut place) = (buffer, offset);
        while !rest.is_empty() {
            let block = self.cached(place / block_bytes)?;
            // The range lies inside of the file, so its first byte lies inside of the block.
            let inside = &block[(place % block_bytes) as usize..];
            let count = inside.len().min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&inside[..count]);
            place += count as u64;
            rest = later;
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.blob.name()
    }
}

impl fmt::Debug for ZFile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ZFile")
            .field("blob", &self.blob)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
