//! Random layers, alone and stacked: read, committed, flattened, compacted.

use crate::model::*;
use aenv_storage::blob::FileBlob;
use aenv_storage::chain::{LayerChain, UpperLayers, check_order};
use aenv_storage::commit::{Below, LayerOptions, Source, flatten, write_layer, write_layer_file};
use aenv_storage::layer::{Form, Layer};
use aenv_storage::{Image, StorageError};
use proptest::collection::vec;
use proptest::prelude::{Just, ProptestConfig, Strategy, prop_assert, prop_assert_eq, prop_oneof, proptest};
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;

const ALL: u64 = SECTORS * SECTOR as u64;

/// A layer of a stack: what is done to it, its form and its virtual size.
fn layer() -> impl Strategy<Value = (Vec<Operation>, u8, u64)> {
    let size =
        prop_oneof![3 => Just(ALL), 1 => Just(0), 1 => (1..2 * SECTORS).prop_map(|sectors| sectors * 512)];
    (operations(), 0..3_u8, size)
}

fn build(operations: &[Operation], form: u8, virtual_size: u64) -> Arc<Layer> {
    match form {
        0 => {
            let (data, index) = log_pair(operations, virtual_size);
            Layer::from_log(blob(data), blob(index).as_ref()).unwrap()
        }
        1 => open_bytes(sealed_in_place(operations, virtual_size)).unwrap(),
        _ => open_bytes(committed(operations, virtual_size)).unwrap(),
    }
}

/// Stacks the layers and makes the disk that they must show.
fn stack(parts: &[(Vec<Operation>, u8, u64)]) -> (LayerChain, Vec<u8>) {
    let mut layers = vec![build(&[], 2, ALL)];
    let (mut disk, mut size) = (vec![0; 2 * ALL as usize], ALL);
    for (operations, form, virtual_size) in parts {
        apply(operations, &mut disk);
        size = if *virtual_size == 0 { size } else { *virtual_size };
        layers.push(build(operations, *form, *virtual_size));
    }
    disk.truncate(size as usize);
    (LayerChain::new(layers).unwrap(), disk)
}

fn write(source: Source<'_>, options: &LayerOptions) -> Vec<u8> {
    let mut bytes = Vec::new();
    let summary = write_layer(source, options, &mut bytes, Path::new("new layer")).unwrap();
    assert_eq!(summary.layer_bytes, bytes.len() as u64);
    bytes
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_form_reads_as_the_disk(operations in operations(), start in 0..ALL, length in 0..ALL) {
        let mut disk = vec![0; ALL as usize];
        apply(&operations, &mut disk);
        for form in 0..3 {
            let layer = build(&operations, form, ALL);
            layer.verify(|_| ()).unwrap();
            prop_assert_eq!(layer.uuid(), Some(Uuid::parse_str(UUIDS[0]).unwrap()));
            let chain = LayerChain::new(vec![layer]).unwrap();
            prop_assert!(read_all(&chain).unwrap() == disk, "form {}", form);
            data_runs(&chain, &disk);
            let mut part = vec![0xee; length.min(ALL - start) as usize];
            chain.read_at(&mut part, start).unwrap();
            prop_assert!(part == disk[start as usize..start as usize + part.len()]);
        }
    }

    #[test]
    fn a_log_that_ends_early_is_what_was_written_first(operations in operations(), cut in 0..5000_u64) {
        let (data, mut index) = log_pair(&operations, ALL);
        index.truncate(4096 + (cut as usize).min(index.len() - 4096));
        let mut disk = vec![0; ALL as usize];
        let (mut left, mut done) = ((index.len() - 4096) / 16, 0);
        for operation in &operations {
            if left == 0 { break; }
            done += 1;
            left = left.saturating_sub(if operation.length % 3 == 0 { 2 } else { 1 });
        }
        apply(&operations[..done], &mut disk);
        let chain = LayerChain::new(vec![Layer::from_log(blob(data), blob(index).as_ref()).unwrap()]).unwrap();
        prop_assert!(read_all(&chain).unwrap() == disk);
    }

    #[test]
    fn a_stack_reads_as_its_layers_one_over_the_other(parts in vec(layer(), 0..8), start in 0..2 * ALL, length in 0..9000_u64) {
        let (chain, disk) = stack(&parts);
        prop_assert!(read_all(&chain).unwrap() == disk);
        data_runs(&chain, &disk);
        let (start, length) = (start.min(chain.size()), length as usize);
        let mut part = vec![0xee; length];
        match chain.read_at(&mut part, start) {
            Ok(()) => prop_assert!(part == disk[start as usize..start as usize + length]),
            Err(error) => {
                prop_assert!(start + length as u64 > chain.size(), "{}", error);
                prop_assert!(matches!(error, StorageError::OutOfRange { .. }), "{}", error);
            }
        }
    }

    #[test]
    fn a_flattened_stack_reads_the_same_and_has_no_zeros(parts in vec(layer(), 0..8), coarse in 0..3_u32) {
        let (chain, disk) = stack(&parts);
        let granularity = 4096 << (4 * coarse);
        let options = LayerOptions { granularity, user_tag: b"flat".to_vec(), ..LayerOptions::default() };
        let flat = open_bytes(write(Source::Image(&chain), &options)).unwrap();
        prop_assert_eq!((flat.form(), flat.user_tag(), flat.uuid()), (Form::Committed, &b"flat"[..], None));
        prop_assert!(flat.index().iter().all(|mapping| !mapping.zeroed));
        let flat = LayerChain::new(vec![flat]).unwrap();
        prop_assert!(read_all(&flat).unwrap() == disk);
        for run in data_runs(&flat, &disk) {
            prop_assert_eq!(run.start % granularity, 0);
            for granule in disk[run.start as usize..run.end as usize].chunks(granularity as usize) {
                prop_assert!(!is_zero(granule), "zeros were stored in {:?}", run);
            }
        }
    }

    #[test]
    fn compacted_upper_layers_over_the_lower_ones_read_the_same(
        parts in vec(layer(), 1..7), from in 0..7_usize, coarse in 0..3_u32,
    ) {
        let (chain, disk) = stack(&parts);
        let chain = Arc::new(chain);
        let from = from.clamp(1, chain.layers().len());
        let lower = LayerChain::new(chain.layers()[..from].to_vec()).unwrap();
        let upper = UpperLayers::new(chain, from);
        let options = LayerOptions { granularity: 4096 << (4 * coarse), ..LayerOptions::default() };
        let kept = open_bytes(write(Source::Delta(&upper, Below::Unknown), &options)).unwrap();
        let needed = open_bytes(write(Source::Delta(&upper, Below::Image(&lower)), &options)).unwrap();
        prop_assert!(needed.index().len() <= 2 * kept.index().len() + 2);
        let zeroed = |layer: &Layer| layer.index().iter().filter(|m| m.zeroed).map(|m| m.length).sum::<u64>();
        prop_assert!(zeroed(&needed) <= zeroed(&kept));
        for compacted in [kept, needed] {
            let mut layers = lower.layers().to_vec();
            layers.push(compacted);
            prop_assert!(read_all(&LayerChain::new(layers).unwrap()).unwrap() == disk);
        }
    }
}

#[test]
fn a_sparse_layer_has_what_was_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("sparse");
    let size = 64 << 20;
    let operations: Vec<Operation> = [(0, 8, 1), (640, 40, 2), (16, 1, 3), (672, 8, 0)]
        .map(|(start, length, data)| Operation { start, length, data: Some(data) })
        .to_vec();
    sparse(&operations, size, &path);
    let layer = Layer::from_sparse(FileBlob::open(&path).unwrap()).unwrap();
    assert_eq!((layer.form(), layer.virtual_size()), (Form::Sparse, size));
    let chain = LayerChain::new(vec![layer]).unwrap();
    let mut disk = vec![0; size as usize];
    apply(&operations, &mut disk);
    assert!(read_all(&chain).unwrap() == disk);
    let runs = data_runs(&chain, &disk);
    assert!(runs.iter().map(|run| run.end - run.start).sum::<u64>() < 1 << 20, "{runs:?}");
    let error = Layer::from_blob(Arc::new(FileBlob::open(&path).unwrap())).unwrap_err();
    assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
}

#[test]
fn data_that_was_lost_with_the_end_of_a_log_pair_reads_as_zeros() {
    let operations =
        [Operation { start: 8, length: 8, data: Some(7) }, Operation { start: 64, length: 8, data: Some(8) }];
    let (mut data, index) = log_pair(&operations, ALL);
    data.truncate(data.len() - 1000);
    let chain = LayerChain::new(vec![Layer::from_log(blob(data), blob(index).as_ref()).unwrap()]).unwrap();
    let mut disk = vec![0; ALL as usize];
    apply(&operations, &mut disk);
    disk[72 * SECTOR - 1000..].fill(0);
    assert!(read_all(&chain).unwrap() == disk);
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let (path, flat) = (directory.path().join("layer"), directory.path().join("flat"));
    let (chain, disk) = stack(&[(vec![Operation { start: 3, length: 90, data: Some(1) }], 0, ALL)]);
    let options = LayerOptions::default();
    let summary = write_layer_file(Source::Image(&chain), &options, &path).unwrap();
    assert_eq!(summary.layer_bytes, std::fs::metadata(&path).unwrap().len());
    assert!(write_layer_file(Source::Image(&chain), &options, &path).is_err());
    flatten(vec![open(&path)], &options, &flat).unwrap();
    assert!(std::fs::read(&path).unwrap() == std::fs::read(&flat).unwrap());
    assert!(read_all(&LayerChain::new(vec![open(&flat)]).unwrap()).unwrap() == disk);
    let wrong = [
        LayerOptions { granularity: 512, ..options.clone() },
        LayerOptions { granularity: 12288, ..options.clone() },
        LayerOptions { granularity: 2 << 20, ..options.clone() },
        LayerOptions { user_tag: vec![b'x'; 257], ..options },
    ];
    for options in wrong {
        let error =
            write_layer_file(Source::Image(&chain), &options, &directory.path().join("none")).unwrap_err();
        assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn the_order_of_layers_is_checked_when_asked_for() {
    let (chain, _) = stack(&[]);
    let made = |uuid: u128, parent: u128| {
        let some = |number: u128| (number != 0).then(|| Uuid::from_u128(number));
        let options = LayerOptions { uuid: some(uuid), parent: some(parent), ..LayerOptions::default() };
        open_bytes(write(Source::Image(&chain), &options)).unwrap()
    };
    check_order(&[]).unwrap();
    check_order(&[made(1, 0), made(2, 1), made(3, 2)]).unwrap();
    check_order(&[made(1, 9)]).unwrap();
    // Nothing is said that could be wrong.
    check_order(&[made(1, 0), made(2, 0)]).unwrap();
    check_order(&[made(0, 0), made(2, 1), made(0, 2), made(0, 5)]).unwrap();
    let refused = [
        vec![made(1, 1)],
        vec![made(1, 0), made(2, 3)],
        vec![made(1, 0), made(1, 1)],
        vec![made(1, 2), made(2, 1)],
        vec![made(1, 0), made(2, 1), made(1, 2)],
        // Upside down, each to its next, and one that is known to belong elsewhere.
        vec![made(2, 1), made(1, 0)],
        vec![made(3, 2), made(2, 1), made(1, 0)],
        vec![made(1, 0), made(3, 2), made(2, 1)],
        vec![made(1, 0), made(0, 0), made(2, 1)],
    ];
    for layers in refused {
        let error = check_order(&layers).unwrap_err();
        assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
        LayerChain::new(layers).unwrap();
    }
}

#[test]
fn a_layer_with_mappings_behind_its_end_or_without_a_size_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layer");
    let (chain, _) = stack(&[(vec![Operation { start: 3, length: 90, data: Some(1) }], 0, ALL)]);
    write_layer_file(Source::Image(&chain), &LayerOptions::default(), &path).unwrap();
    let whole = open(&path);
    whole.check_size().unwrap();
    let end = whole.index().iter().map(|mapping| mapping.end()).max().unwrap() * 512;
    let mut bytes = std::fs::read(&path).unwrap();
    let trailer = bytes.len() - 4096;
    for (size, is_right) in [(end, true), (end - 512, false), (512, false), (0, false)] {
        bytes[trailer + 48..trailer + 56].copy_from_slice(&size.to_le_bytes());
        let checked = open_bytes(bytes.clone()).unwrap().check_size();
        match is_right {
            true => checked.unwrap(),
            false => assert!(matches!(checked, Err(StorageError::Damaged { .. })), "{size}: {checked:?}"),
        }
    }
}

#[test]
fn a_chain_needs_layers_and_a_size_and_not_too_many() {
    let sized = build(&[], 2, ALL);
    LayerChain::new(vec![sized.clone(); 255]).unwrap();
    for layers in [Vec::new(), vec![build(&[], 2, 0)], vec![sized; 256]] {
        let error = LayerChain::new(layers).unwrap_err();
        assert!(matches!(error, StorageError::Unsupported { .. }), "{error}");
    }
}
