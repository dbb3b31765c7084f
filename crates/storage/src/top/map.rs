//! The state of every block of a top: two bits each, without locks.
//!
//! ```text
//! chunks   ┌───────┬───────┬───────┐   one per 32768 blocks (128 MiB); a chunk without any block of the top is not there
//!          │ 8 KiB │   –   │ 8 KiB │
//!          └───┬───┴───────┴───────┘
//! words        └─▶ 1024 of 64 bits: 32 blocks each, block 0 in the lowest two bits
//! states   00 absent: what lies below shows    01 data: in the data file    10 zero: reads as zeros
//! ```
//! Owns the states and how many blocks have each. Readers see a state at once, or the one before. Writers of the same
//! block are kept apart by the top's region locks.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCKS_PER_WORD: u64 = 32;
const WORDS_PER_CHUNK: u64 = 1024;
const BLOCKS_PER_CHUNK: u64 = BLOCKS_PER_WORD * WORDS_PER_CHUNK;
/// Words that several maps are looked at for together: those of one cache line, of 256 blocks.
const WORDS_PER_LINE: usize = 8;
const BLOCKS_PER_LINE: u64 = BLOCKS_PER_WORD * WORDS_PER_LINE as u64;
const LOW_BITS: u64 = 0x5555_5555_5555_5555;

/// Where a block's content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Below this top.
    Absent,
    /// In the data file, at its own offset.
    Data,
    /// Nowhere: it reads as zeros.
    Zero,
}

impl BlockState {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Absent => 0,
            Self::Data => 1,
            Self::Zero => 2,
        }
    }

    pub(super) fn from_code(code: u32) -> Option<Self> {
        match code {
            0 => Some(Self::Absent),
            1 => Some(Self::Data),
            2 => Some(Self::Zero),
            _ => None,
        }
    }

    /// A word of which all blocks have this state.
    fn word(self) -> u64 {
        u64::from(self.code()) * LOW_BITS
    }
}

/// A run of blocks that get one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockRange {
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) state: BlockState,
}

impl BlockRange {
    pub(crate) fn blocks(&self) -> Range<u64> {
        self.first..self.first + self.count
    }
}

#[derive(Debug)]
pub(crate) struct BlockMap {
    blocks: u64,
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
    data_blocks: AtomicU64,
    zero_blocks: AtomicU64,
}

impl BlockMap {
    pub(crate) fn new(blocks: u64) -> Self {
        let chunks = (0..blocks.div_ceil(BLOCKS_PER_CHUNK)).map(|_| OnceLock::new()).collect();
        Self { blocks, chunks, data_blocks: AtomicU64::new(0), zero_blocks: AtomicU64::new(0) }
    }

    /// Number of blocks there are.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn data_blocks(&self) -> u64 {
        self.data_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn zero_blocks(&self) -> u64 {
        self.zero_blocks.load(Ordering::Relaxed)
    }

    pub(crate) fn state(&self, block: u64) -> BlockState {
        let code = self.word(block) >> (2 * (block % BLOCKS_PER_WORD)) & 3;
        match code {
            0 => BlockState::Absent,
            1 => BlockState::Data,
            _ => BlockState::Zero,
        }
    }

    /// The state of `block`, and where the run of blocks with the same state ends, `limit` at most. Never empty.
    pub(crate) fn run(&self, block: u64, limit: u64) -> (BlockState, u64) {
        let state = self.state(block);
        let mut position = block;
        while position < limit {
            let Some(chunk) = self.chunk(position) else {
                if state != BlockState::Absent {
                    break;
                }
                position = (position / BLOCKS_PER_CHUNK + 1) * BLOCKS_PER_CHUNK;
                continue;
            };
            let within = position % BLOCKS_PER_WORD;
            let word = chunk[word_index(position)].load(Ordering::Acquire);
            let different = (word ^ state.word()) >> (2 * within);
            if different != 0 {
                position += u64::from(different.trailing_zeros()) / 2;
                break;
            }
            position += BLOCKS_PER_WORD - within;
        }
        // A writer may have changed `block` since its state was read: the run holds at least it.
        (state, position.clamp(block + 1, limit.max(block + 1)))
    }

    /// The runs of `range`, in order.
    pub(crate) fn runs(&self, range: Range<u64>) -> impl Iterator<Item = BlockRange> {
        let mut position = range.start;
        std::iter::from_fn(move || {
            (position < range.end).then(|| {
                let first = position;
                let (state, end) = self.run(first, range.end);
                position = end;
                BlockRange { first, count: end - first, state }
            })
        })
    }

    pub(crate) fn set(&self, range: Range<u64>, state: BlockState) {
        let mut position = range.start;
        while position < range.end {
            let within = position % BLOCKS_PER_WORD;
            let count = (BLOCKS_PER_WORD - within).min(range.end - position);
            let slot = &self.chunks[chunk_index(position)];
            if state != BlockState::Absent || slot.get().is_some() {
                let chunk = slot.get_or_init(|| (0..WORDS_PER_CHUNK).map(|_| AtomicU64::new(0)).collect());
                self.set_in_word(&chunk[word_index(position)], within, count, state);
            }
            position += count;
        }
    }

    fn set_in_word(&self, word: &AtomicU64, within: u64, count: u64, state: BlockState) {
        let mask = u64::MAX >> (64 - 2 * count) << (2 * within);
        let change = |old: u64| Some(old & !mask | state.word() & mask);
        // The closure always gives a value, so both arms hold the word as it was.
        let (Ok(old) | Err(old)) = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        let new = old & !mask | state.word() & mask;
        adjust(&self.data_blocks, old & LOW_BITS, new & LOW_BITS);
        adjust(&self.zero_blocks, old & !LOW_BITS, new & !LOW_BITS);
    }

    /// The states of the blocks of a line, from its first one on; `None` when all are absent.
    fn line(&self, line: u64) -> Option<&[AtomicU64]> {
        let first = word_index(line * BLOCKS_PER_LINE);
        self.chunk(line * BLOCKS_PER_LINE).map(|chunk| &chunk[first..first + WORDS_PER_LINE])
    }

    fn chunk(&self, block: u64) -> Option<&[AtomicU64]> {
        self.chunks.get(chunk_index(block))?.get().map(AsRef::as_ref)
    }

    fn word(&self, block: u64) -> u64 {
        self.chunk(block).map_or(0, |chunk| chunk[word_index(block)].load(Ordering::Acquire))
    }
}

/// How many blocks of `range` show data of one of the maps, which are given from the uppermost to the lowest: of each block,
/// the uppermost that has it decides.
///
/// One pass, word by word: for a single block it costs a look at each map until one has it.
pub(crate) fn count_shown<'a>(maps: &(impl Iterator<Item = &'a BlockMap> + Clone), range: Range<u64>) -> u64 {
    let (mut shown, mut position) = (0, range.start);
    while position < range.end {
        let chunk_end = (position / BLOCKS_PER_CHUNK + 1) * BLOCKS_PER_CHUNK;
        if maps.clone().all(|map| map.chunk(position).is_none()) {
            position = chunk_end;
            continue;
        }
        let chunk_end = chunk_end.min(range.end);
        while position < chunk_end {
            let line = position / BLOCKS_PER_LINE;
            let end = chunk_end.min((line + 1) * BLOCKS_PER_LINE);
            shown += count_shown_in_line(maps.clone(), line, position..end);
            position = end;
        }
    }
    shown
}

/// The same for a range in one line.
fn count_shown_in_line<'a>(maps: impl Iterator<Item = &'a BlockMap>, line: u64, range: Range<u64>) -> u64 {
    let words = (range.start % BLOCKS_PER_LINE / BLOCKS_PER_WORD) as usize
        ..((range.end - line * BLOCKS_PER_LINE).div_ceil(BLOCKS_PER_WORD)) as usize;
    // Low bits of the blocks that no map above has.
    let mut open = [0; WORDS_PER_LINE];
    for index in words.clone() {
        let first = line * BLOCKS_PER_LINE + index as u64 * BLOCKS_PER_WORD;
        let from = range.start.max(first) - first;
        let to = range.end.min(first + BLOCKS_PER_WORD) - first;
        open[index] = u64::MAX >> (64 - 2 * (to - from)) << (2 * from) & LOW_BITS;
    }
    let mut shown = 0;
    for states in maps.filter_map(|map| map.line(line)) {
        let mut left = 0;
        for (open, state) in open[words.clone()].iter_mut().zip(&states[words.clone()]) {
            let state = state.load(Ordering::Acquire);
            shown += u64::from((state & *open).count_ones());
            *open &= !(state | state >> 1);
            left |= *open;
        }
        if left == 0 {
            break;
        }
    }
    shown
}

fn adjust(counter: &AtomicU64, old: u64, new: u64) {
    let (old, new) = (u64::from(old.count_ones()), u64::from(new.count_ones()));
    if new >= old {
        counter.fetch_add(new - old, Ordering::Relaxed);
    } else {
        counter.fetch_sub(old - new, Ordering::Relaxed);
    }
}

fn chunk_index(block: u64) -> usize {
    (block / BLOCKS_PER_CHUNK) as usize
}

fn word_index(block: u64) -> usize {
    (block % BLOCKS_PER_CHUNK / BLOCKS_PER_WORD) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn state() -> impl Strategy<Value = BlockState> {
        prop_oneof![Just(BlockState::Absent), Just(BlockState::Data), Just(BlockState::Zero)]
    }

    proptest! {
        #[test]
        fn behaves_as_a_list(changes in prop::collection::vec((0_u64..70_000, 1_u64..40_000, state()), 1..12)) {
            let blocks = 70_001;
            let map = BlockMap::new(blocks);
            let mut model = vec![BlockState::Absent; 70_001];
            for (first, count, state) in changes {
                let end = (first + count).min(blocks);
                map.set(first..end, state);
                model[first as usize..end as usize].fill(state);
            }
            let mut position = 0;
            for run in map.runs(0..blocks) {
                prop_assert_eq!(run.first, position);
                prop_assert!(model[run.first as usize..run.blocks().end as usize].iter().all(|it| *it == run.state));
                prop_assert!(model.get(run.blocks().end as usize).is_none_or(|next| *next != run.state));
                position = run.blocks().end;
            }
            prop_assert_eq!(position, blocks);
            let count = |state| model.iter().filter(|it| **it == state).count() as u64;
            prop_assert_eq!(map.data_blocks(), count(BlockState::Data));
            prop_assert_eq!(map.zero_blocks(), count(BlockState::Zero));
            prop_assert_eq!(count_shown(&std::iter::once(&map), 0..blocks), count(BlockState::Data));
        }
    }

    proptest! {
        #[test]
        fn what_shows_of_several_maps_is_what_a_walk_through_them_finds(
            changes in prop::collection::vec((0..4_usize, 0_u64..70_000, 1_u64..40_000, state()), 1..12),
            ranges in prop::collection::vec((0_u64..70_001, prop_oneof![0_u64..70, 0_u64..70_001]), 8),
        ) {
            let blocks = 70_001;
            let maps: Vec<_> = (0..4).map(|_| BlockMap::new(blocks)).collect();
            for (map, first, count, state) in changes {
                maps[map].set(first..(first + count).min(blocks), state);
            }
            for (first, count) in ranges {
                let range = first..(first + count).min(blocks);
                let shows = |block: &u64| {
                    let mut states = maps.iter().map(|map| map.state(*block));
                    states.find(|state| *state != BlockState::Absent) == Some(BlockState::Data)
                };
                prop_assert_eq!(count_shown(&maps.iter(), range.clone()), range.filter(shows).count() as u64);
            }
        }
    }

    #[test]
    fn untouched_areas_cost_nothing_and_are_passed_at_once() {
        let map = BlockMap::new(1 << 31);
        map.set((1 << 31) - 1..1 << 31, BlockState::Data);
        assert_eq!(map.run(0, 1 << 31), (BlockState::Absent, (1 << 31) - 1));
        assert_eq!(map.chunks.iter().filter(|chunk| chunk.get().is_some()).count(), 1);
        map.set(0..1 << 30, BlockState::Absent);
        assert_eq!(map.chunks.iter().filter(|chunk| chunk.get().is_some()).count(), 1);
    }
}
