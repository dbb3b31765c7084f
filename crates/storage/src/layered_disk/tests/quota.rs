//! What a quota counts: blocks that are the disk's own for its guest, each once, however often they are stored.

use super::*;
use crate::top::BlockState;

/// Bytes of blocks of which the tops show data, found block by block.
pub(super) fn shown_bytes(disk: &LayeredDisk) -> u64 {
    let state = disk.state();
    let sealed = state.below.tops().iter().map(|top| &**top.top());
    let from_bottom: Vec<_> = sealed.chain([&*state.current]).collect();
    let blocks = 0..disk.size() / BLOCK_BYTES;
    blocks.filter(|block| shows(&from_bottom, *block)).count() as u64 * BLOCK_BYTES
}

/// Whether the uppermost of the tops that has a block has data.
fn shows(from_bottom: &[&Top], block: u64) -> bool {
    let mut states = from_bottom.iter().rev().map(|top| top.map().state(block));
    states.find(|state| *state != BlockState::Absent) == Some(BlockState::Data)
}

/// What the model becomes when the disk goes back so many seals.
fn sealed_model(disk: &LayeredDisk, back: usize) -> Option<(Vec<u8>, Vec<bool>)> {
    let bytes = sealed_content(disk, back)?;
    let tops = disk.sealed_tops();
    let from_bottom: Vec<_> = tops[..tops.len() - back].iter().map(|top| &**top.top()).collect();
    let own = (0..disk.size() / BLOCK_BYTES).map(|block| shows(&from_bottom, block)).collect();
    Some((bytes, own))
}

/// Its bytes, and which blocks its guest wrote and did not discard since. Knows nothing of tops.
struct Model {
    bytes: Vec<u8>,
    own: Vec<bool>,
    quota: u64,
}

impl Model {
    fn own_bytes(&self) -> u64 {
        self.own.iter().filter(|own| **own).count() as u64 * BLOCK_BYTES
    }

    /// Writes until the quota refuses; `false` when it does.
    fn write(&mut self, range: Range<u64>, byte: u8) -> bool {
        const TOGETHER: u64 = 1 << 20;
        let mut start = range.start;
        while start < range.end {
            // So much is written, or refused, as a whole.
            let end = range.end.min((start / TOGETHER + 1) * TOGETHER);
            let blocks = (start / BLOCK_BYTES) as usize..end.div_ceil(BLOCK_BYTES) as usize;
            let new = self.own[blocks.clone()].iter().filter(|own| !**own).count() as u64 * BLOCK_BYTES;
            if new > 0 && self.own_bytes() + new > self.quota {
                return false;
            }
            self.own[blocks].fill(true);
            self.bytes[start as usize..end as usize].fill(byte);
            start = end;
        }
        true
    }

    fn discard(&mut self, blocks: Range<u64>) {
        self.own[blocks.start as usize..blocks.end as usize].fill(false);
        let bytes = blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES;
        self.bytes[bytes.start as usize..bytes.end as usize].fill(0);
    }

    /// Whether the step is not refused.
    fn run(&mut self, step: &Step) -> bool {
        match *step {
            Step::Write { offset, length, byte } => self.write(offset..offset + length, byte),
            Step::Discard { offset, length } => {
                self.discard(whole_blocks(&(offset..offset + length)));
                true
            }
            Step::Zero { offset, length } => {
                let (start, end) = (offset, offset + length);
                let blocks = whole_blocks(&(start..end));
                if blocks.is_empty() {
                    return self.write(start..end, 0);
                }
                if !self.write(start..blocks.start * BLOCK_BYTES, 0) {
                    return false;
                }
                self.discard(blocks.clone());
                self.write(blocks.end * BLOCK_BYTES..end, 0)
            }
            Step::Flush
            | Step::Seal
            | Step::Durable
            | Step::Compact(_)
            | Step::Rewind(_)
            | Step::RewriteLog => true,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_of_the_guest_are_charged_once(
        steps in steps_and_deaths(120),
        quota in prop_oneof![8_u64..40, Just(BLOCKS)],
    ) {
        let simulation = Simulation::default();
        let size = BLOCKS * BLOCK_BYTES;
        let lower = Arc::new(Stripes { size: 400 * BLOCK_BYTES + 100 });
        let quota = quota * BLOCK_BYTES;
        let mut model =
            Model { bytes: model_of(&lower, size), own: vec![false; BLOCKS as usize], quota };
        let create = LayeredDisk::create_in(simulation.directory(), lower.clone(), size, quota, &BOOT);
        let mut disk = create.unwrap();
        for step in &steps {
            if let Some(step) = step {
                let sealed = match step {
                    Step::Rewind(back) => sealed_model(&disk, *back),
                    _ => None,
                };
                match step.run(&disk) {
                    Ok(()) => {
                        prop_assert!(model.run(step), "{:?} is over the quota", step);
                        if let Some((bytes, own)) = sealed {
                            (model.bytes, model.own) = (bytes, own);
                        }
                    }
                    Err(StorageError::QuotaExceeded { .. }) => {
                        prop_assert!(!model.run(step), "{:?} is within the quota", step);
                    }
                    Err(error) => panic!("{step:?}: {error}"),
                }
            } else {
                drop(disk);
                disk = LayeredDisk::open_in(simulation.directory(), lower.clone(), &BOOT).unwrap();
            }
            prop_assert_eq!(disk.usage().charged_bytes, model.own_bytes(), "after {:?}", step);
        }
        assert_same(&content(&disk), &model.bytes, "content");
        disk.flush().unwrap();
        drop(disk);
        let disk = LayeredDisk::open_in(simulation.directory(), lower, &BootId::new([2; 16])).unwrap();
        prop_assert_eq!(disk.usage().charged_bytes, model.own_bytes(), "after a power cut");
        prop_assert_eq!(shown_bytes(&disk), model.own_bytes());
    }
}

#[test]
fn a_guest_that_writes_the_same_blocks_between_seals_is_never_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let lower = Arc::new(Stripes { size: 32 * BLOCK_BYTES });
    let quota = 16 * BLOCK_BYTES;
    let disk = LayeredDisk::create(&path, lower.clone(), 64 * BLOCK_BYTES, quota, &BOOT).unwrap();
    for round in 1..=5_u8 {
        disk.write_at(&[round; 16 * BLOCK_BYTES as usize], 24 * BLOCK_BYTES).unwrap();
        let refused = disk.write_at(&[round], 0).unwrap_err();
        assert!(matches!(refused, StorageError::QuotaExceeded { .. }), "{refused}");
        disk.seal().unwrap();
        assert_eq!(disk.usage().charged_bytes, quota);
        assert_eq!(disk.usage().stored_bytes, u64::from(round) * quota);
    }
    // What only sealed tops have is given back, too, although they go on storing it.
    disk.discard(30 * BLOCK_BYTES, 10 * BLOCK_BYTES).unwrap();
    assert_eq!(disk.usage().charged_bytes, 6 * BLOCK_BYTES);
    disk.discard(30 * BLOCK_BYTES, 10 * BLOCK_BYTES).unwrap();
    assert_eq!(disk.usage().charged_bytes, 6 * BLOCK_BYTES, "once");
    disk.write_at(&[9; 10 * BLOCK_BYTES as usize], 40 * BLOCK_BYTES).unwrap();
    assert_eq!(disk.usage().charged_bytes, quota);
    assert_eq!(disk.usage().stored_bytes, 5 * quota + 10 * BLOCK_BYTES);
    assert_eq!(disk.compact(usize::MAX).unwrap(), Compaction::Merged { freed_bytes: 4 * quota });
    assert_eq!(disk.usage().charged_bytes, quota, "a merge frees the host's room alone");
    let expected = content(&disk);
    drop(disk);
    let disk = LayeredDisk::open(&path, lower, &BOOT).unwrap();
    assert_eq!(disk.usage().charged_bytes, quota);
    assert_same(&content(&disk), &expected, "opened again");
    assert!(matches!(disk.write_at(&[1], 0), Err(StorageError::QuotaExceeded { .. })));
}
