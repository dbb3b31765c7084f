//! From a stored file to the bytes of a layer: which wrappings it has, and what is inside of them.
//!
//! ```text
//! file ─▶ tar archive? ─yes▶ its one file ─▶ zfile? ─yes▶ its uncompressed bytes ─▶ layer
//!             └─no────────────────▲            └─no──────────────────▲
//! ```
//! Each wrapping is taken off at most once, in this order, so nothing can nest without end. Owns no state.
//! What remains may be anything: only [`Layer`] judges it.

use crate::blob::FileBlob;
use crate::cache::BlockCache;
use crate::layer::Layer;
use crate::zfile::{ZFile, ZFileInfo, has_magic};
use crate::{Blob, StorageError, tar_wrap};
use std::path::Path;
use std::sync::Arc;

/// Bytes that are enough to recognise a zfile.
const MAGIC_BYTES: usize = 24;

/// A stored file without its wrappings.
#[derive(Debug)]
pub struct Unwrapped {
    /// The bytes of the layer.
    pub blob: Arc<dyn Blob>,
    /// Whether it was the file in a tar archive.
    pub in_tar: bool,
    /// The zfile it was compressed in, if any.
    pub zfile: Option<Arc<ZFile>>,
}

impl Unwrapped {
    /// How it was compressed, if it was.
    #[must_use]
    pub fn compression(&self) -> Option<ZFileInfo> {
        self.zfile.as_ref().map(|zfile| zfile.info())
    }

    /// Reads everything once, so that every checksum there is was looked at; `progress` gets the bytes of each piece.
    ///
    /// # Errors
    /// The first damage that is found, or the blob's error.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<(), StorageError> {
        if let Some(zfile) = &self.zfile {
            return zfile.verify(progress);
        }
        let mut buffer = vec![0; 1 << 20];
        let (size, mut place) = (self.blob.stored_size(), 0);
        while place < size {
            let count = (size - place).min(buffer.len() as u64);
            self.blob.read_exact_at(&mut buffer[..count as usize], place)?;
            progress(count);
            place += count;
        }
        Ok(())
    }
}

/// Takes the wrappings off and says which there were.
///
/// # Errors
/// As [`tar_wrap::unwrap`] and [`ZFile::open`].
pub fn unwrap_layer(blob: Arc<dyn Blob>, cache: &Arc<BlockCache>) -> Result<Unwrapped, StorageError> {
    let outer_size = blob.stored_size();
    let blob = tar_wrap::unwrap(blob)?;
    // An archive is always larger than what is in it.
    let in_tar = blob.stored_size() != outer_size;
    let mut start = [0; MAGIC_BYTES];
    if blob.stored_size() < MAGIC_BYTES as u64 {
        return Ok(Unwrapped { blob, in_tar, zfile: None });
    }
    blob.read_exact_at(&mut start, 0)?;
    if !has_magic(&start) {
        return Ok(Unwrapped { blob, in_tar, zfile: None });
    }
    let zfile = Arc::new(ZFile::open(blob, cache)?);
    Ok(Unwrapped { blob: zfile.clone(), in_tar, zfile: Some(zfile) })
}

/// The bytes of the layer that is stored in a blob, whatever it is wrapped in.
///
/// # Errors
/// As [`unwrap_layer`].
pub fn open_layer_blob(blob: Arc<dyn Blob>, cache: &Arc<BlockCache>) -> Result<Arc<dyn Blob>, StorageError> {
    Ok(unwrap_layer(blob, cache)?.blob)
}

impl Layer {
    /// Opens a sealed layer that is stored in a file, whatever it is wrapped in. Reads its index.
    ///
    /// # Errors
    /// As [`open_layer_blob`] and [`Layer::from_blob`].
    pub fn open(path: &Path, cache: &Arc<BlockCache>) -> Result<Arc<Self>, StorageError> {
        Self::from_blob(open_layer_blob(Arc::new(FileBlob::open(path)?), cache)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryBlob;
    use crate::zfile::{ZFileOptions, write};
    use std::io::Cursor;

    fn blob(bytes: Vec<u8>) -> Arc<dyn Blob> {
        Arc::new(MemoryBlob::new("file", bytes))
    }

    fn compressed(bytes: &[u8]) -> Vec<u8> {
        let mut output = Cursor::new(Vec::new());
        write(&MemoryBlob::new("source", bytes.to_vec()), &mut output, ZFileOptions::lz4()).unwrap();
        output.into_inner()
    }

    fn wrapped(bytes: &[u8]) -> Vec<u8> {
        let mut archive = Vec::new();
        tar_wrap::wrap(&blob(bytes.to_vec()), &mut archive).unwrap();
        archive
    }

    #[test]
    fn every_wrapping_is_found_and_taken_off_once() {
        let cache = Arc::new(BlockCache::new(0));
        let layer: Vec<u8> = (0..50_000_u32).map(|number| (number / 7) as u8).collect();
        let (zfile, tar) = (compressed(&layer), wrapped(&layer));
        let both = wrapped(&zfile);
        let cases = [
            (layer.clone(), false, false, layer.clone()),
            (zfile.clone(), false, true, layer.clone()),
            (tar.clone(), true, false, layer.clone()),
            (both.clone(), true, true, layer),
            // The wrong order, and one too many, are not followed.
            (compressed(&tar), false, true, tar),
            (compressed(&zfile), false, true, zfile),
            (wrapped(&both), true, false, both),
            (Vec::new(), false, false, Vec::new()),
        ];
        for (stored, in_tar, is_zfile, expected) in cases {
            let found = unwrap_layer(blob(stored), &cache).unwrap();
            assert_eq!((found.in_tar, found.compression().is_some()), (in_tar, is_zfile));
            let mut bytes = vec![0; found.blob.stored_size() as usize];
            found.blob.read_exact_at(&mut bytes, 0).unwrap();
            assert!(bytes == expected);
        }
    }
}
