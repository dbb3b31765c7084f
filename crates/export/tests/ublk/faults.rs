//! Storage without room, over its quota, slow, or broken.

use crate::stage::{Aligned, MIB, Stage, open_direct, pattern, until};
use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{Content, Export, ExportError, Exporter};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// Writes one block in another thread.
fn write_in_background(device: &Path, seed: u64, offset: u64) -> JoinHandle<std::io::Result<()>> {
    let device = PathBuf::from(device);
    std::thread::spawn(move || {
        let mut block = Aligned::new(4096);
        pattern(block.bytes(), seed);
        open_direct(&device, true).write_all_at(block.bytes(), offset)
    })
}

#[test]
fn writes_wait_for_room_and_reads_go_on() {
    let Some(mut stage) = Stage::new("full") else { return };
    let (_, backing, device) = stage.disk(160, "full", 4 * MIB);
    backing.full.store(true, Ordering::SeqCst);
    let writers: Vec<_> = (0..20).map(|n| write_in_background(&device, n, n * 4096)).collect();
    until("twenty writes wait", || stage.exporter().stalled().iter().any(|stall| stall.requests == 20));
    let stall = stage.exporter().stalled().remove(0);
    assert!(stall.number == 160 && stall.reason.contains("no space"), "{stall:?}");
    let mut block = Aligned::new(4096);
    open_direct(&device, false).read_exact_at(block.bytes(), MIB).unwrap();
    // Several times as long as until a retry.
    std::thread::sleep(Duration::from_millis(800));
    assert!(writers.iter().all(|writer| !writer.is_finished()), "a write was answered without room");
    assert_eq!(stage.exporter().stalled(), [stall], "still the same stall");
    backing.full.store(false, Ordering::SeqCst);
    for (seed, writer) in (0..).zip(writers) {
        writer.join().unwrap().unwrap();
        let (mut wanted, mut found) = ([0; 4096], [0; 4096]);
        pattern(&mut wanted, seed);
        backing.file().read_exact_at(&mut found, seed * 4096).unwrap();
        assert!(wanted == found);
    }
    until("nothing is stalled", || stage.exporter().stalled().is_empty());
}

#[test]
fn removal_does_not_wait_for_room() {
    let Some(mut stage) = Stage::new("full-end") else { return };
    let (export, backing, device) = stage.disk(161, "full-end", 4 * MIB);
    backing.full.store(true, Ordering::SeqCst);
    let writer = write_in_background(&device, 1, 0);
    until("a write waits", || !stage.exporter().stalled().is_empty());
    stage.exporter().remove(&export).unwrap();
    assert!(writer.join().unwrap().is_err(), "there was no room");
    assert!(stage.exporter().stalled().is_empty());
}

#[test]
fn a_removal_that_failed_can_only_be_repeated() {
    let Some(mut stage) = Stage::new("ending") else { return };
    stage.exporter = None;
    let settings = Settings { stop_limit: Duration::from_secs(2), ..Settings::new(&stage.instance) };
    stage.exporter = Some(UblkExporter::new(&settings).unwrap());
    let (export, backing, device) = stage.disk(165, "ending", 4 * MIB);
    backing.gate.close();
    let reader =
        std::thread::spawn(move || open_direct(&device, false).read_exact_at(Aligned::new(4096).bytes(), 0));
    until("storage has the request", || backing.gate.waiting() == 1);
    let content = || Content::Disk(Arc::clone(&backing) as _);
    let kind = |result: Result<PathBuf, ExportError>| match result {
        Err(ExportError::Io { source, .. }) => source.kind(),
        other => panic!("{other:?}"),
    };
    for _ in 0..3 {
        assert_eq!(kind(stage.exporter().remove(&export).map(|()| PathBuf::new())), ErrorKind::TimedOut);
        assert_eq!(kind(stage.exporter().add(&export, content())), ErrorKind::ResourceBusy);
        assert_eq!(kind(stage.exporter().recover(&export, content())), ErrorKind::ResourceBusy);
        let other = Export { number: 167, ..export.clone() };
        let taken = stage.exporter().add(&other, content());
        assert!(matches!(taken, Err(ExportError::Taken { what: "name", .. })), "{taken:?}");
        assert_eq!(stage.exporter().leftovers().unwrap(), [0; 0]);
    }
    backing.gate.open();
    reader.join().unwrap().unwrap();
    stage.exporter().remove(&export).unwrap();
    until("the number is free", || stage.exporter().add(&export, content()).is_ok());
}

#[test]
fn a_quota_is_told_to_the_guest() {
    let Some(mut stage) = Stage::new("quota") else { return };
    let (_, backing, device) = stage.disk(162, "quota", 4 * MIB);
    backing.over_quota.store(true, Ordering::SeqCst);
    let error = write_in_background(&device, 1, 0).join().unwrap().unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NOSPC));
    backing.over_quota.store(false, Ordering::SeqCst);
    write_in_background(&device, 1, 0).join().unwrap().unwrap();
}

#[test]
fn storage_that_panics_fails_one_request() {
    let Some(mut stage) = Stage::new("panic") else { return };
    let (_, backing, device) = stage.disk(163, "panic", 4 * MIB);
    let file = open_direct(&device, false);
    let mut block = Aligned::new(4096);
    backing.panics.store(true, Ordering::SeqCst);
    for _ in 0..10 {
        let error = file.read_exact_at(block.bytes(), 0).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    }
    backing.panics.store(false, Ordering::SeqCst);
    file.read_exact_at(block.bytes(), 0).unwrap();
}

#[test]
fn slow_storage_of_one_device_does_not_stop_another() {
    let Some(mut stage) = Stage::new("slow") else { return };
    let (_, slow, slow_device) = stage.disk(164, "slow", 4 * MIB);
    let (_, _, quick_device) = stage.disk(166, "quick", 4 * MIB);
    slow.gate.close();
    let readers: Vec<_> = (0..32_u64)
        .map(|n| {
            let file = open_direct(&slow_device, false);
            std::thread::spawn(move || file.read_exact_at(Aligned::new(4096).bytes(), n * 4096))
        })
        .collect();
    until("storage has requests", || slow.gate.waiting() > 2);
    let mut block = Aligned::new(4096);
    let quick = open_direct(&quick_device, true);
    for n in 0..100 {
        quick.write_all_at(block.bytes(), n * 4096).unwrap();
        quick.read_exact_at(block.bytes(), n * 4096).unwrap();
    }
    assert!(readers.iter().all(|reader| !reader.is_finished()), "the gate is closed");
    slow.gate.open();
    readers.into_iter().for_each(|reader| reader.join().unwrap().unwrap());
}
