//! The blob that needs nothing else: a file of this machine.
//!
//! Owns the open file. Must not know what the bytes mean; where a file may be short is for the reader of its format to
//! say.

use crate::StorageError;
use crate::contents::Blob;
use crate::raw_file::failed;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A regular file, opened read-only, that nobody writes while it is open here. Its size is taken once, at the opening.
#[derive(Debug)]
pub struct FileBlob {
    file: File,
    path: PathBuf,
    size: u64,
}

impl FileBlob {
    /// Opens a file.
    ///
    /// # Errors
    /// When there is no such regular file, or it may not be read.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        // Without waiting: a pipe would wait for somebody to write into it, before it is seen that it is none of ours.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = File::options().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| failed("open", path, error))?;
        let metadata = file.metadata().map_err(|error| failed("open", path, error))?;
        if !metadata.is_file() {
            return Err(failed("open", path, io::Error::other("not a regular file")));
        }
        Ok(Self { file, path: path.to_owned(), size: metadata.len() })
    }

    /// Where it is stored.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The parts that are not holes, in order, in bytes.
    ///
    /// # Errors
    /// The system's error.
    pub fn data_extents(&self) -> Result<Vec<Range<u64>>, StorageError> {
        aenv_sys::file::data_extents(&self.file).map_err(|error| failed("find holes of", &self.path, error))
    }
}

impl Blob for FileBlob {
    fn stored_size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        check_range(|| self.name(), self.size, offset, buffer.len() as u64)?;
        match self.file.read_exact_at(buffer, offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(StorageError::Damaged {
                name: self.name(),
                reason: format!("it had {} bytes when it was opened and is shorter now", self.size),
            }),
            read => read.map_err(|error| failed("read", &self.path, error)),
        }
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// The range as such when it lies in something of `size` bytes.
pub(crate) fn check_range(
    name: impl FnOnce() -> String,
    size: u64,
    offset: u64,
    length: u64,
) -> Result<Range<u64>, StorageError> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(offset..end),
        _ => Err(StorageError::OutOfRange { name: name(), offset, length, size }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blob");
        std::fs::write(&path, b"0123456789").unwrap();
        let blob = FileBlob::open(&path).unwrap();
        let mut buffer = [0; 4];
        blob.read_exact_at(&mut buffer, 6).unwrap();
        assert_eq!(&buffer, b"6789");
        blob.read_exact_at(&mut [], 10).unwrap();
        for offset in [7, 10, 11, u64::MAX - 3, u64::MAX] {
            let error = blob.read_exact_at(&mut buffer, offset).unwrap_err();
            assert!(matches!(error, StorageError::OutOfRange { size: 10, .. }), "{error}");
            assert!(error.to_string().contains(&blob.name()), "{error}");
        }
        assert!(FileBlob::open(directory.path()).is_err());
    }

    #[test]
    fn a_file_that_shrank_is_damaged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blob");
        std::fs::write(&path, [1; 8192]).unwrap();
        let blob = FileBlob::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        blob.read_exact_at(&mut [0; 4096], 0).unwrap();
        let error = blob.read_exact_at(&mut [0; 4096], 4096).unwrap_err();
        assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
    }
}
