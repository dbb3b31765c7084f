//! Reads hostile bytes as far as anybody could, and watches how it is done.
//!
//! ```text
//! bytes ─▶ Watched blob ─▶ open as layer | index | zfile | tar ─▶ read everything, up to a limit ─▶ Content or StorageError
//! ```
//! Used by the fuzz targets and by the test `hostile` of `aenv-storage`. Owns nothing. A panic here is a finding: of the
//! reader, or of [`Watched`] when the reader asks for what cannot be there or for too much at once.

use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;
use aenv_storage::open::unwrap_layer;
use aenv_storage::zfile::ZFile;
use aenv_storage::{Blob, Image, MemoryBlob, StorageError};
use std::sync::Arc;

/// Largest piece that a reader may ask for at once, in bytes.
const LARGEST_READ: usize = 1 << 20;
/// Bytes of content after which reading ends: mappings may show the same data again and again.
const LIMIT: u64 = 32 << 20;
/// Runs of data after which reading ends.
const MAX_RUNS: usize = 100_000;
const HEADER_BYTES: usize = 4096;

/// The data file of a writable layer that overlaybd made: only its header matters.
const DATA_HEADER: &[u8] = include_bytes!("../templates/writable.data.header");
/// The log that belongs to it, without entries.
const LOG_HEADER: &[u8] = include_bytes!("../templates/writable.index.header");
/// The first and the last block of a sealed layer that overlaybd made.
const SEALED_HEADER: &[u8] = include_bytes!("../templates/sealed.header");
const SEALED_TRAILER: &[u8] = include_bytes!("../templates/sealed.trailer");

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Size that the reader told, in bytes.
    pub size: u64,
    /// Everything that was read, with its places mixed in.
    pub hash: u64,
    /// Bytes that were read.
    pub bytes: u64,
}

impl Content {
    fn new(size: u64) -> Self {
        Self { size, hash: 0xcbf2_9ce4_8422_2325, bytes: 0 }
    }

    fn add(&mut self, place: u64, bytes: &[u8]) {
        self.mix(place);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        for byte in rest {
            self.mix(u64::from(*byte));
        }
        self.bytes += bytes.len() as u64;
    }

    fn mix(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    }
}

/// A blob that accepts no read which lies outside of it, or is huge.
#[derive(Debug)]
struct Watched(MemoryBlob);

impl Blob for Watched {
    fn stored_size(&self) -> u64 {
        self.0.stored_size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let length = buffer.len();
        assert!(length <= LARGEST_READ, "{length} bytes at {offset} are too many at once");
        let end = offset.checked_add(length as u64);
        let size = self.stored_size();
        assert!(end.is_some_and(|end| end <= size), "{length} bytes at {offset} are not in a blob of {size}");
        self.0.read_exact_at(buffer, offset)
    }

    fn name(&self) -> String {
        self.0.name()
    }
}

fn watched(bytes: &[u8]) -> Arc<dyn Blob> {
    Arc::new(Watched(MemoryBlob::new("hostile", bytes.to_vec())))
}

fn cache() -> Arc<BlockCache> {
    Arc::new(BlockCache::new(0))
}

/// Reads any bytes as a plain sealed layer, alone and under itself.
///
/// # Errors
/// What the reader returns.
pub fn read_layer(bytes: &[u8]) -> Result<Content, StorageError> {
    read_chain(&Layer::from_blob(watched(bytes))?)
}

/// Reads any bytes as the log of a writable layer, then as the index of a sealed layer.
///
/// # Errors
/// What the reader of the second form returns.
pub fn read_index(bytes: &[u8]) -> Result<Content, StorageError> {
    let mut data = DATA_HEADER.to_vec();
    data.resize(HEADER_BYTES + (64 << 10), 7);
    let log = [LOG_HEADER, bytes].concat();
    let _judged_too = Layer::from_log(watched(&data), &*watched(&log)).and_then(|layer| read_chain(&layer));

    let mut sealed = SEALED_HEADER.to_vec();
    sealed.resize(HEADER_BYTES + (64 << 10), 7);
    let index_offset = sealed.len() as u64;
    sealed.extend_from_slice(bytes);
    // Room for a part of an entry, as files that were sealed in place have it.
    sealed.resize(sealed.len().next_multiple_of(512), 0);
    let mut trailer = SEALED_TRAILER.to_vec();
    trailer[32..40].copy_from_slice(&index_offset.to_le_bytes());
    trailer[40..48].copy_from_slice(&((bytes.len() / 16) as u64).to_le_bytes());
    sealed.extend_from_slice(&trailer);
    read_layer(&sealed)
}

/// Reads any bytes as a compressed file.
///
/// # Errors
/// What the reader returns.
pub fn read_zfile(bytes: &[u8]) -> Result<Content, StorageError> {
    let zfile = ZFile::open(watched(bytes), &cache())?;
    let mut verified = 0;
    // Damage is found by one of the two ways exactly when it is found by the other.
    let judged = zfile.verify(|bytes| verified += bytes);
    let content = read_blob(&zfile);
    if content.as_ref().is_ok_and(|content| content.bytes == zfile.stored_size()) {
        assert!(judged.is_ok(), "it can be read, but {judged:?}");
        assert_eq!(verified, zfile.stored_size());
    }
    content
}

/// Reads any bytes as a stored layer, in whatever wrapping.
///
/// # Errors
/// What the reader returns.
pub fn read_tar(bytes: &[u8]) -> Result<Content, StorageError> {
    let unwrapped = unwrap_layer(watched(bytes), &cache())?;
    read_chain(&Layer::from_blob(unwrapped.blob)?)
}

fn read_blob(blob: &dyn Blob) -> Result<Content, StorageError> {
    let mut content = Content::new(blob.stored_size());
    // Not a multiple of any block, so that reads cross them.
    let mut buffer = vec![0; 100_001];
    let mut place = 0;
    while place < blob.stored_size() && place < LIMIT {
        let count = (blob.stored_size() - place).min(buffer.len() as u64) as usize;
        blob.read_exact_at(&mut buffer[..count], place)?;
        content.add(0, &buffer[..count]);
        place += count as u64;
    }
    Ok(content)
}

/// Everything that a layer shows; it must show the same through a second one of itself.
fn read_chain(layer: &Arc<Layer>) -> Result<Content, StorageError> {
    let alone = LayerChain::new(vec![layer.clone()])?;
    let content = read_image(&alone)?;
    let doubled = LayerChain::new(vec![layer.clone(), layer.clone()])?;
    assert_eq!(read_image(&doubled)?, content);
    Ok(content)
}

fn read_image(image: &dyn Image) -> Result<Content, StorageError> {
    let mut content = Content::new(image.size());
    let mut buffer = vec![0; 300_000];
    let (mut place, mut runs) = (0, 0);
    while let Some(run) = image.next_data(place)?
        && content.bytes < LIMIT
        && runs < MAX_RUNS
    {
        assert!(run.start >= place && run.end > run.start, "{run:?} from {place}");
        place = run.start;
        while place < run.end && content.bytes < LIMIT {
            let count = (run.end - place).min(buffer.len() as u64) as usize;
            image.read_at(&mut buffer[..count], place)?;
            content.add(place, &buffer[..count]);
            place += count as u64;
        }
        runs += 1;
    }
    Ok(content)
}
