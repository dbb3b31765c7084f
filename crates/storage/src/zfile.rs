//! Compressed files that can be read anywhere: overlaybd's zfile.
//!
//! ```text
//! ┌────────┬────────┬────────┬─────┬────────┬───────────────────┬─────────┐
//! │ header │ record │ record │  …  │ record │ index: one u32    │ trailer │
//! │ 512    │   0    │   1    │     │  n-1   │ length per record │ 512     │
//! └────────┴────────┴────────┴─────┴────────┴───────────────────┴─────────┘
//!  record = compressed block of `block_bytes` (the last may be shorter) and, if the header says so, its CRC (4 bytes)
//!  a record's length includes its CRC; its place is the sum of the lengths before it
//!
//! header (and trailer; little-endian)
//!   0 magic, 8 and 16 bytes   24 u32 size = 96      28 u32 digest: CRC of these 512 bytes with this field 0
//!  32 u64 flags               40 u64 index offset   48 u64 number of records   56 u64 uncompressed size
//!  64 u32 CRC of the index    72 u32 block bytes    76 u8 algorithm  77 u8 level  78 u8 dictionary  88 u8 records have CRCs
//! ```
//! All CRCs are CRC-32C without the usual inversions. What is not a multiple of a block is not padded. There is no record
//! that is stored as it is, so data that cannot be compressed grows a little.
//!
//! Owns no state; [`ZFile`] and [`ZFileWriter`] own theirs. Must not know what is in the bytes.

mod codec;
mod header;
mod index;
mod reader;
mod writer;

pub use codec::Algorithm;
pub use header::has_magic;
pub use reader::{ZFile, ZFileInfo};
pub use writer::{Compressed, DEFAULT_ZSTD_LEVEL, ZFileOptions, ZFileWriter, write};

/// Bytes of the header, and of the trailer.
pub const HEADER_BYTES: usize = 512;

/// Smallest block a file may have, in bytes.
pub const MIN_BLOCK_BYTES: u32 = 4 << 10;

/// Largest block a file may have to be read, in bytes.
pub const MAX_BLOCK_BYTES: u32 = 64 << 10;

/// Largest block that we write, in bytes: overlaybd's own reader fails on records longer than 64 KiB.
pub const MAX_WRITTEN_BLOCK_BYTES: u32 = 32 << 10;

/// Most blocks a file may have: 256 GiB in the smallest blocks, for which the index takes 272 MiB of memory.
pub const MAX_BLOCKS: u64 = 1 << 26;

#[cfg(test)]
mod tests;
