//! Prints how long it takes to find a sector among a million mappings, to open a layer that has them, and to merge such
//! layers. Owns nothing.
//!
//! `cargo run --release -p aenv-storage --example index_lookup`

use aenv_storage::chain::LayerChain;
use aenv_storage::commit::{Below, LayerOptions, Source, write_layer};
use aenv_storage::index::IndexBuilder;
use aenv_storage::layer::Layer;
use aenv_storage::lsmt::{Mapping, SECTOR_LIMIT};
use aenv_storage::merge::merge;
use aenv_storage::{Change, ChangeKind, Delta, Image, MemoryBlob, StorageError};
use std::hint::black_box;
use std::io::{Write, stdout};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LOOKUPS: u64 = 4_000_000;
/// Entries that a layer of ours may have.
const ENTRIES: u64 = 999_936;
const BLOCK: u64 = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = stdout();
    for mappings in [1_000, 100_000, 1_000_000, 10_000_000] {
        let mut builder = IndexBuilder::with_capacity(mappings as usize);
        for number in 0..mappings {
            builder.push(Mapping { offset: number * 16, length: 8, stored: 8, zeroed: false, tag: 0 })?;
        }
        let index = builder.finish();
        let mut sector = 1_u64;
        let begun = Instant::now();
        for _ in 0..LOOKUPS {
            // The next place depends on what was found, so that searches do not overlap.
            let found = index.find(sector) as u64;
            sector = (sector.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(found | 1) >> 11)
                % (mappings * 16);
        }
        let each = begun.elapsed().as_nanos() as f64 / LOOKUPS as f64;
        black_box(sector);
        writeln!(out, "{mappings:>10} mappings: {each:.0} ns a lookup")?;
    }
    let begun = Instant::now();
    let mut file = Vec::new();
    let options = LayerOptions::default();
    write_layer(Source::Delta(&Scattered, Below::Unknown), &options, &mut file, Path::new("layer"))?;
    writeln!(out, "layer of {ENTRIES} entries: written in {:.0?}", begun.elapsed())?;
    let blob = Arc::new(MemoryBlob::new("layer", file));
    let (layer, time) = timed(|| Layer::from_blob(blob.clone()))?;
    writeln!(out, "opened in {time:.0?}")?;
    for layers in [1, 2, 16, 64] {
        let (chain, time) = timed(|| LayerChain::new(vec![layer.clone(); layers]))?;
        writeln!(out, "{layers:>3} such layers make a chain of {} mappings in {time:.0?}", chain.mappings())?;
    }
    let mut builder = IndexBuilder::default();
    for number in 0..1000 {
        builder.push(Mapping { offset: number * 9_001, length: 8, stored: 8, zeroed: false, tag: 0 })?;
    }
    let small = builder.finish();
    for layers in [1, 16, 63] {
        let mut stack = vec![layer.index()];
        stack.resize(1 + layers, &small);
        let begun = Instant::now();
        let merged = merge(&stack, SECTOR_LIMIT)?;
        let time = begun.elapsed();
        writeln!(out, "{layers:>3} layers of 1000 over it make {} mappings in {time:.0?}", merged.len())?;
    }
    Ok(())
}

fn timed<T>(run: impl FnOnce() -> Result<T, StorageError>) -> Result<(T, Duration), StorageError> {
    let begun = Instant::now();
    let done = run()?;
    Ok((done, begun.elapsed()))
}

/// Every second block was made to be zeros: as many entries as possible without data.
#[derive(Debug)]
struct Scattered;

impl Image for Scattered {
    fn size(&self) -> u64 {
        2 * ENTRIES * BLOCK
    }

    fn read_at(&self, buffer: &mut [u8], _offset: u64) -> Result<(), StorageError> {
        buffer.fill(0);
        Ok(())
    }

    fn next_data(&self, _offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok(None)
    }
}

impl Delta for Scattered {
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        let start = offset.next_multiple_of(2 * BLOCK);
        let change = Change { range: start..start + BLOCK, kind: ChangeKind::Zeros };
        Ok((start < self.size()).then_some(change))
    }
}
