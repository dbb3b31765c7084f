//! Where the sectors of a layer or of a whole chain are: sorted, disjoint mappings in memory.
//!
//! Two words a mapping, in two arrays, so that a search touches one of them only:
//! ```text
//! places    offset << 14 | length       sorted: the search compares these as plain numbers
//! targets   as on disk                  where the data is
//! sample    every 64th place            small enough to stay in the processor's cache
//! ```
//! Owns the arrays. Must not know layers or files: what `stored` and `tag` mean is for the one who built it.

#[cfg(test)]
mod tests;

use crate::lsmt::{MAXIMUM_LENGTH, Mapping, SECTOR_LIMIT, STORED_LIMIT};
use std::ops::Range;

const LENGTH_BITS: u32 = 14;
/// Mappings between two samples: eight cache lines of places.
const SAMPLE_STEP: usize = 64;

/// Sorted, disjoint mappings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    places: Vec<u64>,
    targets: Vec<u64>,
    sample: Vec<u64>,
}

/// What a run of sectors holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Not mapped.
    Absent,
    /// Zeros, said by the layer `tag`.
    Zeroed {
        /// As in [`Mapping`].
        tag: u8,
    },
    /// Data.
    Stored {
        /// First sector in the file.
        stored: u64,
        /// As in [`Mapping`].
        tag: u8,
    },
}

/// A run of sectors with one content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First sector in the disk.
    pub start: u64,
    /// First sector behind it.
    pub end: u64,
    /// What it holds.
    pub content: Content,
}

impl Index {
    /// Number of mappings.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The mapping of this number.
    #[must_use]
    pub fn get(&self, number: usize) -> Option<Mapping> {
        let (place, target) = (self.places.get(number)?, self.targets.get(number)?);
        Some(Mapping::from_parts(place >> LENGTH_BITS, place & MAXIMUM_LENGTH, *target))
    }

    /// All mappings in order.
    pub fn iter(&self) -> impl Iterator<Item = Mapping> + '_ {
        (0..self.len()).filter_map(|number| self.get(number))
    }

    /// Number of the first mapping that ends behind `sector`; [`Index::len`] when there is none.
    #[must_use]
    pub fn find(&self, sector: u64) -> usize {
        // Greater than the place of every mapping that begins at the sector or before, smaller than of all others.
        let key = sector.min(SECTOR_LIMIT) << LENGTH_BITS | MAXIMUM_LENGTH;
        let block = self.sample.partition_point(|place| *place <= key);
        let first = block.saturating_sub(1) * SAMPLE_STEP;
        let window = &self.places[first..self.places.len().min(first + SAMPLE_STEP)];
        let behind = first + window.partition_point(|place| *place <= key);
        match behind.checked_sub(1).and_then(|number| self.get(number)) {
            Some(mapping) if mapping.end() > sector => behind - 1,
            _ => behind,
        }
    }

    /// What a range of sectors holds, in order, without gaps; where nothing is mapped a segment is as long as possible.
    #[must_use]
    pub fn segments(&self, range: Range<u64>) -> Segments<'_> {
        Segments { index: self, number: self.find(range.start), position: range.start, end: range.end }
    }
}

/// The segments of a range.
#[derive(Debug)]
pub struct Segments<'a> {
    index: &'a Index,
    number: usize,
    position: u64,
    end: u64,
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    fn next(&mut self) -> Option<Segment> {
        let start = self.position;
        if start >= self.end {
            return None;
        }
        let found = self.index.get(self.number).and_then(|mapping| mapping.clip(start, self.end));
        let (end, content) = match found {
            Some(mapping) if mapping.offset == start => {
                self.number += 1;
                let content = if mapping.zeroed {
                    Content::Zeroed { tag: mapping.tag }
                } else {
                    Content::Stored { stored: mapping.stored, tag: mapping.tag }
                };
                (mapping.end(), content)
            }
            Some(mapping) => (mapping.offset, Content::Absent),
            None => (self.end, Content::Absent),
        };
        self.position = end;
        Some(Segment { start, end, content })
    }
}

/// Takes mappings in order and makes an index of them.
#[derive(Debug, Default)]
pub struct IndexBuilder {
    places: Vec<u64>,
    targets: Vec<u64>,
}

impl IndexBuilder {
    /// With room for so many mappings.
    #[must_use]
    pub fn with_capacity(mappings: usize) -> Self {
        Self { places: Vec::with_capacity(mappings), targets: Vec::with_capacity(mappings) }
    }

    /// Adds a mapping behind all others.
    ///
    /// # Errors
    /// With what is wrong, when it is empty, too long, or begins before the one before it ends.
    pub fn push(&mut self, mapping: Mapping) -> Result<(), String> {
        let Mapping { offset, length, stored, zeroed, .. } = mapping;
        if length == 0 || length > MAXIMUM_LENGTH || offset > SECTOR_LIMIT - length {
            return Err(format!("{length} sectors at sector {offset} cannot be mapped"));
        }
        if !zeroed && stored > STORED_LIMIT - length {
            return Err(format!("{length} sectors at sector {stored} of a file cannot be said"));
        }
        if offset < self.end() {
            return Err(format!(
                "sector {offset} follows although all up to sector {} came before",
                self.end()
            ));
        }
        self.places.push(offset << LENGTH_BITS | length);
        self.targets.push(mapping.target());
        Ok(())
    }

    /// Number of mappings so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether there is none so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The index of all mappings that were added.
    #[must_use]
    pub fn finish(self) -> Index {
        let sample = self.places.iter().step_by(SAMPLE_STEP).copied().collect();
        Index { places: self.places, targets: self.targets, sample }
    }

    /// First sector behind the last mapping.
    pub(crate) fn end(&self) -> u64 {
        self.places.last().map_or(0, |place| (place >> LENGTH_BITS) + (place & MAXIMUM_LENGTH))
    }
}
