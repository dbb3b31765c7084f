//! Reads a sealed layer: committed to a new file, or sealed in place.
//!
//! The trailer counts; of the header only magic and kind are looked at, for the header of a file that was sealed in place
//! still says that it is written. Every mapping must lie in the data before it is believed. Owns nothing.

use crate::StorageError;
use crate::contents::Blob;
use crate::index::{Index, IndexBuilder};
use crate::lsmt::entry::{ENTRY_BYTES, Mapping, decode};
use crate::lsmt::header::{FLAG_DATA, FLAG_HEADER, FLAG_SEALED, FLAG_SPARSE, HEADER_BYTES, Header};
use crate::lsmt::{MAXIMUM_ENTRIES, SECTOR_BYTES};

/// Entries that are read at once.
const BATCH_ENTRIES: u64 = 4096;
/// First sector of a file that may hold data.
pub(crate) const FIRST_DATA_SECTOR: u64 = HEADER_BYTES / SECTOR_BYTES;

/// A sealed layer as its file describes it.
#[derive(Debug)]
pub(crate) struct Sealed {
    pub(crate) trailer: Header,
    pub(crate) index: Index,
    /// It was written as a whole, not sealed in place.
    pub(crate) committed: bool,
}

/// Reads and checks all but the data.
pub(crate) fn read(blob: &dyn Blob) -> Result<Sealed, StorageError> {
    let damaged = |reason: String| StorageError::Damaged { name: blob.name(), reason };
    let size = blob.stored_size();
    if size < HEADER_BYTES {
        return Err(damaged(format!(
            "it has {size} bytes, less than the {HEADER_BYTES} of a layer's header"
        )));
    }
    let header = Header::read(blob, 0, "header")?;
    if !header.has(FLAG_HEADER) {
        return Err(damaged("it begins with a trailer instead of a header".to_owned()));
    }
    let trailer_offset = size - HEADER_BYTES;
    if trailer_offset < HEADER_BYTES {
        return Err(
            not_sealed(blob, &header).unwrap_or_else(|| damaged("it ends before its trailer".to_owned()))
        );
    }
    let trailer = match Header::read(blob, trailer_offset, "trailer") {
        Err(error @ StorageError::Damaged { .. }) => return Err(not_sealed(blob, &header).unwrap_or(error)),
        read => read?,
    };
    if trailer.has(FLAG_HEADER) || !trailer.has(FLAG_DATA | FLAG_SEALED) {
        return Err(damaged(format!("its trailer has the flags {:#x} of something else", trailer.flags)));
    }
    let index = read_index(blob, &trailer, trailer_offset)?;
    Ok(Sealed { index, committed: header.has(FLAG_SEALED), trailer })
}

/// What to say of a file without a trailer whose header does not promise one.
fn not_sealed(blob: &dyn Blob, header: &Header) -> Option<StorageError> {
    let reason = match header.flags & (FLAG_DATA | FLAG_SEALED | FLAG_SPARSE) {
        FLAG_DATA => {
            "it is the data of a writable layer that was not sealed: open it together with its index"
        }
        0 => "it is the index of a writable layer: open it together with its data",
        flags if flags & FLAG_SEALED == 0 => {
            "it is a sparse writable layer that was not sealed: open it as such"
        }
        _ => return None,
    };
    Some(StorageError::Unsupported { name: blob.name(), reason: reason.to_owned() })
}

fn read_index(blob: &dyn Blob, trailer: &Header, trailer_offset: u64) -> Result<Index, StorageError> {
    let damaged = |reason: String| StorageError::Damaged { name: blob.name(), reason };
    let (offset, entries) = (trailer.index_offset, trailer.index_entries);
    if offset < HEADER_BYTES || offset > trailer_offset {
        return Err(damaged(format!(
            "its index is said to begin at byte {offset}, outside of {HEADER_BYTES} to {trailer_offset}"
        )));
    }
    if entries > (trailer_offset - offset) / ENTRY_BYTES {
        return Err(damaged(format!(
            "its index is said to have {entries} entries, but there are {} bytes for it",
            trailer_offset - offset
        )));
    }
    if entries > MAXIMUM_ENTRIES {
        let reason = format!("its index has {entries} entries, more than {MAXIMUM_ENTRIES}");
        return Err(StorageError::Unsupported { name: blob.name(), reason });
    }
    let data_end = offset / SECTOR_BYTES;
    // At most a million, and the file has as many bytes as that takes.
    let mut builder = IndexBuilder::with_capacity(entries as usize);
    for_each_entry(blob, offset, entries, |number, mapping| {
        check_place(&mapping, data_end)
            .and_then(|()| builder.push(mapping))
            .map_err(|reason| damaged(format!("entry {number} of its index is wrong: {reason}")))
    })?;
    Ok(builder.finish())
}

fn check_place(mapping: &Mapping, data_end: u64) -> Result<(), String> {
    let Mapping { stored, length, .. } = *mapping;
    // `stored` has 55 bits and `length` 14: the sum fits.
    if !mapping.zeroed && (stored < FIRST_DATA_SECTOR || stored + length > data_end) {
        return Err(format!(
            "{length} sectors at {stored} are not all inside of the data, {FIRST_DATA_SECTOR} to {data_end}"
        ));
    }
    Ok(())
}

/// Hands out the entries at byte `offset` of a file in order, with their numbers, padding left out.
pub(crate) fn for_each_entry(
    blob: &dyn Blob,
    offset: u64,
    entries: u64,
    mut take: impl FnMut(u64, Mapping) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let mut buffer = vec![0; (entries.min(BATCH_ENTRIES) * ENTRY_BYTES) as usize];
    let mut number = 0;
    while number < entries {
        let batch = (entries - number).min(BATCH_ENTRIES);
        let bytes = &mut buffer[..(batch * ENTRY_BYTES) as usize];
        blob.read_exact_at(bytes, offset + number * ENTRY_BYTES)?;
        let (raw_entries, _) = bytes.as_chunks();
        for raw in raw_entries {
            let decoded = decode(raw).map_err(|reason| StorageError::Damaged {
                name: blob.name(),
                reason: format!("entry {number} of its index is wrong: {reason}"),
            })?;
            if let Some(mapping) = decoded {
                take(number, mapping)?;
            }
            number += 1;
        }
    }
    Ok(())
}
