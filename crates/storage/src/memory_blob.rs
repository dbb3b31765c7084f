//! A blob that is held in memory: what was received or made there, and the inputs of tests and fuzzers.
//!
//! Owns its bytes, which never change.

use crate::{Blob, StorageError};

/// Bytes in memory, with a name for messages.
#[derive(Debug, Clone)]
pub struct MemoryBlob {
    name: String,
    bytes: Vec<u8>,
}

impl MemoryBlob {
    /// A blob of these bytes.
    #[must_use]
    pub fn new(name: impl Into<String>, bytes: Vec<u8>) -> Self {
        Self { name: name.into(), bytes }
    }
}

impl Blob for MemoryBlob {
    fn stored_size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let inside = usize::try_from(offset)
            .ok()
            .and_then(|start| self.bytes.get(start..start.checked_add(buffer.len())?));
        match inside {
            Some(bytes) => {
                buffer.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(StorageError::OutOfRange {
                name: self.name(),
                offset,
                length: buffer.len() as u64,
                size: self.stored_size(),
            }),
        }
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_inside_is_read() {
        let blob = MemoryBlob::new("three", vec![1, 2, 3]);
        let mut two = [0; 2];
        blob.read_exact_at(&mut two, 1).unwrap();
        assert_eq!(two, [2, 3]);
        for offset in [2, 3, 4, u64::MAX] {
            let error = blob.read_exact_at(&mut two, offset).unwrap_err();
            assert!(matches!(error, StorageError::OutOfRange { size: 3, .. }), "{error}");
        }
        blob.read_exact_at(&mut [], 3).unwrap();
    }
}
