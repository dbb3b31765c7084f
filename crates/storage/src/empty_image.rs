//! An image of zeros: what a disk stands on that is made of nothing. Owns no storage.

use crate::{Image, StorageError};
use std::ops::Range;

/// An image of zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmptyImage {
    size: u64,
}

impl EmptyImage {
    /// One of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self { size }
    }

    fn check(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.size) {
            return Ok(());
        }
        Err(StorageError::OutOfRange { name: "an empty image".to_owned(), offset, length, size: self.size })
    }
}

impl Image for EmptyImage {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.check(offset, buffer.len() as u64)?;
        buffer.fill(0);
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>, StorageError> {
        self.check(offset, 0)?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zeros_to_its_end() {
        let image = EmptyImage::new(10);
        let mut buffer = [7; 4];
        image.read_at(&mut buffer, 6).unwrap();
        assert_eq!((image.size(), buffer), (10, [0; 4]));
        assert_eq!(image.next_data(10).unwrap(), None);
        for offset in [7, 10, u64::MAX] {
            assert!(matches!(image.read_at(&mut buffer, offset), Err(StorageError::OutOfRange { .. })));
        }
        assert!(image.next_data(11).is_err());
    }
}
