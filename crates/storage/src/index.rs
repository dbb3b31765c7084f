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
use std::fmt;
use std::ops::Range;

const LENGTH_BITS: u32 = 14;
/// Mappings that are shown to people who debug.
const SHOWN_MAPPINGS: usize = 32;
const TAG_SHIFT: u32 = 56;
const TAG_MASK: u64 = 0xff << TAG_SHIFT;
/// Mappings between two samples: eight cache lines of places.
const SAMPLE_STEP: usize = 64;

/// Sorted, disjoint mappings.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Index {
    places: Vec<u64>,
    targets: Vec<u64>,
    sample: Vec<u64>,
}

/// Shows the first mappings only: there may be millions.
impl fmt::Debug for Index {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} mappings ", self.len())?;
        formatter.debug_list().entries(self.iter().take(SHOWN_MAPPINGS)).finish()
    }
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
        // Not the whole mapping: its target would be one more miss of the cache.
        match behind.checked_sub(1).and_then(|number| self.places.get(number)) {
            Some(place) if end_of(*place) > sector => behind - 1,
            _ => behind,
        }
    }

    /// The same up to sector `end`, with another tag.
    pub(crate) fn retagged(&self, tag: u8, end: u64) -> Self {
        let count = self.places.partition_point(|place| place >> LENGTH_BITS < end);
        let (places, targets) = (&self.places[..count], &self.targets[..count]);
        let tag_bits = u64::from(tag) << TAG_SHIFT;
        let mut builder = IndexBuilder {
            places: places.to_vec(),
            targets: targets.iter().map(|target| target & !TAG_MASK | tag_bits).collect(),
        };
        if let Some(last) = builder.places.last_mut() {
            let offset = *last >> LENGTH_BITS;
            let length = (*last & MAXIMUM_LENGTH).min(end - offset);
            *last = offset << LENGTH_BITS | length;
        }
        builder.finish()
    }

    /// Number of the first mapping from `number` on that begins at `sector` or behind. Takes time in proportion to the
    /// logarithm of the distance.
    pub(crate) fn first_from(&self, number: usize, sector: u64) -> usize {
        let before =
            |number: usize| self.places.get(number).is_some_and(|place| place >> LENGTH_BITS < sector);
        let (mut known, mut step) = (number, 1);
        while before(known + step - 1) {
            known += step;
            step *= 2;
        }
        let window = self.places.get(known..self.len().min(known + step)).unwrap_or_default();
        known + window.partition_point(|place| place >> LENGTH_BITS < sector)
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

    /// Adds mappings of an index, by their numbers, behind all others.
    ///
    /// # Errors
    /// As [`IndexBuilder::push`].
    pub(crate) fn extend(&mut self, index: &Index, numbers: Range<usize>) -> Result<(), String> {
        if numbers.is_empty() {
            return Ok(());
        }
        // Those of an index are in order: only the first may come too early.
        if let Some(first) = index.get(numbers.start) {
            self.push(first)?;
        }
        let rest = numbers.start + 1..numbers.end;
        self.places.extend_from_slice(index.places.get(rest.clone()).unwrap_or_default());
        self.targets.extend_from_slice(index.targets.get(rest).unwrap_or_default());
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
        self.places.last().map_or(0, |place| end_of(*place))
    }
}

/// First sector behind the mapping of this place.
fn end_of(place: u64) -> u64 {
    (place >> LENGTH_BITS) + (place & MAXIMUM_LENGTH)
}
