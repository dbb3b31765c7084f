//! Servers that die at a bad time.

use crate::roles::Actor;
use crate::stage::{Aligned, MIB, Stage, open_direct, pattern, until};
use aenv_export::ublk::Settings;
use aenv_export::{Content, Exporter};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Requests that the kernel may have in each device, as in the exporter's usual settings.
const DEPTH: u64 = 128;
/// Readers, more than there may be requests.
const READERS: u64 = DEPTH + 12;

#[test]
fn a_server_that_dies_with_all_requests_is_recovered() {
    let Some(mut stage) = Stage::new("laden") else { return };
    // As the exporter sets it, one command stays in the kernel. With none there the time of a request has to end first.
    for (number, requests) in [(180, DEPTH - 1), (181, DEPTH)] {
        let name = format!("laden-{requests}");
        let (export, file) = (stage.export(number, &name), stage.file(&name));
        let (mut server, _) = Actor::server("add-slow", &stage.instance, &export, &file);
        let queue = format!("/sys/block/ublkb{number}/queue/");
        let setting =
            |name: &str| std::fs::read_to_string(format!("{queue}{name}")).unwrap().trim().to_owned();
        assert_eq!(setting("nr_requests"), (DEPTH - 1).to_string());
        assert_eq!(setting("io_timeout"), "1000");
        std::fs::write(format!("{queue}nr_requests"), requests.to_string()).unwrap();
        let backing = stage.backing(&name, crate::roles::SERVED_BYTES);
        let mut content = vec![0; usize::try_from(READERS * 4096).unwrap()];
        pattern(&mut content, requests);
        backing.file().write_all_at(&content, 0).unwrap();

        let device = format!("/dev/ublkb{number}");
        let readers: Vec<_> = (0..READERS)
            .map(|n| {
                let file = open_direct(Path::new(&device), false);
                std::thread::spawn(move || {
                    let mut block = Aligned::new(4096);
                    file.read_exact_at(block.bytes(), n * 4096).map(|()| block)
                })
            })
            .collect();
        until("the server has all that there may be", || reads_in_flight(number) == requests);
        server.kill();
        let killed = Instant::now();
        stage.exporter().recover(&export, Content::Disk(backing)).unwrap();
        println!(
            "{requests} of {DEPTH} requests with the server: recovered after {} ms",
            killed.elapsed().as_millis()
        );
        for (reader, wanted) in readers.into_iter().zip(content.chunks(4096)) {
            let mut block = reader.join().unwrap().unwrap();
            assert!(block.bytes() == wanted, "wrong data");
        }
    }
}

/// Where whoever tried before died: before and after the requests were mapped.
#[test]
fn a_recovery_that_was_interrupted_is_done_again() {
    let Some(mut stage) = Stage::new("seized") else { return };
    let export = stage.export(182, "seized");
    let file = stage.file("seized");
    let (mut server, _) = Actor::server("add", &stage.instance, &export, &file);
    for (round, what) in ["open", "map", "map", "open"].into_iter().enumerate() {
        let mut block = Aligned::new(4096);
        pattern(block.bytes(), round as u64);
        let at = round as u64 * 4096;
        std::fs::File::options().write(true).open(&file).unwrap().write_all_at(block.bytes(), at).unwrap();
        server.kill();
        let reader = std::thread::spawn(move || {
            let mut found = Aligned::new(4096);
            open_direct(Path::new("/dev/ublkb182"), false).read_exact_at(found.bytes(), at).map(|()| found)
        });
        let mut seizer = Actor::start(&format!("seize {what} 182 {DEPTH}"));
        seizer.hear("READY");
        seizer.kill();
        let (next, said) = Actor::server("recover", &stage.instance, &export, &file);
        println!("after a death at {what}: {said}");
        server = next;
        let mut found = reader.join().unwrap().unwrap();
        assert!(found.bytes() == block.bytes(), "wrong data");
    }
}

/// A process is dead for its parent before the kernel has closed its files.
#[test]
fn a_recoverer_that_still_has_the_device_open_is_waited_for() {
    let Some(mut stage) = Stage::new("lingering") else { return };
    let export = stage.export(183, "lingering");
    let file = stage.file("lingering");
    let (mut server, _) = Actor::server("add", &stage.instance, &export, &file);
    server.kill();
    let mut seizer = Actor::start(&format!("seize open 183 {DEPTH}"));
    seizer.hear("READY");
    let ending = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(2));
        seizer.kill();
    });
    let content = Content::Disk(stage.backing("lingering", crate::roles::SERVED_BYTES));
    stage.exporter().recover(&export, content).unwrap();
    ending.join().unwrap();
    assert_eq!(std::fs::read("/dev/ublkb183").unwrap(), std::fs::read(file).unwrap());
}

/// The largest requests, which are copied in several pieces.
#[test]
fn a_server_that_is_killed_while_it_copies_fails_no_request() {
    let Some(mut stage) = Stage::new("copying") else { return };
    let export = stage.export(184, "copying");
    let file = stage.file("copying");
    let (mut server, _) = Actor::server("add", &stage.instance, &export, &file);
    let done = Arc::new(AtomicBool::new(false));
    let users: Vec<_> = (0..crate::roles::SERVED_BYTES / MIB)
        .map(|part| {
            let done = Arc::clone(&done);
            std::thread::spawn(move || {
                let file = open_direct(Path::new("/dev/ublkb184"), true);
                let size = usize::try_from(MIB).unwrap();
                let (mut written, mut found) = (Aligned::new(size), Aligned::new(size));
                let mut count = 0_u64;
                while count == 0 || !done.load(Ordering::SeqCst) {
                    pattern(written.bytes(), part << 32 | count);
                    file.write_all_at(written.bytes(), part * MIB).unwrap();
                    file.read_exact_at(found.bytes(), part * MIB).unwrap();
                    assert!(found.bytes() == written.bytes(), "wrong data in part {part}");
                    count += 1;
                }
                count
            })
        })
        .collect();
    let mut random = StdRng::seed_from_u64(17);
    for _ in 0..15 {
        std::thread::sleep(Duration::from_millis(random.random_range(0..60)));
        server.kill();
        server = Actor::server("recover", &stage.instance, &export, &file).0;
    }
    done.store(true, Ordering::SeqCst);
    let counts: Vec<_> = users.into_iter().map(|user| user.join().unwrap()).collect();
    println!("writes and reads of {MIB} bytes over 15 kills: {}", counts.iter().sum::<u64>());
}

/// A copy that had to wait for memory in a process that is being killed would fail its request.
#[test]
fn memory_that_is_copied_from_and_to_stays_present() {
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    };
    let before = locked();
    let Some(stage) = Stage::new("locked") else { return };
    let workers = u64::try_from(Settings::new("locked").workers).unwrap();
    assert!(locked() >= before + workers * MIB, "{before} bytes were locked, now {}", locked());
    drop(stage);
    assert_eq!(locked(), before);
}

/// Reads that the driver has of a device.
fn reads_in_flight(number: u32) -> u64 {
    let counts = std::fs::read_to_string(format!("/sys/block/ublkb{number}/inflight")).unwrap();
    counts.split_whitespace().next().unwrap().parse().unwrap()
}
