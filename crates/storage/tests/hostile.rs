//! Stored bytes that were changed by accident or by an enemy: a clear error or right content, within bounds.
//!
//! ```text
//! samples of overlaybd's tools, files of our own writers ─▶ seeded mutations ─▶ (checksums made right again)
//!     ─▶ the entry points of the fuzzers ─▶ no panic, no read outside, no huge allocation; what is read is what was stored
//! ```
//! The corpus of the fuzzers is run too. Memory is bounded by a limit of the process, which an allocation of a size that
//! was only claimed exceeds.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "a test run shows how many mutations were accepted")]

#[expect(unreachable_pub, reason = "it is a crate of its own where it is fuzzed")]
#[path = "../../../fuzz/src/lib.rs"]
mod entry_points;
mod mutation;

use aenv_storage::commit::{LayerOptions, Source, write_layer};
use aenv_storage::zfile::{Algorithm, ZFileOptions};
use aenv_storage::{Blob, Image, MemoryBlob, StorageError, tar_wrap, zfile};
use entry_points::{Content, read_index, read_layer, read_tar, read_zfile};
use mutation::{Wrapping, fix_checksums, mutate};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use std::io::Cursor;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

type Reader = fn(&[u8]) -> Result<Content, StorageError>;

/// Mutations of each small file, and of each large one.
const MANY: u64 = 1500;
const FEW: u64 = 250;
/// No input may keep a reader busy for so long: it is a loop then.
const DEADLINE: Duration = Duration::from_secs(30);
/// Memory that the process may take beyond what it has when the tests start, in bytes.
const MEMORY: u64 = 1 << 30;

#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Image for Bytes {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        buffer.copy_from_slice(&self.0[offset as usize..offset as usize + buffer.len()]);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok((offset < self.size()).then(|| offset..self.size()))
    }
}

fn layer_of(image: Vec<u8>) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_layer(Source::Image(&Bytes(image)), &LayerOptions::default(), &mut bytes, Path::new("seed"))
        .unwrap();
    bytes
}

/// A layer of an image with text, noise and holes.
fn layer(seed: u64, blocks: usize) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut image = vec![0; blocks * 4096];
    for block in image.chunks_mut(4096) {
        match random.random_range(0..3) {
            0 => {}
            1 => block.iter_mut().enumerate().for_each(|(at, byte)| *byte = b"some text, "[at % 11]),
            _ => random.fill_bytes(&mut block[..1000]),
        }
    }
    layer_of(image)
}

fn compressed(bytes: &[u8], algorithm: Algorithm, block_bytes: u32) -> Vec<u8> {
    let mut output = Cursor::new(Vec::new());
    let options = ZFileOptions { algorithm, block_bytes, level: 3 };
    zfile::write(&MemoryBlob::new("seed", bytes.to_vec()), &mut output, options).unwrap();
    output.into_inner()
}

fn wrapped(bytes: &[u8]) -> Vec<u8> {
    let blob: Arc<dyn Blob> = Arc::new(MemoryBlob::new("seed", bytes.to_vec()));
    let mut archive = Vec::new();
    tar_wrap::wrap(&blob, &mut archive).unwrap();
    archive
}

fn golden(name: &str) -> Vec<u8> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/overlaybd");
    std::fs::read(directory.join(name)).unwrap()
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

fn limit_memory() {
    static LIMITED: Once = Once::new();
    LIMITED.call_once(|| {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let limit = rustix::process::Rlimit {
            current: Some(pages * 4096 + MEMORY),
            maximum: rustix::process::getrlimit(rustix::process::Resource::As).maximum,
        };
        rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    });
}

/// Reads one input; says which it was when that goes wrong.
fn read(reader: Reader, bytes: &[u8], what: &str) -> Result<Content, StorageError> {
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| reader(bytes)));
    let outcome = outcome.unwrap_or_else(|_| panic!("{what}: the reader panicked"));
    assert!(start.elapsed() < DEADLINE, "{what}: {:?}", start.elapsed());
    if let Err(error) = &outcome {
        let typed = matches!(error, StorageError::Damaged { .. } | StorageError::Unsupported { .. });
        assert!(typed && error.to_string().contains("hostile"), "{what}: {error:?}");
    }
    outcome
}

/// Mutates a file again and again, and makes the checksums right afterwards to reach what lies behind them.
fn torture(name: &str, reader: Reader, wrapping: Wrapping, bytes: &[u8], rounds: u64) {
    limit_memory();
    let original = read(reader, bytes, name).unwrap();
    let other = wrapped(&compressed(&layer(99, 8), Algorithm::Lz4, 4096));
    let (mut accepted, mut refused) = (0, 0);
    let (mut accepted_fixed, mut refused_fixed) = (0, 0);
    for round in 0..rounds {
        let what = format!("{name}, round {round}");
        let mut random = StdRng::seed_from_u64(round);
        let mut changed = bytes.to_vec();
        mutate(&mut random, &mut changed, &other);
        match read(reader, &changed, &what) {
            Ok(content) => {
                // Where everything has checksums, what is read is what was stored.
                assert!(!wrapping.is_compressed() || content == original, "{what}: {content:?}");
                accepted += 1;
            }
            Err(_) => refused += 1,
        }
        if wrapping.has_checksums() {
            fix_checksums(&mut changed, wrapping);
            match read(reader, &changed, &format!("{what}, fixed")) {
                Ok(_) => accepted_fixed += 1,
                Err(_) => refused_fixed += 1,
            }
        }
    }
    println!("{name}: {accepted} accepted, {refused} refused");
    println!("{name}, checksums made right: {accepted_fixed} accepted, {refused_fixed} refused");
    let passed = if wrapping.has_checksums() { accepted_fixed } else { accepted };
    assert!(passed > 0 && refused > 0, "{name}: the mutations are too weak or too strong");
}

#[test]
fn plain_layers() {
    torture("own layer", read_layer, Wrapping::None, &layer(1, 40), MANY);
    torture("layer2.lsmt", read_layer, Wrapping::None, &golden("layer2.lsmt"), FEW);
    torture("sealed2.lsmt", read_layer, Wrapping::None, &golden("sealed2.lsmt"), FEW);
}

#[test]
fn indexes() {
    let log = golden("layer2.upper.index");
    let sealed = golden("layer2.lsmt");
    let own = layer(2, 300);
    limit_memory();
    for (name, index) in [
        ("log of overlaybd", &log[4096..]),
        ("index of overlaybd", &sealed[sealed.len() - 8192..sealed.len() - 4096]),
        ("own index", &own[own.len() - 8192..own.len() - 4096]),
    ] {
        for round in 0..MANY {
            let mut changed = index.to_vec();
            mutate(&mut StdRng::seed_from_u64(round), &mut changed, &log);
            let _content_or_error = read(read_index, &changed, &format!("{name}, round {round}"));
        }
    }
}

#[test]
fn compressed_layers_of_ours() {
    let layer = layer(3, 40);
    for (name, algorithm, block_bytes) in [
        ("own lz4 in 4 KiB", Algorithm::Lz4, 4096),
        ("own lz4 in 32 KiB", Algorithm::Lz4, 32 << 10),
        ("own zstd in 16 KiB", Algorithm::Zstd, 16 << 10),
    ] {
        let bytes = compressed(&layer, algorithm, block_bytes);
        torture(name, read_zfile, Wrapping::ZFile, &bytes, MANY);
        torture(name, read_tar, Wrapping::ZFile, &bytes, MANY / 3);
    }
}

#[test]
fn compressed_layers_of_overlaybd() {
    for name in ["layer1.lz4.zfile", "layer1.zstd16k.zfile", "layer1.zstd64k.zfile", "merged.zfile"] {
        torture(name, read_zfile, Wrapping::ZFile, &golden(name), FEW / 3);
    }
}

#[test]
fn wrapped_layers() {
    let layer = layer(4, 40);
    torture("own tar", read_tar, Wrapping::Tar, &wrapped(&layer), MANY);
    let bytes = wrapped(&compressed(&layer, Algorithm::Zstd, 8 << 10));
    torture("own tar of zstd", read_tar, Wrapping::ZFileInTar, &bytes, MANY);
    torture(
        "layer2.overlaybd.commit",
        read_tar,
        Wrapping::ZFileInTar,
        &golden("layer2.overlaybd.commit"),
        FEW,
    );
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let layer = layer(5, 3);
    let zfile = compressed(&layer, Algorithm::Lz4, 4096);
    let cases: [(&str, Reader, &[u8]); 3] =
        [("layer", read_layer, &layer), ("zfile", read_zfile, &zfile), ("detected", read_tar, &zfile)];
    for (name, reader, bytes) in cases {
        for length in 0..bytes.len() {
            let what = format!("{name}, {length} of {}", bytes.len());
            assert!(read(reader, &bytes[..length], &what).is_err(), "{what}");
        }
    }
}

#[test]
fn claimed_sizes_allocate_nothing() {
    limit_memory();
    // As many entries, blocks and bytes as the fields can say, in files of a few kilobytes.
    let plain = layer(6, 3);
    let compressed = compressed(&plain, Algorithm::Lz4, 4096);
    for value in [1_u64 << 20, 1 << 32, 1 << 40, u64::MAX / 4, u64::MAX / 16, u64::MAX - 511, u64::MAX] {
        for at in [32, 40, 48] {
            let mut changed = plain.clone();
            let field = changed.len() - 4096 + at;
            changed[field..field + 8].copy_from_slice(&value.to_le_bytes());
            let outcome = read(read_layer, &changed, &format!("layer, {value} at {at}"));
            assert!(at == 48 || outcome.is_err(), "layer, {value} at {at}");
        }
        for at in [40, 48, 56] {
            let mut changed = compressed.clone();
            let field = changed.len() - 512 + at;
            changed[field..field + 8].copy_from_slice(&value.to_le_bytes());
            fix_checksums(&mut changed, Wrapping::ZFile);
            assert!(read(read_zfile, &changed, &format!("zfile, {value} at {at}")).is_err());
        }
    }
}

#[test]
fn the_corpus_of_the_fuzzers() {
    limit_memory();
    let readers: [(&str, Reader); 4] =
        [("layer", read_layer), ("index", read_index), ("zfile", read_zfile), ("tar", read_tar)];
    for (name, reader) in readers {
        let mut files = 0;
        for entry in std::fs::read_dir(corpus().join(name)).unwrap() {
            let path = entry.unwrap().path();
            let outcome = read(reader, &std::fs::read(&path).unwrap(), &path.display().to_string());
            let is_good = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("good-"));
            assert!(!is_good || outcome.is_ok(), "{}: {outcome:?}", path.display());
            files += 1;
        }
        assert!(files >= 2, "{name} has {files} files");
    }
}

#[test]
#[ignore = "writes the good files of fuzz/corpus: run it after a change of what our writers write"]
fn write_the_corpus() {
    let layer = layer(7, 4);
    let index = &layer[layer.len() - 8192..layer.len() - 4096];
    let lz4 = compressed(&layer, Algorithm::Lz4, 4096);
    let zstd = compressed(&layer, Algorithm::Zstd, 8192);
    let log = &golden("layer2.upper.index")[4096..];
    let files: [(&str, &[u8]); 10] = [
        ("layer/good-small", &layer),
        ("layer/good-empty", &layer_of(vec![0; 4096])),
        ("index/good-padded", index),
        ("index/log-of-overlaybd", log),
        ("zfile/good-lz4", &lz4),
        ("zfile/good-zstd", &zstd),
        ("zfile/good-empty", &compressed(b"", Algorithm::Zstd, 4096)),
        ("tar/good-lz4", &wrapped(&lz4)),
        ("tar/good-plain", &wrapped(&layer)),
        ("tar/good-zfile", &zstd),
    ];
    for (name, bytes) in files {
        let path = corpus().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}
