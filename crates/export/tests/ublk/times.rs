//! Times, printed and not judged: sizes of what a device costs over the file behind it.

use crate::stage::{Aligned, MIB, Stage, open_direct};
use aenv_export::{Content, Exporter};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::thread::CpuSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 * MIB;
const ROUNDS: usize = 300;

/// Mean and 99th percentile of 4 KiB requests, one after the other.
fn measure(file: &File, write: bool) -> String {
    let mut random = StdRng::seed_from_u64(5);
    let mut block = Aligned::new(4096);
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let offset = random.random_range(0..SIZE / 4096) * 4096;
            let started = Instant::now();
            if write {
                file.write_all_at(block.bytes(), offset).unwrap();
            } else {
                file.read_exact_at(block.bytes(), offset).unwrap();
            }
            started.elapsed()
        })
        .collect();
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / u32::try_from(times.len()).unwrap();
    format!("{} µs mean, {} µs p99", mean.as_micros(), times[times.len() * 99 / 100].as_micros())
}

/// The yardstick: two threads wake each other, once in each direction, where the kernel puts them, or on these processors. In
/// an emulated machine it takes long to wake another processor, and a request does that up to four times.
fn measure_wakes(processors: Option<[usize; 2]>) -> String {
    std::thread::spawn(move || wake_each_other(processors)).join().unwrap()
}

fn wake_each_other(processors: Option<[usize; 2]>) -> String {
    let pin = move |index: usize| {
        if let Some(processors) = processors {
            let mut set = CpuSet::new();
            set.set(processors[index]);
            rustix::thread::sched_setaffinity(None, &set).unwrap();
        }
    };
    let (mut here, mut there) = UnixStream::pair().unwrap();
    pin(0);
    let echo = std::thread::spawn(move || {
        pin(1);
        let mut byte = [0];
        while there.read_exact(&mut byte).is_ok() {
            there.write_all(&byte).unwrap();
        }
    });
    let started = Instant::now();
    for _ in 0..ROUNDS {
        here.write_all(&[1]).unwrap();
        here.read_exact(&mut [0]).unwrap();
    }
    let mean = started.elapsed() / u32::try_from(ROUNDS).unwrap();
    drop(here);
    echo.join().unwrap();
    format!("{} µs", mean.as_micros())
}

#[test]
fn times_of_4_kib_requests() {
    let Some(mut stage) = Stage::new("times") else { return };
    let export = stage.export(170, "times");
    let backing = stage.backing("times", SIZE);
    backing.file().write_all_at(&vec![1; usize::try_from(SIZE).unwrap()], 0).unwrap();
    backing.file().sync_all().unwrap();
    let started = Instant::now();
    let device = stage.exporter().add(&export, Content::Disk(backing)).unwrap();
    println!("add to usable: {} µs", started.elapsed().as_micros());
    println!("two threads waking each other, round trip: {}", measure_wakes(None));
    let processors = rustix::thread::sched_getaffinity(None).unwrap();
    let mut usable = (0..CpuSet::MAX_CPU).filter(|processor| processors.is_set(*processor));
    if let (Some(first), Some(second)) = (usable.next(), usable.next()) {
        println!("the same on two processors, round trip:     {}", measure_wakes(Some([first, second])));
    }
    for write in [false, true] {
        let what = if write { "write" } else { "read" };
        println!(
            "4 KiB random {what}, direct, plain file: {}",
            measure(&open_direct(&stage.file("times"), true), write)
        );
        println!("4 KiB random {what}, direct, ublk:       {}", measure(&open_direct(&device, true), write));
    }
}
