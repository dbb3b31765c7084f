//! Checksums and the two compressions of a zfile's blocks.
//!
//! Owns no state; buffers and contexts are lent by the caller.

use crate::cache::Scratch;
use std::io;

/// CRC-32C register that a record's checksum starts from.
const RECORD_SEED: u32 = 100_007;

/// How blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// LZ4 block format: decompresses several times faster.
    Lz4,
    /// One Zstandard frame per block: a quarter smaller.
    Zstd,
}

impl Algorithm {
    /// The number that stands in a header.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }

    /// The algorithm with this number in a header.
    pub(super) fn from_number(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// Its usual name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// CRC-32C with the register starting at `seed` and not inverted at either end.
pub(super) fn raw_crc(bytes: &[u8], seed: u32) -> u32 {
    // The crate inverts at both ends, as everybody else does; inverting once more undoes it.
    !crc32c::crc32c_append(!seed, bytes)
}

/// The checksum of a compressed block.
pub(super) fn record_crc(compressed: &[u8]) -> u32 {
    raw_crc(compressed, RECORD_SEED)
}

/// Fills `block` with what `compressed` holds, which must be neither more nor less.
///
/// # Errors
/// Why it cannot be decompressed.
pub(super) fn decompress(
    algorithm: Algorithm,
    compressed: &[u8],
    block: &mut [u8],
    zstd: &mut Option<zstd::bulk::Decompressor<'static>>,
) -> Result<(), String> {
    let expected = block.len();
    let length = match algorithm {
        Algorithm::Lz4 => {
            lz4_flex::block::decompress_into(compressed, block).map_err(|error| error.to_string())?
        }
        Algorithm::Zstd => {
            let context = match zstd {
                Some(context) => context,
                None => zstd.insert(zstd::bulk::Decompressor::new().map_err(|error| error.to_string())?),
            };
            context.decompress_to_buffer(compressed, block).map_err(|error| error.to_string())?
        }
    };
    if length == expected { Ok(()) } else { Err(format!("it holds {length} bytes instead of {expected}")) }
}

impl Scratch {
    /// The record buffer at this length, with whatever bytes were in it, and the zstd context.
    pub(super) fn parts(
        &mut self,
        length: usize,
    ) -> (&mut [u8], &mut Option<zstd::bulk::Decompressor<'static>>) {
        if self.record.len() < length {
            self.record.resize(length, 0);
        }
        (&mut self.record[..length], &mut self.zstd)
    }
}

/// Compresses blocks one after the other.
pub(super) enum Compressor {
    Lz4(lz4_flex::block::CompressTable),
    Zstd(zstd::bulk::Compressor<'static>),
}

impl Compressor {
    /// A compressor; the level counts for zstd only.
    ///
    /// # Errors
    /// When there is no such level or no memory.
    pub(super) fn new(algorithm: Algorithm, level: i32) -> io::Result<Self> {
        Ok(match algorithm {
            Algorithm::Lz4 => Self::Lz4(lz4_flex::block::CompressTable::small()),
            Algorithm::Zstd => Self::Zstd(zstd::bulk::Compressor::new(level)?),
        })
    }

    /// Appends the compressed block to `output` and returns its length.
    ///
    /// # Errors
    /// When the compressor fails, which it never should.
    pub(super) fn append(&mut self, block: &[u8], output: &mut Vec<u8>) -> io::Result<usize> {
        let start = output.len();
        let bound = match self {
            Self::Lz4(_) => lz4_flex::block::get_maximum_output_size(block.len()),
            Self::Zstd(_) => zstd::zstd_safe::compress_bound(block.len()),
        };
        output.resize(start + bound, 0);
        let length = match self {
            Self::Lz4(table) => lz4_flex::block::compress_into_with_table(block, &mut output[start..], table)
                .map_err(io::Error::other)?,
            Self::Zstd(context) => context.compress_to_buffer(block, &mut output[start..])?,
        };
        output.truncate(start + length);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksums_are_those_of_the_format() {
        assert_eq!(raw_crc(b"123456789", 100_007), 0x3C9B_D4E0);
        assert_eq!(raw_crc(b"", 5), 5);
        assert_eq!(raw_crc(b"6789", raw_crc(b"12345", 0)), raw_crc(b"123456789", 0));
    }

    proptest! {
        #[test]
        fn blocks_come_back_and_only_at_their_length(
            block in proptest::collection::vec(prop_oneof![3 => Just(7_u8), 1 => any::<u8>()], 1..20_000),
            zstd in any::<bool>(),
        ) {
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let mut compressor = Compressor::new(algorithm, 3).unwrap();
            let mut stored = vec![1, 2, 3];
            for _again in 0..2 {
                stored.truncate(3);
                let length = compressor.append(&block, &mut stored).unwrap();
                prop_assert_eq!(length, stored.len() - 3);
            }
            let (mut context, mut found) = (None, vec![0; block.len()]);
            decompress(algorithm, &stored[3..], &mut found, &mut context).unwrap();
            prop_assert_eq!(&found, &block);
            for wrong in [block.len() - 1, block.len() + 1] {
                prop_assert!(decompress(algorithm, &stored[3..], &mut vec![0; wrong], &mut context).is_err());
            }
        }

        #[test]
        fn no_bytes_make_decompression_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..600), length in 0_usize..5000, zstd in any::<bool>(),
        ) {
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let _damaged_or_not = decompress(algorithm, &bytes, &mut vec![0; length], &mut None);
        }
    }
}
