//! Writing and clearing blocks of a top: data first, then log, then the state that shows it; the other way round for holes.
//!
//! Owns nothing; the orders that crash safety rests on are in [`super`].

use super::{Allowance, BlockRange, BlockState, REGION_LOCKS, Top, lock, read_clipped};
use crate::raw_file::failed;
use crate::{BLOCK_BYTES, Image, StorageError};
use std::ops::Range;
use std::sync::{PoisonError, RwLock};

/// Blocks whose states change one writer at a time.
const REGION_BLOCKS: u64 = 256;

impl Top {
    /// Writes; the range must lie in the top, and the top must not be sealed.
    pub(crate) fn write_at(
        &self,
        data: &[u8],
        offset: u64,
        below: &dyn Image,
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
        below: &dyn Image,
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
        let reservation = allowance.reserve(count - self.map.count_data(blocks.clone()))?;
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

    /// Makes whole blocks read as zeros and frees their room.
    pub(crate) fn clear(
        &self,
        blocks: Range<u64>,
        below: &dyn Image,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let _counted = self.count_change();
        let mut position = blocks.start;
        while position < blocks.end {
            let (state, end) = self.map.run(position, blocks.end);
            let hidden = hides_nothing(below, position..end)?;
            if state == BlockState::Absent && hidden.1 && hidden.0 > position {
                // Zeros already, as far as `hidden.0`.
                position = hidden.0;
                continue;
            }
            let region_end = (position / REGION_BLOCKS + 1) * REGION_BLOCKS;
            let part = position..region_end.min(blocks.end);
            self.clear_in_region(part.clone(), below, allowance)?;
            position = part.end;
        }
        Ok(())
    }

    fn clear_in_region(
        &self,
        blocks: Range<u64>,
        below: &dyn Image,
        allowance: &Allowance,
    ) -> Result<(), StorageError> {
        let _alone = self.region(blocks.start).write().unwrap_or_else(PoisonError::into_inner);
        let (mut changes, mut freed) = (Vec::new(), Vec::new());
        let mut position = blocks.start;
        while position < blocks.end {
            let (end, nothing_below) = hides_nothing(below, position..blocks.end)?;
            let state = if nothing_below { BlockState::Absent } else { BlockState::Zero };
            for run in self.map.runs(position..end).filter(|run| run.state != state) {
                // Absent and zero look the same where nothing is below.
                if run.state == BlockState::Data || state == BlockState::Zero {
                    changes.push(BlockRange { state, ..run });
                }
                if run.state == BlockState::Data {
                    freed.push(run);
                }
            }
            position = end;
        }
        self.change(&changes)?;
        allowance.release(freed.iter().map(|run| run.count).sum());
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

/// From the first block of `blocks` on: how far it goes that all or none of them may show something of `below`, and
/// whether it is none.
fn hides_nothing(below: &dyn Image, blocks: Range<u64>) -> Result<(u64, bool), StorageError> {
    let start = blocks.start * BLOCK_BYTES;
    let next = if start < below.size() { below.next_data(start)? } else { None };
    Ok(match next {
        None => (blocks.end, true),
        Some(data) if data.start / BLOCK_BYTES > blocks.start => {
            (blocks.end.min(data.start / BLOCK_BYTES), true)
        }
        Some(data) => (blocks.end.min(data.end.div_ceil(BLOCK_BYTES).max(blocks.start + 1)), false),
    })
}
