//! The digests of a blob's chunks, by which every range of it that is fetched can be checked on its own.
//!
//! Format, version 1; numbers are little-endian:
//!
//! ```text
//! offset  bytes
//!      0      8  "AENVCHNK"
//!      8      4  version: 1
//!     12      4  bytes of a chunk: a power of two from 4096 to 16 MiB
//!     16      8  bytes of the blob
//!     24     32  SHA-256 of the whole blob
//!     56   32·n  SHA-256 of each chunk; n = bytes of the blob / bytes of a chunk, rounded up; the last chunk may be shorter
//! ```
//! The list itself is named by its own SHA-256, so nothing in it can be changed unnoticed. Pure: must not do any I/O.

use crate::digest::Digest;
use sha2::{Digest as _, Sha256};
use std::ops::Range;

const MAGIC: &[u8; 8] = b"AENVCHNK";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
/// What lists are made with here: a reader fetches no less than this, and hashes as much for its first byte.
pub const CHUNK_BYTES: u32 = 256 << 10;
const CHUNK_BYTES_ALLOWED: Range<u32> = 4096..(16 << 20) + 1;

/// The digests of all chunks of one blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkList {
    chunk_bytes: u32,
    blob_bytes: u64,
    blob: Digest,
    chunks: Vec<Digest>,
}

/// Why bytes are no chunk list, or why a chunk is not what its list says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The list cannot be read.
    #[error("the chunk list is damaged: {reason}")]
    Damaged {
        /// What is wrong.
        reason: String,
    },
    /// A later version, by its number.
    #[error("the chunk list has version {version}, this program reads version 1: use a newer one")]
    UnknownVersion {
        /// Its version.
        version: u32,
    },
    /// The list has no such chunk.
    #[error("the blob has {chunks} chunks, there is no number {index}")]
    NoSuchChunk {
        /// Which was asked for, from 0.
        index: u64,
        /// Chunks there are.
        chunks: u64,
    },
    /// The bytes are not those of the chunk.
    #[error("chunk {index} is damaged: its digest is {found}, it must be {expected}")]
    Mismatch {
        /// Which, from 0.
        index: u64,
        /// What the list says.
        expected: Digest,
        /// What its bytes have.
        found: Digest,
    },
}

impl ChunkList {
    /// The list of a blob that is one chunk: no object is needed for it. `chunk_bytes` is what it must not be longer than.
    ///
    /// # Errors
    /// When it is longer.
    pub fn of_one(blob: Digest, blob_bytes: u64, chunk_bytes: u32) -> Result<Self, ChunkError> {
        if blob_bytes > u64::from(chunk_bytes) {
            let reason = format!("{blob_bytes} bytes are more than one chunk of {chunk_bytes}");
            return Err(ChunkError::Damaged { reason });
        }
        let chunks = if blob_bytes == 0 { Vec::new() } else { vec![blob] };
        Ok(Self { chunk_bytes, blob_bytes, blob, chunks })
    }

    /// Reads a list. Takes no more memory than `bytes` has.
    ///
    /// # Errors
    /// When the bytes are not exactly one list.
    pub fn parse(bytes: &[u8]) -> Result<Self, ChunkError> {
        let damaged = |reason: String| ChunkError::Damaged { reason };
        let Some((header, digests)) = bytes.split_at_checked(HEADER_BYTES) else {
            return Err(damaged(format!("{} bytes are less than its header", bytes.len())));
        };
        if &header[..8] != MAGIC {
            return Err(damaged("it does not begin as one".to_owned()));
        }
        let version = u32_at(header, 8);
        if version != VERSION {
            return Err(ChunkError::UnknownVersion { version });
        }
        let chunk_bytes = u32_at(header, 12);
        if !chunk_bytes.is_power_of_two() || !CHUNK_BYTES_ALLOWED.contains(&chunk_bytes) {
            return Err(damaged(format!("chunks of {chunk_bytes} bytes")));
        }
        let blob_bytes = u64::from(u32_at(header, 16)) | u64::from(u32_at(header, 20)) << 32;
        let (chunks, rest) = digests.as_chunks::<{ Digest::BYTES }>();
        if !rest.is_empty() || chunks.len() as u64 != blob_bytes.div_ceil(u64::from(chunk_bytes)) {
            return Err(damaged(format!(
                "{} bytes of digests for a blob of {blob_bytes} bytes in chunks of {chunk_bytes}",
                digests.len()
            )));
        }
        let mut blob = [0; Digest::BYTES];
        blob.copy_from_slice(&header[24..HEADER_BYTES]);
        let chunks = chunks.iter().copied().map(Digest::from_bytes).collect();
        Ok(Self { chunk_bytes, blob_bytes, blob: Digest::from_bytes(blob), chunks })
    }

    /// The list as it is stored.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + self.chunks.len() * Digest::BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.chunk_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.blob_bytes.to_le_bytes());
        bytes.extend_from_slice(self.blob.as_bytes());
        self.chunks.iter().for_each(|chunk| bytes.extend_from_slice(chunk.as_bytes()));
        bytes
    }

    /// Bytes of each chunk but the last.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// Bytes of the blob.
    #[must_use]
    pub fn blob_bytes(&self) -> u64 {
        self.blob_bytes
    }

    /// Digest of the whole blob.
    #[must_use]
    pub fn blob(&self) -> Digest {
        self.blob
    }

    /// Digests of the chunks, in their order.
    #[must_use]
    pub fn chunks(&self) -> &[Digest] {
        &self.chunks
    }

    /// Where chunk `index` lies in the blob, in bytes.
    ///
    /// # Errors
    /// When there is no such chunk.
    pub fn range(&self, index: u64) -> Result<Range<u64>, ChunkError> {
        self.digest(index)?;
        let start = index * u64::from(self.chunk_bytes);
        Ok(start..(start + u64::from(self.chunk_bytes)).min(self.blob_bytes))
    }

    /// Checks that `bytes` are those of chunk `index`, all of them.
    ///
    /// # Errors
    /// When they are not, or there is no such chunk.
    pub fn verify(&self, index: u64, bytes: &[u8]) -> Result<(), ChunkError> {
        let expected = self.digest(index)?;
        let found = Digest::of(bytes);
        if found == expected { Ok(()) } else { Err(ChunkError::Mismatch { index, expected, found }) }
    }

    fn digest(&self, index: u64) -> Result<Digest, ChunkError> {
        let place = usize::try_from(index).ok().and_then(|index| self.chunks.get(index)).copied();
        place.ok_or(ChunkError::NoSuchChunk { index, chunks: self.chunks.len() as u64 })
    }
}

/// Makes the list of a blob whose bytes are given from the first to the last, in pieces of any length.
#[derive(Debug)]
pub struct ChunkListBuilder {
    chunk_bytes: u32,
    blob_bytes: u64,
    blob: Sha256,
    chunk: Sha256,
    in_chunk: usize,
    chunks: Vec<Digest>,
}

impl Default for ChunkListBuilder {
    fn default() -> Self {
        Self {
            chunk_bytes: CHUNK_BYTES,
            blob_bytes: 0,
            blob: Sha256::new(),
            chunk: Sha256::new(),
            in_chunk: 0,
            chunks: Vec::new(),
        }
    }
}

impl ChunkListBuilder {
    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.blob.update(bytes);
        self.blob_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES as usize - self.in_chunk));
            self.chunk.update(now);
            self.in_chunk += now.len();
            if self.in_chunk == CHUNK_BYTES as usize {
                self.end_chunk();
            }
            bytes = later;
        }
    }

    /// The list, when all bytes were given.
    #[must_use]
    pub fn finish(mut self) -> ChunkList {
        if self.in_chunk > 0 {
            self.end_chunk();
        }
        ChunkList {
            chunk_bytes: self.chunk_bytes,
            blob_bytes: self.blob_bytes,
            blob: Digest::from_bytes(self.blob.finalize().into()),
            chunks: self.chunks,
        }
    }

    fn end_chunk(&mut self) {
        self.chunks.push(Digest::from_bytes(self.chunk.finalize_reset().into()));
        self.in_chunk = 0;
    }
}

/// The number at `offset`, which lies inside of every header.
fn u32_at(header: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([header[offset], header[offset + 1], header[offset + 2], header[offset + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy as _, any, prop_assert, prop_assert_eq, proptest};

    fn list(bytes: &[u8], pieces: usize) -> ChunkList {
        let mut builder = ChunkListBuilder::default();
        bytes.chunks(pieces).for_each(|piece| builder.update(piece));
        builder.finish()
    }

    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at / 1000 + at * 7) as u8).collect()
    }

    #[test]
    fn chunks_do_not_depend_on_how_bytes_come() {
        let bytes = content(2 * CHUNK_BYTES as usize + 17);
        let whole = list(&bytes, bytes.len());
        assert_eq!(list(&bytes, 4099), whole);
        assert_eq!((whole.chunks().len(), whole.blob()), (3, Digest::of(&bytes)));
        for index in 0..3 {
            let range = whole.range(index).unwrap();
            let chunk = &bytes[range.start as usize..range.end as usize];
            whole.verify(index, chunk).unwrap();
            assert!(matches!(whole.verify(index, &chunk[1..]), Err(ChunkError::Mismatch { .. })));
        }
        assert_eq!(whole.range(2).unwrap().end, bytes.len() as u64);
        assert!(matches!(whole.range(3), Err(ChunkError::NoSuchChunk { index: 3, chunks: 3 })));
    }

    #[test]
    fn a_short_blob_is_its_own_list() {
        for bytes in [content(0), content(1), content(CHUNK_BYTES as usize)] {
            let of_one = ChunkList::of_one(Digest::of(&bytes), bytes.len() as u64, CHUNK_BYTES).unwrap();
            assert_eq!(of_one, list(&bytes, 100_000));
        }
        let long = u64::from(CHUNK_BYTES) + 1;
        assert!(ChunkList::of_one(Digest::of(b""), long, CHUNK_BYTES).is_err());
    }

    #[test]
    fn every_prefix_and_every_longer_text_is_refused() {
        let stored = list(&content(CHUNK_BYTES as usize * 2), 9999).to_bytes();
        for length in 0..stored.len() {
            assert!(ChunkList::parse(&stored[..length]).is_err(), "{length}");
        }
        let longer = [stored.as_slice(), &[0; Digest::BYTES]].concat();
        assert!(ChunkList::parse(&longer).is_err());
        let mut newer = stored;
        newer[8] = 2;
        assert_eq!(ChunkList::parse(&newer), Err(ChunkError::UnknownVersion { version: 2 }));
    }

    #[test]
    fn lists_of_version_1_are_read_for_ever() {
        let mut golden = b"AENVCHNK\x01\0\0\0\0\x10\0\0\x01\x10\0\0\0\0\0\0".to_vec();
        golden.extend([0xaa; 32].into_iter().chain([0xbb; 32]).chain([0xcc; 32]));
        let read = ChunkList::parse(&golden).unwrap();
        assert_eq!((read.chunk_bytes(), read.blob_bytes()), (4096, 4097));
        assert_eq!(read.blob(), Digest::from_bytes([0xaa; 32]));
        assert_eq!(read.chunks(), [Digest::from_bytes([0xbb; 32]), Digest::from_bytes([0xcc; 32])]);
        assert_eq!(read.to_bytes(), golden);
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_read_as_they_are(
            at in 0_usize..200,
            value in any::<u8>(),
            blob in (0_usize..3).prop_map(|chunks| content(chunks * CHUNK_BYTES as usize + 5)),
        ) {
            let mut stored = list(&blob, 65_536).to_bytes();
            let place = at % stored.len();
            stored[place] = value;
            if let Ok(read) = ChunkList::parse(&stored) {
                prop_assert_eq!(read.to_bytes(), stored);
                prop_assert!(read.chunks().len() <= 3);
            }
        }
    }
}
