//! A stack of layers, read as one image.
//!
//! ```text
//! read ─▶ merged index, built once ─▶ segments ─┬─▶ stored in layer k: read there
//!                                               └─▶ zeroed or mapped by none: zeros
//! ```
//! The virtual size is that of the topmost layer that has one. Owns the merged index; shares the layers. Must not write.

use crate::StorageError;
use crate::blob::check_range;
use crate::contents::{Change, ChangeKind, Delta, Image};
use crate::index::{Content, Index, Segment};
use crate::layer::Layer;
use crate::lsmt::SECTOR_BYTES;
use crate::merge::merge;
use std::ops::Range;
use std::sync::Arc;
use uuid::Uuid;

/// Layers, bottom → top, as one image.
#[derive(Debug)]
pub struct LayerChain {
    layers: Vec<Arc<Layer>>,
    index: Index,
    size: u64,
}

impl LayerChain {
    /// Stacks layers, bottom → top. Whether they were made upon one another is not looked at: see [`check_order`].
    ///
    /// # Errors
    /// [`StorageError::Unsupported`] when there is no layer, there are too many, or none has a virtual size.
    pub fn new(layers: Vec<Arc<Layer>>) -> Result<Self, StorageError> {
        let name = layers
            .last()
            .map_or_else(|| "a chain".to_owned(), |top| format!("the chain up to {}", top.name()));
        let unsupported = |reason: String| StorageError::Unsupported { name: name.clone(), reason };
        let sizes = layers.iter().rev().map(|layer| layer.virtual_size());
        let Some(size) = sizes.into_iter().find(|size| *size > 0) else {
            return Err(unsupported("it has no layer that has a virtual size".to_owned()));
        };
        let indexes: Vec<&Index> = layers.iter().map(|layer| layer.index()).collect();
        let index = merge(&indexes, size / SECTOR_BYTES).map_err(unsupported)?;
        Ok(Self { layers, index, size })
    }

    /// The layers, bottom → top.
    #[must_use]
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// Which layer has what.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Number of mappings of the merged index.
    #[must_use]
    pub fn mappings(&self) -> usize {
        self.index.len()
    }

    fn name(&self) -> String {
        self.layers.last().map(|layer| layer.name()).unwrap_or_default()
    }

    /// Reads the part of a segment that lies in the range of bytes which `buffer` is for.
    pub(crate) fn read_segment(
        &self,
        segment: &Segment,
        buffer: &mut [u8],
        range: &Range<u64>,
    ) -> Result<(), StorageError> {
        let segment_start = segment.start * SECTOR_BYTES;
        let (from, to) = (segment_start.max(range.start), (segment.end * SECTOR_BYTES).min(range.end));
        // The segment was found with the range, so that they overlap; differences are at most the buffer's length.
        let part = &mut buffer[(from - range.start) as usize..(to - range.start) as usize];
        match segment.content {
            Content::Absent | Content::Zeroed { .. } => part.fill(0),
            Content::Stored { stored, tag } => {
                let layer = self.layers.get(usize::from(tag)).ok_or_else(|| StorageError::Damaged {
                    name: self.name(),
                    reason: format!("its index names layer {tag} of {}", self.layers.len()),
                })?;
                layer.read_stored(part, stored * SECTOR_BYTES + (from - segment_start))?;
            }
        }
        Ok(())
    }

    /// The first run of segments in a range of bytes that `kind` gives one and the same kind to.
    pub(crate) fn next_run<K: PartialEq>(
        &self,
        range: Range<u64>,
        kind: impl Fn(Content) -> Option<K>,
    ) -> Option<(Range<u64>, K)> {
        let end = range.end.min(self.size);
        if range.start >= end {
            return None;
        }
        let mut run: Option<(Range<u64>, K)> = None;
        for segment in self.index.segments(range.start / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES)) {
            let bytes =
                (segment.start * SECTOR_BYTES).max(range.start)..(segment.end * SECTOR_BYTES).min(end);
            match (&mut run, kind(segment.content)) {
                (None, Some(kind)) => run = Some((bytes, kind)),
                (Some((range, of)), Some(kind)) if *of == kind => range.end = bytes.end,
                (Some(_), _) => break,
                (None, None) => {}
            }
        }
        run
    }
}

impl Image for LayerChain {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let range = check_range(|| self.name(), self.size, offset, buffer.len() as u64)?;
        for segment in self.index.segments(range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES)) {
            self.read_segment(&segment, buffer, &range)?;
        }
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.next_data_in(offset..self.size)
    }

    fn next_data_in(&self, range: Range<u64>) -> Result<Option<Range<u64>>, StorageError> {
        let run = self.next_run(range, |content| matches!(content, Content::Stored { .. }).then_some(()));
        Ok(run.map(|(range, ())| range))
    }
}

/// The upper layers of a chain, as what they change of the lower ones.
#[derive(Debug, Clone)]
pub struct UpperLayers {
    chain: Arc<LayerChain>,
    from: usize,
}

impl UpperLayers {
    /// The changes that the layers from position `from` on make.
    #[must_use]
    pub fn new(chain: Arc<LayerChain>, from: usize) -> Self {
        Self { chain, from }
    }
}

impl Image for UpperLayers {
    fn size(&self) -> u64 {
        self.chain.size()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.chain.read_at(buffer, offset)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.chain.next_data(offset)
    }

    fn next_data_in(&self, range: Range<u64>) -> Result<Option<Range<u64>>, StorageError> {
        self.chain.next_data_in(range)
    }
}

impl Delta for UpperLayers {
    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        let run = self.chain.next_run(offset..self.size(), |content| {
            let (tag, kind) = match content {
                Content::Absent => return None,
                Content::Zeroed { tag } => (tag, ChangeKind::Zeros),
                Content::Stored { tag, .. } => (tag, ChangeKind::Data),
            };
            (usize::from(tag) >= self.from).then_some(kind)
        });
        Ok(run.map(|(range, kind)| Change { range, kind }))
    }
}

/// Checks that the layers, bottom → top, can be made upon one another, as far as their ids tell. A layer that names no parent, or
/// lies on one without an id, may be right: converters and mergers leave them out. Images from registries may even contradict
/// them, so this is asked for where the order is somebody's word.
///
/// # Errors
/// [`StorageError::Unsupported`] with the first layer that was made upon another one than the one below it, or is its own
/// ancestor.
pub fn check_order(layers: &[Arc<Layer>]) -> Result<(), StorageError> {
    for (position, layer) in layers.iter().enumerate() {
        let refused = |reason: String| Err(StorageError::Unsupported { name: layer.name(), reason });
        let below = layers.get(..position).unwrap_or_default();
        let itself = |other: &Option<Uuid>| other.is_some() && *other == layer.uuid();
        if itself(&layer.parent())
            || below.iter().any(|lower| itself(&lower.uuid()) || itself(&lower.parent()))
        {
            return refused(
                "it cannot lie there: its uuid is that of a layer below it, or of a parent of one".to_owned(),
            );
        }
        if let (Some(lower), Some(parent)) = (below.last(), layer.parent())
            && let Some(uuid) = lower.uuid()
            && uuid != parent
        {
            let lower = lower.name();
            return refused(format!("it was made upon the layer {parent}, but {lower} below it is {uuid}"));
        }
        let is_parent = |other: &&Arc<Layer>| other.uuid().is_some() && other.uuid() == layer.parent();
        if let Some(parent) = layers.iter().find(is_parent)
            && below.last().is_none_or(|lower| !is_parent(&lower))
        {
            return refused(format!("it was made upon {}, which does not lie right below it", parent.name()));
        }
    }
    Ok(())
}
