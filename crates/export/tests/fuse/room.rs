//! A host without room: writes wait, reads go on, and nothing fails.

use crate::memory::FileDisk;
use crate::stage::{Stage, add_disk, start, wait_until};
use aenv_export::fuse::FuseExporter;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

const SIZE: u64 = 256 << 20;

/// Threads that each write once; as many bytes each, one behind the other.
fn write_each(stage: &Stage, count: u64, length: usize) -> Vec<JoinHandle<()>> {
    let write = |number: u64| {
        let path = stage.mount("disk-1");
        std::thread::spawn(move || {
            let file = File::options().write(true).open(path).unwrap();
            let data = vec![u8::try_from(number % 250 + 1).unwrap(); length];
            file.write_all_at(&data, number * length as u64).unwrap();
        })
    };
    (0..count).map(write).collect()
}

fn waiting(exporter: &FuseExporter) -> u32 {
    exporter.stalled().iter().map(|stall| stall.requests).sum()
}

fn verify(disk: &FileDisk, count: u64, length: usize) {
    use aenv_storage::BlockDevice as _;
    let mut back = vec![0; length];
    for number in 0..count {
        disk.read_at(&mut back, number * length as u64).unwrap();
        assert!(back.iter().all(|byte| u64::from(*byte) == number % 250 + 1), "{number}");
    }
}

#[test]
fn writes_wait_while_there_is_no_room_and_other_disks_go_on() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let (disk, other) = (stage.disk("content", SIZE), stage.disk("other", 8192));
    add_disk(&exporter, 1, &disk);
    let other = File::options().read(true).write(true).open(add_disk(&exporter, 2, &other)).unwrap();
    disk.full.store(true, Ordering::SeqCst);
    // More than there are workers.
    let writers = write_each(&stage, 20, 4096);
    wait_until("all wait", || waiting(&exporter) == 20);
    let stall = exporter.stalled().remove(0);
    assert_eq!((stall.number, stall.requests), (1, 20));
    assert!(stall.reason.contains("no space"), "{}", stall.reason);
    assert!(stall.since <= std::time::SystemTime::now());
    other.write_all_at(b"x", 0).unwrap();
    let mut back = [0; 4096];
    File::open(stage.mount("disk-1")).unwrap().read_exact_at(&mut back, 0).unwrap();
    assert_eq!(back, [0; 4096]);
    disk.full.store(false, Ordering::SeqCst);
    exporter.retry_stalled();
    for writer in writers {
        writer.join().unwrap();
    }
    wait_until("nothing waits", || exporter.stalled().is_empty());
    verify(&disk, 20, 4096);
}

#[test]
fn reads_go_on_when_more_waits_than_may_be_held() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    add_disk(&exporter, 1, &disk);
    disk.full.store(true, Ordering::SeqCst);
    let writers = write_each(&stage, 100, 1 << 20);
    wait_until("more than 64 MiB wait", || waiting(&exporter) > 64);
    let file = File::open(stage.mount("disk-1")).unwrap();
    for _ in 0..50 {
        file.read_exact_at(&mut [0; 4096], 0).unwrap();
    }
    disk.full.store(false, Ordering::SeqCst);
    for writer in writers {
        writer.join().unwrap();
    }
    wait_until("nothing waits", || waiting(&exporter) == 0);
    verify(&disk, 100, 1 << 20);
}

#[test]
fn a_process_whose_write_waits_can_be_killed() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    add_disk(&exporter, 1, &disk);
    disk.full.store(true, Ordering::SeqCst);
    let mut stuck = [start("stuck", stage.directory.path()), start("stuck", stage.directory.path())];
    wait_until("both wait", || waiting(&exporter) == 2);
    for process in &mut stuck {
        process.0.kill().unwrap();
    }
    wait_until("both have ended", || stuck.iter_mut().all(|process| process.0.try_wait().unwrap().is_some()));
    wait_until("nothing waits", || waiting(&exporter) == 0);
    assert!(!stage.path("written").exists());
}
