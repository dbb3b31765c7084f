//! Raw disk images in files: read as an [`Image`], and written from one, with holes where there is nothing.
//!
//! Owns the open file and where its data is. Must not know layers.

use crate::blob::{FileBlob, check_range};
use crate::commit::is_zero;
use crate::raw_file::failed;
use crate::{BLOCK_BYTES, Blob, Image, StorageError};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes read and written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// A raw image that nobody writes. A file that is not a multiple of [`BLOCK_BYTES`] reads as if zeros followed.
#[derive(Debug)]
pub struct RawImage {
    file: FileBlob,
    /// Parts that are not holes, in order, in bytes.
    extents: Vec<Range<u64>>,
    size: u64,
}

impl RawImage {
    /// Opens a file and finds its holes.
    ///
    /// # Errors
    /// When there is no such regular file or it cannot be read.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        let file = FileBlob::open(path)?;
        let extents = file.data_extents()?;
        let size = file.stored_size().checked_next_multiple_of(BLOCK_BYTES).ok_or_else(|| {
            StorageError::Unsupported {
                name: file.name(),
                reason: format!("{} bytes are too many", file.stored_size()),
            }
        })?;
        Ok(Self { file, extents, size })
    }

    /// Bytes that are not in holes.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.extents.iter().map(|extent| extent.end - extent.start).sum()
    }
}

impl Image for RawImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        check_range(|| self.file.name(), self.size, offset, buffer.len() as u64)?;
        // At most the buffer's length.
        let there = self.file.stored_size().saturating_sub(offset).min(buffer.len() as u64) as usize;
        let (stored, behind) = buffer.split_at_mut(there);
        behind.fill(0);
        if stored.is_empty() { Ok(()) } else { self.file.read_exact_at(stored, offset) }
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        let first = self.extents.partition_point(|extent| extent.end <= offset);
        Ok(self.extents.get(first).map(|extent| extent.start.max(offset)..extent.end))
    }
}

/// Writes all of an image into an empty file, with holes for what is zeros. Returns the bytes that were written. The file is
/// called `name` in messages, and not made durable.
///
/// # Errors
/// When the image cannot be read or the file not be written.
pub fn write_raw(image: &dyn Image, file: &File, name: &Path) -> Result<u64, StorageError> {
    let unwritable = |error| failed("write", name, error);
    file.set_len(image.size()).map_err(unwritable)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut place, mut written) = (0, 0);
    while let Some(run) = image.next_data(place)? {
        place = run.start;
        while place < run.end {
            let count = (run.end - place).min(BUFFER_BYTES as u64);
            let piece = &mut buffer[..count as usize];
            image.read_at(piece, place)?;
            written += write_nonzero(file, piece, place).map_err(unwritable)?;
            place += count;
        }
    }
    Ok(written)
}

/// Writes the blocks that are not all zeros, neighbours together.
fn write_nonzero(file: &File, piece: &[u8], place: u64) -> std::io::Result<u64> {
    let blocks: Vec<&[u8]> = piece.chunks(BLOCK_BYTES as usize).collect();
    let (mut start, mut written) = (0, 0);
    for group in blocks.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
        let end = start + group.iter().map(|block| block.len()).sum::<usize>();
        if !group.first().is_none_or(|block| is_zero(block)) {
            file.write_all_at(&piece[start..end], place + start as u64)?;
            written += (end - start) as u64;
        }
        start = end;
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn sparse(path: &Path, size: u64, data: &[(u64, &[u8])]) {
        let file = File::create(path).unwrap();
        file.set_len(size).unwrap();
        for (offset, bytes) in data {
            file.write_all_at(bytes, *offset).unwrap();
        }
    }

    #[test]
    fn holes_are_not_read_and_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let (path, copy) = (directory.path().join("raw"), directory.path().join("copy"));
        sparse(&path, 1 << 32, &[(8192, &[1; 4096]), (1 << 31, &[0; 65536]), ((1 << 31) + 100, &[2; 5])]);
        let image = RawImage::open(&path).unwrap();
        assert_eq!(image.size(), 1 << 32);
        assert!(image.data_bytes() < 1 << 20);
        let file = File::options().read(true).write(true).create_new(true).open(&copy).unwrap();
        assert_eq!(write_raw(&image, &file, &copy).unwrap(), 8192, "one block each");
        let metadata = file.metadata().unwrap();
        assert_eq!(metadata.len(), 1 << 32);
        assert!(metadata.blocks() * 512 < 1 << 20);
        let again = RawImage::open(&copy).unwrap();
        for offset in [0, 8192, 12288, 1 << 31, (1 << 31) + 65536, (1 << 32) - 4096] {
            let (mut one, mut other) = ([9; 4096], [8; 4096]);
            image.read_at(&mut one, offset).unwrap();
            again.read_at(&mut other, offset).unwrap();
            assert_eq!(one, other, "{offset}");
        }
    }

    #[test]
    fn the_end_of_an_odd_file_is_filled_with_zeros() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("raw");
        std::fs::write(&path, [3; 5000]).unwrap();
        let image = RawImage::open(&path).unwrap();
        assert_eq!(image.size(), 8192);
        let mut buffer = [9; 4096];
        image.read_at(&mut buffer, 4096).unwrap();
        assert_eq!((buffer[903], buffer[904], buffer[4095]), (3, 0, 0));
        image.read_at(&mut buffer[..100], 8000).unwrap();
        assert_eq!(buffer[..100], [0; 100]);
        assert!(matches!(image.read_at(&mut buffer, 4097), Err(StorageError::OutOfRange { .. })));
        assert!(RawImage::open(directory.path()).is_err());
    }
}
