//! Writes the memory of a stopped QEMU machine to a file of its own.
//!
//! Owns the two files only until they are complete. A guest's memory is a private mapping of a base file (an empty one
//! after a boot, a capture's image after a restore), so what it wrote is exactly the anonymous pages of that mapping:
//!
//! ```text
//! base file  [ A ][ B ][   ][ D ]          reflink ─▶ [ A ][ B ][   ][ D ]
//! mapping    [ A ][ b'][ c'][ 0 ]  changed: b' c' 0 ─▶ [ A ][ b'][ c'][   ]   new image; zero pages are holes
//! ```

use crate::driver::{CaptureBase, CaptureReport, VmmError};
use crate::partial::{PartialFiles, failed};
use aenv_sys::file::{ReflinkError, data_extents, punch_hole, reflink};
use aenv_sys::memory::{self, FileMapping, PAGE_SIZE};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of device state beyond which something is wrong: it has some KiB per device, and the VMM may have been taken over.
const LONGEST_STATE: u64 = 16 << 20;
/// Memory read at a time.
const BATCH_BYTES: u64 = 4 << 20;

/// Copies the device state to where it belongs from where the VMM could write it: some KiB.
pub(super) async fn take_state(partial: &PartialFiles, from: PathBuf) -> Result<(), VmmError> {
    let to = partial.files().state.clone();
    let copy = move || {
        let length = std::fs::metadata(&from)?.len();
        if length > LONGEST_STATE {
            let what = format!("the VMM wrote {length} bytes of device state");
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        std::fs::copy(from, to)
    };
    let copied = tokio::task::spawn_blocking(copy).await;
    copied
        .unwrap_or_else(|error| Err(io::Error::other(error)))
        .map(drop)
        .map_err(|error| failed(&partial.files().state, error))
}

/// What the memory file is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// All of the memory.
    Whole,
    /// The pages that the guest wrote since the machine was started.
    Changes,
}

/// Adds the memory to a capture whose device state is written.
pub(super) async fn finish(
    partial: Arc<PartialFiles>,
    pid: u32,
    memory_bytes: u64,
    content: Content,
    state_time: Duration,
) -> Result<CaptureReport, VmmError> {
    let started = Instant::now();
    let writer = Arc::clone(&partial);
    let write = move || -> io::Result<(u64, Counts)> {
        let state_bytes = std::fs::metadata(&writer.files().state)?.len();
        let counts = write_memory(pid, memory_bytes, content, &writer.files().memory, BATCH_BYTES)?;
        let read_only = Permissions::from_mode(0o444);
        std::fs::set_permissions(&writer.files().state, read_only.clone())?;
        std::fs::set_permissions(&writer.files().memory, read_only)?;
        Ok((state_bytes, counts))
    };
    let written =
        tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let (state_bytes, counts) = written.map_err(|source| failed(&partial.files().memory, source))?;
    partial.complete();
    let base = match content {
        Content::Whole => CaptureBase::Nothing,
        Content::Changes => CaptureBase::Start,
    };
    Ok(CaptureReport {
        base,
        changed_pages: counts.changed_pages,
        zero_pages: counts.zero_pages,
        state_bytes,
        state_time,
        memory_time: started.elapsed(),
        ..CaptureReport::default()
    })
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    changed_pages: u64,
    zero_pages: u64,
}

fn write_memory(
    pid: u32,
    memory_bytes: u64,
    content: Content,
    path: &Path,
    batch_bytes: u64,
) -> io::Result<Counts> {
    let mappings = guest_memory(memory::file_mappings(pid)?, memory_bytes)?;
    let image = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
    let zeros = match content {
        // Over the base a hole would say that the page is unchanged. The base itself is not needed: who exports it may be away.
        Content::Changes => {
            image.set_len(memory_bytes)?;
            Zeros::Write
        }
        Content::Whole => begin_with_base(&memory::open_mapped_file(pid, &mappings[0])?, &image, path)?,
    };
    let mut counts = Counts::default();
    let mut buffer = vec![0; usize::try_from(batch_bytes).map_err(io::Error::other)?];
    for mapping in &mappings {
        let changed = memory::changed_ranges(pid, mapping.addresses.clone())?;
        for batch in batches(&changed, batch_bytes) {
            let length = batch.iter().map(|run| run.end - run.start).sum::<u64>();
            let bytes = &mut buffer[..usize::try_from(length).map_err(io::Error::other)?];
            memory::read(pid, &batch, bytes)?;
            let mut rest = &bytes[..];
            for run in &batch {
                let (content, behind) =
                    rest.split_at(usize::try_from(run.end - run.start).map_err(io::Error::other)?);
                rest = behind;
                let offset = run.start - mapping.addresses.start + mapping.offset;
                write_run(&image, offset, content, zeros, &mut counts)?;
            }
        }
    }
    Ok(counts)
}

/// Makes the empty file `image` what the guest was started from; tells what zero pages are to become in it.
fn begin_with_base(base: &File, image: &File, path: &Path) -> io::Result<Zeros> {
    if data_extents(base)?.is_empty() {
        image.set_len(base.metadata()?.len())?;
        return Ok(Zeros::Leave);
    }
    reflink(base, image, path).map_err(|error| match error {
        ReflinkError::Io(error) => error,
        unsupported @ ReflinkError::Unsupported { .. } => {
            io::Error::new(io::ErrorKind::Unsupported, unsupported)
        }
    })?;
    Ok(Zeros::Punch)
}

/// The mappings that are the guest's memory: those of the one file that is mapped privately, writable, in full length.
fn guest_memory(mappings: Vec<FileMapping>, memory_bytes: u64) -> io::Result<Vec<FileMapping>> {
    let candidates: Vec<FileMapping> =
        mappings.into_iter().filter(|mapping| mapping.private && mapping.writable).collect();
    let covered = |path: &Path| {
        let of_path = candidates.iter().filter(|mapping| mapping.path == path);
        of_path.map(|mapping| mapping.addresses.end - mapping.addresses.start).sum::<u64>()
    };
    let Some(path) =
        candidates.iter().map(|mapping| &mapping.path).find(|path| covered(path) == memory_bytes)
    else {
        return Err(io::Error::new(
            io::ErrorKind::NotFound,
            "the VMM maps no file of the size of the guest's memory",
        ));
    };
    Ok(candidates.iter().filter(|mapping| mapping.path == *path).cloned().collect())
}

/// Splits runs into groups that fit into the buffer.
fn batches(runs: &[Range<u64>], batch_bytes: u64) -> Vec<Vec<Range<u64>>> {
    let mut batches = Vec::new();
    let mut batch = Vec::new();
    let mut room = batch_bytes;
    for run in runs {
        let mut start = run.start;
        while start < run.end {
            let end = run.end.min(start + room);
            batch.push(start..end);
            room -= end - start;
            start = end;
            if room == 0 {
                batches.push(std::mem::take(&mut batch));
                room = batch_bytes;
            }
        }
    }
    if !batch.is_empty() {
        batches.push(batch);
    }
    batches
}

/// What becomes of pages that are all zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zeros {
    /// They are holes already.
    Leave,
    /// The base may have data there.
    Punch,
    /// They are data like any other.
    Write,
}

/// Writes consecutive pages, those that are zero as `zeros` says.
fn write_run(image: &File, offset: u64, content: &[u8], zeros: Zeros, counts: &mut Counts) -> io::Result<()> {
    let page_bytes = usize::try_from(PAGE_SIZE).map_err(io::Error::other)?;
    let pages: Vec<(&[u8], bool)> =
        content.chunks(page_bytes).map(|page| (page, memory::is_zero(page))).collect();
    let mut position = 0;
    for group in pages.chunk_by(|left, right| left.1 == right.1) {
        let (zero, bytes) = (group[0].1, group.len() * page_bytes);
        let at = offset + position as u64;
        counts.changed_pages += group.len() as u64;
        if zero {
            counts.zero_pages += group.len() as u64;
        }
        match zeros {
            Zeros::Leave if zero => {}
            Zeros::Punch if zero => punch_hole(image, at..at + bytes as u64)?,
            _ => image.write_all_at(&content[position..position + bytes], at)?,
        }
        position += bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
