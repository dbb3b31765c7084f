//! What costs time inside of our own process: finding a block, long chains, seals, recovery. No kernel in between.

use crate::measure::{Numbers, Times, micros};
use crate::report::Table;
use aenv_storage::chain::LayerChain;
use aenv_storage::commit::{LayerOptions, Source, write_layer};
use aenv_storage::index::IndexBuilder;
use aenv_storage::layer::Layer;
use aenv_storage::layered_disk::LayeredDisk;
use aenv_storage::lsmt::Mapping;
use aenv_storage::top::BootId;
use aenv_storage::{BlockDevice, Image, MemoryBlob, StorageError};
use anyhow::{Context, Result, anyhow};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Blocks of the disks made here.
const BLOCKS: u64 = 16 << 10;
const BLOCK: u64 = 4096;

/// An image all of whose blocks hold `content`, in every `stride`-th block.
#[derive(Debug)]
struct Striped {
    content: u8,
    first: u64,
    stride: u64,
}

impl Image for Striped {
    fn size(&self) -> u64 {
        BLOCKS * BLOCK
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        for (position, byte) in buffer.iter_mut().enumerate() {
            let block = (offset + position as u64) / BLOCK;
            *byte = if block % self.stride == self.first { self.content } else { 0 };
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<std::ops::Range<u64>>, StorageError> {
        let mut block = offset / BLOCK;
        while block < BLOCKS && block % self.stride != self.first {
            block += 1;
        }
        let start = (block * BLOCK).max(offset);
        Ok((block < BLOCKS).then(|| start..(block + 1) * BLOCK))
    }
}

/// Time to find one block among a million mappings.
pub(crate) fn index_lookup(table: &mut Table) -> Result<()> {
    const MAPPINGS: u64 = 1_000_000;
    const LOOKUPS: u32 = 2_000_000;
    let mut builder = IndexBuilder::with_capacity(MAPPINGS as usize);
    for number in 0..MAPPINGS {
        // Every other block, so that none can be joined with its neighbour.
        let mapping =
            Mapping { offset: number * 16, length: 8, stored: 8 + number * 8, zeroed: false, tag: 0 };
        builder.push(mapping).map_err(|reason| anyhow!(reason))?;
    }
    let index = builder.finish();
    let (mut numbers, mut found) = (Numbers::new(7), 0);
    let started = Instant::now();
    for _ in 0..LOOKUPS {
        found ^= index.find(numbers.below(MAPPINGS * 16));
    }
    let mean = micros(started.elapsed()) / f64::from(LOOKUPS);
    // Keeps the compiler from leaving the work out.
    anyhow::ensure!(found <= 1 << 21, "impossible positions");
    table.row(vec!["lookup among 1 M mappings".into(), format!("{mean:.3}"), String::new(), String::new()]);
    Ok(())
}

/// Random reads of 4 KiB from chains of several lengths, layers in memory.
pub(crate) fn chains(table: &mut Table) -> Result<()> {
    for length in [1_u64, 16, 64] {
        let layers = (0..length).map(|number| layer(number, length)).collect::<Result<Vec<_>>>()?;
        let chain = LayerChain::new(layers).context("cannot stack the layers")?;
        let (mut numbers, mut buffer) = (Numbers::new(3), vec![0; BLOCK as usize]);
        let mut times = Vec::new();
        let started = Instant::now();
        for _ in 0..200_000 {
            let begun = Instant::now();
            chain.read_at(&mut buffer, numbers.below(BLOCKS) * BLOCK)?;
            times.push(begun.elapsed());
        }
        let count = times.len() as u64;
        row(
            table,
            &format!("read 4 KiB, chain of {length}"),
            &Times::new(times, count * BLOCK, started.elapsed())?,
        );
    }
    Ok(())
}

fn layer(number: u64, of: u64) -> Result<Arc<Layer>> {
    let image = Striped { content: number as u8 + 1, first: number, stride: of };
    let mut bytes = Vec::new();
    let name = format!("layer {number}");
    write_layer(Source::Image(&image), &LayerOptions::default(), &mut bytes, Path::new(&name))?;
    Ok(Layer::from_blob(Arc::new(MemoryBlob::new(name, bytes)))?)
}

/// Seals, with `gibibytes` in the top; then what it takes to open such a top after its process was killed.
pub(crate) fn seal_and_recovery(directory: &Path, gibibytes: u64, table: &mut Table) -> Result<()> {
    let boot = BootId::of_running_kernel().context("cannot read the boot id")?;
    let lower: Arc<dyn Image> = Arc::new(Striped { content: 0, first: 0, stride: 1 });
    let size = (gibibytes + 1) << 30;
    let mut seals = Vec::new();
    for round in 0..3 {
        let path = directory.join(format!("seal-{round}"));
        let disk = LayeredDisk::create(&path, Arc::clone(&lower), size, size, &boot)?;
        fill(&disk, gibibytes)?;
        drop(disk);
        let begun = Instant::now();
        let disk = LayeredDisk::open(&path, Arc::clone(&lower), &boot)?;
        let recovered = begun.elapsed();
        let begun = Instant::now();
        let sealed = disk.seal()?;
        seals.push((begun.elapsed(), recovered));
        drop((sealed, disk));
        LayeredDisk::remove(&path)?;
    }
    let elapsed = std::time::Duration::from_secs(1);
    row(
        table,
        &format!("seal, {gibibytes} GiB in the top"),
        &Times::new(seals.iter().map(|s| s.0).collect(), 0, elapsed)?,
    );
    row(
        table,
        &format!("recovery, {gibibytes} GiB in the top"),
        &Times::new(seals.iter().map(|s| s.1).collect(), 0, elapsed)?,
    );
    Ok(())
}

/// Writes pieces of 64 KiB in a scattered order.
fn fill(disk: &LayeredDisk, gibibytes: u64) -> Result<()> {
    let data = vec![1; 64 << 10];
    let pieces = (gibibytes << 30) / data.len() as u64;
    for number in 0..pieces {
        // An odd step visits every piece once.
        let piece = number.wrapping_mul(0x9E37_79B1) % pieces;
        disk.write_at(&data, piece * data.len() as u64)?;
    }
    Ok(())
}

fn row(table: &mut Table, name: &str, times: &Times) {
    table.row(vec![
        name.to_owned(),
        format!("{:.3}", times.mean()),
        format!("{:.3}", times.percentile(50)),
        format!("{:.3}", times.percentile(99)),
    ]);
}
