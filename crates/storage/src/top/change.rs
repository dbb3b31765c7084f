//! Writing and clearing blocks of a top: data first, then log, then the state that shows it; the other way round for holes.
//!
//! Blocks of which this top or the sealed ones of the same disk show data are charged to the disk's allowance, each once:
//!
//! | this top | sealed ones show | charged | a write | a discard |
//! |---|---|---|---|---|
//! | data | anything | yes | | gives back |
//! | absent | data | yes | | gives back (zero) |
//! | absent | something else | no | takes | |
//! | zero | anything | no | takes | |
//!
//! So neither a seal nor a merge of sealed tops changes what is charged.
//!
//! Owns nothing; the orders that crash safety rests on are in [`super`].

use super::{
    Allowance, BlockRange, BlockState, REGION_LOCKS, StackedImage, Top, count_shown, lock, read_clipped,
};
use crate::raw_file::failed;
use crate::{BLOCK_BYTES, Image, StorageError};
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

/// Blocks whose states change one writer at a time.
const REGION_BLOCKS: u64 = 256;

impl Top {
    /// Writes; the range must lie in the top, and the top must not be sealed. `below` has the sealed tops of the same disk.
    pub(crate) fn write_at(
        &self,
        data: &[u8],
        offset: u64,
        below: &StackedImage,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let _counted = self.count_change();
        let mut rest = data;
        for part in regions_of(offset..offset + data.len() as u64) {
            let (now, after) = rest.split_at((part.end - part.start) as usize);
            self.write_in_region(now, part.start, below, allowance)?;
            rest = after;
        }
        Ok(())
    }

    fn write_in_region(
        &self,
        data: &[u8],
        offset: u64,
        below: &StackedImage,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let end = offset + data.len() as u64;
        let blocks = offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        let region = self.region(blocks.start);
        {
            let _shared = region.read().unwrap_or_else(PoisonError::into_inner);
            if self.map.run(blocks.start, blocks.end) == (BlockState::Data, blocks.end) {
                return self.write_data(data, offset);
            }
        }
        let _alone = region.write().unwrap_or_else(PoisonError::into_inner);
        let count = blocks.end - blocks.start;
        let reservation = allowance.reserve(count - self.charged(blocks.clone(), below))?;
        self.write_whole_blocks(data, offset, below)?;
        let to_data = |run: BlockRange| BlockRange { state: BlockState::Data, ..run };
        let runs = self.map.runs(blocks).filter(|run| run.state != BlockState::Data);
        self.change(&runs.map(to_data).collect::<Vec<_>>())?;
        reservation.keep();
        Ok(())
    }

    /// Writes into blocks of which some are not data: those get all their bytes.
    fn write_whole_blocks(&self, data: &[u8], offset: u64, below: &dyn Image) -> Result<(), StorageError> {
        let end = offset + data.len() as u64;
        let incomplete = |edge: u64| {
            !edge.is_multiple_of(BLOCK_BYTES) && self.map.state(edge / BLOCK_BYTES) != BlockState::Data
        };
        let mut middle = offset..end;
        if incomplete(offset) {
            middle.start = end.min(offset.next_multiple_of(BLOCK_BYTES));
            self.complete_block(&data[..(middle.start - offset) as usize], offset, below)?;
        }
        if middle.start < end && incomplete(end) {
            middle.end = middle.start.max(end - end % BLOCK_BYTES);
            self.complete_block(&data[(middle.end - offset) as usize..], middle.end, below)?;
        }
        let inner = &data[(middle.start - offset) as usize..(middle.end - offset) as usize];
        if inner.is_empty() { Ok(()) } else { self.write_data(inner, middle.start) }
    }

    /// Writes the whole block that `data` is a part of; the rest of it is what it reads as now.
    fn complete_block(&self, data: &[u8], offset: u64, below: &dyn Image) -> Result<(), StorageError> {
        let within = (offset % BLOCK_BYTES) as usize;
        let start = offset - offset % BLOCK_BYTES;
        let mut block = [0; BLOCK_BYTES as usize];
        self.read_at(&mut block, start, |part, position| read_clipped(below, part, position))?;
        block[within..within + data.len()].copy_from_slice(data);
        self.write_data(&block, start)
    }

    pub(super) fn write_data(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.data.write_all_at(data, offset).map_err(|error| failed("write", &self.data_path, error))
    }

    /// How many blocks are charged. Whoever calls holds the region alone.
    fn charged(&self, blocks: Range<u64>, below: &StackedImage) -> u64 {
        count_shown(&std::iter::once(&self.map).chain(below.maps()), blocks)
    }

    /// Makes whole blocks read as zeros and frees their room. `below` has the sealed tops of the same disk.
    pub(crate) fn clear(
        &self,
        blocks: Range<u64>,
        below: &StackedImage,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let _counted = self.count_change();
        let mut visible = Visible::new(below, blocks.clone());
        let mut position = blocks.start;
        while position < blocks.end {
            let (end, shows) = visible.run(position)?;
            if !shows
                && self.map.state(position) == BlockState::Absent
                && let (BlockState::Absent, end) = self.map.run(position, end)
            {
                // Zeros already.
                position = end;
                continue;
            }
            let region_end = (position / REGION_BLOCKS + 1) * REGION_BLOCKS;
            let part = position..region_end.min(blocks.end);
            // Before the region is locked: it may take a while.
            let runs = visible.runs(part.clone())?;
            self.clear_in_region(part.start, &runs, below, allowance)?;
            position = part.end;
        }
        Ok(())
    }

    fn clear_in_region(
        &self,
        first: u64,
        runs: &[(Range<u64>, bool)],
        below: &StackedImage,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let _alone = self.region(first).write().unwrap_or_else(PoisonError::into_inner);
        let (mut changes, mut freed) = (Vec::new(), Vec::new());
        for (blocks, shows) in runs {
            let state = if *shows { BlockState::Zero } else { BlockState::Absent };
            for run in self.map.runs(blocks.clone()).filter(|run| run.state != state) {
                // Absent and zero look the same where nothing is below.
                if run.state == BlockState::Data || state == BlockState::Zero {
                    changes.push(BlockRange { state, ..run });
                }
                if run.state == BlockState::Data {
                    freed.push(run);
                }
            }
        }
        let charged = changes.iter().map(|run| self.charged(run.blocks(), below)).sum();
        self.change(&changes)?;
        // None of them shows data now: what becomes absent has none below.
        allowance.release(charged);
        freed.iter().try_for_each(|run| self.punch(run.blocks()))
    }

    pub(super) fn punch(&self, blocks: Range<u64>) -> Result<(), StorageError> {
        let bytes = blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES;
        self.data.punch_hole(bytes).map_err(|error| failed("make a hole in", &self.data_path, error))
    }

    /// Logs new states, then shows them. Whoever calls holds the region alone.
    pub(super) fn change(&self, changes: &[BlockRange]) -> Result<(), StorageError> {
        if changes.is_empty() {
            return Ok(());
        }
        lock(&self.log).append_ranges(changes).map_err(|error| self.log_failed(error))?;
        for change in changes {
            self.map.set(change.blocks(), change.state);
        }
        Ok(())
    }

    fn region(&self, block: u64) -> &RwLock<()> {
        &self.regions[(block / REGION_BLOCKS) as usize % REGION_LOCKS]
    }
}

/// The parts of a byte range that lie in one region each.
fn regions_of(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    const REGION_BYTES: u64 = REGION_BLOCKS * BLOCK_BYTES;
    let mut position = range.start;
    std::iter::from_fn(move || {
        (position < range.end).then(|| {
            let start = position;
            position = range.end.min((start / REGION_BYTES + 1) * REGION_BYTES);
            start..position
        })
    })
}

/// Which blocks of a range may show something of the image below. Asked in ascending order, it asks the image for each of
/// its runs once, however many parts the range is done in.
struct Visible<'a> {
    below: &'a dyn Image,
    limit: u64,
    /// The last run of blocks that show something: all before it, as far as they were asked for, show nothing.
    last: Range<u64>,
}

impl<'a> Visible<'a> {
    fn new(below: &'a dyn Image, blocks: Range<u64>) -> Self {
        Self { below, limit: blocks.end, last: blocks.start..blocks.start }
    }

    /// Where the run ends that `block`, which is in the range, begins or goes on, and whether it shows something.
    fn run(&mut self, block: u64) -> Result<(u64, bool), StorageError> {
        if block >= self.last.end {
            let data = self.below.next_data_in(block * BLOCK_BYTES..self.limit * BLOCK_BYTES)?;
            self.last = data.map_or(self.limit..self.limit, |data| {
                data.start / BLOCK_BYTES..data.end.div_ceil(BLOCK_BYTES)
            });
        }
        Ok(if block < self.last.start { (self.last.start, false) } else { (self.last.end, true) })
    }

    /// The runs of a part of the range.
    fn runs(&mut self, blocks: Range<u64>) -> Result<Vec<(Range<u64>, bool)>, StorageError> {
        let mut runs = Vec::new();
        let mut position = blocks.start;
        while position < blocks.end {
            let (end, shows) = self.run(position)?;
            runs.push((position..end.min(blocks.end), shows));
            position = end;
        }
        Ok(runs)
    }
}
