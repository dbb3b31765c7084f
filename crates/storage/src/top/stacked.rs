//! Sealed tops over an image, seen as one image.
//!
//! Owns handles only. A block is what the uppermost top that has it says; what none has is the image's.

use super::{BlockMap, BlockState, SealedTop, read_clipped};
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

    /// The maps of the tops, from top to bottom.
    pub(crate) fn maps(&self) -> impl Iterator<Item = &BlockMap> + Clone {
        self.tops.iter().rev().map(|top| top.top().map())
    }

    /// What the tops stand on.
    #[must_use]
    pub fn lower(&self) -> &Arc<dyn Image> {
        &self.lower
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
        let end = offset + length;
        let (mut position, mut rest) = (offset, buffer);
        while position < end {
            let run = run_of_tops(&self.tops, position / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
            let run_end = end.min(run.blocks.end * BLOCK_BYTES);
            // At most the length of the buffer.
            let (part, after) = rest.split_at_mut((run_end - position) as usize);
            match run.shows {
                Shows::Data(top) => top.read_changed(part, position)?,
                Shows::Zeros => part.fill(0),
                Shows::Below => read_clipped(&*self.lower, part, position)?,
            }
            (position, rest) = (run_end, after);
        }
        Ok(())
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
            let piece = position..end.min(run.blocks.end * BLOCK_BYTES);
            let data = match run.shows {
                Shows::Data(_) => Some(piece.clone()),
                Shows::Zeros => None,
                Shows::Below => self.lower.next_data_in(piece.clone())?,
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
            let bytes = offset.max(position * BLOCK_BYTES)..run.blocks.end * BLOCK_BYTES;
            let kind = match run.shows {
                Shows::Below => None,
                Shows::Data(_) => Some(ChangeKind::Data),
                Shows::Zeros => Some(ChangeKind::Zeros),
            };
            match (&mut found, kind) {
                (None, None) => {}
                (None, Some(kind)) => found = Some(Change { range: bytes, kind }),
                // The next top's part of the same run.
                (Some(change), Some(kind)) if kind == change.kind => change.range.end = bytes.end,
                (Some(_), _) => break,
            }
            position = run.blocks.end;
        }
        Ok(found)
    }
}

/// What some tops show of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shows<'a> {
    /// What this one of them stores.
    Data(&'a SealedTop),
    Zeros,
    /// None of them has it.
    Below,
}

/// Blocks of which all show the same.
#[derive(Debug)]
pub(crate) struct TopsRun<'a> {
    pub(crate) blocks: Range<u64>,
    pub(crate) shows: Shows<'a>,
}

/// Blocks that a top's map is searched for the end of a run: who wants the whole run asks again, and who finds something
/// else in another top soon has not paid for all of the disk.
const LOOK_AHEAD: u64 = 32768;

/// The run at `block`, `limit` at most. The next one may show the same.
///
/// The one way through a list of tops, in a loop: there may be thousands, more than a stack has room for.
pub(crate) fn run_of_tops(tops: &[Arc<SealedTop>], block: u64, limit: u64) -> TopsRun<'_> {
    let mut end = limit.min(block + LOOK_AHEAD);
    for top in tops.iter().rev() {
        let map = top.top().map();
        if block >= map.blocks() {
            continue;
        }
        let (state, run_end) = map.run(block, end.min(map.blocks()));
        // Behind the end of a smaller top nothing is known of it.
        end = run_end;
        let shows = match state {
            BlockState::Absent => continue,
            BlockState::Data => Shows::Data(top),
            BlockState::Zero => Shows::Zeros,
        };
        return TopsRun { blocks: block..end, shows };
    }
    TopsRun { blocks: block..end, shows: Shows::Below }
}
