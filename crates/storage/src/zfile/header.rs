//! The 512 bytes at the start and at the end of a zfile; the picture is in the parent module.
//!
//! ```text
//! while it is written  header: flags 0x13, no fields        no trailer
//! complete             header: flags 0x13 or, overwritten,  trailer: flags 0x16, all fields
//!                      0x1B with all fields of the trailer
//! ```
//! Owns no state. Trusts nothing: every field is checked against the format and the size of the file.

use super::codec::{Algorithm, raw_crc};
use super::{HEADER_BYTES, MAX_BLOCK_BYTES, MAX_BLOCKS, MIN_BLOCK_BYTES};
use crate::StorageError;

const MAGIC: [u8; 24] = *b"ZFile\0\x01\0tuji.yyf@Alibaba";
/// Value of the field `size`: bytes that have a meaning.
const USED_BYTES: u32 = 96;

const FLAG_HEADER: u64 = 1 << 0;
const FLAG_DATA: u64 = 1 << 1;
const FLAG_SEALED: u64 = 1 << 2;
const FLAG_OVERWRITTEN: u64 = 1 << 3;
const FLAG_DIGEST: u64 = 1 << 4;
const FLAG_INDEX_COMPRESSED: u64 = 1 << 5;

const AT_USED: usize = 24;
const AT_DIGEST: usize = 28;
const AT_FLAGS: usize = 32;
const AT_INDEX_OFFSET: usize = 40;
const AT_BLOCKS: usize = 48;
const AT_ORIGINAL_SIZE: usize = 56;
const AT_INDEX_CRC: usize = 64;
const AT_BLOCK_BYTES: usize = 72;
const AT_ALGORITHM: usize = 76;
const AT_LEVEL: usize = 77;
const AT_DICTIONARY: usize = 78;
const AT_DICTIONARY_BYTES: usize = 84;
const AT_RECORDS_HAVE_CRC: usize = 88;

/// Whether these first bytes of a file are those of a zfile.
#[must_use]
pub fn has_magic(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

/// Which of the two it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Header,
    Trailer,
}

/// What header and trailer say of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// First byte of the index.
    pub(super) index_offset: u64,
    /// Number of records.
    pub(super) blocks: u64,
    /// Uncompressed size in bytes.
    pub(super) original_size: u64,
    pub(super) index_crc: u32,
    /// Uncompressed size of every block but the last, in bytes.
    pub(super) block_bytes: u32,
    pub(super) algorithm: Algorithm,
    pub(super) level: u8,
    pub(super) records_have_crc: bool,
}

/// One of the two blocks, with a good magic, size and digest; its fields are not judged yet.
pub(super) struct Parsed<'a> {
    bytes: &'a [u8; HEADER_BYTES],
    flags: u64,
    place: &'static str,
    name: &'a str,
}

impl<'a> Parsed<'a> {
    /// Judges what both have in common.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when it is not what it should be or its digest is wrong.
    pub(super) fn new(
        bytes: &'a [u8; HEADER_BYTES],
        role: Role,
        name: &'a str,
    ) -> Result<Self, StorageError> {
        let place = match role {
            Role::Header => "the zfile header",
            Role::Trailer => "the zfile trailer",
        };
        let parsed = Self { bytes, flags: u64_at(bytes, AT_FLAGS), place, name };
        if !has_magic(bytes) {
            return Err(parsed.damaged("does not start with the magic bytes"));
        }
        let used = u32_at(bytes, AT_USED);
        if used != USED_BYTES {
            return Err(parsed.damaged(&format!("says it has {used} bytes instead of {USED_BYTES}")));
        }
        if parsed.flag(FLAG_DIGEST) {
            let (stored, found) = (u32_at(bytes, AT_DIGEST), digest(bytes));
            if stored != found {
                return Err(parsed.damaged(&format!("has digest {stored:08x}, its bytes have {found:08x}")));
            }
        }
        let (is_header, is_data) = (parsed.flag(FLAG_HEADER), parsed.flag(FLAG_DATA));
        let sealed = role == Role::Header || parsed.flag(FLAG_SEALED);
        if is_header != (role == Role::Header) || !is_data || !sealed {
            return Err(parsed.damaged(&format!("has flags {:#x}, which do not belong there", parsed.flags)));
        }
        Ok(parsed)
    }

    /// Whether the header got the trailer's fields after all was written.
    pub(super) fn is_overwritten(&self) -> bool {
        self.flag(FLAG_OVERWRITTEN)
    }

    /// Judges the fields against the format and the file's size.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when they cannot be true, [`StorageError::Unsupported`] when they may be.
    pub(super) fn layout(&self, stored_size: u64) -> Result<Layout, StorageError> {
        let bytes = self.bytes;
        if self.flag(FLAG_INDEX_COMPRESSED) {
            return Err(self.unsupported("says that the index is compressed"));
        }
        if bytes[AT_DICTIONARY] != 0 || u32_at(bytes, AT_DICTIONARY_BYTES) != 0 {
            return Err(self.unsupported("says that there is a dictionary"));
        }
        let number = bytes[AT_ALGORITHM];
        let algorithm = Algorithm::from_number(number)
            .ok_or_else(|| self.unsupported(&format!("names compression {number}; 1 is lz4, 2 is zstd")))?;
        let block_bytes = u32_at(bytes, AT_BLOCK_BYTES);
        if !block_bytes.is_power_of_two() || !(MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&block_bytes) {
            return Err(self.unsupported(&format!(
                "says blocks have {block_bytes} bytes; powers of two from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES} are known"
            )));
        }
        let records_have_crc = match bytes[AT_RECORDS_HAVE_CRC] {
            0 => false,
            1 => true,
            other => return Err(self.damaged(&format!("says {other} where 1 means checksums and 0 none"))),
        };
        let layout = Layout {
            index_offset: u64_at(bytes, AT_INDEX_OFFSET),
            blocks: u64_at(bytes, AT_BLOCKS),
            original_size: u64_at(bytes, AT_ORIGINAL_SIZE),
            index_crc: u32_at(bytes, AT_INDEX_CRC),
            block_bytes,
            algorithm,
            level: bytes[AT_LEVEL],
            records_have_crc,
        };
        self.judge_sizes(&layout, stored_size)?;
        Ok(layout)
    }

    fn judge_sizes(&self, layout: &Layout, stored_size: u64) -> Result<(), StorageError> {
        let needed = layout.original_size.div_ceil(u64::from(layout.block_bytes));
        if layout.blocks != needed {
            return Err(self.damaged(&format!(
                "says {} blocks for {} bytes in blocks of {}, which are {needed}",
                layout.blocks, layout.original_size, layout.block_bytes
            )));
        }
        if layout.blocks > MAX_BLOCKS {
            return Err(
                self.unsupported(&format!("says {} blocks; at most {MAX_BLOCKS} are taken", layout.blocks))
            );
        }
        let trailer_offset = stored_size.saturating_sub(HEADER_BYTES as u64);
        let index_end = layout.index_offset.checked_add(layout.blocks * 4);
        if layout.index_offset < HEADER_BYTES as u64 || index_end.is_none_or(|end| end > trailer_offset) {
            return Err(self.damaged(&format!(
                "says the index has {} entries at {}, which is not inside of the file's {stored_size} bytes",
                layout.blocks, layout.index_offset
            )));
        }
        Ok(())
    }

    fn flag(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    fn damaged(&self, what: &str) -> StorageError {
        StorageError::Damaged { name: self.name.to_owned(), reason: format!("{} {what}", self.place) }
    }

    fn unsupported(&self, what: &str) -> StorageError {
        StorageError::Unsupported { name: self.name.to_owned(), reason: format!("{} {what}", self.place) }
    }
}

impl Layout {
    /// The bytes of the header (as it is overwritten at the end) or trailer.
    pub(super) fn encode(&self, role: Role) -> [u8; HEADER_BYTES] {
        let flags = match role {
            Role::Header => FLAG_HEADER | FLAG_DATA | FLAG_OVERWRITTEN | FLAG_DIGEST,
            Role::Trailer => FLAG_DATA | FLAG_SEALED | FLAG_DIGEST,
        };
        self.encode_with(flags)
    }

    /// The bytes of the header of a file that is not complete yet: no reader takes it.
    pub(super) fn encode_unfinished(&self) -> [u8; HEADER_BYTES] {
        let nothing = Self { index_offset: 0, blocks: 0, original_size: 0, index_crc: 0, ..*self };
        nothing.encode_with(FLAG_HEADER | FLAG_DATA | FLAG_DIGEST)
    }

    fn encode_with(&self, flags: u64) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(AT_USED, &USED_BYTES.to_le_bytes());
        put(AT_FLAGS, &flags.to_le_bytes());
        put(AT_INDEX_OFFSET, &self.index_offset.to_le_bytes());
        put(AT_BLOCKS, &self.blocks.to_le_bytes());
        put(AT_ORIGINAL_SIZE, &self.original_size.to_le_bytes());
        put(AT_INDEX_CRC, &self.index_crc.to_le_bytes());
        put(AT_BLOCK_BYTES, &self.block_bytes.to_le_bytes());
        put(AT_ALGORITHM, &[self.algorithm.number()]);
        put(AT_LEVEL, &[self.level]);
        put(AT_RECORDS_HAVE_CRC, &[u8::from(self.records_have_crc)]);
        let digest = digest(&bytes);
        bytes[AT_DIGEST..AT_DIGEST + 4].copy_from_slice(&digest.to_le_bytes());
        bytes
    }
}

/// The CRC of all bytes, with that of the digest itself as zeros.
fn digest(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let before = raw_crc(&bytes[..AT_DIGEST], 0);
    raw_crc(&bytes[AT_DIGEST + 4..], raw_crc(&[0; 4], before))
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut field = [0; 4];
    field.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(field)
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}
