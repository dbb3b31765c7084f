//! Sealed tops over an image, seen as one image.
//!
//! Owns handles only. A block is what the uppermost top that has it says; what none has is the image's.

use super::{BlockRange, BlockState, SealedTop, read_clipped};
use crate::{BLOCK_BYTES, Change, ChangeKind, Delta, Image, StorageError};
use std::ops::Range;
use std::sync::Arc;

/// An image with sealed tops on it; what a child of a running disk stands on.
#[derive(Debug, Clone)]
pub struct StackedImage {
    lower: Arc<dyn Image>,
    tops: Arc<[Arc<SealedTop>]>,
    size: u64,
}

impl StackedImage {
    /// `tops` from bottom to top, on `lower`. The size is that of the largest.
    #[must_use]
    pub fn new(lower: Arc<dyn Image>, tops: Vec<Arc<SealedTop>>) -> Self {
        let size = tops.iter().map(|top| top.size()).fold(lower.size(), u64::max);
        Self { lower, tops: tops.into(), size }
    }

    /// The tops, from bottom to top.
    #[must_use]
    pub fn tops(&self) -> &[Arc<SealedTop>] {
        &self.tops
    }

    /// What the tops stand on.
    #[must_use]
    pub fn lower(&self) -> &Arc<dyn Image> {
        &self.lower
    }

    fn read_from(&self, tops: &[Arc<SealedTop>], buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let Some((top, below)) = tops.split_last() else {
            return read_clipped(&*self.lower, buffer, offset);
        };
        let there = top.size().saturating_sub(offset).min(buffer.len() as u64);
        let (inside, behind) = buffer.split_at_mut(there as usize);
        if !inside.is_empty() {
            top.top().read_at(inside, offset, |part, position| self.read_from(below, part, position))?;
        }
        if behind.is_empty() { Ok(()) } else { self.read_from(below, behind, offset + there) }
    }
}

impl Image for StackedImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let length = buffer.len() as u64;
        if offset.checked_add(length).is_none_or(|end| end > self.size) {
            let name = "a stack of sealed tops".to_owned();
            return Err(StorageError::OutOfRange { name, offset, length, size: self.size });
        }
        self.read_from(&self.tops, buffer, offset)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.next_data_in(offset..self.size)
    }

    fn next_data_in(&self, range: Range<u64>) -> Result<Option<Range<u64>>, StorageError> {
        let end = range.end.min(self.size);
        let mut position = range.start;
        let mut found: Option<Range<u64>> = None;
        while position < end {
            let run = run_of_tops(&self.tops, position / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let piece = position..end.min(run.blocks().end * BLOCK_BYTES);
            let data = match run.state {
                BlockState::Data => Some(piece.clone()),
                BlockState::Zero => None,
                BlockState::Absent => self.lower.next_data_in(piece.clone())?,
            };
            match (&mut found, data) {
                (None, None) => position = piece.end,
                (None, Some(data)) => {
                    position = data.end;
                    found = Some(data);
                }
                (Some(found), Some(data)) if data.start == found.end => {
                    position = data.end;
                    found.end = data.end;
                }
                (Some(_), _) => break,
            }
        }
        Ok(found)
    }

    fn make_durable(&self) -> Result<(), StorageError> {
        self.lower.make_durable()?;
        self.tops.iter().try_for_each(|top| top.make_durable())
    }
}

impl Delta for StackedImage {
    /// What the tops change of [`StackedImage::lower`], all of them together.
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        let (mut position, blocks) = (offset / BLOCK_BYTES, self.size.div_ceil(BLOCK_BYTES));
        let mut found: Option<Change> = None;
        while position < blocks {
            let run = run_of_tops(&self.tops, position, blocks);
            let bytes = offset.max(position * BLOCK_BYTES)..run.blocks().end * BLOCK_BYTES;
            let kind = match run.state {
                BlockState::Absent => None,
                BlockState::Data => Some(ChangeKind::Data),
                BlockState::Zero => Some(ChangeKind::Zeros),
            };
            match (&mut found, kind) {
                (None, None) => {}
                (None, Some(kind)) => found = Some(Change { range: bytes, kind }),
                // The next top's part of the same run.
                (Some(change), Some(kind)) if kind == change.kind => change.range.end = bytes.end,
                (Some(_), _) => break,
            }
            position = run.blocks().end;
        }
        Ok(found)
    }
}

/// Blocks that a top's map is searched for the end of a run: who wants the whole run asks again, and who finds something
/// else in another top soon has not paid for all of the disk.
const LOOK_AHEAD: u64 = 32768;

/// The run at `block` in which one of the tops, or none, is the uppermost that has the blocks, all in one state. The next
/// one may be in the same.
pub(crate) fn run_of_tops(tops: &[Arc<SealedTop>], block: u64, limit: u64) -> BlockRange {
    let mut end = limit.min(block + LOOK_AHEAD);
    for top in tops.iter().rev() {
        let map = top.top().map();
        if block >= map.blocks() {
            continue;
        }
        let (state, run_end) = map.run(block, end.min(map.blocks()));
        // Behind the end of a smaller top nothing is known of it.
        end = run_end;
        if state != BlockState::Absent {
            return BlockRange { first: block, count: end - block, state };
        }
    }
    BlockRange { first: block, count: end - block, state: BlockState::Absent }
}
