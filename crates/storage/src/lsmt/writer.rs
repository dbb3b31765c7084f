//! Writes a sealed layer from front to back, so that it may go into a file, a compressor or a connection.
//!
//! Adjacent runs are joined up to a length that keeps mappings aligned to 4 KiB. The index is padded to whole blocks of
//! 256 entries, and kept so small that overlaybd reads it. Owns the entries until they are written. Must not decide what
//! is worth being stored.

use crate::StorageError;
use crate::lsmt::entry::{ENTRY_BYTES, Mapping, padding};
use crate::lsmt::header::{FLAG_DATA, FLAG_HEADER, FLAG_SEALED, HEADER_BYTES, Header};
use crate::lsmt::{MAXIMUM_ENTRIES, SECTOR_BYTES};
use crate::raw_file::failed;
use std::io::Write;
use std::path::Path;

/// Longest mapping that is written: the longest there may be, less than 8 MiB, in whole blocks of 4 KiB.
const LONGEST: u64 = 16376;
/// Entries in a block of the index.
const PADDED_TO: u64 = 256;
/// Entries that fit, since padding counts.
const ROOM: u64 = MAXIMUM_ENTRIES / PADDED_TO * PADDED_TO;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerSummary {
    /// Entries of the index, without padding.
    pub entries: u64,
    /// Bytes of data.
    pub data_bytes: u64,
    /// Bytes of everything.
    pub layer_bytes: u64,
}

/// Writes one layer. What was written before an error is of no use.
pub(crate) struct LayerWriter<'a> {
    sink: &'a mut dyn Write,
    /// What the sink is called in messages.
    name: &'a Path,
    header: Header,
    entries: Vec<Mapping>,
    /// Sectors written so far.
    written: u64,
}

impl<'a> LayerWriter<'a> {
    /// Begins with the header. Flags and index of `header` are filled in here.
    pub(crate) fn begin(
        sink: &'a mut dyn Write,
        name: &'a Path,
        header: Header,
    ) -> Result<Self, StorageError> {
        let header = Header { index_offset: 0, index_entries: 0, flags: FLAG_DATA | FLAG_SEALED, ..header };
        let first = Header { flags: FLAG_HEADER | header.flags, ..header.clone() };
        let mut writer = Self { sink, name, header, entries: Vec::new(), written: 0 };
        writer.write(&first.encode())?;
        Ok(writer)
    }

    /// Adds data at byte `offset` of the disk, behind all that was added before. Whole sectors.
    pub(crate) fn data(&mut self, offset: u64, data: &[u8]) -> Result<(), StorageError> {
        let stored = self.written;
        self.write(data)?;
        let mapping = Mapping {
            offset: offset / SECTOR_BYTES,
            length: data.len() as u64 / SECTOR_BYTES,
            stored,
            zeroed: false,
            tag: 0,
        };
        self.map(mapping)
    }

    /// Says that so many bytes at `offset` are zeros, whatever lies below. Whole sectors.
    pub(crate) fn zeros(&mut self, offset: u64, length: u64) -> Result<(), StorageError> {
        let (mut offset, end) = (offset / SECTOR_BYTES, (offset + length) / SECTOR_BYTES);
        while offset < end {
            let length = (end - offset).min(LONGEST);
            self.map(Mapping { offset, length, stored: self.written, zeroed: true, tag: 0 })?;
            offset += length;
        }
        Ok(())
    }

    /// Writes index and trailer.
    pub(crate) fn finish(mut self) -> Result<LayerSummary, StorageError> {
        let entries = std::mem::take(&mut self.entries);
        let data_sectors = self.written - HEADER_BYTES / SECTOR_BYTES;
        let count = entries.len() as u64;
        let padded = count.next_multiple_of(PADDED_TO);
        let trailer = Header {
            index_offset: self.written * SECTOR_BYTES,
            index_entries: padded,
            ..self.header.clone()
        };
        let mut block = Vec::with_capacity((PADDED_TO * ENTRY_BYTES) as usize);
        for entries in entries.chunks(PADDED_TO as usize) {
            block.clear();
            block.extend(entries.iter().flat_map(Mapping::encode));
            for _ in entries.len()..PADDED_TO as usize {
                block.extend(padding());
            }
            self.write(&block)?;
        }
        self.write(&trailer.encode())?;
        self.sink.flush().map_err(|error| failed("write", self.name, error))?;
        Ok(LayerSummary {
            entries: count,
            data_bytes: data_sectors * SECTOR_BYTES,
            layer_bytes: self.written * SECTOR_BYTES,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), StorageError> {
        self.sink.write_all(bytes).map_err(|error| failed("write", self.name, error))?;
        self.written += bytes.len() as u64 / SECTOR_BYTES;
        Ok(())
    }

    /// Adds an entry, or makes the last one longer.
    fn map(&mut self, mapping: Mapping) -> Result<(), StorageError> {
        if let Some(last) = self.entries.last_mut() {
            if mapping.offset < last.end() {
                return Err(self.unsupported(format!(
                    "what is to be written does not come in order: sector {} after all up to {}",
                    mapping.offset,
                    self.entries.last().map_or(0, Mapping::end)
                )));
            }
            let follows = mapping.offset == last.end()
                && mapping.zeroed == last.zeroed
                && mapping.stored == if last.zeroed { last.stored } else { last.stored + last.length };
            if follows && last.length + mapping.length <= LONGEST {
                last.length += mapping.length;
                return Ok(());
            }
        }
        if self.entries.len() as u64 >= ROOM {
            return Err(self.unsupported(format!(
                "it needs more than {ROOM} entries: write it with a coarser granularity"
            )));
        }
        self.entries.push(mapping);
        Ok(())
    }

    fn unsupported(&self, reason: String) -> StorageError {
        StorageError::Unsupported { name: self.name.display().to_string(), reason }
    }
}
