//! One entry of an index: 16 bytes, two words.
//!
//! ```text
//! word 0   offset in the disk: bits 0..50     length: bits 50..64              sectors
//! word 1   offset in the file: bits 0..55     zeroed: bit 55    tag: bits 56..64
//! ```
//! An entry of length 0 at the highest offset is padding. Owns nothing.

/// Bytes of an entry.
pub(crate) const ENTRY_BYTES: u64 = 16;
/// Longest mapping in sectors: 8 MiB less one sector.
pub const MAXIMUM_LENGTH: u64 = (1 << 14) - 1;
/// First sector that cannot be mapped. The one before is the place of padding.
pub const SECTOR_LIMIT: u64 = OFFSET_MASK;

/// First sector of a file that cannot be said.
pub const STORED_LIMIT: u64 = STORED_MASK;

const OFFSET_MASK: u64 = (1 << 50) - 1;
const STORED_MASK: u64 = (1 << 55) - 1;
const ZEROED_BIT: u64 = 1 << 55;

/// A run of sectors of the disk, and where its content is. All numbers are in sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// First sector in the disk.
    pub offset: u64,
    /// Number of sectors, 1 to [`MAXIMUM_LENGTH`].
    pub length: u64,
    /// First sector in the file. Means nothing when `zeroed`.
    pub stored: u64,
    /// The run reads as zeros, whatever lower layers have, and has no data.
    pub zeroed: bool,
    /// In a merged index the position of the layer that has the data, from the bottom; elsewhere it means nothing.
    pub tag: u8,
}

impl Mapping {
    /// First sector of the disk behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// The part that lies in a range of sectors of the disk.
    #[must_use]
    pub fn clip(&self, start: u64, end: u64) -> Option<Self> {
        let (from, to) = (self.offset.max(start), self.end().min(end));
        if from >= to {
            return None;
        }
        let stored = if self.zeroed { self.stored } else { self.stored + (from - self.offset) };
        Some(Self { offset: from, length: to - from, stored, ..*self })
    }

    /// What the second word holds.
    pub(crate) fn target(&self) -> u64 {
        self.stored | if self.zeroed { ZEROED_BIT } else { 0 } | u64::from(self.tag) << 56
    }

    /// The mapping of this place with this second word.
    pub(crate) fn from_parts(offset: u64, length: u64, target: u64) -> Self {
        let [.., tag] = target.to_le_bytes();
        Self { offset, length, stored: target & STORED_MASK, zeroed: target & ZEROED_BIT != 0, tag }
    }

    /// Its 16 bytes.
    pub(crate) fn encode(&self) -> [u8; ENTRY_BYTES as usize] {
        encode_words(self.offset | self.length << 50, self.target())
    }
}

/// The 16 bytes of an entry that maps nothing.
pub(crate) fn padding() -> [u8; ENTRY_BYTES as usize] {
    encode_words(OFFSET_MASK, 0)
}

/// Reads one entry; `None` is padding.
///
/// # Errors
/// With what is wrong, when it maps nothing but is not padding, or ends behind the last sector there can be.
pub(crate) fn decode(bytes: &[u8; ENTRY_BYTES as usize]) -> Result<Option<Mapping>, String> {
    let (first, second) = bytes.split_at(8);
    let word = |half: &[u8]| half.iter().rev().fold(0_u64, |word, byte| word << 8 | u64::from(*byte));
    let (place, target) = (word(first), word(second));
    let (offset, length) = (place & OFFSET_MASK, place >> 50);
    match length {
        0 if offset == OFFSET_MASK => Ok(None),
        0 => Err(format!("it maps no sector at sector {offset}")),
        _ if length > SECTOR_LIMIT - offset => {
            Err(format!("{length} sectors at sector {offset} end behind the last sector there can be"))
        }
        _ => Ok(Some(Mapping::from_parts(offset, length, target))),
    }
}

fn encode_words(first: u64, second: u64) -> [u8; ENTRY_BYTES as usize] {
    let mut bytes = [0; ENTRY_BYTES as usize];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            offset in 0..SECTOR_LIMIT - MAXIMUM_LENGTH, length in 1..=MAXIMUM_LENGTH, stored in 0..=STORED_MASK,
            zeroed in any::<bool>(), tag in any::<u8>(),
        ) {
            let mapping = Mapping { offset, length, stored, zeroed, tag };
            prop_assert_eq!(decode(&mapping.encode()), Ok(Some(mapping)));
        }

        #[test]
        fn any_sixteen_bytes_are_a_mapping_padding_or_an_error(bytes in any::<[u8; 16]>()) {
            if let Ok(Some(mapping)) = decode(&bytes) {
                prop_assert_eq!(mapping.encode(), bytes);
                assert!(mapping.length >= 1 && mapping.end() <= SECTOR_LIMIT);
            }
        }
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let mapping = Mapping { offset: 1048, length: 8, stored: 8, zeroed: false, tag: 0 };
        assert_eq!(mapping.encode(), [0x18, 4, 0, 0, 0, 0, 0x20, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        let zeroed = Mapping { zeroed: true, tag: 3, ..mapping };
        assert_eq!(zeroed.encode()[8..], [8, 0, 0, 0, 0, 0, 0x80, 3]);
        assert_eq!(padding(), [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decode(&padding()), Ok(None));
        assert!(decode(&[0; 16]).is_err());
        assert!(decode(&[0xff; 16]).is_err());
    }

    #[test]
    fn a_clipped_mapping_keeps_its_data_in_place() {
        let mapping = Mapping { offset: 100, length: 10, stored: 50, zeroed: false, tag: 1 };
        assert_eq!(mapping.clip(0, 1000), Some(mapping));
        assert_eq!(mapping.clip(103, 105), Some(Mapping { offset: 103, length: 2, stored: 53, ..mapping }));
        let zeroed = Mapping { zeroed: true, ..mapping };
        assert_eq!(zeroed.clip(103, 200), Some(Mapping { offset: 103, length: 7, stored: 50, ..zeroed }));
        assert_eq!(mapping.clip(110, 200), None);
        assert_eq!(mapping.clip(0, 100), None);
    }
}
