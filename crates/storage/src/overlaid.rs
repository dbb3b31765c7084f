//! Layers over an image of another kind: a flat file with layers on it, read as one image.
//!
//! ```text
//! layers   ██ ░░░ ██          ░ zeroed: hides, like data
//! lower  ████████████████
//! reads  █████   ████████
//! ```
//! Owns handles only. Its size is that of the layers. Must not write.

use crate::blob::check_range;
use crate::chain::LayerChain;
use crate::contents::{Change, ChangeKind, Delta, Image};
use crate::index::Content;
use crate::lsmt::SECTOR_BYTES;
use crate::top::read_clipped;
use crate::{StorageError, layer::Layer};
use std::ops::Range;
use std::sync::Arc;

/// A chain of layers on an image.
#[derive(Debug, Clone)]
pub struct OverlaidImage {
    lower: Arc<dyn Image>,
    chain: Arc<LayerChain>,
}

impl OverlaidImage {
    /// Lays `layers`, bottom → top, over an image.
    ///
    /// # Errors
    /// As [`LayerChain::new`].
    pub fn new(lower: Arc<dyn Image>, layers: Vec<Arc<Layer>>) -> Result<Self, StorageError> {
        Ok(Self { lower, chain: Arc::new(LayerChain::new(layers)?) })
    }

    /// What the layers lie on.
    #[must_use]
    pub fn lower(&self) -> &Arc<dyn Image> {
        &self.lower
    }

    /// The first piece of data from `offset` on; what follows may belong to it.
    fn next_piece(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let end = self.chain.size();
        if offset >= end {
            return Ok(None);
        }
        for segment in self.chain.index().segments(offset / SECTOR_BYTES..end / SECTOR_BYTES) {
            let bytes = (segment.start * SECTOR_BYTES).max(offset)..segment.end * SECTOR_BYTES;
            match segment.content {
                Content::Stored { .. } => return Ok(Some(bytes)),
                Content::Zeroed { .. } => {}
                Content::Absent if bytes.start >= self.lower.size() => {}
                Content::Absent => {
                    let found = self.lower.next_data(bytes.start)?;
                    if let Some(found) = found.filter(|found| found.start < bytes.end) {
                        return Ok(Some(found.start..found.end.min(bytes.end)));
                    }
                }
            }
        }
        Ok(None)
    }
}

impl Image for OverlaidImage {
    fn size(&self) -> u64 {
        self.chain.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let size = self.chain.size();
        let range = check_range(|| "layers over an image".to_owned(), size, offset, buffer.len() as u64)?;
        let sectors = range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES);
        for segment in self.chain.index().segments(sectors) {
            if segment.content != Content::Absent {
                self.chain.read_segment(&segment, buffer, &range)?;
                continue;
            }
            let from = (segment.start * SECTOR_BYTES).max(range.start);
            let to = (segment.end * SECTOR_BYTES).min(range.end);
            // The segment overlaps the range, so that both differences are at most the buffer's length.
            let part = &mut buffer[(from - range.start) as usize..(to - range.start) as usize];
            read_clipped(&*self.lower, part, from)?;
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let Some(mut found) = self.next_piece(offset)? else { return Ok(None) };
        while let Some(more) = self.next_piece(found.end)?.filter(|more| more.start == found.end) {
            found.end = more.end;
        }
        Ok(Some(found))
    }

    fn make_durable(&self) -> Result<(), StorageError> {
        self.lower.make_durable()
    }
}

impl Delta for OverlaidImage {
    /// What the layers change of [`OverlaidImage::lower`], all of them together.
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        let run = self.chain.next_run(offset..self.size(), |content| match content {
            Content::Absent => None,
            Content::Zeroed { .. } => Some(ChangeKind::Zeros),
            Content::Stored { .. } => Some(ChangeKind::Data),
        });
        Ok(run.map(|(range, kind)| Change { range, kind }))
    }
}
