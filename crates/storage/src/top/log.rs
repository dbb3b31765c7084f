//! The log of a top: which blocks changed their state, and what of it is durable. Format and appending.
//!
//! ```text
//! 0      header, 60 bytes, the rest of the block is zero
//!          0 magic "AENVTOP\0"   8 version u32 = 1   12 block size u32 = 4096   16 virtual size u64
//!         24 id of this top [16]   40 id of the top below [16], zeros when it stands on layers   56 CRC u32 of bytes 0..56
//! 4096   records, one after the other, each a multiple of 8 bytes
//!          0 CRC u32   4 length u32 of the record, these 24 bytes included   8 sequence u64, counts from 1   16 kind u32
//!         20 zero u32  24 payload
//!
//!        kind 1 session   boot id [16], random [16]             whoever first opened the top for writing in a boot
//!             2 ranges    { first block u64, blocks u32, state u32 } …
//!             3 commit    sequence u64                           the last record whose data is on the disk
//!             4 sealed    –                                      nothing changes a block after it
//! ```
//! All numbers are little-endian; CRCs are CRC-32C. The CRC of a record goes on from the CRC of the record before it (the
//! first from the header's), so what an earlier life of the file left behind the end is never taken for a record.
//!
//! Owns where the next record goes. Must not know where the data is. Only changes of state are here: to overwrite a block
//! that has data costs nothing.

use super::boot::BootId;
use super::files::StoredFile;
use super::map::{BlockRange, BlockState};
use crate::BLOCK_BYTES;
use std::io;
use std::sync::Arc;

pub(super) const HEADER_BYTES: u64 = 4096;
const HEADER_FIELDS: usize = 60;
const MAGIC: [u8; 8] = *b"AENVTOP\0";
const VERSION: u32 = 1;
pub(super) const RECORD_HEADER_BYTES: usize = 24;
const RANGE_BYTES: usize = 16;
/// A longer record is damage. Batches that do not fit are split.
pub(super) const MAXIMUM_RECORD_BYTES: usize = 64 << 10;
const RANGES_PER_RECORD: usize = (MAXIMUM_RECORD_BYTES - RECORD_HEADER_BYTES) / RANGE_BYTES;

/// The largest virtual disk, in bytes: files of this size are possible on every filesystem we use.
pub(super) const MAXIMUM_DISK_BYTES: u64 = 8 << 40;

/// A random number that is never given twice.
pub(crate) type TopId = [u8; 16];

/// What a top is, fixed when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: TopId,
    pub(crate) parent: TopId,
    /// Virtual size in bytes.
    pub(crate) size: u64,
}

impl Identity {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut header = Vec::with_capacity(HEADER_BYTES as usize);
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((BLOCK_BYTES as u32).to_le_bytes());
        header.extend(self.size.to_le_bytes());
        header.extend(self.id);
        header.extend(self.parent);
        header.extend(crc32c::crc32c(&header).to_le_bytes());
        header.resize(HEADER_BYTES as usize, 0);
        header
    }

    /// The identity, and the CRC that records go on from.
    pub(super) fn decode(header: &[u8; HEADER_BYTES as usize]) -> Result<(Self, u32), HeaderError> {
        let (fields, crc) = header[..HEADER_FIELDS].split_at(HEADER_FIELDS - 4);
        let crc = u32_at(crc, 0);
        if fields[..8] != MAGIC {
            return Err(HeaderError::Damaged("it does not begin as the log of a top does"));
        }
        if crc32c::crc32c(fields) != crc {
            return Err(HeaderError::Damaged("the checksum of its header is wrong"));
        }
        if u32_at(fields, 8) != VERSION || u64::from(u32_at(fields, 12)) != BLOCK_BYTES {
            return Err(HeaderError::Unsupported("it is of another version or block size"));
        }
        let identity =
            Self { size: u64_at(fields, 16), id: bytes_at(fields, 24), parent: bytes_at(fields, 40) };
        if !size_is_valid(identity.size) {
            return Err(HeaderError::Damaged("its virtual size is impossible"));
        }
        Ok((identity, crc))
    }

    pub(super) fn crc(&self) -> u32 {
        u32_at(&self.encode(), HEADER_FIELDS - 4)
    }
}

/// Why a header is not taken.
#[derive(Debug)]
pub(super) enum HeaderError {
    Damaged(&'static str),
    Unsupported(&'static str),
}

pub(crate) fn size_is_valid(size: u64) -> bool {
    size > 0 && size.is_multiple_of(BLOCK_BYTES) && size <= MAXIMUM_DISK_BYTES
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Record {
    Session { boot: BootId, session: [u8; 16] },
    Ranges(Vec<BlockRange>),
    Commit { covers: u64 },
    Sealed,
}

impl Record {
    fn kind(&self) -> u32 {
        match self {
            Self::Session { .. } => 1,
            Self::Ranges(_) => 2,
            Self::Commit { .. } => 3,
            Self::Sealed => 4,
        }
    }

    fn encode_payload(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Session { boot, session } => {
                bytes.extend(boot.bytes());
                bytes.extend(session);
            }
            Self::Ranges(ranges) => ranges.iter().for_each(|range| encode_range(range, bytes)),
            Self::Commit { covers } => bytes.extend(covers.to_le_bytes()),
            Self::Sealed => {}
        }
    }

    /// The record of a payload whose CRC is right, so anything unexpected in it is not a torn write.
    pub(super) fn decode(
        kind: u32,
        payload: &[u8],
        sequence: u64,
        blocks: u64,
    ) -> Result<Self, &'static str> {
        match (kind, payload.len()) {
            (1, 32) => {
                Ok(Self::Session { boot: BootId::new(bytes_at(payload, 0)), session: bytes_at(payload, 16) })
            }
            (2, length) if length.is_multiple_of(RANGE_BYTES) => payload
                .chunks_exact(RANGE_BYTES)
                .map(|range| decode_range(range, blocks))
                .collect::<Result<_, _>>()
                .map(Self::Ranges),
            (3, 8) if u64_at(payload, 0) < sequence => Ok(Self::Commit { covers: u64_at(payload, 0) }),
            (4, 0) => Ok(Self::Sealed),
            _ => Err("a record is of an unknown kind or length"),
        }
    }
}

fn encode_range(range: &BlockRange, bytes: &mut Vec<u8>) {
    bytes.extend(range.first.to_le_bytes());
    // A disk has 2^31 blocks at most.
    bytes.extend((range.count as u32).to_le_bytes());
    bytes.extend(range.state.code().to_le_bytes());
}

fn decode_range(bytes: &[u8], blocks: u64) -> Result<BlockRange, &'static str> {
    let (first, count) = (u64_at(bytes, 0), u64::from(u32_at(bytes, 8)));
    let state = BlockState::from_code(u32_at(bytes, 12)).ok_or("a block has an unknown state")?;
    match first.checked_add(count) {
        Some(end) if end <= blocks && count > 0 => Ok(BlockRange { first, count, state }),
        _ => Err("a range lies outside of the disk"),
    }
}

/// The CRC of a record whose first four bytes are left out.
pub(super) fn record_crc(before: u32, rest: &[u8]) -> u32 {
    crc32c::crc32c_append(before, rest)
}

/// Where the log ends, and how it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LogEnd {
    /// First byte behind the last record.
    pub(super) position: u64,
    /// Sequence of the last record, 0 before the first.
    pub(super) sequence: u64,
    /// CRC of the last record.
    pub(super) crc: u32,
    /// Sequence of the last record that is not a commit.
    pub(super) last_change: u64,
    /// What the last commit covers that is known to be on the disk.
    pub(super) committed: u64,
}

impl LogEnd {
    pub(super) fn of_new_log(identity: &Identity) -> Self {
        Self { position: HEADER_BYTES, sequence: 0, crc: identity.crc(), last_change: 0, committed: 0 }
    }
}

/// A log that is written.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) file: Arc<dyn StoredFile>,
    pub(super) end: LogEnd,
}

impl Log {
    /// Appends one record. When it fails, the log ends where it did: the next record overwrites what was written.
    pub(super) fn append(&mut self, record: &Record) -> io::Result<()> {
        let mut payload = Vec::new();
        record.encode_payload(&mut payload);
        self.append_raw(record.kind(), &payload)?;
        if !matches!(record, Record::Commit { .. }) {
            self.end.last_change = self.end.sequence;
        }
        Ok(())
    }

    pub(super) fn append_raw(&mut self, kind: u32, payload: &[u8]) -> io::Result<()> {
        let end = &mut self.end;
        let sequence = end.sequence + 1;
        let length = RECORD_HEADER_BYTES + payload.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.extend([0; 4]);
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend(sequence.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(payload);
        let crc = record_crc(end.crc, &bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        self.file.write_all_at(&bytes, end.position)?;
        (end.position, end.sequence, end.crc) = (end.position + length as u64, sequence, crc);
        Ok(())
    }

    /// Appends ranges, in as many records as they need. When it fails, the log ends where it did.
    pub(super) fn append_ranges(&mut self, ranges: &[BlockRange]) -> io::Result<()> {
        let before = self.end;
        for part in ranges.chunks(RANGES_PER_RECORD) {
            if let Err(error) = self.append(&Record::Ranges(part.to_vec())) {
                self.end = before;
                return Err(error);
            }
        }
        Ok(())
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(bytes, at))
}

/// The bytes of a field that the caller knows to be there.
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
