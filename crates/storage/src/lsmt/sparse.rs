//! Reads the writable form in one sparse file: sector `n` of the disk lies in sector `n + 8` of the file, and is mapped
//! where the file has no hole.
//!
//! What was discarded is a hole like what was never written: lower layers show through. Owns nothing.

use crate::StorageError;
use crate::blob::FileBlob;
use crate::contents::Blob;
use crate::index::{Index, IndexBuilder};
use crate::lsmt::SECTOR_BYTES;
use crate::lsmt::entry::{MAXIMUM_LENGTH, Mapping, SECTOR_LIMIT};
use crate::lsmt::header::{FLAG_DATA, FLAG_HEADER, FLAG_SPARSE, HEADER_BYTES, Header};
use crate::lsmt::sealed::FIRST_DATA_SECTOR;

/// Mappings a file may need: 16 bytes of memory each.
const MAXIMUM_MAPPINGS: usize = 1 << 24;

/// Reads the header and asks the filesystem for the holes.
pub(crate) fn read(file: &FileBlob) -> Result<(Header, Index), StorageError> {
    let damaged = |reason: String| StorageError::Damaged { name: file.name(), reason };
    let size = file.stored_size();
    if size < HEADER_BYTES {
        return Err(damaged(format!(
            "it has {size} bytes, less than the {HEADER_BYTES} of a layer's header"
        )));
    }
    let header = Header::read(file, 0, "header")?;
    let flags = FLAG_HEADER | FLAG_DATA | FLAG_SPARSE;
    if header.flags != flags {
        return Err(damaged(format!(
            "its flags are {:#x}, not the {flags:#x} of a sparse layer",
            header.flags
        )));
    }
    let limit = match header.virtual_size {
        0 => SECTOR_LIMIT,
        bytes => bytes / SECTOR_BYTES,
    };
    let mut builder = IndexBuilder::default();
    for extent in file.data_extents()? {
        let start = (extent.start / SECTOR_BYTES).max(FIRST_DATA_SECTOR) - FIRST_DATA_SECTOR;
        let end = extent.end.div_ceil(SECTOR_BYTES).saturating_sub(FIRST_DATA_SECTOR).min(limit);
        // Extents may be told that begin in the sector in which the one before ended.
        let mut offset = start.max(builder.end());
        while offset < end {
            let length = (end - offset).min(MAXIMUM_LENGTH);
            let stored = offset + FIRST_DATA_SECTOR;
            builder.push(Mapping { offset, length, stored, zeroed: false, tag: 0 }).map_err(&damaged)?;
            offset += length;
        }
        if builder.len() > MAXIMUM_MAPPINGS {
            let reason = format!("its data is scattered over more than {MAXIMUM_MAPPINGS} places");
            return Err(StorageError::Unsupported { name: file.name(), reason });
        }
    }
    Ok((header, builder.finish()))
}
