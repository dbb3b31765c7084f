//! The tar archive around a layer in a registry, which makes a layer pass for an ordinary image layer.
//!
//! ```text
//! ours and overlaybd's   0 pax header │ 512 "15 size=634466\n" │ 1024 file header, size 0 │ 1536 layer │ zeros to 512 │ 1024 zeros
//! a plain archive        0 file header with the size           │ 512 layer               │ zeros to 512 │ 1024 zeros
//! ```
//! Only these two forms are read; any other archive is refused by name. Owns no state. Must not know what the layer is.

use crate::{Blob, StorageError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use tar::{EntryType, Header, PaxExtensions};

/// Bytes in front of the layer in an archive that we write.
pub const PREFIX_BYTES: usize = 1536;

const BLOCK_BYTES: usize = 512;
/// Zeros after the last file of an archive.
const END_BYTES: usize = 1024;
const EXTENSION_NAME: &str = "overlaybd.pax";
const PAYLOAD_NAME: &str = "overlaybd.commit";

/// Bytes of another blob, from `start` on.
#[derive(Debug)]
struct Window {
    blob: Arc<dyn Blob>,
    start: u64,
    size: u64,
}

impl Blob for Window {
    fn stored_size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.size) {
            return Err(StorageError::OutOfRange {
                name: self.name(),
                offset,
                length: buffer.len() as u64,
                size: self.size,
            });
        }
        // The window lies inside of the blob.
        self.blob.read_exact_at(buffer, self.start + offset)
    }

    fn name(&self) -> String {
        self.blob.name()
    }
}

/// Whether this first block of a file is a header of a tar archive: it says so and its checksum is right.
#[must_use]
pub fn is_header(block: &[u8; BLOCK_BYTES]) -> bool {
    let header = Header::from_byte_slice(block);
    let sum: u32 = block.iter().enumerate().map(|(at, byte)| counted(at, *byte)).sum();
    header.as_ustar().is_some() && header.cksum().is_ok_and(|stored| stored == sum)
}

/// A byte as the checksum counts it: its own field counts as spaces.
fn counted(at: usize, byte: u8) -> u32 {
    u32::from(if (148..156).contains(&at) { b' ' } else { byte })
}

/// What is inside of the archive; the blob itself when it is none.
///
/// # Errors
/// [`StorageError::Damaged`] when the archive is cut off or contradicts itself; [`StorageError::Unsupported`] when it is
/// an archive of another kind; else the blob's errors.
pub fn unwrap(blob: Arc<dyn Blob>) -> Result<Arc<dyn Blob>, StorageError> {
    let mut block = [0; BLOCK_BYTES];
    if blob.stored_size() < BLOCK_BYTES as u64 {
        return Ok(blob);
    }
    blob.read_exact_at(&mut block, 0)?;
    if !is_header(&block) {
        return Ok(blob);
    }
    let (start, size) = payload(&*blob, &block)?;
    if start.checked_add(size).is_none_or(|end| end > blob.stored_size()) {
        return Err(damaged(
            &*blob,
            format!(
                "the archive says there are {size} bytes at {start}, but it has only {}",
                blob.stored_size()
            ),
        ));
    }
    Ok(Arc::new(Window { blob, start, size }))
}

/// First byte and length of the file in the archive.
fn payload(blob: &dyn Blob, first: &[u8; BLOCK_BYTES]) -> Result<(u64, u64), StorageError> {
    let header = Header::from_byte_slice(first);
    match header.entry_type() {
        EntryType::Regular => Ok((BLOCK_BYTES as u64, size_field(blob, header)?)),
        EntryType::XHeader => {
            let length = size_field(blob, header)?;
            if blob.stored_size() < PREFIX_BYTES as u64 {
                return Err(damaged(blob, "the archive ends inside of its headers".to_owned()));
            }
            let length =
                usize::try_from(length).ok().filter(|length| *length <= BLOCK_BYTES).ok_or_else(|| {
                    unsupported(
                        blob,
                        format!("it is an archive that starts with {length} bytes of extensions"),
                    )
                })?;
            let mut rest = [0; PREFIX_BYTES - BLOCK_BYTES];
            blob.read_exact_at(&mut rest, BLOCK_BYTES as u64)?;
            let (extensions, second) = rest.split_at(BLOCK_BYTES);
            let mut file = [0; BLOCK_BYTES];
            file.copy_from_slice(second);
            if !is_header(&file) {
                return Err(damaged(blob, "the second header of the archive is not one".to_owned()));
            }
            let file = Header::from_byte_slice(&file);
            if file.entry_type() != EntryType::Regular {
                return Err(not_a_layer(blob, file.entry_type()));
            }
            let size = match extended_size(&extensions[..length]).map_err(|what| damaged(blob, what))? {
                Some(size) => size,
                None => size_field(blob, file)?,
            };
            Ok((PREFIX_BYTES as u64, size))
        }
        other => Err(not_a_layer(blob, other)),
    }
}

/// The size that the extensions tell, if they do.
fn extended_size(extensions: &[u8]) -> Result<Option<u64>, String> {
    let mut size = None;
    for extension in PaxExtensions::new(extensions) {
        let extension = extension.map_err(|error| format!("the archive's extensions: {error}"))?;
        if extension.key_bytes() == b"size" {
            let text = String::from_utf8_lossy(extension.value_bytes());
            let parsed = text.parse();
            size = Some(parsed.map_err(|_| format!("the archive says that the size is {text:?}"))?);
        }
    }
    Ok(size)
}

fn size_field(blob: &dyn Blob, header: &Header) -> Result<u64, StorageError> {
    header.entry_size().map_err(|error| damaged(blob, format!("the size in the archive's header: {error}")))
}

fn not_a_layer(blob: &dyn Blob, first: EntryType) -> StorageError {
    unsupported(blob, format!("it is a tar archive, but its first entry ({first:?}) is not a layer"))
}

fn damaged(blob: &dyn Blob, reason: String) -> StorageError {
    StorageError::Damaged { name: blob.name(), reason }
}

fn unsupported(blob: &dyn Blob, reason: String) -> StorageError {
    StorageError::Unsupported { name: blob.name(), reason }
}

/// What stands before a layer of so many bytes. The same for the same size, on every machine and at any time.
///
/// # Errors
/// Never for sizes that a file can have; the tar library's otherwise.
pub fn prefix(payload_bytes: u64) -> io::Result<[u8; PREFIX_BYTES]> {
    let mut bytes = Vec::with_capacity(PREFIX_BYTES);
    let record = size_record(payload_bytes);
    let mut extension = file_header(EXTENSION_NAME, EntryType::XHeader)?;
    extension.set_size(record.len() as u64);
    extension.set_cksum();
    bytes.extend_from_slice(extension.as_bytes());
    bytes.extend_from_slice(record.as_bytes());
    bytes.resize(2 * BLOCK_BYTES, 0);
    let mut file = file_header(PAYLOAD_NAME, EntryType::Regular)?;
    // The real size may be larger than the field; it stands in the extension, and only there.
    file.set_size(0);
    file.set_cksum();
    bytes.extend_from_slice(file.as_bytes());
    bytes.try_into().map_err(|_| io::Error::other("the headers of the archive have the wrong length"))
}

/// What stands after a layer of so many bytes.
#[must_use]
pub fn suffix(payload_bytes: u64) -> Vec<u8> {
    let over = payload_bytes % BLOCK_BYTES as u64;
    let padding = if over == 0 { 0 } else { BLOCK_BYTES - over as usize };
    vec![0; padding + END_BYTES]
}

fn file_header(name: &str, kind: EntryType) -> io::Result<Header> {
    let mut header = Header::new_ustar();
    header.set_path(name)?;
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    Ok(header)
}

/// `LENGTH size=SIZE\n`, where the length counts itself.
fn size_record(size: u64) -> String {
    let rest = format!(" size={size}\n");
    let mut length = rest.len() + 1;
    while format!("{length}{rest}").len() != length {
        length += 1;
    }
    format!("{length}{rest}")
}

/// An archive whose payload is being written: the headers, which have its size, are written at the end.
#[derive(Debug)]
#[must_use = "without its headers it is no archive"]
pub struct Wrapping {
    start: u64,
}

impl Wrapping {
    /// Leaves room for the headers at the output's present position. The payload follows.
    ///
    /// # Errors
    /// Those of the output.
    pub fn begin(output: &mut (impl Write + Seek)) -> io::Result<Self> {
        let start = output.stream_position()?;
        output.write_all(&[0; PREFIX_BYTES])?;
        Ok(Self { start })
    }

    /// Ends the payload where the output stands. The output is left at the end of the archive.
    ///
    /// # Errors
    /// Those of the output, and when it stands before the payload's start.
    pub fn finish(self, output: &mut (impl Write + Seek)) -> io::Result<()> {
        let end = output.stream_position()?;
        let size = end
            .checked_sub(self.start + PREFIX_BYTES as u64)
            .ok_or_else(|| io::Error::other("what was wrapped ends before its start"))?;
        output.write_all(&suffix(size))?;
        let archive_end = output.stream_position()?;
        output.seek(SeekFrom::Start(self.start))?;
        output.write_all(&prefix(size)?)?;
        output.seek(SeekFrom::Start(archive_end))?;
        Ok(())
    }
}

/// Writes the archive around a blob. Returns its length in bytes.
///
/// # Errors
/// Those of the output; what the blob fails with is in the error's source.
pub fn wrap(payload: &Arc<dyn Blob>, output: &mut impl Write) -> io::Result<u64> {
    let size = payload.stored_size();
    let (before, after) = (prefix(size)?, suffix(size));
    output.write_all(&before)?;
    let copied = io::copy(&mut BlobReader { blob: payload.clone(), place: 0 }, output)?;
    output.write_all(&after)?;
    Ok(copied + (before.len() + after.len()) as u64)
}

/// A blob read from its start to its end.
struct BlobReader {
    blob: Arc<dyn Blob>,
    place: u64,
}

impl Read for BlobReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rest = self.blob.stored_size() - self.place;
        let count = usize::try_from(rest).unwrap_or(usize::MAX).min(buffer.len());
        self.blob.read_exact_at(&mut buffer[..count], self.place).map_err(io::Error::other)?;
        self.place += count as u64;
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
