//! Logs that are written anew, and what else rests on it: the flushes of others wait for the same rounds.

use super::*;

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
    let recorded = simulation.recorded();
    disk.rewrite_log(false).unwrap();
    assert!(!simulation.was_created(recorded, "top-1.log.new"), "it was not written anew");
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
