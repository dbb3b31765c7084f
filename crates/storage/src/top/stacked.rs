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

    /// The first piece of data in `range`; what follows it may belong to it.
    fn next_piece(
        &self,
        tops: &[Arc<SealedTop>],
        range: Range<u64>,
    ) -> Result<Option<Range<u64>>, StorageError> {
        let clip =
            |found: Range<u64>| (found.start < range.end).then(|| found.start..found.end.min(range.end));
        let Some((top, below)) = tops.split_last() else {
            let found =
                if range.start < self.lower.size() { self.lower.next_data(range.start)? } else { None };
            return Ok(found.and_then(clip));
        };
        let end = range.end.min(top.size());
        let mut position = range.start;
        while position < end {
            let (state, run_end) = top.top().map().run(position / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let run_end = end.min(run_end * BLOCK_BYTES);
            match state {
                BlockState::Data => return Ok(Some(position..run_end)),
                BlockState::Zero => {}
                BlockState::Absent => {
                    if let Some(found) = self.next_piece(below, position..run_end)? {
                        return Ok(Some(found));
                    }
                }
            }
            position = run_end;
        }
        if position < range.end { self.next_piece(below, position..range.end) } else { Ok(None) }
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
        let Some(mut found) = self.next_piece(&self.tops, offset..self.size.max(offset))? else {
            return Ok(None);
        };
        while let Some(more) =
            self.next_piece(&self.tops, found.end..self.size)?.filter(|it| it.start == found.end)
        {
            found.end = more.end;
        }
        Ok(Some(found))
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

/// The run at `block` in which one of the tops, or none, is the uppermost that has the blocks, all in one state.
pub(crate) fn run_of_tops(tops: &[Arc<SealedTop>], block: u64, limit: u64) -> BlockRange {
    let mut end = limit;
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
