//! A guest's memory as a flat file with layers on it, and the layer that a capture adds.
//!
//! ```text
//!             below: what the last capture stored      start: what the VMM was started from
//! changes ────────────┐                                   │
//! (pages that were    ├─ over one of the two, or nothing ─┘
//!  written, no other) │
//!                     ▼
//! content ── 64 KiB of it against 64 KiB of below, page by page ─┬─ equal                 nothing
//!                                                                ├─ zeros where data was  a zeroed entry
//!                                                                └─ else                  data
//! ```
//! Only what may differ is looked at: the changes, and what the layers hold that only one of `start` and `below` has. So a page
//! that an earlier layer changed and that is not among the changes is the start's again.
//!
//! A chain that would become longer than [`LONGEST`] is not made longer: the new layer lies on the flat file and has everything.
//! The files before it stay as they are for those who map them.
//!
//! Owns the new file until it has its name. Must not remove what it replaces.

use crate::cache::BlockCache;
use crate::commit::{Existing, LayerSummary, is_zero, publish};
use crate::layer::Layer;
use crate::lsmt::SECTOR_BYTES;
use crate::lsmt::header::Header;
use crate::lsmt::writer::LayerWriter;
use crate::raw_file::failed;
use crate::{BLOCK_BYTES, EmptyImage, Image, OverlaidImage, RawImage, StorageError};
use std::collections::HashMap;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// Layers on the flat file of one memory, at most.
pub const LONGEST: usize = 8;
/// Bytes that are read and compared at once.
const WINDOW_BYTES: u64 = 64 << 10;
/// Bytes that are written at once: changed pages lie scattered.
const WRITE_BYTES: usize = 1 << 20;

/// The files that a memory is composed of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryFiles {
    /// The flat file at the bottom; zeros when there is none.
    pub image: Option<PathBuf>,
    /// The layers on it, bottom to top.
    pub layers: Vec<PathBuf>,
}

/// What changed pages are to be laid over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// They are all there is.
    Nothing,
    /// What the VMM was started from.
    Start,
    /// What the layer is to lie on.
    Below,
}

/// What a new layer is made of.
#[derive(Debug, Clone)]
pub struct NewLayer<'a> {
    /// What it is to lie on.
    pub below: &'a MemoryFiles,
    /// What the VMM was started from.
    pub start: &'a MemoryFiles,
    /// A flat file in which the pages that were written are data, and all else is holes.
    pub changes: &'a Path,
    /// What they change.
    pub over: Over,
    /// Size of the memory.
    pub bytes: u64,
}

/// A layer that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMemory {
    /// All of the memory, with the new layer.
    pub files: MemoryFiles,
    /// What the new layer has.
    pub summary: LayerSummary,
}

/// Opens a memory of `bytes` to be read.
///
/// # Errors
/// When a file is missing or damaged, or they are not of this size.
pub fn open(
    files: &MemoryFiles,
    bytes: u64,
    cache: &Arc<BlockCache>,
) -> Result<Arc<dyn Image>, StorageError> {
    Ok(Open::default().memory(files, bytes, cache)?.whole)
}

/// Writes the layer of a capture into a new file, which is durable when this returns. One of that name, left by an earlier
/// attempt, is replaced: nobody may use it yet.
///
/// # Errors
/// When something cannot be read, the sizes differ, or the file cannot be written. Nothing is left of it then.
pub fn write(new: &NewLayer<'_>, path: &Path, cache: &Arc<BlockCache>) -> Result<NewMemory, StorageError> {
    let unsupported =
        |reason: String| Err(StorageError::Unsupported { name: new.changes.display().to_string(), reason });
    if new.bytes == 0 || !new.bytes.is_multiple_of(BLOCK_BYTES) {
        return unsupported(format!("a memory of {} bytes is not possible", new.bytes));
    }
    let changes = RawImage::open(new.changes)?;
    if changes.size() != new.bytes {
        return unsupported(format!("it has {} bytes, the memory {}", changes.size(), new.bytes));
    }
    let flattened = new.below.layers.len() >= LONGEST;
    let flat = MemoryFiles { image: new.below.image.clone(), layers: Vec::new() };
    let target_files = if flattened { &flat } else { new.below };
    let nothing = MemoryFiles::default();
    let under_files = match new.over {
        Over::Nothing => &nothing,
        Over::Start => new.start,
        Over::Below => new.below,
    };
    let mut open = Open::default();
    let target = open.memory(target_files, new.bytes, cache)?;
    let under = open.memory(under_files, new.bytes, cache)?;
    let candidates = candidates(&changes, &target, &under)?;
    let source = Comparison { changes, under: under.whole, below: target.whole };
    let header = Header {
        flags: 0,
        index_offset: 0,
        index_entries: 0,
        virtual_size: new.bytes,
        uuid: None,
        parent: None,
        user_tag: Vec::new(),
    };
    let summary = publish(path, Existing::Replace, |file| {
        let mut sink = BufWriter::with_capacity(WRITE_BYTES, file);
        let mut writer = LayerWriter::begin(&mut sink, path, header)?;
        source.write(&candidates, &mut writer)?;
        let summary = writer.finish()?;
        sink.flush().map_err(|error| failed("write", path, error))?;
        Ok(summary)
    })?;
    let mut files = target_files.clone();
    files.layers.push(path.to_owned());
    Ok(NewMemory { files, summary })
}

/// What was opened, so that two chains share what both have.
#[derive(Default)]
struct Open {
    layers: HashMap<PathBuf, Arc<Layer>>,
    images: HashMap<PathBuf, Arc<RawImage>>,
}

/// A memory that is open.
struct Memory<'a> {
    files: &'a MemoryFiles,
    layers: Vec<Arc<Layer>>,
    whole: Arc<dyn Image>,
}

impl Open {
    fn memory<'a>(
        &mut self,
        files: &'a MemoryFiles,
        bytes: u64,
        cache: &Arc<BlockCache>,
    ) -> Result<Memory<'a>, StorageError> {
        let lower: Arc<dyn Image> = match &files.image {
            Some(path) => self.image(path)?,
            None => Arc::new(EmptyImage::new(bytes)),
        };
        let layers =
            files.layers.iter().map(|path| self.layer(path, cache)).collect::<Result<Vec<_>, _>>()?;
        let whole: Arc<dyn Image> = match layers.is_empty() {
            true => lower,
            false => Arc::new(OverlaidImage::new(lower, layers.clone())?),
        };
        if whole.size() != bytes {
            let name = files.layers.last().or(files.image.as_ref());
            return Err(StorageError::Unsupported {
                name: name.map_or_else(String::new, |name| name.display().to_string()),
                reason: format!("it is a memory of {} bytes, not of {bytes}", whole.size()),
            });
        }
        Ok(Memory { files, layers, whole })
    }

    fn image(&mut self, path: &Path) -> Result<Arc<RawImage>, StorageError> {
        if let Some(image) = self.images.get(path) {
            return Ok(Arc::clone(image));
        }
        let image = Arc::new(RawImage::open(path)?);
        self.images.insert(path.to_owned(), Arc::clone(&image));
        Ok(image)
    }

    fn layer(&mut self, path: &Path, cache: &Arc<BlockCache>) -> Result<Arc<Layer>, StorageError> {
        if let Some(layer) = self.layers.get(path) {
            return Ok(Arc::clone(layer));
        }
        let layer = Layer::open(path, cache)?;
        self.layers.insert(path.to_owned(), Arc::clone(&layer));
        Ok(layer)
    }
}

/// Whole pages in which the changes laid over `under` may differ from `target`, in order and disjoint.
fn candidates(
    changes: &RawImage,
    target: &Memory<'_>,
    under: &Memory<'_>,
) -> Result<Vec<Range<u64>>, StorageError> {
    let mut ranges = Vec::new();
    data_of(changes, &mut ranges)?;
    if target.files.image == under.files.image {
        // Where the layers that both have are uppermost, or none is, both read the same.
        let pairs = target.files.layers.iter().zip(&under.files.layers);
        let common = pairs.take_while(|(one, other)| one == other).count();
        let own = |memory: &Memory<'_>| memory.layers[common..].to_vec();
        for layer in own(target).into_iter().chain(own(under)) {
            let mappings = layer.index().iter();
            ranges.extend(mappings.map(|at| at.offset * SECTOR_BYTES..at.end() * SECTOR_BYTES));
        }
    } else {
        data_of(&*target.whole, &mut ranges)?;
        data_of(&*under.whole, &mut ranges)?;
    }
    Ok(joined(ranges, changes.size()))
}

/// Adds all ranges of an image that may not be zeros.
fn data_of(image: &dyn Image, ranges: &mut Vec<Range<u64>>) -> Result<(), StorageError> {
    let mut position = 0;
    while position < image.size()
        && let Some(range) = image.next_data(position)?
    {
        position = range.end;
        ranges.push(range);
    }
    Ok(())
}

/// Ranges made whole pages up to `end`, sorted, those joined that touch.
fn joined(mut ranges: Vec<Range<u64>>, end: u64) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = range.start - range.start % BLOCK_BYTES..range.end.min(end).next_multiple_of(BLOCK_BYTES);
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ if range.start < range.end => joined.push(range),
            _ => {}
        }
    }
    joined
}

/// What a page is in comparison with the one below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Equal,
    Zeros,
    Data,
}

/// The memory as it is to be, and what is below of the layer.
struct Comparison {
    changes: RawImage,
    under: Arc<dyn Image>,
    below: Arc<dyn Image>,
}

impl Comparison {
    fn write(&self, ranges: &[Range<u64>], writer: &mut LayerWriter<'_>) -> Result<(), StorageError> {
        let mut content = vec![0; WINDOW_BYTES as usize];
        let mut below = vec![0; WINDOW_BYTES as usize];
        // The next data of what is below, once it was looked for; nothing follows when it is empty.
        let mut data: Option<Range<u64>> = None;
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let length = WINDOW_BYTES.min(range.end - start);
                let content = &mut content[..length as usize];
                self.read_content(content, start)?;
                if data.as_ref().is_none_or(|data| !data.is_empty() && data.end <= start) {
                    data = Some(self.below.next_data(start)?.unwrap_or_default());
                }
                let is_hole =
                    data.as_ref().is_none_or(|data| data.is_empty() || data.start >= start + length);
                let below = match is_hole {
                    true => None,
                    false => {
                        let below = &mut below[..length as usize];
                        self.below.read_at(below, start)?;
                        Some(&*below)
                    }
                };
                write_window(content, below, start, writer)?;
                start += length;
            }
        }
        Ok(())
    }

    /// Reads the memory as it is to be.
    fn read_content(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let end = offset + buffer.len() as u64;
        let mut position = offset;
        while position < end {
            let changed = self.changes.next_data(position)?.filter(|changed| changed.start < end);
            let (unchanged_end, changed_end) =
                changed.map_or((end, end), |changed| (changed.start, changed.end.min(end)));
            // Both lie between `offset` and `end`.
            let part = |from: u64, to: u64| (from - offset) as usize..(to - offset) as usize;
            if position < unchanged_end {
                self.under.read_at(&mut buffer[part(position, unchanged_end)], position)?;
            }
            if unchanged_end < changed_end {
                self.changes.read_at(&mut buffer[part(unchanged_end, changed_end)], unchanged_end)?;
            }
            position = changed_end;
        }
        Ok(())
    }
}

/// Writes what of some pages differs from those below, which are zeros when they are not given.
fn write_window(
    content: &[u8],
    below: Option<&[u8]>,
    offset: u64,
    writer: &mut LayerWriter<'_>,
) -> Result<(), StorageError> {
    let page_bytes = BLOCK_BYTES as usize;
    let kind = |number: usize, page: &[u8]| {
        let place = number * page_bytes;
        match below.map(|below| &below[place..place + page.len()]) {
            Some(below) if below == page => Page::Equal,
            None if is_zero(page) => Page::Equal,
            Some(_) if is_zero(page) => Page::Zeros,
            _ => Page::Data,
        }
    };
    let kinds: Vec<Page> =
        content.chunks(page_bytes).enumerate().map(|(number, page)| kind(number, page)).collect();
    let mut start = 0;
    for run in kinds.chunk_by(|one, other| one == other) {
        let end = (start + run.len() * page_bytes).min(content.len());
        match run.first() {
            Some(Page::Data) => writer.data(offset + start as u64, &content[start..end])?,
            Some(Page::Zeros) => writer.zeros(offset + start as u64, (end - start) as u64)?,
            Some(Page::Equal) | None => {}
        }
        start = end;
    }
    Ok(())
}
