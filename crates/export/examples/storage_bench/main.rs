//! Measures the storage: access through FUSE or ublk against a plain file and NBD, the index, chains, seals, recovery,
//! shared memory. Prints tables; judges nothing. Run by `cargo xtask bench storage`.
//!
//! Owns a temporary directory, an exporter and, with FUSE, the holder process of its mount; all of it goes with it.

#![expect(clippy::print_stdout, reason = "a benchmark prints")]
#![expect(clippy::cast_precision_loss, reason = "sizes and times far below 2^52")]

mod access;
mod exporter;
mod inside;
mod mappers;
mod measure;
mod nbd;
mod report;

use access::Target;
use aenv_export::{Content, Export, Exporter};
use aenv_storage::blob::FileBlob;
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::commit::{LayerOptions, Source, write_layer_file};
use aenv_storage::layer::Layer;
use aenv_storage::layered_disk::LayeredDisk;
use aenv_storage::top::BootId;
use aenv_storage::zfile::{self, ZFileOptions};
use aenv_storage::{Image, StorageError};
use anyhow::{Context, Result};
use clap::Parser;
use exporter::{Mounted, Way};
use report::Table;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Parser)]
struct Options {
    /// How disks are handed to the kernel
    #[arg(long, value_enum, default_value = "fuse")]
    way: Way,
    /// Where disks and files are made, on the file system to be measured; a directory below it is used and removed
    #[arg(long, default_value = ".")]
    directory: PathBuf,
    /// Seconds for each access
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// MiB of the disk
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// GiB in the top that is sealed and recovered
    #[arg(long, default_value_t = 1)]
    seal: u64,
    /// Be the holder of a FUSE mount in this directory
    #[arg(long, hide = true)]
    hold: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(directory) = &options.hold {
        return Ok(exporter::hold(directory)?);
    }
    let temporary = tempfile::Builder::new().prefix("storage-bench-").tempdir_in(&options.directory)?;
    let directory = temporary.path();
    let size = options.size << 20;
    let cache = Arc::new(BlockCache::new(size * 2));
    let base = base_layer(directory, size, &cache)?;
    println!("access, {} MiB, {} s each\n", options.size, options.seconds);
    let mounted = Mounted::new(options.way, directory)?;
    access_tables(&options, directory, &base, mounted.exporter())?;
    drop(mounted);

    println!("inside\n");
    let mut table = Table::new(&["what", "mean µs", "p50", "p99"]);
    inside::index_lookup(&mut table)?;
    inside::chains(&mut table)?;
    inside::seal_and_recovery(directory, options.seal, &mut table)?;
    table.print()?;
    println!("block cache: {:?}", cache.counts());
    Ok(())
}

fn access_tables(
    options: &Options,
    directory: &Path,
    base: &Arc<dyn Image>,
    exporter: &dyn Exporter,
) -> Result<()> {
    let size = base.size();
    let boot = BootId::of_running_kernel().context("cannot read the boot id")?;
    let disk = LayeredDisk::create(&directory.join("disk"), Arc::clone(base), size, size, &boot)?;
    let export = Export { number: 1, name: "disk".into(), owner: 0 };
    let path = exporter.add(&export, Content::Disk(Arc::new(disk)))?;
    let image = Export { number: 2, name: "image".into(), owner: 0 };
    let image_path = exporter.add(&image, Content::Image(Arc::clone(base)))?;
    exporter.start()?;
    access::warm(&path, size)?;

    let plain = directory.join("plain");
    copy(base.as_ref(), &plain)?;
    let mut targets = vec![("plain file", Target::File(plain)), (options.way.name(), Target::File(path))];
    let served = directory.join("nbd.raw");
    copy(base.as_ref(), &served)?;
    match nbd::Server::start(&served, &directory.join("nbd.sock"))? {
        Some(server) => targets.push(("NBD", Target::Nbd(Arc::new(server)))),
        None => println!("NBD: not measured, qemu-nbd is not installed\n"),
    }
    access::measure(&targets, size, Duration::from_secs_f64(options.seconds))?.print()?;

    // A block device is not what memory is mapped from.
    if options.way == Way::Fuse {
        let mut table = Table::new(&["memory", "", "", ""]);
        mappers::measure(&image_path, 8, &mut table)?;
        table.print()?;
    }
    exporter.remove(&export)?;
    exporter.remove(&image)?;
    Ok(())
}

/// A base layer of `size` bytes that compresses to about half, as a zfile.
fn base_layer(directory: &Path, size: u64, cache: &Arc<BlockCache>) -> Result<Arc<dyn Image>> {
    let plain = directory.join("base.lsmt");
    let options = LayerOptions { granularity: 1 << 20, ..LayerOptions::default() };
    write_layer_file(Source::Image(&HalfNoise { size }), &options, &plain)?;
    let compressed = directory.join("base.zfile");
    let output = std::fs::File::create_new(&compressed)?;
    zfile::write(&FileBlob::open(&plain)?, output, ZFileOptions::lz4())?;
    std::fs::remove_file(&plain)?;
    let layer = Layer::open(&compressed, cache)?;
    Ok(Arc::new(LayerChain::new(vec![layer])?))
}

fn copy(image: &dyn Image, to: &Path) -> Result<()> {
    let file = std::fs::File::create_new(to)?;
    let mut buffer = vec![0; 1 << 20];
    for offset in (0..image.size()).step_by(buffer.len()) {
        image.read_at(&mut buffer, offset)?;
        std::os::unix::fs::FileExt::write_all_at(&file, &buffer, offset)?;
    }
    file.sync_all().context("cannot sync the copy")
}

/// In every 64 bytes half without a pattern, half alike.
#[derive(Debug)]
struct HalfNoise {
    size: u64,
}

impl Image for HalfNoise {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        for (number, chunk) in buffer.chunks_mut(8).enumerate() {
            let position = offset / 8 + number as u64;
            let word = if position % 8 < 4 {
                position.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29)
            } else {
                1
            };
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        Ok((offset < self.size).then_some(offset..self.size))
    }
}
