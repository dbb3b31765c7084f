//! Devices are made, survive their server, are removed, and are told apart.

use crate::roles::{Actor, SERVED_BYTES};
use crate::stage::{MIB, Stage, open_direct, pattern, until};
use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{Content, ExportError, Exporter};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn a_killed_server_makes_requests_wait_and_loses_nothing() {
    let Some(mut stage) = Stage::new("killed") else { return };
    let export = stage.export(120, "killed");
    let (backing, end) = (stage.file("killed"), stage.file("end"));
    let (mut server, said) = Actor::server("add", &stage.instance, &export, &backing);
    println!("add in a new process: {said}");
    let device = Path::new("/dev/ublkb120");
    let half = SERVED_BYTES / 2;
    let mut writers: Vec<_> = (0..2).map(|n| Actor::writer(device, n * half, half, 40 + n, &end)).collect();
    writers.iter_mut().for_each(|writer| drop(writer.hear("BEGUN")));
    for round in 0..5 {
        std::thread::sleep(Duration::from_millis(700));
        let killed = Instant::now();
        server.kill();
        // Long enough for requests to pile up; also for the driver to notice.
        std::thread::sleep(Duration::from_millis(150 * round));
        let (next, said) = Actor::server("recover", &stage.instance, &export, &backing);
        println!(
            "round {round}: served again {} ms after the kill; recovery: {said}",
            killed.elapsed().as_millis()
        );
        server = next;
    }
    std::fs::write(&end, "").unwrap();
    for writer in &mut writers {
        println!("verified I/O over five kills: {}", writer.hear("DONE"));
        assert!(writer.finish(), "a writer met an error");
    }
    // The next server is this process: what is on the device is what is in the file.
    server.kill();
    let content = Content::Disk(stage.backing("killed", SERVED_BYTES));
    stage.exporter().recover(&export, content).unwrap();
    assert!(std::fs::read(device).unwrap() == std::fs::read(&backing).unwrap());
}

#[test]
fn a_recovery_may_be_interrupted_at_any_time() {
    let Some(mut stage) = Stage::new("interrupted") else { return };
    let export = stage.export(128, "interrupted");
    let backing = stage.file("interrupted");
    let (mut server, _) = Actor::server("add", &stage.instance, &export, &backing);
    server.kill();
    let mut random = StdRng::seed_from_u64(11);
    for _ in 0..12 {
        let role = format!("serve recover {} 128 interrupted {}", stage.instance, backing.display());
        let mut server = Actor::start(&role);
        std::thread::sleep(Duration::from_millis(random.random_range(0..120)));
        server.kill();
    }
    let content = || Content::Disk(stage.backing("interrupted", SERVED_BYTES));
    let device = match stage.exporter().recover(&export, content()) {
        Err(ExportError::Lost { reason, .. }) => {
            println!("lost by interruptions: {reason}");
            stage.exporter().add(&export, content())
        }
        recovered => recovered,
    };
    assert_eq!(std::fs::read(device.unwrap()).unwrap().len() as u64, SERVED_BYTES);
}

#[test]
fn a_dropped_exporter_leaves_devices_to_its_successor() {
    let Some(mut stage) = Stage::new("dropped") else { return };
    let (export, backing, device) = stage.disk(121, "dropped", 4 * MIB);
    let mut content = vec![0; 4 << 20];
    pattern(&mut content, 3);
    backing.file().write_all_at(&content, 0).unwrap();
    stage.exporter = None;
    let reader = std::thread::spawn(move || std::fs::read(device).unwrap());
    std::thread::sleep(Duration::from_millis(300));
    assert!(!reader.is_finished(), "somebody answered");
    let successor = UblkExporter::new(&Settings::new(&stage.instance)).unwrap();
    successor.recover(&export, Content::Disk(backing)).unwrap();
    stage.exporter = Some(successor);
    assert!(reader.join().unwrap() == content);
}

#[test]
fn what_is_recovered_must_be_the_same() {
    let Some(mut stage) = Stage::new("same") else { return };
    let export = stage.export(122, "same");
    let disk = |size| Content::Disk(stage.backing("same", size));
    let lost = |result: Result<_, _>| matches!(result, Err(ExportError::Lost { .. }));
    assert!(lost(stage.exporter().recover(&export, disk(4 * MIB))), "there is no such device");
    stage.exporter().add(&export, disk(4 * MIB)).unwrap();
    let again = stage.exporter().add(&export, disk(4 * MIB));
    assert!(matches!(again, Err(ExportError::Taken { what: "number", .. })), "{again:?}");
    let other = aenv_export::Export { number: 123, ..export.clone() };
    let again = stage.exporter().add(&other, disk(4 * MIB));
    assert!(matches!(again, Err(ExportError::Taken { what: "name", .. })), "{again:?}");
    stage.exporter = None;
    let successor = UblkExporter::new(&Settings::new(&stage.instance)).unwrap();
    let renamed = aenv_export::Export { name: "other".to_owned(), ..export };
    assert!(lost(successor.recover(&renamed, Content::Disk(stage.backing("same", 4 * MIB)))), "another name");
    assert!(lost(successor.recover(&export, Content::Disk(stage.backing("same", 8 * MIB)))), "another size");
    assert!(lost(successor.recover(&export, Content::Image(stage.backing("same", 4 * MIB)))), "another kind");
    let stranger = UblkExporter::new(&Settings::new("test-stranger")).unwrap();
    assert!(
        lost(stranger.recover(&export, Content::Disk(stage.backing("same", 4 * MIB)))),
        "another instance"
    );
    // None of them did any harm.
    stranger.remove(&export).unwrap();
    successor.remove(&renamed).unwrap();
    successor.recover(&export, Content::Disk(stage.backing("same", 4 * MIB))).unwrap();
    stage.exporter = Some(successor);
    assert_eq!(std::fs::read("/dev/ublkb122").unwrap().len() as u64, 4 * MIB);
}

#[test]
fn leftovers_are_ours_and_nobody_elses() {
    let Some(mut stage) = Stage::new("leftovers") else { return };
    let export = stage.export(124, "leftovers");
    let served = stage.export(125, "served");
    stage.exporter().add(&served, Content::Disk(stage.backing("served", MIB))).unwrap();
    let (mut server, _) = Actor::server("add", &stage.instance, &export, &stage.file("leftovers"));
    server.kill();
    assert_eq!(stage.exporter().leftovers().unwrap(), [124]);
    let stranger = UblkExporter::new(&Settings::new("test-stranger")).unwrap();
    assert!(stranger.leftovers().unwrap().is_empty());
    stranger.remove_leftover(124).unwrap();
    stage.exporter().remove_leftover(125).unwrap();
    assert!(Path::new("/dev/ublkb124").exists() && Path::new("/dev/ublkb125").exists());
    stage.exporter().remove_leftover(124).unwrap();
    until("the device is gone", || !Path::new("/dev/ublkb124").exists());
    assert!(stage.exporter().leftovers().unwrap().is_empty());
}

#[test]
fn removal_does_not_wait_for_those_who_have_it_open() {
    let Some(mut stage) = Stage::new("open") else { return };
    let (export, backing, device) = stage.disk(126, "open", 4 * MIB);
    let file = open_direct(&device, true);
    let mut buffer = crate::stage::Aligned::new(4096);
    file.read_exact_at(buffer.bytes(), 0).unwrap();
    let started = Instant::now();
    stage.exporter().remove(&export).unwrap();
    println!("removal of an open device: {} ms", started.elapsed().as_millis());
    assert!(file.read_exact_at(buffer.bytes(), 4096).is_err(), "a removed device was read");
    assert!(!device.exists());
    // Its number belongs to whoever has it open.
    let again = stage.exporter().add(&export, Content::Disk(backing.clone()));
    assert!(matches!(again, Err(ExportError::Taken { what: "number", .. })), "{again:?}");
    stage.exporter().remove(&export).unwrap();
    drop(file);
    let mut added = Err(());
    until("the number is free", || {
        added = stage.exporter().add(&export, Content::Disk(backing.clone())).map_err(drop);
        added.is_ok()
    });
    stage.exporter().remove(&export).unwrap();
    stage.exporter().remove(&export).unwrap();
}

#[test]
fn twenty_devices_at_once() {
    let Some(mut stage) = Stage::new("twenty") else { return };
    let threads_before = threads();
    let started = Instant::now();
    let disks: Vec<_> = (0..20).map(|n| stage.disk(130 + n, &format!("twenty-{n}"), MIB)).collect();
    println!(
        "twenty devices: {} ms, threads before {threads_before}, now {}",
        started.elapsed().as_millis(),
        threads()
    );
    // Threads of commands may be about to end.
    until("there are no threads per device", || threads() == threads_before);
    let end = stage.file("end");
    let mut writers: Vec<_> = disks
        .iter()
        .enumerate()
        .map(|(seed, (_, _, device))| Actor::writer(device, 0, MIB, seed as u64, &end))
        .collect();
    writers.iter_mut().for_each(|writer| drop(writer.hear("BEGUN")));
    std::fs::write(&end, "").unwrap();
    for writer in &mut writers {
        writer.hear("DONE");
        assert!(writer.finish());
    }
    let started = Instant::now();
    for (export, _, device) in &disks {
        stage.exporter().remove(export).unwrap();
        assert!(!device.exists());
    }
    println!("twenty removals: {} ms", started.elapsed().as_millis());
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn numbers_that_cannot_be_are_refused() {
    let Some(stage) = Stage::new("numbers") else { return };
    for number in [0, 1 << 20, u32::MAX] {
        let export = aenv_export::Export { number, name: "number".to_owned(), owner: 0 };
        let refused = stage.exporter().add(&export, Content::Disk(stage.backing("number", MIB)));
        assert!(matches!(refused, Err(ExportError::Io { .. })), "{refused:?}");
    }
    let export = aenv_export::Export { number: 127, name: "odd".to_owned(), owner: 0 };
    let refused = stage.exporter().add(&export, Content::Disk(stage.backing("odd", 1000)));
    assert!(matches!(refused, Err(ExportError::Storage(_))), "{refused:?}");
    assert!(File::open("/dev/ublkc127").is_err());
}
