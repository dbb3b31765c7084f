//! Logs that are written anew, and what else rests on it: the flushes of others wait for the same rounds.

use super::*;
use std::io::ErrorKind;

const SIZE: u64 = 600 * BLOCK_BYTES;

/// A disk whose log has nothing to spare: every second block is data, and its record is needed.
fn new_disk(simulation: &Simulation) -> LayeredDisk {
    let lower = Arc::new(Stripes { size: 0 });
    let disk = LayeredDisk::create_in(simulation.directory(), lower, SIZE, u64::MAX, &BOOT).unwrap();
    for block in (0..600).step_by(2) {
        disk.write_at(&[1; 4096], block * BLOCK_BYTES).unwrap();
    }
    disk.flush().unwrap();
    disk
}

/// The content that is left when the host loses its power after so many operations.
fn after_power_cut(simulation: &Simulation, count: usize, seed: u64) -> Vec<u8> {
    let cut = simulation.after_power_cut(count, seed);
    let lower = Arc::new(Stripes { size: 0 });
    content(&LayeredDisk::open_in(cut.directory(), lower, &BootId::new([2; 16])).unwrap())
}

#[test]
fn a_log_that_is_left_alone_is_flushed_all_the_same() {
    let simulation = Simulation::default();
    let disk = new_disk(&simulation);
    disk.write_at(&[5; 100], 8192).unwrap();
    // Not worth it: but another caller of the same round may wait for a flush.
    simulation.let_fail(|act, name| {
        assert!((act, name) != (Act::Create, "top-1.log.new"), "it is not written anew");
        None
    });
    disk.rewrite_log(false).unwrap();
    let count = simulation.recorded();
    for seed in 0..32 {
        let found = after_power_cut(&simulation, count, seed);
        assert_same(&found[8192..8292], &[5; 100], "the round succeeded");
    }
}

#[test]
fn flushes_that_share_the_rounds_of_a_rewrite_are_durable() {
    const WRITERS: u64 = 3;
    let simulation = Simulation::default();
    let disk = new_disk(&simulation);
    let ended = AtomicBool::new(false);
    let acknowledged = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let (disk, simulation, ended, acknowledged) = (&disk, &simulation, &ended, &acknowledged);
        let rewriter = scope.spawn(move || {
            while !ended.load(Ordering::Acquire) {
                disk.rewrite_log(false).unwrap();
            }
        });
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn(move || {
                    for round in 1..=100_u8 {
                        disk.write_at(&[round; 512], 2 * writer * BLOCK_BYTES).unwrap();
                        // Rounds that take a while, so that others gather for the next.
                        simulation
                            .after_next_sync(|| std::thread::sleep(std::time::Duration::from_micros(200)));
                        disk.flush().unwrap();
                        lock(acknowledged).push((simulation.recorded(), writer, round));
                    }
                })
            })
            .collect();
        let outcomes: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        ended.store(true, Ordering::Release);
        outcomes.into_iter().for_each(|outcome| outcome.unwrap());
        rewriter.join().unwrap();
    });
    for (count, writer, round) in acknowledged.into_inner().unwrap() {
        for seed in 0..4 {
            let found = after_power_cut(&simulation, count, seed);
            let sector = &found[(2 * writer * BLOCK_BYTES) as usize..][..512];
            assert!(sector.iter().all(|byte| *byte >= round), "writer {writer}: {} of {round}", sector[0]);
        }
    }
}

/// A disk whose log is long for what it says, and looked at by the next flush.
fn new_wasteful_disk(simulation: &Simulation) -> LayeredDisk {
    let disk = new_disk(simulation);
    disk.discard(0, SIZE).unwrap();
    disk.write_at(&[1; 4096], 0).unwrap();
    disk.flush().unwrap();
    disk.state().current.look_at_log_with_next_flush();
    disk
}

#[test]
fn a_flush_succeeds_though_the_log_cannot_be_written_anew() {
    for (refused, kind) in [
        (Act::Create, ErrorKind::StorageFull),
        (Act::Write, ErrorKind::StorageFull),
        (Act::Write, ErrorKind::Other),
        (Act::Sync, ErrorKind::StorageFull),
        (Act::Rename, ErrorKind::StorageFull),
        (Act::Rename, ErrorKind::Other),
    ] {
        let simulation = Simulation::default();
        let disk = new_wasteful_disk(&simulation);
        let attempts = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&attempts);
        simulation.let_fail(move |act, name| {
            let refuses = act == refused && name == "top-1.log.new";
            counted.fetch_add(refuses.into(), Ordering::Relaxed);
            refuses.then_some(kind)
        });
        let log_bytes = disk.usage().log_bytes;
        for round in 5..8 {
            disk.write_at(&[round; 512], 0).unwrap();
            disk.flush().unwrap();
        }
        assert_eq!(attempts.load(Ordering::Relaxed), 1, "not with every flush: {refused:?}");
        assert!(disk.usage().log_bytes >= log_bytes, "the old one goes on: {refused:?}");
        let names = simulation.directory().names().unwrap();
        assert!(!names.contains(&"top-1.log.new".to_owned()), "nothing half-made is left: {refused:?}");
        for seed in 0..8 {
            let found = after_power_cut(&simulation, simulation.recorded(), seed);
            assert_same(&found[..512], &[7; 512], "flushed");
        }
        simulation.let_fail(|_, _| None);
        disk.state().current.look_at_log_with_next_flush();
        disk.flush().unwrap();
        assert!(disk.usage().log_bytes < log_bytes / 2, "with room again");
    }
}

#[test]
fn who_asks_for_a_new_log_that_cannot_be_made_is_told_and_its_round_was_a_flush() {
    let simulation = Simulation::default();
    let disk = new_wasteful_disk(&simulation);
    let refuse = |act: Act, name: &str| {
        (act == Act::Write && name == "top-1.log.new").then_some(ErrorKind::StorageFull)
    };
    simulation.let_fail(refuse);
    disk.write_at(&[9; 512], 0).unwrap();
    assert!(matches!(disk.rewrite_log(true), Err(StorageError::NoSpace { .. })), "it is told");
    for seed in 0..8 {
        let found = after_power_cut(&simulation, simulation.recorded(), seed);
        assert_same(&found[..512], &[9; 512], "and the flush was one");
    }
}
