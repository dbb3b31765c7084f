//! The block of 4096 bytes that every file of the format begins with, and that a sealed one also ends with.
//!
//! ```text
//!   0  8  "LSMT" 0 1 2 0         48  8  virtual size in bytes
//!   8 16  second magic           56 37  uuid, text and NUL         all zeros: has none
//!  24  4  390, bytes used        93 37  uuid of the parent
//!  28  4  flags                 130  2  reserved
//!  32  8  index: first byte     132  2  version 1.1
//!  40  8  index: entries        134 256 user tag, padded with NUL
//! ```
//! Owns the encoding of this block. Must not judge whether it fits the rest of the file.

use crate::StorageError;
use crate::contents::Blob;
use crate::lsmt::SECTOR_BYTES;
use crate::lsmt::entry::SECTOR_LIMIT;
use uuid::Uuid;

/// Bytes of a header or trailer.
pub(crate) const HEADER_BYTES: u64 = 4096;
/// Bytes a user tag may have.
pub const USER_TAG_BYTES: usize = 256;

/// Set in a header, clear in a trailer.
pub(crate) const FLAG_HEADER: u32 = 1;
/// Set in a file of data, clear in one with an index only.
pub(crate) const FLAG_DATA: u32 = 1 << 1;
/// Nothing will be written any more.
pub(crate) const FLAG_SEALED: u32 = 1 << 2;
/// The writable form in one sparse file.
pub(crate) const FLAG_SPARSE: u32 = 1 << 4;

const MAGIC: [u8; 24] = [
    0x4c, 0x53, 0x4d, 0x54, 0x00, 0x01, 0x02, 0x00, 0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2,
    0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
];
const USED_BYTES: u32 = 390;
const VERSION: [u8; 2] = [1, 1];
const UUID_BYTES: usize = 37;

/// What a header or trailer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) flags: u32,
    /// First byte of the index; 0 in the header of a sealed file.
    pub(crate) index_offset: u64,
    /// Entries of the index, padding included.
    pub(crate) index_entries: u64,
    /// Bytes of the disk. 0: as large as the layers below.
    pub(crate) virtual_size: u64,
    pub(crate) uuid: Option<Uuid>,
    pub(crate) parent: Option<Uuid>,
    /// Without the padding.
    pub(crate) user_tag: Vec<u8>,
}

impl Header {
    /// Reads the block at byte `offset` of a file. `what` names it in messages.
    pub(crate) fn read(blob: &dyn Blob, offset: u64, what: &str) -> Result<Self, StorageError> {
        let mut block = [0; HEADER_BYTES as usize];
        blob.read_exact_at(&mut block, offset)?;
        Self::decode(&block).map_err(|fault| fault.of(blob, format_args!("the {what} at byte {offset}")))
    }

    /// Whether a file begins with the magic of a header.
    pub(crate) fn begins(start: &[u8]) -> bool {
        start.starts_with(&MAGIC)
    }

    pub(crate) fn decode(block: &[u8; HEADER_BYTES as usize]) -> Result<Self, Fault> {
        if !Self::begins(block) {
            return Err(Fault::Damaged("does not have the magic of a layer".to_owned()));
        }
        let used = number(&block[24..28]);
        if used != u64::from(USED_BYTES) {
            return Err(Fault::Damaged(format!("says that it has {used} bytes, not {USED_BYTES}")));
        }
        if block[132] != VERSION[0] {
            return Err(Fault::Unsupported(format!("has version {}.{}, not 1", block[132], block[133])));
        }
        let virtual_size = number(&block[48..56]);
        if virtual_size > SECTOR_LIMIT * SECTOR_BYTES || !virtual_size.is_multiple_of(SECTOR_BYTES) {
            return Err(Fault::Damaged(format!(
                "has a virtual size of {virtual_size} bytes, which is not a multiple of {SECTOR_BYTES} up to {}",
                SECTOR_LIMIT * SECTOR_BYTES
            )));
        }
        let tag = &block[134..134 + USER_TAG_BYTES];
        let tag_length = tag.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Ok(Self {
            flags: block[28..32].iter().rev().fold(0, |flags, byte| flags << 8 | u32::from(*byte)),
            index_offset: number(&block[32..40]),
            index_entries: number(&block[40..48]),
            virtual_size,
            uuid: decode_uuid(&block[56..56 + UUID_BYTES], "uuid")?,
            parent: decode_uuid(&block[93..93 + UUID_BYTES], "parent's uuid")?,
            user_tag: tag[..tag_length].to_vec(),
        })
    }

    /// The block. The user tag must not be longer than [`USER_TAG_BYTES`]: what is too much is left out.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES as usize] {
        let mut block = [0; HEADER_BYTES as usize];
        block[..24].copy_from_slice(&MAGIC);
        block[24..28].copy_from_slice(&USED_BYTES.to_le_bytes());
        block[28..32].copy_from_slice(&self.flags.to_le_bytes());
        block[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_entries.to_le_bytes());
        block[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        encode_uuid(&mut block[56..92], self.uuid);
        encode_uuid(&mut block[93..129], self.parent);
        block[132..134].copy_from_slice(&VERSION);
        for (byte, from) in block[134..134 + USER_TAG_BYTES].iter_mut().zip(&self.user_tag) {
            *byte = *from;
        }
        block
    }

    /// Whether all of these flags are set.
    pub(crate) fn has(&self, flags: u32) -> bool {
        self.flags & flags == flags
    }
}

/// What is wrong with a block, before it is known whose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    Damaged(String),
    Unsupported(String),
}

impl Fault {
    pub(crate) fn of(self, blob: &dyn Blob, place: impl std::fmt::Display) -> StorageError {
        let name = blob.name();
        match self {
            Self::Damaged(reason) => StorageError::Damaged { name, reason: format!("{place} {reason}") },
            Self::Unsupported(reason) => {
                StorageError::Unsupported { name, reason: format!("{place} {reason}") }
            }
        }
    }
}

/// A little-endian number of up to eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn decode_uuid(field: &[u8], what: &str) -> Result<Option<Uuid>, Fault> {
    if field.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let fault = || Fault::Damaged(format!("has a {what} that is none"));
    let (text, end) = field.split_at(UUID_BYTES - 1);
    // Exactly the form with hyphens has this length among those the parser takes.
    let uuid = Uuid::try_parse_ascii(text).map_err(|_| fault())?;
    if end != [0] {
        return Err(fault());
    }
    Ok((!uuid.is_nil()).then_some(uuid))
}

fn encode_uuid(field: &mut [u8], uuid: Option<Uuid>) {
    let text = uuid.unwrap_or(Uuid::nil()).hyphenated().to_string();
    field.copy_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop_assert_eq, proptest};

    fn example() -> Header {
        Header {
            flags: FLAG_HEADER | FLAG_DATA | FLAG_SEALED,
            index_offset: 8192,
            index_entries: 256,
            virtual_size: 1 << 30,
            uuid: Some(Uuid::from_u128(0x2222_2222_2222_2222_2222_2222_2222_2222)),
            parent: None,
            user_tag: b"what it is for".to_vec(),
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let header = example();
        assert_eq!(Header::decode(&header.encode()), Ok(header.clone()));
        let upper: Vec<u8> = header.encode().iter().map(u8::to_ascii_uppercase).collect();
        assert!(upper.starts_with(b"LSMT"));
        let full = Header { user_tag: vec![b'x'; USER_TAG_BYTES], ..header };
        assert_eq!(Header::decode(&full.encode()), Ok(full));
    }

    #[test]
    fn every_checked_field_is_checked() {
        let good = example().encode();
        let with = |at: usize, bytes: &[u8]| {
            let mut block = good;
            block[at..at + bytes.len()].copy_from_slice(bytes);
            Header::decode(&block)
        };
        for (at, byte) in good.iter().enumerate().take(24) {
            assert!(matches!(with(at, &[byte ^ 1]), Err(Fault::Damaged(_))), "byte {at}");
        }
        assert!(matches!(with(24, &391_u32.to_le_bytes()), Err(Fault::Damaged(_))));
        assert!(matches!(with(132, &[2]), Err(Fault::Unsupported(_))));
        for size in [1, 511, 513, (1 << 59) + 512, u64::MAX - 511, u64::MAX] {
            assert!(matches!(with(48, &size.to_le_bytes()), Err(Fault::Damaged(_))), "{size}");
        }
        assert!(matches!(with(56, b"g"), Err(Fault::Damaged(_))));
        assert!(matches!(with(92, b"x"), Err(Fault::Damaged(_))));
        assert!(matches!(with(101, b"0"), Err(Fault::Damaged(_))));
        assert_eq!(with(93, &[0; 37]).unwrap().parent, None);
        assert_eq!(
            with(93, b"ABCDEFAB-0000-0000-0000-00000000000a").unwrap().parent.unwrap().as_u128() & 0xf,
            10
        );
    }

    proptest! {
        #[test]
        fn any_block_is_a_header_or_an_error(bytes in any::<[u8; 32]>(), at in 24_usize..390, keep in 0_usize..32) {
            let mut block = example().encode();
            block[at..at + keep].copy_from_slice(&bytes[..keep]);
            if let Ok(header) = Header::decode(&block) {
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }
    }
}
