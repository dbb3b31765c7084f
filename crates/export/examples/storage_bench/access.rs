//! Reads, writes and flushes through the kernel: FUSE or ublk against a plain file on the same disk and against NBD.
//!
//! All with direct I/O, so that no page cache of the client answers. The disk is a base layer (lz4, 16 KiB blocks) with a
//! writable top; reads of the base come from a warm cache of decompressed blocks.

use crate::measure::{AlignedBuffer, Numbers, Operation, Times, repeat};
use crate::nbd::{self, Request};
use crate::report::Table;
use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Small operations.
const SMALL: usize = 4096;
/// Large ones.
const LARGE: usize = 1 << 20;
/// Which writes are flushed.
const WRITTEN: u8 = 0x5A;

/// Something with bytes that can be read and written.
#[derive(Debug)]
pub(crate) enum Target {
    /// A file or block device.
    File(PathBuf),
    /// A server's export.
    Nbd(Arc<nbd::Server>),
}

/// One thread's way to a target.
enum Access {
    File(File),
    Nbd(nbd::Client),
}

impl Target {
    fn open(&self) -> Result<Access> {
        match self {
            Self::Nbd(server) => Ok(Access::Nbd(server.connect()?)),
            Self::File(path) => {
                let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
                let file = OpenOptions::new().read(true).write(true).custom_flags(direct).open(path);
                Ok(Access::File(file.with_context(|| format!("cannot open {}", path.display()))?))
            }
        }
    }
}

impl Access {
    fn read(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Self::File(file) => file.read_exact_at(buffer, offset).map(|()| buffer.len()),
            Self::Nbd(client) => client.ask(Request::Read, buffer, offset),
        }
    }

    fn write(&mut self, data: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Self::File(file) => file.write_all_at(data, offset).map(|()| data.len()),
            Self::Nbd(client) => client.ask(Request::Write, data, offset),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::File(file) => file.sync_data(),
            Self::Nbd(client) => client.ask(Request::Flush, &mut [], 0).map(drop),
        }
    }
}

/// What is measured, with the number of threads.
const CASES: [(&str, Kind, usize); 7] = [
    ("random read 4 KiB", Kind::RandomRead, 1),
    ("random read 4 KiB, 2 threads", Kind::RandomRead, 2),
    ("random write 4 KiB", Kind::RandomWrite, 1),
    ("random write 4 KiB, 2 threads", Kind::RandomWrite, 2),
    ("write 4 KiB and fsync", Kind::Flush, 1),
    ("sequential read 1 MiB", Kind::SequentialRead, 1),
    ("sequential write 1 MiB", Kind::SequentialWrite, 1),
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    RandomRead,
    RandomWrite,
    Flush,
    SequentialRead,
    SequentialWrite,
}

/// Measures every case on every target; the first target is what the others are compared with.
pub(crate) fn measure(targets: &[(&str, Target)], size: u64, time: Duration) -> Result<Table> {
    let mut table = Table::new(&["access", "by", "mean µs", "p50", "p99", "MiB/s", "mean, ratio"]);
    for (case, kind, threads) in CASES {
        let mut first = None;
        for (name, target) in targets {
            let times = run(target, kind, threads, size, time).with_context(|| format!("{case}, {name}"))?;
            let base = *first.get_or_insert(times.mean());
            table.row(vec![
                case.to_owned(),
                (*name).to_owned(),
                format!("{:.1}", times.mean()),
                format!("{:.1}", times.percentile(50)),
                format!("{:.1}", times.percentile(99)),
                format!("{:.0}", times.throughput()),
                format!("{:.2}x", times.mean() / base),
            ]);
        }
    }
    Ok(table)
}

/// Reads all of a file once, so that what lies behind it is warm.
pub(crate) fn warm(path: &Path, size: u64) -> Result<()> {
    let mut access = Target::File(path.to_owned()).open()?;
    let mut buffer = AlignedBuffer::new(LARGE, 0);
    for offset in (0..size).step_by(LARGE) {
        access.read(buffer.get(), offset).context("cannot read the export")?;
    }
    Ok(())
}

fn run(target: &Target, kind: Kind, threads: usize, size: u64, time: Duration) -> Result<Times> {
    let operations = (0..threads).map(|thread| operation(target.open()?, kind, thread, size));
    repeat(operations.collect::<Result<_>>()?, time)
}

fn operation(mut access: Access, kind: Kind, thread: usize, size: u64) -> Result<Operation> {
    let mut numbers = Numbers::new(thread as u64 + 1);
    let length = match kind {
        Kind::SequentialRead | Kind::SequentialWrite => LARGE,
        Kind::RandomRead | Kind::RandomWrite | Kind::Flush => SMALL,
    };
    let mut buffer = AlignedBuffer::new(length, WRITTEN);
    let steps = size / length as u64;
    // Writes go to the second half, so that reads find what they were warmed with.
    let writes_from = steps / 2;
    let mut next = 0;
    Ok(Box::new(move || {
        let buffer = buffer.get();
        let mut sequential = |count: u64| {
            next = (next + 1) % count;
            next
        };
        let unit = length as u64;
        match kind {
            Kind::RandomRead => access.read(buffer, numbers.below(writes_from) * unit),
            Kind::SequentialRead => access.read(buffer, sequential(writes_from) * unit),
            Kind::RandomWrite => {
                access.write(buffer, (writes_from + numbers.below(steps - writes_from)) * unit)
            }
            Kind::SequentialWrite => {
                access.write(buffer, (writes_from + sequential(steps - writes_from)) * unit)
            }
            Kind::Flush => {
                let written =
                    access.write(buffer, (writes_from + numbers.below(steps - writes_from)) * unit)?;
                access.flush()?;
                Ok(written)
            }
        }
    }))
}
