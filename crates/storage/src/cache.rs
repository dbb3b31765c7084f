//! The one cache of clean, decompressed blocks, shared by all layers of a process.
//!
//! ```text
//! reader ─▶ (blob, block) cached? ──yes──▶ copy out
//!                │ no: the first who asks decodes, others who want the same block wait for it
//!                ▼
//!            decode ─▶ insert ─▶ seldom used blocks go when the bytes exceed the capacity
//! ```
//! Eviction resists scans: a block is kept for long only when it was asked for again, so one sequential reader does not
//! displace what many others use; a quarter of the room is left to newcomers, so that a reader of small pieces finds the
//! block it has just decoded. Owns the blocks, the counters and reusable buffers. Holds nothing that cannot be made anew,
//! and must not know where blocks come from. Blocks of files that are stored plainly do not belong here: the kernel
//! caches those.

use crate::StorageError;
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{DefaultHashBuilder, OptionsBuilder, Weighter};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The least a cache holds, in bytes: a few of the largest blocks.
pub const MIN_CAPACITY_BYTES: u64 = 1 << 20;

/// What an entry costs beside its bytes: key, table slots, reference counts, and the allocator's own.
const ENTRY_OVERHEAD_BYTES: u64 = 128;
/// Smallest block there is, for the estimate of how many entries there can be.
const SMALLEST_BLOCK_BYTES: u64 = 4096;
/// A part of the cache with its own lock has at least so much room, in bytes.
const SHARD_BYTES: u64 = 4 << 20;
/// Parts of the cache with their own locks, at most.
const MAX_SHARDS: u64 = 64;
/// Part of the room for blocks that were asked for again.
const HOT_SHARE: f64 = 0.75;
/// Scratch buffers that are kept for reuse, at most.
const IDLE_SCRATCHES: usize = 32;

/// A blob as the cache knows it; given out by [`BlockCache::new_blob_id`] and never again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlobId(u64);

type Key = (BlobId, u64);

#[derive(Debug, Clone, Copy)]
struct ByBytes;

impl Weighter<Key, Arc<[u8]>> for ByBytes {
    fn weight(&self, _key: &Key, block: &Arc<[u8]>) -> u64 {
        block.len() as u64 + ENTRY_OVERHEAD_BYTES
    }
}

/// How a cache has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheCounts {
    /// Blocks that were there, or were just being decoded for somebody else.
    pub hits: u64,
    /// Blocks that had to be decoded, failures included.
    pub misses: u64,
    /// Bytes held now, with what the entries themselves need.
    pub bytes: u64,
    /// Bytes that are held at most.
    pub capacity_bytes: u64,
    /// Blocks held now.
    pub blocks: u64,
}

/// Clean decompressed blocks, bounded in bytes.
pub struct BlockCache {
    blocks: Cache<Key, Arc<[u8]>, ByBytes>,
    capacity_bytes: u64,
    next_blob: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    idle_scratches: Mutex<Vec<Scratch>>,
}

/// What decoding a block needs and the next one can use again.
#[derive(Default)]
pub(crate) struct Scratch {
    /// A block as it is stored.
    pub(crate) record: Vec<u8>,
    /// A context of zstd, made when first needed.
    pub(crate) zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl BlockCache {
    /// An empty cache of so many bytes, or of [`MIN_CAPACITY_BYTES`] when that is more.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        let capacity_bytes = capacity_bytes.max(MIN_CAPACITY_BYTES);
        let shards = (capacity_bytes / SHARD_BYTES).clamp(1, MAX_SHARDS);
        // The builder rounds up to a power of two, which would make the shards too small.
        let shards = if shards.is_power_of_two() { shards } else { shards.next_power_of_two() / 2 };
        let estimated_blocks = capacity_bytes / (SMALLEST_BLOCK_BYTES + ENTRY_OVERHEAD_BYTES);
        let options = OptionsBuilder::new()
            .shards(usize::try_from(shards).unwrap_or(1))
            .estimated_items_capacity(usize::try_from(estimated_blocks).unwrap_or(usize::MAX))
            .weight_capacity(capacity_bytes)
            .hot_allocation(HOT_SHARE)
            .build()
            .expect("capacity and estimate are set");
        Self {
            blocks: Cache::with_options(
                options,
                ByBytes,
                DefaultHashBuilder::default(),
                DefaultLifecycle::default(),
            ),
            capacity_bytes,
            next_blob: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            idle_scratches: Mutex::new(Vec::new()),
        }
    }

    /// A name for a blob whose blocks are to be cached.
    pub fn new_blob_id(&self) -> BlobId {
        BlobId(self.next_blob.fetch_add(1, Ordering::Relaxed))
    }

    /// The block, decoded by `decode` unless it is there. Readers of one block that come at once decode it once; when
    /// that fails, the next of them tries.
    ///
    /// # Errors
    /// What `decode` returns; nothing is kept then.
    pub fn get_or_decode(
        &self,
        blob: BlobId,
        block: u64,
        decode: impl FnOnce() -> Result<Arc<[u8]>, StorageError>,
    ) -> Result<Arc<[u8]>, StorageError> {
        let mut was_there = true;
        let found = self.blocks.get_or_insert_with(&(blob, block), || {
            was_there = false;
            decode()
        });
        let counter = if was_there { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Forgets everything, for example because memory is short.
    pub fn clear(&self) {
        self.blocks.clear();
        self.idle().clear();
    }

    /// How it has done so far.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        CacheCounts {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            bytes: self.blocks.weight(),
            capacity_bytes: self.capacity_bytes,
            blocks: self.blocks.len() as u64,
        }
    }

    /// Lends buffers for decoding.
    pub(crate) fn with_scratch<R>(&self, work: impl FnOnce(&mut Scratch) -> R) -> R {
        let lent = self.idle().pop();
        let mut scratch = lent.unwrap_or_default();
        let result = work(&mut scratch);
        let mut idle = self.idle();
        if idle.len() < IDLE_SCRATCHES {
            idle.push(scratch);
        }
        result
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Scratch>> {
        // Every holder of this lock does a single push, pop or clear.
        self.idle_scratches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for BlockCache {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BlockCache").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

/// A block of zeros to decode into, in the one allocation that the cache will hold.
pub(crate) fn new_block(bytes: usize) -> Arc<[u8]> {
    std::iter::repeat_n(0, bytes).collect()
}

#[cfg(test)]
mod tests;
