//! Reads the writable, log-structured form: a file of data and a log of index entries, later ones over earlier ones.
//!
//! The format has neither checksums nor commit marks. A rest of less than an entry at the end of the log is a torn write
//! and ignored; data that is missing at the end of the file reads as zeros. Owns nothing.

use crate::StorageError;
use crate::contents::Blob;
use crate::index::{Index, IndexBuilder};
use crate::lsmt::entry::{ENTRY_BYTES, Mapping, STORED_LIMIT};
use crate::lsmt::header::{FLAG_DATA, FLAG_HEADER, FLAG_SEALED, FLAG_SPARSE, HEADER_BYTES, Header};
use crate::lsmt::sealed::{FIRST_DATA_SECTOR, for_each_entry};
use std::collections::BTreeMap;

/// Mappings that may be in force after the whole log: about 300 MB while it is read.
const MAXIMUM_LIVE: usize = 1 << 22;
/// Every flag there may be. Others mark private forms of other programs.
const KNOWN_FLAGS: u32 = FLAG_HEADER | FLAG_DATA | FLAG_SEALED | FLAG_SPARSE;

/// Reads both headers and the whole log. The header is the one of the data.
pub(crate) fn read(data: &dyn Blob, log: &dyn Blob) -> Result<(Header, Index), StorageError> {
    let header = read_header(data, "data", FLAG_HEADER | FLAG_DATA)?;
    let log_header = read_header(log, "index", FLAG_HEADER)?;
    let damaged = |reason: String| StorageError::Damaged { name: log.name(), reason };
    if log_header.uuid != header.uuid {
        return Err(damaged(format!("it belongs to other data than {}: the uuids differ", data.name())));
    }
    if log_header.index_offset != HEADER_BYTES {
        return Err(damaged(format!(
            "its entries are said to begin at byte {}, not {HEADER_BYTES}",
            log_header.index_offset
        )));
    }
    let entries = log.stored_size().saturating_sub(HEADER_BYTES) / ENTRY_BYTES;
    let mut live = BTreeMap::new();
    for_each_entry(log, HEADER_BYTES, entries, |number, mapping| {
        if !mapping.zeroed
            && (mapping.stored < FIRST_DATA_SECTOR || mapping.stored > STORED_LIMIT - mapping.length)
        {
            return Err(damaged(format!(
                "entry {number} of it says that data is at sector {}, where none can be",
                mapping.stored
            )));
        }
        overwrite(&mut live, mapping);
        if live.len() > MAXIMUM_LIVE {
            let reason = format!("more than {MAXIMUM_LIVE} mappings are in force in it");
            return Err(StorageError::Unsupported { name: log.name(), reason });
        }
        Ok(())
    })?;
    let mut builder = IndexBuilder::with_capacity(live.len());
    for mapping in live.into_values() {
        builder.push(mapping).map_err(&damaged)?;
    }
    Ok((header, builder.finish()))
}

fn read_header(blob: &dyn Blob, what: &str, flags: u32) -> Result<Header, StorageError> {
    let size = blob.stored_size();
    if size < HEADER_BYTES {
        let reason = format!("it has {size} bytes, less than the {HEADER_BYTES} of a layer's header");
        return Err(StorageError::Damaged { name: blob.name(), reason });
    }
    let header = Header::read(blob, 0, "header")?;
    if header.flags & !KNOWN_FLAGS != 0 {
        let reason = format!("it has the flags {:#x}, some of which are not known", header.flags);
        return Err(StorageError::Unsupported { name: blob.name(), reason });
    }
    if header.flags != flags {
        let reason = format!(
            "its flags are {:#x}, not the {flags:#x} of the {what} of a writable layer",
            header.flags
        );
        return Err(StorageError::Damaged { name: blob.name(), reason });
    }
    Ok(header)
}

/// Puts a mapping over all that were before.
fn overwrite(live: &mut BTreeMap<u64, Mapping>, mapping: Mapping) {
    let (start, end) = (mapping.offset, mapping.end());
    if let Some((_, before)) = live.range(..start).next_back()
        && before.end() > start
    {
        let before = *before;
        live.extend(before.clip(before.offset, start).map(|left| (left.offset, left)));
        live.extend(before.clip(end, before.end()).map(|right| (right.offset, right)));
    }
    while let Some((&offset, hidden)) = live.range(start..end).next() {
        let hidden = *hidden;
        live.remove(&offset);
        live.extend(hidden.clip(end, hidden.end()).map(|right| (right.offset, right)));
    }
    live.insert(start, mapping);
}
