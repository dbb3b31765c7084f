//! Times of 4 KiB random reads and writes with direct I/O through a FUSE export of a disk in memory, with one and with two
//! threads: mean and percentiles. Needs root.
//!
//! `cargo run --release -p aenv-export --example fuse_times`

#![expect(clippy::print_stdout, reason = "to print is what it is for")]

use aenv_export::fuse::FuseExporter;
use aenv_export::fuse::holder::{HolderOptions, run, stop};
use aenv_export::{Content, Export, Exporter};
use aenv_storage::{BlockDevice, StorageError};
use aenv_sys::pages::Pages;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

const SIZE: usize = 256 << 20;
const BLOCK: usize = 4096;
const COUNT: usize = 60_000;

/// A disk in memory. One lock for every MiB.
#[derive(Debug)]
struct Memory(Vec<RwLock<Vec<u8>>>);

const PIECE: usize = 1 << 20;

impl Memory {
    fn each(
        &self,
        length: usize,
        offset: u64,
        mut work: impl FnMut(&RwLock<Vec<u8>>, usize, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        let offset = usize::try_from(offset).expect("it lies in memory");
        while done < length {
            let at = (offset + done) % PIECE;
            let part = (length - done).min(PIECE - at);
            work(&self.0[(offset + done) / PIECE], at, done..done + part);
            done += part;
        }
    }
}

impl BlockDevice for Memory {
    fn size(&self) -> u64 {
        SIZE as u64
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.each(buffer.len(), offset, |piece, at, range| {
            let piece = piece.read().expect("no thread panics");
            let length = range.len();
            buffer[range].copy_from_slice(&piece[at..at + length]);
        });
        Ok(())
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.each(data.len(), offset, |piece, at, range| {
            let mut piece = piece.write().expect("no thread panics");
            let length = range.len();
            piece[at..at + length].copy_from_slice(&data[range]);
        });
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> Result<(), StorageError> {
        Ok(())
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        self.write_at(&vec![0; length as usize], offset)
    }

    fn flush(&self) -> Result<(), StorageError> {
        Ok(())
    }
}

fn main() {
    let mut arguments = std::env::args_os().skip(1);
    if let Some(directory) = arguments.next() {
        return hold(Path::new(&directory));
    }
    let directory = tempfile::tempdir().expect("a directory can be made");
    std::fs::create_dir(directory.path().join("mount")).expect("a directory can be made");
    let program = std::env::current_exe().expect("this program has a path");
    let mut holder =
        Command::new(program).arg(directory.path()).spawn().expect("this program can be started");
    let socket = directory.path().join("socket");
    let exporter = FuseExporter::connect(&socket, Duration::from_secs(10)).expect("the holder runs");
    exporter.start().expect("requests can be served");
    let disk = Memory((0..SIZE / PIECE).map(|_| RwLock::new(vec![1; PIECE])).collect());
    let export = Export { number: 1, name: "disk".to_owned(), owner: 0 };
    let path = exporter.add(&export, Content::Disk(Arc::new(disk))).expect("a disk can be exported");
    println!("{COUNT} times 4 KiB at random, direct I/O, from memory; microseconds");
    println!("{:>8} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9}", "", "threads", "mean", "p50", "p99", "max", "IOPS");
    for write in [false, true] {
        for threads in [1, 2] {
            measure(&path, threads, write);
        }
    }
    drop(exporter);
    stop(&socket, true).expect("the holder can be stopped");
    holder.wait().expect("the holder ends");
}

fn hold(directory: &Path) {
    let options =
        HolderOptions { socket: directory.join("socket"), mount: directory.join("mount"), workers: 4 };
    run(&options).expect("FUSE can be mounted");
}

fn measure(path: &Path, threads: usize, write: bool) {
    let started = Instant::now();
    let mut times: Vec<Duration> = std::thread::scope(|scope| {
        let workers: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || time_each(path, thread as u64, write))).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("no thread panics")).collect()
    });
    let took = started.elapsed();
    times.sort_unstable();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let mean = times.iter().sum::<Duration>() / u32::try_from(times.len()).expect("not so many");
    println!(
        "{:>8} {threads:>7} {:>8.1} {:>8.1} {:>8.1} {:>8.0} {:>9.0}",
        if write { "write" } else { "read" },
        micros(mean),
        micros(times[times.len() / 2]),
        micros(times[times.len() * 99 / 100]),
        micros(times[times.len() - 1]),
        times.len() as f64 / took.as_secs_f64()
    );
}

fn time_each(path: &Path, seed: u64, write: bool) -> Vec<Duration> {
    // O_DIRECT of x86-64.
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(0o40000)
        .open(path)
        .expect("the disk can be opened");
    let mut buffer = Pages::new(BLOCK).expect("there is memory");
    let mut random = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut one = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let offset = random % (SIZE / BLOCK) as u64 * BLOCK as u64;
        let started = Instant::now();
        let done =
            if write { file.write_all_at(&buffer, offset) } else { file.read_exact_at(&mut buffer, offset) };
        done.expect("the disk works");
        started.elapsed()
    };
    // Warm up.
    for _ in 0..COUNT / 20 {
        one();
    }
    (0..COUNT).map(|_| one()).collect()
}
