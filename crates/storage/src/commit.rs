//! Makes compact sealed layers: of an image, of the changes that a top or some layers make, or of a whole chain.
//!
//! ```text
//! changes, in order ─▶ granules of 4 KiB (or more) ─▶ all zeros? ─┬─ no  ─▶ data
//!                                                                └─ yes ─▶ zeroed entry where something lies below,
//!                                                                          nothing where not
//! ```
//! Owns a buffer, and the new file until it has its name. Must not remove what it replaces.

use crate::StorageError;
use crate::chain::LayerChain;
use crate::contents::{BLOCK_BYTES, Change, ChangeKind, Delta, Image};
use crate::layer::Layer;
use crate::lsmt::{SECTOR_BYTES, SECTOR_LIMIT};

use crate::lsmt::header::Header;
pub use crate::lsmt::header::USER_TAG_BYTES;
pub use crate::lsmt::writer::LayerSummary;
use crate::lsmt::writer::LayerWriter;
use crate::raw_file::failed;
use crate::zfile::{Compressed, ZFileOptions, ZFileWriter};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;

/// Bytes that are read at once, and the coarsest granularity.
const BUFFER_BYTES: u64 = 1 << 20;

/// What a layer is made of.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// All of an image: the layer is to lie at the bottom of a chain, or alone.
    Image(&'a dyn Image),
    /// What a delta changes: the layer is to lie on what is below of the delta.
    Delta(&'a dyn Delta, Below<'a>),
}

/// What the new layer will lie on.
#[derive(Debug, Clone, Copy)]
pub enum Below<'a> {
    /// Something that is not known: all zeros are kept.
    Unknown,
    /// This image: zeros are kept only where it may have data.
    Image(&'a dyn Image),
}

/// How a layer is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOptions {
    /// Who it is.
    pub uuid: Option<Uuid>,
    /// The layer it is made upon.
    pub parent: Option<Uuid>,
    /// Anything, usually text; at most [`USER_TAG_BYTES`]. NULs at its end are lost.
    pub user_tag: Vec<u8>,
    /// Unit of bytes in which data is stored or left out: a power of two from [`BLOCK_BYTES`] to 1 MiB. A coarser one
    /// makes a shorter index and more data.
    pub granularity: u64,
}

impl Default for LayerOptions {
    fn default() -> Self {
        Self { uuid: None, parent: None, user_tag: Vec::new(), granularity: BLOCK_BYTES }
    }
}

/// Writes a sealed layer into `sink`, which is called `name` in messages.
///
/// # Errors
/// When the source cannot be read or the sink not be written; [`StorageError::Unsupported`] when the options or the
/// source's size are not possible, or the index would become too long.
pub fn write_layer(
    source: Source<'_>,
    options: &LayerOptions,
    sink: &mut dyn Write,
    name: &Path,
) -> Result<LayerSummary, StorageError> {
    let image: &dyn Image = match source {
        Source::Image(image) => image,
        Source::Delta(delta, _) => delta,
    };
    check(image.size(), options, name)?;
    let header = Header {
        flags: 0,
        index_offset: 0,
        index_entries: 0,
        virtual_size: image.size(),
        uuid: options.uuid,
        parent: options.parent,
        user_tag: options.user_tag.clone(),
    };
    let writer = LayerWriter::begin(sink, name, header)?;
    Commit { source, image, writer, granularity: options.granularity }.run()
}

/// As [`write_layer`], into a new file that is durable when this returns. While it is written its name begins with
/// `.layer-`, and it is removed when that fails.
///
/// # Errors
/// As [`write_layer`], and when there is such a file already. When only its name cannot be made durable, the whole file is
/// there and stays.
pub fn write_layer_file(
    source: Source<'_>,
    options: &LayerOptions,
    path: &Path,
) -> Result<LayerSummary, StorageError> {
    publish(path, Existing::Refuse, |file| write_layer(source, options, file, path))
}

/// As [`write_layer_file`], as a zfile.
///
/// # Errors
/// As [`write_layer_file`], and when the compression is not possible.
pub fn write_compressed_layer_file(
    source: Source<'_>,
    options: &LayerOptions,
    compression: ZFileOptions,
    path: &Path,
) -> Result<(LayerSummary, Compressed), StorageError> {
    publish(path, Existing::Refuse, |file| {
        let mut zfile = ZFileWriter::new(file, compression).map_err(|error| failed("write", path, error))?;
        let summary = write_layer(source, options, &mut zfile, path)?;
        let (_, compressed) = zfile.finish().map_err(|error| failed("write", path, error))?;
        Ok((summary, compressed))
    })
}

/// What becomes of a file that has the new one's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Existing {
    /// It stays, and the new one is not made.
    Refuse,
    /// The new one takes its place; whoever has it open goes on reading what it was.
    Replace,
}

/// Makes a file that is complete and durable when it gets its name, and not there at all before.
pub(crate) fn publish<T>(
    path: &Path,
    existing: Existing,
    write: impl FnOnce(&mut std::fs::File) -> Result<T, StorageError>,
) -> Result<T, StorageError> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".layer-")
        .tempfile_in(directory)
        .map_err(|error| failed("make", path, error))?;
    let written = write(file.as_file_mut())?;
    file.as_file().sync_all().map_err(|error| failed("sync", path, error))?;
    let named = match existing {
        Existing::Refuse => file.persist_noclobber(path),
        Existing::Replace => file.persist(path),
    };
    named.map_err(|error| failed("make", path, error.error))?;
    let directory_file = std::fs::File::open(directory).map_err(|error| failed("open", directory, error))?;
    directory_file.sync_all().map_err(|error| failed("sync", directory, error))?;
    Ok(written)
}

/// Writes one layer that has all that a stack of layers, bottom → top, shows.
///
/// # Errors
/// As [`write_layer_file`] and [`LayerChain::new`].
pub fn flatten(
    layers: Vec<Arc<Layer>>,
    options: &LayerOptions,
    path: &Path,
) -> Result<LayerSummary, StorageError> {
    let chain = LayerChain::new(layers)?;
    write_layer_file(Source::Image(&chain), options, path)
}

fn check(size: u64, options: &LayerOptions, name: &Path) -> Result<(), StorageError> {
    let unsupported =
        |reason: String| Err(StorageError::Unsupported { name: name.display().to_string(), reason });
    let granularity = options.granularity;
    if !granularity.is_power_of_two() || !(BLOCK_BYTES..=BUFFER_BYTES).contains(&granularity) {
        return unsupported(format!("a granularity of {granularity} bytes is not possible"));
    }
    if options.user_tag.len() > USER_TAG_BYTES {
        return unsupported(format!(
            "its user tag has {} bytes, more than {USER_TAG_BYTES}",
            options.user_tag.len()
        ));
    }
    if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || size > SECTOR_LIMIT * SECTOR_BYTES {
        return unsupported(format!(
            "its virtual size is {size} bytes, which is not a positive multiple of {SECTOR_BYTES} up to {}",
            SECTOR_LIMIT * SECTOR_BYTES
        ));
    }
    Ok(())
}

struct Commit<'a> {
    source: Source<'a>,
    image: &'a dyn Image,
    writer: LayerWriter<'a>,
    granularity: u64,
}

impl Commit<'_> {
    fn run(mut self) -> Result<LayerSummary, StorageError> {
        let size = self.image.size();
        let mut buffer = vec![0; size.min(BUFFER_BYTES) as usize];
        // Everything before is written. Begins a granule, except at the end.
        let mut position = 0;
        while position < size
            && let Some(change) = self.next_change(position)?
        {
            let (first, last) = (change.range.start.max(position), change.range.end.min(size));
            if first >= last {
                break;
            }
            let start = first - first % self.granularity;
            let whole_end = if last == size { size } else { last - last % self.granularity };
            if change.kind == ChangeKind::Zeros && first == start && whole_end > start {
                self.zeros(start..whole_end)?;
                position = whole_end;
            } else {
                // Of zeros that fill no granule only the first part is known to be in this one.
                let needed = if change.kind == ChangeKind::Zeros { start + 1 } else { last };
                position = needed.next_multiple_of(self.granularity).min(size);
                self.copy(start..position, &mut buffer)?;
            }
        }
        self.writer.finish()
    }

    fn next_change(&self, offset: u64) -> Result<Option<Change>, StorageError> {
        match self.source {
            Source::Delta(delta, _) => delta.next_change(offset),
            Source::Image(image) => {
                Ok(image.next_data(offset)?.map(|range| Change { range, kind: ChangeKind::Data }))
            }
        }
    }

    /// Reads a range of granules and writes those that are not all zeros.
    fn copy(&mut self, range: Range<u64>, buffer: &mut [u8]) -> Result<(), StorageError> {
        let mut position = range.start;
        while position < range.end {
            let length = (range.end - position).min(buffer.len() as u64);
            let read = &mut buffer[..length as usize];
            self.image.read_at(read, position)?;
            // At most the length of the buffer.
            let granularity = self.granularity as usize;
            let granule = |at: usize| &read[at..read.len().min(at + granularity)];
            let mut start = 0;
            while start < read.len() {
                let zeros = is_zero(granule(start));
                let mut end = start + granule(start).len();
                while end < read.len() && is_zero(granule(end)) == zeros {
                    end += granule(end).len();
                }
                let (offset, run) = (position + start as u64, &read[start..end]);
                if zeros {
                    self.zeros(offset..offset + run.len() as u64)?;
                } else {
                    self.writer.data(offset, run)?;
                }
                start = end;
            }
            position += length;
        }
        Ok(())
    }

    /// Hides what lies below of a range of granules.
    fn zeros(&mut self, range: Range<u64>) -> Result<(), StorageError> {
        let below = match self.source {
            Source::Image(_) => return Ok(()),
            Source::Delta(_, Below::Unknown) => {
                return self.writer.zeros(range.start, range.end - range.start);
            }
            Source::Delta(_, Below::Image(below)) => below,
        };
        // Layers may have data behind their chain's end, which shows when the disk grows.
        let known_end = below.size() - below.size() % self.granularity;
        let hidden = range.start.max(known_end.min(range.end))..range.end;
        let mut position = range.start;
        while position < hidden.start
            && let Some(data) = below.next_data_in(position..hidden.start)?
        {
            let start = data.start - data.start % self.granularity;
            let end = data.end.max(start + 1).next_multiple_of(self.granularity).min(hidden.start);
            self.writer.zeros(start, end - start)?;
            position = end;
        }
        self.writer.zeros(hidden.start, hidden.end - hidden.start)
    }
}

/// Whether all bytes are zero. Looks at 64 at once, and stops at the first that are not.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    let (chunks, rest) = bytes.as_chunks::<64>();
    chunks.iter().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
