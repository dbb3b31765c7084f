//! Layers that overlaybd's own tools compressed and wrapped: read byte for byte, and written again by us.
//!
//! Owns nothing but what it reads. The expected bytes are those that overlaybd stored, and the checksum of the image that
//! its tools made of both layers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;
use aenv_storage::open::{Unwrapped, unwrap_layer};
use aenv_storage::zfile::{Algorithm, ZFileOptions, write};
use aenv_storage::{Blob, Image, MemoryBlob, tar_wrap};
use sha2::{Digest, Sha256};
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// SHA-256 of the raw image of both layers, 1 GiB.
const MERGED: &str = "9288aabbd5381aae69084df4458806e0899b3c7d87ef4e3f160a51ecfe7bc685";

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/overlaybd").join(name)
}

fn unwrapped(name: &str) -> Unwrapped {
    let stored = MemoryBlob::new(name, std::fs::read(path(name)).unwrap());
    unwrap_layer(Arc::new(stored), &Arc::new(BlockCache::new(8 << 20))).unwrap()
}

fn all_of(blob: &dyn Blob) -> Vec<u8> {
    let mut bytes = vec![0; blob.stored_size() as usize];
    blob.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// SHA-256 of the whole image, holes included, in bounded memory.
fn digest(image: &dyn Image) -> String {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let zeros = vec![0; 1 << 20];
    let (mut place, mut run) = (0, image.next_data(0).unwrap());
    while place < image.size() {
        let (end, is_data) = match &run {
            Some(run) if run.start <= place => (run.end, true),
            Some(run) => (run.start, false),
            None => (image.size(), false),
        };
        let count = (end - place).min(1 << 20) as usize;
        if is_data {
            image.read_at(&mut buffer[..count], place).unwrap();
            digest.update(&buffer[..count]);
        } else {
            digest.update(&zeros[..count]);
        }
        place += count as u64;
        if run.as_ref().is_some_and(|run| run.end <= place) {
            run = image.next_data(place).unwrap();
        }
    }
    hex::encode(digest.finalize())
}

#[test]
fn all_forms_of_a_layer_hold_the_same_bytes() {
    let first = all_of(&*unwrapped("layer1.lz4.zfile").blob);
    for (name, in_tar, algorithm, block_bytes) in [
        ("layer1.lz4.zfile", false, Algorithm::Lz4, 4096),
        ("layer1.zstd16k.zfile", false, Algorithm::Zstd, 16384),
        ("layer1.zstd64k.zfile", false, Algorithm::Zstd, 65536),
        ("layer1.overlaybd.commit", true, Algorithm::Lz4, 4096),
    ] {
        let found = unwrapped(name);
        let info = found.compression().unwrap();
        assert_eq!(
            (found.in_tar, info.algorithm, info.block_bytes),
            (in_tar, algorithm, block_bytes),
            "{name}"
        );
        assert!(info.has_checksums);
        let mut verified = 0;
        found.zfile.as_ref().unwrap().verify(|bytes| verified += bytes).unwrap();
        assert_eq!(verified, first.len() as u64);
        assert!(all_of(&*found.blob) == first, "{name}");
    }
}

#[test]
fn a_compressed_layer_holds_the_plain_one() {
    let plain = unwrapped("layer2.lsmt");
    assert!(!plain.in_tar && plain.zfile.is_none());
    let compressed = unwrapped("layer2.overlaybd.commit");
    assert!(all_of(&*compressed.blob) == all_of(&*plain.blob));
}

#[test]
fn the_merged_file_is_the_expected_image() {
    let cache = Arc::new(BlockCache::new(4 << 20));
    let merged = LayerChain::new(vec![Layer::open(&path("merged.zfile"), &cache).unwrap()]).unwrap();
    assert_eq!(merged.size(), 1 << 30);
    assert_eq!(digest(&merged), MERGED);
}

#[test]
fn wrapped_layers_stack_to_the_expected_image() {
    let cache = Arc::new(BlockCache::new(4 << 20));
    let open = |name| Layer::open(&path(name), &cache).unwrap();
    let merged = LayerChain::new(vec![open("merged.zfile")]).unwrap();
    for lower in
        ["layer1.lz4.zfile", "layer1.zstd16k.zfile", "layer1.zstd64k.zfile", "layer1.overlaybd.commit"]
    {
        for upper in ["layer2.lsmt", "layer2.overlaybd.commit", "sealed2.lsmt"] {
            let chain = LayerChain::new(vec![open(lower), open(upper)]).unwrap();
            assert_same(&chain, &merged, &format!("{lower} {upper}"));
        }
    }
}

/// Compares two images wherever one of them may have data.
fn assert_same(one: &dyn Image, other: &dyn Image, what: &str) {
    assert_eq!(one.size(), other.size());
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    for image in [one, other] {
        let mut place = 0;
        while let Some(run) = image.next_data(place).unwrap() {
            place = run.start;
            while place < run.end {
                let count = (run.end - place).min(1 << 20) as usize;
                one.read_at(&mut left[..count], place).unwrap();
                other.read_at(&mut right[..count], place).unwrap();
                assert!(left[..count] == right[..count], "{what}: bytes from {place} on differ");
                place += count as u64;
            }
        }
    }
}

#[test]
fn what_we_write_again_holds_the_same() {
    let layer = all_of(&*unwrapped("layer1.lz4.zfile").blob);
    for options in [ZFileOptions::lz4(), ZFileOptions::zstd()] {
        let mut output = Cursor::new(Vec::new());
        write(&MemoryBlob::new("layer", layer.clone()), &mut output, options).unwrap();
        let zfile: Arc<dyn Blob> = Arc::new(MemoryBlob::new("zfile", output.into_inner()));
        let mut archive = Vec::new();
        tar_wrap::wrap(&zfile, &mut archive).unwrap();
        let again =
            unwrap_layer(Arc::new(MemoryBlob::new("tar", archive)), &Arc::new(BlockCache::new(0))).unwrap();
        assert!(again.in_tar && again.zfile.is_some());
        assert!(all_of(&*again.blob) == layer, "{options:?}");
    }
}
