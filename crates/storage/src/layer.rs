//! One immutable layer: a blob and the index of what is in it.
//!
//! ```text
//! committed        written as a whole                      ┐ `Layer::open`, `Layer::from_blob`:
//! sealed in place  a log pair that got index and trailer   ┘ missing data is damage
//! log-structured   data and a log, still writable          ┐ `Layer::from_log`, `Layer::from_sparse`: nobody may write
//! sparse           one sparse file, still writable         ┘ them meanwhile; missing data at the end reads as zeros
//! ```
//! Owns the index. Must not know what lies above or below it.

use crate::StorageError;
use crate::blob::FileBlob;
use crate::contents::Blob;
use crate::index::Index;
use crate::lsmt::SECTOR_BYTES;
use crate::lsmt::header::Header;
use crate::lsmt::{log, sealed, sparse};
use std::sync::Arc;
use uuid::Uuid;

/// Which form of the format a layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Written as a whole.
    Committed,
    /// Was writable, and got an index and a trailer at its end.
    SealedInPlace,
    /// Writable: a file of data and a log of entries.
    LogStructured,
    /// Writable: one sparse file.
    Sparse,
}

/// A layer, ready to be read.
#[derive(Debug)]
pub struct Layer {
    blob: Arc<dyn Blob>,
    form: Form,
    header: Header,
    index: Index,
}

impl Layer {
    /// Opens a sealed layer that is stored as such, not compressed or wrapped. Reads its index.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when the bytes are no layer, or contradict themselves; [`StorageError::Unsupported`] when
    /// it is one that was not sealed, of a later version, or too large.
    pub fn from_blob(blob: Arc<dyn Blob>) -> Result<Arc<Self>, StorageError> {
        let sealed = sealed::read(blob.as_ref())?;
        let form = if sealed.committed { Form::Committed } else { Form::SealedInPlace };
        Ok(Arc::new(Self { blob, form, header: sealed.trailer, index: sealed.index }))
    }

    /// Opens a writable, log-structured layer for reading.
    ///
    /// # Errors
    /// As [`Layer::from_blob`].
    pub fn from_log(data: Arc<dyn Blob>, index: &dyn Blob) -> Result<Arc<Self>, StorageError> {
        let (header, index) = log::read(data.as_ref(), index)?;
        Ok(Arc::new(Self { blob: data, form: Form::LogStructured, header, index }))
    }

    /// Opens a writable, sparse layer for reading.
    ///
    /// # Errors
    /// As [`Layer::from_blob`].
    pub fn from_sparse(file: FileBlob) -> Result<Arc<Self>, StorageError> {
        let (header, index) = sparse::read(&file)?;
        Ok(Arc::new(Self { blob: Arc::new(file), form: Form::Sparse, header, index }))
    }

    /// What it is called in messages.
    #[must_use]
    pub fn name(&self) -> String {
        self.blob.name()
    }

    /// Which form it has.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// Bytes of the disk it is a layer of; 0 when it is as large as the layers below.
    #[must_use]
    pub fn virtual_size(&self) -> u64 {
        self.header.virtual_size
    }

    /// Bytes of its blob, without compression: header, data, index.
    #[must_use]
    pub fn stored_size(&self) -> u64 {
        self.blob.stored_size()
    }

    /// Who it is, when it was given an identity.
    #[must_use]
    pub fn uuid(&self) -> Option<Uuid> {
        self.header.uuid
    }

    /// The layer it was made upon. Nobody but [`crate::chain::check_order`] looks at it.
    #[must_use]
    pub fn parent(&self) -> Option<Uuid> {
        self.header.parent
    }

    /// What its maker wrote about it, usually text.
    #[must_use]
    pub fn user_tag(&self) -> &[u8] {
        &self.header.user_tag
    }

    /// What it maps.
    #[must_use]
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Checks that it has a size and maps nothing behind its end. Reading does not need it: a stack of layers has the size of
    /// the topmost one that has any, and shows nothing behind that.
    ///
    /// # Errors
    /// [`StorageError::Damaged`] when it does not. No tool that seals layers makes such a one.
    pub fn check_size(&self) -> Result<(), StorageError> {
        let damaged = |reason: String| Err(StorageError::Damaged { name: self.name(), reason });
        let size = self.virtual_size();
        if size == 0 {
            return damaged("its trailer says that it is a layer of a disk of 0 bytes".to_owned());
        }
        // In order: the last one ends last.
        let last = self.index.len().checked_sub(1).and_then(|number| self.index.get(number));
        match last {
            Some(mapping) if mapping.end() > size / SECTOR_BYTES => damaged(format!(
                "it maps sectors {} to {}, but a disk of {size} bytes ends at sector {}",
                mapping.offset,
                mapping.end(),
                size / SECTOR_BYTES
            )),
            _ => Ok(()),
        }
    }

    /// Fills `buffer` from byte `offset` of the blob on, which must come from a mapping.
    ///
    /// # Errors
    /// When it cannot be read or fails a checksum of the blob.
    pub fn read_stored(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        match self.form {
            // The index was checked: no mapping reaches over the end.
            Form::Committed | Form::SealedInPlace => self.blob.read_exact_at(buffer, offset),
            Form::LogStructured | Form::Sparse => {
                let there = self.blob.stored_size().saturating_sub(offset).min(buffer.len() as u64) as usize;
                let (stored, missing) = buffer.split_at_mut(there);
                missing.fill(0);
                if stored.is_empty() { Ok(()) } else { self.blob.read_exact_at(stored, offset) }
            }
        }
    }

    /// Reads all data that is mapped, so that every checksum of the blob is looked at. `progress` gets the number of bytes
    /// after each piece.
    ///
    /// # Errors
    /// The first one that occurs.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<(), StorageError> {
        let mut buffer = vec![0; 1 << 20];
        for mapping in self.index.iter().filter(|mapping| !mapping.zeroed) {
            // At most 2^55 and 2^14 sectors: the bytes fit into 64 bits.
            let (mut offset, end) =
                (mapping.stored * SECTOR_BYTES, (mapping.stored + mapping.length) * SECTOR_BYTES);
            while offset < end {
                let length = (end - offset).min(buffer.len() as u64);
                self.read_stored(&mut buffer[..length as usize], offset)?;
                progress(length);
                offset += length;
            }
        }
        Ok(())
    }
}
