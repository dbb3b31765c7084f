//! How long it takes to seal a disk with 1 GiB in its top, to open it again, and to read and write 4 KiB of it.
//!
//! `cargo run --release -p aenv-storage --example top_times -- DIRECTORY`; the directory should be on the disk in question.
#![expect(clippy::print_stdout, reason = "this program prints times")]

use aenv_storage::layered_disk::LayeredDisk;
use aenv_storage::top::BootId;
use aenv_storage::{BLOCK_BYTES, BlockDevice, Image, StorageError};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const DISK_BYTES: u64 = 64 << 30;
const TOP_BYTES: u64 = 1 << 30;
const SAMPLES: usize = 20_000;
/// Tops of the chain that is read through at the end.
const CHAIN: usize = 64;

/// A disk that was never written.
#[derive(Debug)]
struct Nothing;

impl Image for Nothing {
    fn size(&self) -> u64 {
        0
    }

    fn read_at(&self, buffer: &mut [u8], _: u64) -> Result<(), StorageError> {
        buffer.fill(0);
        Ok(())
    }

    fn next_data(&self, _: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok(None)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let boot = BootId::of_running_kernel()?;
    for (name, sequential) in
        [("1 GiB written in order", true), ("1 GiB of 4 KiB blocks, every second one", false)]
    {
        let path = directory.join(format!("top-times-{}", std::process::id()));
        let disk = LayeredDisk::create(&path, Arc::new(Nothing), DISK_BYTES, u64::MAX, &boot)?;
        println!("{name}");
        let filled = fill(&disk, sequential);
        let measured = filled.and_then(|()| measure(disk, &path, &boot, sequential));
        LayeredDisk::remove(&path)?;
        measured?;
    }
    Ok(())
}

fn fill(disk: &LayeredDisk, sequential: bool) -> Result<(), StorageError> {
    let started = Instant::now();
    if sequential {
        for megabyte in 0..TOP_BYTES >> 20 {
            disk.write_at(&vec![megabyte as u8; 1 << 20], megabyte << 20)?;
        }
    } else {
        for block in 0..TOP_BYTES / BLOCK_BYTES {
            disk.write_at(&[block as u8; BLOCK_BYTES as usize], 2 * block * BLOCK_BYTES)?;
        }
    }
    println!("  write                         {:9.1} ms", milliseconds(started.elapsed()));
    Ok(())
}

fn measure(
    disk: LayeredDisk,
    path: &std::path::Path,
    boot: &BootId,
    sequential: bool,
) -> Result<(), StorageError> {
    let log_bytes = disk.usage().log_bytes;
    drop(disk);
    let started = Instant::now();
    let disk = LayeredDisk::open(path, Arc::new(Nothing), boot)?;
    println!("  open, log of {log_bytes:9} bytes  {:9.1} ms", milliseconds(started.elapsed()));
    let span = if sequential { TOP_BYTES } else { 2 * TOP_BYTES };
    let mut random = StdRng::seed_from_u64(1);
    let mut block = vec![1; BLOCK_BYTES as usize];
    let mut position = |span: u64| random.random_range(0..span / BLOCK_BYTES) * BLOCK_BYTES;
    let mut read = |disk: &LayeredDisk| disk.read_at(&mut block, position(span));
    percentiles("read 4 KiB", || read(&disk))?;
    let data = vec![2; BLOCK_BYTES as usize];
    let mut next = 0;
    percentiles("overwrite 4 KiB", || {
        next = (next + 7919 * 2 * BLOCK_BYTES) % TOP_BYTES;
        disk.write_at(&data, next)
    })?;
    let mut fresh = 4 * TOP_BYTES;
    percentiles("write 4 KiB for the first time", || {
        fresh += 3 * BLOCK_BYTES;
        disk.write_at(&data, fresh)
    })?;
    let seal = |what: &str| -> Result<(), StorageError> {
        let started = Instant::now();
        disk.seal()?;
        println!("  {what:<29} {:9.3} ms", milliseconds(started.elapsed()));
        Ok(())
    };
    seal("seal with 1 GiB, not flushed")?;
    seal("seal, nothing written")?;
    let started = Instant::now();
    disk.flush()?;
    println!("  flush of all that             {:9.1} ms", milliseconds(started.elapsed()));
    seal("seal, all flushed")?;
    while disk.usage().sealed_tops < CHAIN {
        disk.write_at(&data, fresh)?;
        disk.seal()?;
    }
    percentiles("read 4 KiB through 64 tops", || read(&disk))?;
    percentiles("first write 4 KiB on 64 tops", || {
        fresh += 3 * BLOCK_BYTES;
        disk.write_at(&data, fresh)
    })?;
    drop(disk);
    let started = Instant::now();
    let disk = LayeredDisk::open(path, Arc::new(Nothing), boot)?;
    println!("  open with 64 tops             {:9.1} ms", milliseconds(started.elapsed()));
    drop(disk);
    Ok(())
}

fn percentiles(
    what: &str,
    mut operation: impl FnMut() -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let mut times = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let started = Instant::now();
        operation()?;
        times.push(started.elapsed());
    }
    let mean = times.iter().sum::<Duration>() / SAMPLES as u32;
    times.sort_unstable();
    let at = |part: usize| microseconds(times[SAMPLES * part / 100]);
    println!("  {what:<30} mean {:.1} p50 {:.1} p99 {:.1} us", microseconds(mean), at(50), at(99));
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
