//! Every crash: after each recorded operation, the process dies, or the host loses its power with any of the writes that
//! were not flushed. See the simulation for what is left then.

use super::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::ErrorKind;

const BLOCKS: u64 = 20;
const SIZE: u64 = BLOCKS * BLOCK_BYTES;
/// Different power cuts after each operation.
const CUTS: u64 = 3;

fn lower() -> Stripes {
    Stripes { size: 12 * BLOCK_BYTES + 100 }
}

/// A life of a disk: its recorded operations, and what it should hold at each moment.
struct Life {
    simulation: Simulation,
    boot: BootId,
    /// The content after each step, and the one it began with.
    contents: Vec<Vec<u8>>,
    /// Number of recorded operations before and after each step.
    spans: Vec<(usize, usize)>,
    /// For each flush: operations recorded before it returned, and steps that it covers.
    flushes: Vec<(usize, usize)>,
}

impl Life {
    /// Begins where an earlier life ended; `None` for a new disk.
    fn begin(simulation: Simulation, boot: BootId, found: Option<&LayeredDisk>, steps: &[Step]) -> Self {
        let made = found.is_none().then(|| {
            LayeredDisk::create_in(simulation.directory(), Arc::new(lower()), SIZE, u64::MAX, &boot).unwrap()
        });
        let disk = found.or(made.as_ref()).unwrap();
        let mut model = content(disk);
        let mut life =
            Self { simulation, boot, contents: vec![model.clone()], spans: Vec::new(), flushes: Vec::new() };
        for (number, step) in steps.iter().enumerate() {
            let before = life.simulation.recorded();
            step.run_with(disk, &mut model).unwrap();
            assert_same(&content(disk), &model, "while it lives");
            life.contents.push(model.clone());
            life.spans.push((before, life.simulation.recorded()));
            if matches!(step, Step::Flush) {
                life.flushes.push((life.simulation.recorded(), number));
            }
        }
        life
    }

    /// Which contents the disk may have when only the first `count` operations were done: those after steps `first..=last`.
    fn possible(&self, count: usize, first: usize) -> &[Vec<u8>] {
        let begun = self.spans.iter().take_while(|(before, _)| *before < count).count();
        &self.contents[first..=begun.max(first)]
    }

    fn check_death(&self, count: usize, random: &mut StdRng) {
        let died = self.simulation.after_death(count, random);
        let disk = match LayeredDisk::open_in(died.directory(), Arc::new(lower()), &self.boot) {
            Ok(disk) => disk,
            Err(error) => {
                let first = self.spans.first().map_or(0, |span| span.0);
                assert!(count < first, "died in step at {count}, not while it was made: {error}");
                return;
            }
        };
        let ended = self.spans.iter().take_while(|(_, after)| *after <= count).count();
        // The operation in flight is done in part, at any byte.
        let found = content(&disk);
        assert_possible(&found, self.possible(count + 1, ended), 1, &format!("death after {count}"));
        if random.random_bool(0.3) {
            // The next process flushes what it found, though the one before it had written it.
            disk.flush().unwrap();
            drop(disk);
            let cut = died.after_power_cut(died.recorded(), random.random());
            let disk =
                LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &BootId::new([0xFF; 16])).unwrap();
            assert_same(&content(&disk), &found, "flushed by the next process");
        }
    }

    /// Opens the disk as a power cut leaves it; `None` when it was never flushed and is gone.
    fn check_power_cut(&self, count: usize, seed: u64) -> Option<(Simulation, LayeredDisk)> {
        let cut = self.simulation.after_power_cut(count, seed);
        let boot = BootId::new((u128::from(seed) + 1000).to_le_bytes());
        let flushed = self.flushes.iter().take_while(|(recorded, _)| *recorded <= count).last();
        let disk = match LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &boot) {
            Ok(disk) => disk,
            Err(error) => {
                let lost = matches!(error, StorageError::NeverDurable { .. } | StorageError::Io { .. });
                assert!(lost && flushed.is_none(), "power cut {seed} after {count}: {error}");
                return None;
            }
        };
        let first = flushed.map_or(0, |(_, step)| *step);
        let what = format!("power cut {seed} after {count}");
        assert_possible(&content(&disk), self.possible(count, first), 512, &what);
        Some((cut, disk))
    }
}

/// Each part of the content is one of those it may be.
fn assert_possible(found: &[u8], possible: &[Vec<u8>], part: usize, what: &str) {
    for (index, bytes) in found.chunks(part).enumerate() {
        let range = index * part..index * part + bytes.len();
        assert!(
            possible.iter().any(|content| &content[range.clone()] == bytes),
            "{what}: block {}, byte {}: {:?}, which is none of {:?}",
            range.start / 4096,
            range.start % 4096,
            &bytes[..1],
            possible.iter().map(|content| content[range.start]).collect::<Vec<_>>()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_crash_leaves_what_it_may(
        steps in prop::collection::vec(step(SIZE), 1..25),
        later in prop::collection::vec(step(SIZE), 1..12),
        can_swap_names in prop::bool::weighted(0.7),
        seed in any::<u64>(),
    ) {
        let mut random = StdRng::seed_from_u64(seed);
        let simulation = Simulation::default();
        if !can_swap_names {
            simulation.let_fail(|act, _| (act == Act::Exchange).then_some(ErrorKind::InvalidInput));
        }
        let life = Life::begin(simulation, BOOT, None, &steps);
        let operations = life.simulation.recorded();
        let second = random.random_range(0..operations);
        for count in 0..=operations {
            life.check_death(count, &mut random);
            for cut in 0..CUTS {
                let seed = u64::from(u32::MAX) * cut + count as u64;
                let survivor = life.check_power_cut(count, seed);
                // Some of them go on, and are cut again: nothing of the void writes may come back.
                if let Some((simulation, disk)) = survivor.filter(|_| count == second || count % 16 == cut as usize) {
                    let boot = BootId::new((u128::from(seed) + 1000).to_le_bytes());
                    let durable = content(&disk);
                    let mut life = Life::begin(simulation, boot, Some(&disk), &later);
                    drop(disk);
                    // What was found was not flushed, and need not be found again; what was flushed before was checked.
                    life.contents[0] = durable;
                    let until = life.simulation.recorded();
                    for _ in 0..6 {
                        let count = random.random_range(0..=until);
                        if life.flushes.iter().any(|(recorded, _)| *recorded <= count) {
                            life.check_power_cut(count, random.random());
                        }
                        if count >= life.spans[0].0 {
                            life.check_death(count, &mut random);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_void_write_never_comes_back() {
    let simulation = Simulation::default();
    let disk =
        LayeredDisk::create_in(simulation.directory(), Arc::new(lower()), SIZE, u64::MAX, &BOOT).unwrap();
    disk.flush().unwrap();
    disk.write_at(&[0xAA; 4096], 4096).unwrap();
    drop(disk);
    // Cuts at random keep data and log; those that keep the whole block matter.
    for seed in 0..64 {
        let cut = simulation.after_power_cut(simulation.recorded(), seed);
        let boot = |number: u8| BootId::new([number; 16]);
        let disk = LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &boot(2)).unwrap();
        let mut expected = model_of(&lower(), SIZE);
        assert_same(&content(&disk), &expected, "the write is void");
        assert_eq!(disk.usage().stored_bytes, 0);
        assert_eq!(cut.stored_bytes("top-1.data"), 0, "and its bytes are freed");
        disk.write_at(&[0xBB; 10], 4100).unwrap();
        disk.flush().unwrap();
        expected[4100..4110].fill(0xBB);
        drop(disk);
        for again in 0..8 {
            let cut = cut.after_power_cut(cut.recorded(), again);
            let disk = LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &boot(3)).unwrap();
            assert_same(&content(&disk), &expected, "the rest of the block is from below");
        }
    }
}

#[test]
fn leftovers_of_a_power_cut_are_freed_though_the_process_that_finds_them_dies() {
    let simulation = Simulation::default();
    let create = LayeredDisk::create_in(simulation.directory(), Arc::new(lower()), SIZE, u64::MAX, &BOOT);
    let disk = create.unwrap();
    disk.flush().unwrap();
    disk.write_at(&[0xAA; 4096], 4096).unwrap();
    disk.write_at(&[0xBB; 4096], 5 * BLOCK_BYTES).unwrap();
    drop(disk);
    let boot = BootId::new([2; 16]);
    let mut random = StdRng::seed_from_u64(6);
    let mut kept = 0;
    for seed in 0..32 {
        let cut = simulation.after_power_cut(simulation.recorded(), seed);
        kept += u64::from(cut.stored_bytes("top-1.data") > 0);
        drop(LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &boot).unwrap());
        for count in 0..=cut.recorded() {
            let died = cut.after_death(count, &mut random);
            let disk = LayeredDisk::open_in(died.directory(), Arc::new(lower()), &boot).unwrap();
            assert_eq!(died.stored_bytes("top-1.data"), 0, "power cut {seed}, death after {count}");
            assert_same(&content(&disk), &model_of(&lower(), SIZE), "the writes are void");
        }
    }
    assert!(kept > 0, "some of the power cuts leave something");
}

#[test]
fn a_flush_does_not_cover_what_is_written_while_it_runs() {
    let simulation = Simulation::default();
    let disk =
        LayeredDisk::create_in(simulation.directory(), Arc::new(lower()), SIZE, u64::MAX, &BOOT).unwrap();
    disk.flush().unwrap();
    disk.write_at(&[1; 4096], 0).unwrap();
    let disk = Arc::new(disk);
    let other = Arc::clone(&disk);
    // The first sync is that of the data file; below, the block has data, which must show if the write is void.
    simulation.after_next_sync(move || other.write_at(&[2; 4096], 7 * BLOCK_BYTES).unwrap());
    disk.flush().unwrap();
    let count = simulation.recorded();
    let mut new = model_of(&lower(), SIZE);
    new[..4096].fill(1);
    let mut newer = new.clone();
    newer[7 * 4096..8 * 4096].fill(2);
    assert_same(&content(&*disk), &newer, "both writes ended");
    for seed in 0..64 {
        let cut = simulation.after_power_cut(count, seed);
        let disk = LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &BootId::new([2; 16])).unwrap();
        assert_possible(&content(&disk), &[new.clone(), newer.clone()], 512, &format!("power cut {seed}"));
    }
    // The next one does.
    disk.flush().unwrap();
    for seed in 0..16 {
        let cut = simulation.after_power_cut(simulation.recorded(), seed);
        let disk = LayeredDisk::open_in(cut.directory(), Arc::new(lower()), &BootId::new([2; 16])).unwrap();
        assert_same(&content(&disk), &newer, "flushed");
    }
}

#[test]
fn a_failed_fsync_is_told_until_the_disk_is_opened_again() {
    let simulation = Simulation::default();
    let open = || LayeredDisk::open_in(simulation.directory(), Arc::new(lower()), &BOOT);
    let create = LayeredDisk::create_in(simulation.directory(), Arc::new(lower()), SIZE, u64::MAX, &BOOT);
    let disk = create.unwrap();
    disk.flush().unwrap();
    disk.write_at(&[3; 4096], 0).unwrap();
    simulation.let_fail(|act, _| (act == Act::Sync).then_some(ErrorKind::Other));
    assert!(matches!(disk.flush(), Err(StorageError::NotDurable { .. })));
    simulation.let_fail(|_, _| None);
    assert!(
        matches!(disk.flush(), Err(StorageError::NotDurable { .. })),
        "a second attempt must not pretend"
    );
    disk.write_at(&[4; 4096], 0).unwrap();
    assert!(matches!(disk.flush(), Err(StorageError::NotDurable { .. })));
    drop(disk);
    let disk = open().unwrap();
    disk.flush().unwrap();
    disk.seal().unwrap();
    simulation.let_fail(|act, _| (act == Act::Sync).then_some(ErrorKind::Other));
    assert!(matches!(disk.flush(), Err(StorageError::NotDurable { .. })));
    simulation.let_fail(|_, _| None);
    assert!(matches!(disk.flush(), Err(StorageError::NotDurable { .. })), "nor for the manifest");
    drop(disk);
    open().unwrap().flush().unwrap();
}
