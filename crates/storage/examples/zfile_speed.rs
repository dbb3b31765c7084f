//! Prints how fast zfiles are written, and read from a cold and from a warm cache, by one reader and by two. Owns nothing.
//!
//! `cargo run --release -p aenv-storage --example zfile_speed`

use aenv_storage::cache::BlockCache;
use aenv_storage::zfile::{ZFile, ZFileOptions, write};
use aenv_storage::{Blob, MemoryBlob};
use std::io::{Cursor, Write, stdout};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BYTES: usize = 128 << 20;
const READS: u64 = 500_000;
const PIECE: usize = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = stdout();
    let image = MemoryBlob::new("image", image());
    for (name, options) in [
        ("lz4 in 4 KiB", ZFileOptions { block_bytes: 4096, ..ZFileOptions::lz4() }),
        ("lz4 in 16 KiB", ZFileOptions::lz4()),
        ("zstd in 16 KiB", ZFileOptions::zstd()),
    ] {
        let begun = Instant::now();
        let mut stored = Cursor::new(Vec::new());
        let written = write(&image, &mut stored, options)?;
        let ratio = written.original_bytes as f64 / written.stored_bytes as f64;
        writeln!(
            out,
            "{name}: written with {:.0} MB/s, ratio {ratio:.2}",
            megabytes(BYTES, begun.elapsed())
        )?;

        let cache = Arc::new(BlockCache::new(2 * BYTES as u64));
        let zfile = ZFile::open(Arc::new(MemoryBlob::new(name, stored.into_inner())), &cache)?;
        let begun = Instant::now();
        let blocks = zfile.info().blocks;
        let mut buffer = vec![0; PIECE];
        for block in 0..blocks {
            zfile.read_exact_at(&mut buffer, block * u64::from(options.block_bytes))?;
        }
        writeln!(out, "  cold: {:.1} us a block", micros(begun.elapsed(), blocks))?;
        writeln!(out, "  warm: {:.2} us a random read of 4 KiB", micros(random_reads(&zfile, 1)?, READS))?;
        let begun = Instant::now();
        let ended: Vec<_> = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..2)
                .map(|seed| {
                    scope.spawn({
                        let zfile = &zfile;
                        move || random_reads(zfile, seed)
                    })
                })
                .collect();
            readers.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        for reader in ended {
            reader.map_err(|_| "a reader panicked")??;
        }
        writeln!(out, "  warm: {:.2} M reads/s by two readers", 2.0 / micros(begun.elapsed(), READS))?;
        writeln!(out, "  {:?}", cache.counts())?;
    }
    Ok(())
}

/// Half of it words, a quarter zeros, a quarter noise.
fn image() -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let mut image = Vec::with_capacity(BYTES);
    while image.len() < BYTES {
        match next() % 4 {
            0 => image.resize(image.len() + PIECE, 0),
            1 => image.extend((0..PIECE).map(|_| next() as u8)),
            _ => image.extend((0..PIECE / 8).flat_map(|_| (next() % 500).to_le_bytes())),
        }
    }
    image
}

fn random_reads(zfile: &ZFile, seed: u64) -> Result<Duration, aenv_storage::StorageError> {
    let mut buffer = vec![0; PIECE];
    let pieces = zfile.stored_size() / PIECE as u64;
    let mut place = seed;
    let begun = Instant::now();
    for _ in 0..READS {
        place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(u64::from(buffer[0]) | 1);
        zfile.read_exact_at(&mut buffer, (place >> 20) % pieces * PIECE as u64)?;
    }
    Ok(begun.elapsed())
}

fn micros(time: Duration, count: u64) -> f64 {
    time.as_secs_f64() * 1e6 / count as f64
}

fn megabytes(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}
