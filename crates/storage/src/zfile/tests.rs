use super::codec::raw_crc;
use super::*;
use crate::cache::BlockCache;
use crate::{Blob, MemoryBlob, StorageError};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use std::io::{Cursor, Seek, SeekFrom, Write};
use std::sync::Arc;

const LZ4_4K: ZFileOptions = ZFileOptions { algorithm: Algorithm::Lz4, block_bytes: 4096, level: 0 };
const ZSTD_32K: ZFileOptions = ZFileOptions { algorithm: Algorithm::Zstd, block_bytes: 32 << 10, level: 1 };

fn compress(bytes: &[u8], options: ZFileOptions) -> Vec<u8> {
    let mut output = Cursor::new(Vec::new());
    let written = write(&MemoryBlob::new("source", bytes.to_vec()), &mut output, options).unwrap();
    let output = output.into_inner();
    let expected = Compressed { original_bytes: bytes.len() as u64, stored_bytes: output.len() as u64 };
    assert_eq!(written, expected);
    output
}

fn open(stored: Vec<u8>) -> Result<ZFile, StorageError> {
    ZFile::open(Arc::new(MemoryBlob::new("file.zfile", stored)), &Arc::new(BlockCache::new(0)))
}

fn read_all(zfile: &ZFile) -> Result<Vec<u8>, StorageError> {
    let mut bytes = vec![0; zfile.stored_size() as usize];
    zfile.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// Text, zeros and noise, as an image has.
fn mixed_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut bytes = Vec::with_capacity(length);
    while bytes.len() < length {
        let run = random.random_range(1..9000);
        match random.random_range(0..3) {
            0 => bytes.resize(bytes.len() + run, 0),
            1 => bytes.extend((0..run).map(|at| b"a word, "[at % 8])),
            _ => bytes.extend(random_bytes(random.random(), run)),
        }
    }
    bytes.truncate(length);
    bytes
}

/// Writes the digest that the bytes of a header or trailer at `at` should have.
fn fix_digest(stored: &mut [u8], at: usize) {
    stored[at + 28..at + 32].fill(0);
    let digest = raw_crc(&stored[at..at + HEADER_BYTES], 0);
    stored[at + 28..at + 32].copy_from_slice(&digest.to_le_bytes());
}

/// The file with a field of both header and trailer changed, digests fixed.
fn with_field(stored: &[u8], at: usize, value: &[u8]) -> Vec<u8> {
    let mut changed = stored.to_vec();
    for base in [0, stored.len() - HEADER_BYTES] {
        changed[base + at..base + at + value.len()].copy_from_slice(value);
        fix_digest(&mut changed, base);
    }
    changed
}

#[test]
fn bytes_come_back_at_every_size_around_blocks_and_batches() {
    for options in [LZ4_4K, ZSTD_32K, ZFileOptions::lz4(), ZFileOptions::zstd()] {
        let block = options.block_bytes as usize;
        for length in [0, 1, block - 1, block, block + 1, 40 * block + 17, 5 << 20] {
            let bytes = mixed_bytes(length as u64, length);
            let zfile = open(compress(&bytes, options)).unwrap();
            assert_eq!(zfile.stored_size(), length as u64);
            assert!(read_all(&zfile).unwrap() == bytes, "{options:?} {length}");
            let mut seen = 0;
            zfile.verify(|bytes| seen += bytes).unwrap();
            assert_eq!(seen, length as u64);
            let info = zfile.info();
            assert_eq!((info.algorithm, info.block_bytes), (options.algorithm, options.block_bytes));
            assert!(info.has_checksums);
        }
    }
}

#[test]
fn data_that_cannot_be_compressed_stays_within_what_others_read() {
    for options in [LZ4_4K, ZFileOptions { algorithm: Algorithm::Lz4, ..ZSTD_32K }, ZSTD_32K] {
        let bytes = random_bytes(1, 1 << 20);
        let stored = compress(&bytes, options);
        let zfile = open(stored.clone()).unwrap();
        assert!(read_all(&zfile).unwrap() == bytes);
        let blocks = bytes.len() / options.block_bytes as usize;
        let index = &stored[stored.len() - HEADER_BYTES - blocks * 4..stored.len() - HEADER_BYTES];
        let lengths: Vec<u32> =
            index.as_chunks::<4>().0.iter().map(|entry| u32::from_le_bytes(*entry)).collect();
        assert!(lengths.iter().all(|length| (5..=65536).contains(length)), "{lengths:?}");
        for group in lengths.chunks(65536 / options.block_bytes as usize) {
            let partial: u32 = group[..group.len() - 1].iter().sum();
            assert!(partial < 65535, "{partial}");
        }
    }
}

#[test]
fn a_zfile_starts_where_its_output_stood() {
    let mut output = Cursor::new(vec![1; 1536]);
    output.seek(SeekFrom::End(0)).unwrap();
    let mut writer = ZFileWriter::new(output, LZ4_4K).unwrap();
    writer.write_all(&[3; 10_000]).unwrap();
    let (output, written) = writer.finish().unwrap();
    assert_eq!(output.position(), 1536 + written.stored_bytes);
    let stored = output.into_inner();
    assert_eq!(stored[..1536], [1; 1536]);
    assert_eq!(read_all(&open(stored[1536..].to_vec()).unwrap()).unwrap(), [3; 10_000]);
}

#[test]
fn reads_outside_are_refused() {
    let zfile = open(compress(&[1; 10_000], LZ4_4K)).unwrap();
    for (offset, length) in [(9_999, 2), (10_000, 1), (u64::MAX, 1), (u64::MAX - 1, 4096), (0, 10_001)] {
        let error = zfile.read_exact_at(&mut vec![0; length], offset).unwrap_err();
        assert!(matches!(error, StorageError::OutOfRange { size: 10_000, .. }), "{error}");
    }
    zfile.read_exact_at(&mut [], 10_000).unwrap();
}

#[test]
fn any_flipped_bit_is_found() {
    let bytes = mixed_bytes(5, 30_000);
    let stored = compress(&bytes, LZ4_4K);
    for position in 0..stored.len() {
        let mut damaged = stored.clone();
        damaged[position] ^= 1 << (position % 8);
        let error = open(damaged).and_then(|zfile| read_all(&zfile)).unwrap_err();
        assert!(error.to_string().contains("file.zfile"), "{error}");
    }
}

#[test]
fn any_shorter_file_is_refused() {
    let stored = compress(&mixed_bytes(6, 9000), LZ4_4K);
    for length in 0..stored.len() {
        assert!(open(stored[..length].to_vec()).is_err(), "{length} of {}", stored.len());
    }
}

#[test]
fn fields_that_cannot_be_true_are_named() {
    let stored = compress(&mixed_bytes(7, 30_000), LZ4_4K);
    let huge = u64::MAX.to_le_bytes();
    let cases: [(usize, &[u8], &str); 16] = [
        (24, &97_u32.to_le_bytes(), "97 bytes"),
        (40, &huge, "not inside"),
        (40, &0_u64.to_le_bytes(), "not inside"),
        (40, &(stored.len() as u64).to_le_bytes(), "not inside"),
        (40, &600_u64.to_le_bytes(), "index starts at 600|checksum|possible"),
        (48, &huge, "blocks for"),
        (48, &7_u64.to_le_bytes(), "blocks for"),
        (56, &huge, "blocks for"),
        (64, &[9; 4], "checksum"),
        (72, &0_u32.to_le_bytes(), "blocks have 0 bytes"),
        (72, &5000_u32.to_le_bytes(), "blocks have 5000 bytes"),
        (72, &(128_u32 << 10).to_le_bytes(), "blocks have 131072 bytes"),
        (76, &[0], "compression 0"),
        (78, &[1], "dictionary"),
        (84, &[1], "dictionary"),
        (88, &[2], "1 means checksums"),
    ];
    for (at, value, expected) in cases {
        let error = open(with_field(&stored, at, value)).map(|_| ()).unwrap_err().to_string();
        assert!(expected.split('|').any(|part| error.contains(part)), "{at}: {error}");
    }
    // As many blocks as the size needs, but more than are taken, whatever the size of the file.
    let mut many = with_field(&stored, 48, &(1_u64 << 40).to_le_bytes());
    many = with_field(&many, 56, &(1_u64 << 52).to_le_bytes());
    let error = open(many).map(|_| ()).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
}

#[test]
fn an_index_of_zeros_or_of_huge_records_is_refused_early() {
    let stored = compress(&mixed_bytes(8, 30_000), LZ4_4K);
    for entry in [0_u32, 4, 6000, u32::MAX] {
        let mut changed = stored.clone();
        let index = stored.len() - HEADER_BYTES - 8 * 4;
        changed[index..index + 4].copy_from_slice(&entry.to_le_bytes());
        let error = open(changed).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("record 0 has"), "{error}");
    }
}

#[test]
fn without_checksums_a_wrong_length_is_still_found() {
    // Two records of 4 KiB; the file says that they have no checksums, so these count as compressed bytes.
    let stored = with_field(&compress(&[1; 8192], LZ4_4K), 88, &[0]);
    let error = open(stored).and_then(|zfile| read_all(&zfile)).unwrap_err();
    assert!(error.to_string().contains("decompressed"), "{error}");
}

#[test]
fn what_was_not_finished_is_no_zfile() {
    let mut writer = ZFileWriter::new(Cursor::new(Vec::new()), LZ4_4K).unwrap();
    writer.write_all(&random_bytes(2, 20 << 20)).unwrap();
    writer.flush().unwrap();
    let bytes = writer.output.get_ref().clone();
    assert!(bytes.len() > 4 << 20, "batches were written");
    assert!(open(bytes).is_err());
}

#[test]
fn options_out_of_range_are_refused() {
    for options in [
        ZFileOptions { block_bytes: 0, ..LZ4_4K },
        ZFileOptions { block_bytes: 5000, ..LZ4_4K },
        ZFileOptions { block_bytes: 64 << 10, ..LZ4_4K },
        ZFileOptions { level: 0, ..ZSTD_32K },
        ZFileOptions { level: 23, ..ZSTD_32K },
    ] {
        let error = ZFileWriter::new(Cursor::new(Vec::new()), options).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
}

#[test]
fn an_error_of_the_output_is_returned_and_stays() {
    /// Takes so many bytes, then is full.
    struct Full(Cursor<Vec<u8>>, usize);
    impl Write for Full {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            if self.0.position() as usize + data.len() > self.1 {
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            self.0.write(data)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    impl Seek for Full {
        fn seek(&mut self, place: SeekFrom) -> std::io::Result<u64> {
            self.0.seek(place)
        }
    }
    let mut writer = ZFileWriter::new(Full(Cursor::new(Vec::new()), 1 << 20), LZ4_4K).unwrap();
    let error = writer.write_all(&random_bytes(3, 30 << 20)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert!(writer.finish().is_err());
}

#[test]
fn readers_at_once_see_the_same_and_decode_each_block_once() {
    let bytes = mixed_bytes(9, 600_000);
    let cache = Arc::new(BlockCache::new(16 << 20));
    let blob = Arc::new(MemoryBlob::new("shared", compress(&bytes, ZFileOptions::lz4())));
    let zfile = ZFile::open(blob, &cache).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (zfile, bytes) = (&zfile, &bytes);
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(seed);
                for _ in 0..2000 {
                    let start = random.random_range(0..bytes.len());
                    let length = random.random_range(0..50_000).min(bytes.len() - start);
                    let mut found = vec![0; length];
                    zfile.read_exact_at(&mut found, start as u64).unwrap();
                    assert!(found == bytes[start..start + length]);
                }
            });
        }
    });
    let counts = cache.counts();
    assert_eq!(counts.misses, zfile.info().blocks);
    assert!(counts.hits > 8000, "{counts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_range_reads_as_the_original(
        seed in any::<u64>(), length in 1_usize..200_000, zstd in any::<bool>(), shift in 12_u32..=15,
        ranges in proptest::collection::vec((any::<prop::sample::Index>(), 0_usize..70_000), 1..20),
    ) {
        let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
        let options = ZFileOptions { algorithm, block_bytes: 1 << shift, level: 3 };
        let bytes = mixed_bytes(seed, length);
        let zfile = open(compress(&bytes, options)).unwrap();
        for (start, count) in ranges {
            let start = start.index(length);
            let count = count.min(length - start);
            let mut found = vec![0; count];
            zfile.read_exact_at(&mut found, start as u64).unwrap();
            prop_assert!(found == bytes[start..start + count]);
        }
    }
}
