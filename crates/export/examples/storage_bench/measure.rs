//! Times of one operation that is repeated by some threads for some time. Owns only what it measures.

use anyhow::{Context, Result, bail};
use std::io;
use std::time::{Duration, Instant};

/// What a run of one operation showed.
#[derive(Debug, Clone)]
pub(crate) struct Times {
    /// Of every operation, sorted.
    sorted: Vec<Duration>,
    bytes: u64,
    elapsed: Duration,
}

impl Times {
    pub(crate) fn new(mut times: Vec<Duration>, bytes: u64, elapsed: Duration) -> Result<Self> {
        if times.is_empty() {
            bail!("nothing was measured");
        }
        times.sort_unstable();
        Ok(Self { sorted: times, bytes, elapsed })
    }

    /// Microseconds.
    pub(crate) fn mean(&self) -> f64 {
        let sum: Duration = self.sorted.iter().sum();
        micros(sum) / self.sorted.len() as f64
    }

    /// Microseconds that `percent` of all operations did not exceed.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        let last = self.sorted.len() - 1;
        micros(self.sorted[(last * percent).div_ceil(100)])
    }

    /// MiB per second of all threads together.
    pub(crate) fn throughput(&self) -> f64 {
        self.bytes as f64 / f64::from(1 << 20) / self.elapsed.as_secs_f64()
    }
}

/// Microseconds.
pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// An operation of one thread; gives the number of bytes it moved.
pub(crate) type Operation = Box<dyn FnMut() -> io::Result<usize> + Send>;

/// Repeats the operations, each in a thread of its own, until `time` has passed.
pub(crate) fn repeat(operations: Vec<Operation>, time: Duration) -> Result<Times> {
    let started = Instant::now();
    let run = move |mut operation: Operation| -> io::Result<(Vec<Duration>, u64)> {
        let (mut times, mut bytes) = (Vec::with_capacity(1 << 16), 0);
        while started.elapsed() < time {
            let begun = Instant::now();
            bytes += operation()? as u64;
            times.push(begun.elapsed());
        }
        Ok((times, bytes))
    };
    let threads: Vec<_> =
        operations.into_iter().map(|operation| std::thread::spawn(move || run(operation))).collect();
    let (mut all, mut bytes) = (Vec::new(), 0);
    for thread in threads {
        let Ok(result) = thread.join() else { bail!("a measuring thread panicked") };
        let (times, moved) = result.context("an operation failed")?;
        all.extend(times);
        bytes += moved;
    }
    Times::new(all, bytes, started.elapsed())
}

/// Bytes that begin at a multiple of 4096, as direct I/O wants them.
#[derive(Debug)]
pub(crate) struct AlignedBuffer {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl AlignedBuffer {
    pub(crate) fn new(length: usize, fill: u8) -> Self {
        let bytes = vec![fill; length + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Self { bytes, start, length }
    }

    pub(crate) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// Numbers without a pattern, the same in every run.
#[derive(Debug, Clone)]
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Below `end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
