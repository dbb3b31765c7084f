//! The files of overlaybd's own tools: what they must read as is known byte by byte.

use aenv_storage::blob::FileBlob;
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::{LayerChain, check_order};
use aenv_storage::commit::{LayerOptions, flatten};
use aenv_storage::layer::{Form, Layer};
use aenv_storage::lsmt::Mapping;
use aenv_storage::{Image, StorageError};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

const SIZE: u64 = 1 << 30;
const SHA256: &str = "9288aabbd5381aae69084df4458806e0899b3c7d87ef4e3f160a51ecfe7bc685";

fn sample(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/overlaybd").join(name)
}

fn cache() -> Arc<BlockCache> {
    Arc::new(BlockCache::new(32 << 20))
}

fn layer(name: &str) -> Arc<Layer> {
    Layer::open(&sample(name), &cache()).unwrap()
}

/// The writable form of layer 2.
fn log_pair() -> Arc<Layer> {
    let index = FileBlob::open(&sample("layer2.upper.index")).unwrap();
    Layer::from_log(Arc::new(FileBlob::open(&sample("layer2.upper.data")).unwrap()), &index).unwrap()
}

/// Sector ranges that a layer maps, joined, with what they hold.
fn content(layer: &Arc<Layer>) -> Vec<(u64, Vec<u8>)> {
    let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
    for Mapping { offset, length, stored, zeroed, .. } in layer.index().iter() {
        let mut bytes = vec![0; length as usize * 512];
        if !zeroed {
            layer.read_stored(&mut bytes, stored * 512).unwrap();
        }
        match runs.last_mut() {
            Some((start, run)) if *start + run.len() as u64 / 512 == offset => run.extend(bytes),
            _ => runs.push((offset, bytes)),
        }
    }
    runs
}

/// Hands out the expected image in order, in pieces of 1 MiB.
fn for_each_expected_piece(mut take: impl FnMut(u64, &[u8])) {
    let file = File::open(sample("merged.raw.zst")).unwrap();
    let mut decoder = zstd::stream::read::Decoder::new(file).unwrap();
    let mut piece = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(piece.len()) {
        decoder.read_exact(&mut piece).unwrap();
        take(offset, &piece);
    }
    assert_eq!(decoder.read(&mut piece).unwrap(), 0);
}

#[test]
fn the_forms_of_layer_2_hold_the_same() {
    let (committed, sealed) = (layer("layer2.lsmt"), layer("sealed2.lsmt"));
    let (pair, wrapped) = (log_pair(), layer("layer2.overlaybd.commit"));
    assert_eq!(
        [committed.form(), sealed.form(), pair.form(), wrapped.form()],
        [Form::Committed, Form::SealedInPlace, Form::LogStructured, Form::Committed]
    );
    assert_eq!(sealed.uuid(), pair.uuid());
    let expected = content(&committed);
    let mapped: usize = expected.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(mapped, 13 * 256 * 512);
    for layer in [sealed, pair, wrapped] {
        assert_eq!(layer.virtual_size(), SIZE);
        assert_eq!(layer.parent(), committed.parent());
        assert!(content(&layer) == expected, "{}", layer.name());
    }
}

#[test]
fn layer_2_is_what_the_merged_image_shows_of_it() {
    let layer = log_pair();
    let chain = LayerChain::new(vec![layer]).unwrap();
    let mut compared = 0;
    for_each_expected_piece(|offset, piece| {
        let mut position = offset;
        while let Some(run) = chain.next_data(position).unwrap()
            && run.start < offset + piece.len() as u64
        {
            let end = run.end.min(offset + piece.len() as u64);
            let mut bytes = vec![0; (end - run.start) as usize];
            chain.read_at(&mut bytes, run.start).unwrap();
            assert!(bytes == piece[(run.start - offset) as usize..(end - offset) as usize], "{run:?}");
            compared += bytes.len();
            position = end;
        }
    });
    assert_eq!(compared, 13 * 256 * 512);
}

#[test]
fn the_chain_is_the_merged_image_and_so_is_its_flattened_form() {
    let layers = vec![layer("layer1.lz4.zfile"), layer("layer2.lsmt")];
    check_order(&layers).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("flat");
    let summary = flatten(layers.clone(), &LayerOptions::default(), &path).unwrap();
    assert!(summary.layer_bytes < 4 << 20, "{summary:?}");
    let flat = LayerChain::new(vec![Layer::open(&path, &cache()).unwrap()]).unwrap();
    let chain = LayerChain::new(layers).unwrap();
    let (mut hash, mut read) = (Sha256::new(), vec![0; 1 << 20]);
    for_each_expected_piece(|offset, piece| {
        for image in [&chain, &flat] {
            image.read_at(&mut read, offset).unwrap();
            assert!(read == piece, "{} at {offset}", image.layers()[0].name());
        }
        hash.update(&read);
    });
    assert_eq!(hex::encode(hash.finalize()), SHA256);
}

#[test]
fn every_compression_of_layer_1_has_the_same_content() {
    let expected = content(&layer("layer1.lz4.zfile"));
    for name in ["layer1.zstd16k.zfile", "layer1.zstd64k.zfile", "layer1.overlaybd.commit"] {
        assert!(content(&layer(name)) == expected, "{name}");
    }
}

#[test]
fn the_halves_of_a_log_pair_are_not_mistaken_for_layers() {
    for name in ["layer2.upper.data", "layer2.upper.index"] {
        let error = Layer::open(&sample(name), &cache()).unwrap_err();
        assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    }
    let (data, index) = (sample("layer2.upper.data"), sample("layer2.upper.index"));
    let (data, index) = (FileBlob::open(&data).unwrap(), FileBlob::open(&index).unwrap());
    let error = Layer::from_log(Arc::new(index), &data).unwrap_err();
    assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
}
