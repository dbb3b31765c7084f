//! Writes memory and device state of a stopped Firecracker machine to files of the caller.
//!
//! Owns the capture directory of a jail and the knowledge of what the memory is made of. Firecracker can write the pages that
//! were dirtied since its previous snapshot. Only the first such set is complete: it marks buffers for received frames when it
//! takes them from the guest's ring, not when it fills them, and a snapshot in between forgets the marks
//! (docs/decisions/2026-11-30-firecracker-driver.md). So:
//!
//! ```text
//! start              base (zeros or the restored image)
//! first, changes ─▶  what was dirtied since the start
//! first, whole   ─▶  base ◀ what was dirtied            blocks are shared, not copied, where the filesystem can
//! later ones     ─▶  all of the memory, by Firecracker
//! ```

use super::jail::on_path;
use super::requests::{Snapshot, name};
use crate::driver::{CaptureBase, CaptureReport};
use crate::partial::PartialFiles;
use aenv_sys::file::{ReflinkError, data_extents, punch_hole, reflink};
use aenv_sys::memory::{self, PAGE_SIZE};
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Made before the first capture: a later process of ours must know that there was one.
const CAPTURED: &str = "captured";
/// Memory looked at at a time.
const BATCH_BYTES: u64 = 1 << 20;

/// What a machine's memory is made of.
#[derive(Debug)]
pub(super) enum Lineage {
    /// The pages dirtied so far, over this image; over zeros when there is none.
    Started(Option<File>),
    /// There was a capture, so it cannot be told.
    Captured,
}

impl Lineage {
    /// Of a machine that an earlier process of ours started.
    pub(super) fn adopted(run_dir: &Path, pid: u32, memory_bytes: u64) -> io::Result<Self> {
        if marker(run_dir).try_exists()? {
            return Ok(Self::Captured);
        }
        let mappings = memory::file_mappings(pid)?;
        let candidates = || mappings.iter().filter(|mapping| mapping.private && mapping.writable);
        let covered = |path: &Path| {
            let same = candidates().filter(|mapping| mapping.path == path);
            same.map(|mapping| mapping.addresses.end - mapping.addresses.start).sum::<u64>()
        };
        // A booted guest's memory is anonymous.
        let image = candidates().find(|mapping| covered(&mapping.path) == memory_bytes);
        let base = image.map(|mapping| memory::open_mapped_file(pid, mapping)).transpose()?;
        Ok(Self::Started(base))
    }

    /// What Firecracker is to be asked for.
    pub(super) fn snapshot(&self) -> Snapshot {
        match self {
            Self::Started(_) => Snapshot::Diff,
            Self::Captured => Snapshot::Full,
        }
    }
}

/// The file that says that there was a capture.
pub(super) fn marker(run_dir: &Path) -> PathBuf {
    run_dir.join(CAPTURED)
}

/// What the memory file is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// All of the memory.
    Whole,
    /// The pages that were written since the start; all of the memory where that cannot be told.
    Changes,
}

/// The directory in a jail where Firecracker writes. Held open and used through its descriptor: the jailed user owns the
/// directory above it and may put something else in its place.
#[derive(Debug)]
pub(super) struct CaptureDirectory {
    handle: File,
}

impl CaptureDirectory {
    /// Opens it.
    ///
    /// # Errors
    /// When it is not there or not ours.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
        let flags = flags.bits().cast_signed();
        let handle = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let handle = handle.map_err(|error| on_path(path, &error))?;
        if handle.metadata()?.uid() != rustix::process::geteuid().as_raw() {
            let what = format!("{} is not ours: the jailed process has exchanged it", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        Ok(Self { handle })
    }

    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.handle.as_raw_fd()))
    }

    /// Makes two empty files that `user` may write.
    pub(super) fn prepare(&self, user: u32) -> io::Result<()> {
        for name in [name::MEMORY, name::STATE] {
            let path = self.path(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            chown(&path, Some(user), Some(user))?;
        }
        Ok(())
    }

    /// Makes a file of ours that shares the blocks of a written one where the filesystem can, and removes that one. Not the file itself: Firecracker
    /// may still have it open for writing, and others are to map what it is now.
    fn take(&self, name: &str, target: &Path, longest: u64) -> io::Result<()> {
        let path = self.path(name);
        let source = File::open(&path)?;
        let length = source.metadata()?.len();
        if length > longest {
            let what =
                format!("{} has {length} bytes, more than the {longest} it can have", target.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        compose(None, &source, target)?;
        std::fs::remove_file(&path)
    }
}

/// Bytes of device state beyond which something is wrong: it has some KiB per device.
const LONGEST_STATE: u64 = 16 << 20;

/// One capture, from the moment that Firecracker has written its files.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) directory: Arc<CaptureDirectory>,
    pub(super) partial: Arc<PartialFiles>,
    /// As it was when Firecracker was asked, by [`Lineage::snapshot`].
    pub(super) lineage: Lineage,
    pub(super) content: Content,
    /// Size of the guest's memory.
    pub(super) memory_bytes: u64,
    /// How long Firecracker took; it writes both files in one command.
    pub(super) written_in: Duration,
}

impl Written {
    /// Puts the files where the caller wants them. Blocks.
    pub(super) fn finish(self) -> io::Result<CaptureReport> {
        let started = Instant::now();
        let target = &self.partial.files().memory;
        let changed = OpenOptions::new().read(true).write(true).open(self.directory.path(name::MEMORY))?;
        let length = changed.metadata()?.len();
        if length != self.memory_bytes {
            let what =
                format!("Firecracker wrote {length} bytes of memory, the guest has {}", self.memory_bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let mut counts = Counts { changed_pages: pages(&data_extents(&changed)?), zero_pages: 0 };
        let base = match (&self.lineage, self.content) {
            (Lineage::Started(_), Content::Changes) => {
                self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                CaptureBase::Start
            }
            (Lineage::Started(Some(base)), Content::Whole) => {
                compose(Some(base), &changed, target)?;
                std::fs::remove_file(self.directory.path(name::MEMORY))?;
                CaptureBase::Nothing
            }
            (Lineage::Started(None), Content::Whole) => {
                self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                CaptureBase::Nothing
            }
            (Lineage::Captured, _) => {
                counts.zero_pages = punch_zeros(&changed)?;
                self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                CaptureBase::Nothing
            }
        };
        self.directory.take(name::STATE, &self.partial.files().state, LONGEST_STATE)?;
        let report = CaptureReport {
            base,
            changed_pages: counts.changed_pages,
            zero_pages: counts.zero_pages,
            state_bytes: std::fs::metadata(&self.partial.files().state)?.len(),
            state_time: self.written_in,
            memory_time: started.elapsed(),
        };
        self.partial.complete();
        Ok(report)
    }
}

#[derive(Debug, Clone, Copy)]
struct Counts {
    changed_pages: u64,
    zero_pages: u64,
}

fn pages(extents: &[std::ops::Range<u64>]) -> u64 {
    extents.iter().map(|extent| (extent.end - extent.start) / PAGE_SIZE).sum()
}

/// Makes a new file of `base`, or of zeros, with `changes` laid over it.
fn compose(base: Option<&File>, changes: &File, target: &Path) -> io::Result<()> {
    let image = OpenOptions::new().read(true).write(true).create_new(true).open(target)?;
    if let Some(base) = base {
        reflink(base, &image, target).map_err(|error| match error {
            ReflinkError::Io(error) => error,
            unsupported @ ReflinkError::Unsupported { .. } => {
                io::Error::new(io::ErrorKind::Unsupported, unsupported)
            }
        })?;
    }
    if base.is_none() {
        image.set_len(changes.metadata()?.len())?;
    }
    for extent in data_extents(changes)? {
        let (mut from, mut to) = (extent.start, extent.start);
        while from < extent.end {
            let rest = usize::try_from(extent.end - from).map_err(io::Error::other)?;
            // Shares blocks where the filesystem can, and copies in the kernel where it cannot.
            let copied = rustix::fs::copy_file_range(changes, Some(&mut from), &image, Some(&mut to), rest)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
    std::fs::set_permissions(target, Permissions::from_mode(0o444))
}

/// Makes holes of the pages that are all zero; returns how many.
fn punch_zeros(image: &File) -> io::Result<u64> {
    let page = usize::try_from(PAGE_SIZE).map_err(io::Error::other)?;
    let mut buffer = vec![0; usize::try_from(BATCH_BYTES).map_err(io::Error::other)?];
    let mut zero_pages = 0;
    for extent in data_extents(image)? {
        let mut start = extent.start;
        while start < extent.end {
            let length = usize::try_from(BATCH_BYTES.min(extent.end - start)).map_err(io::Error::other)?;
            let bytes = &mut buffer[..length];
            image.read_exact_at(bytes, start)?;
            let zeros: Vec<bool> = bytes.chunks(page).map(memory::is_zero).collect();
            let mut at = start;
            for run in zeros.chunk_by(|left, right| left == right) {
                let end = at + run.len() as u64 * PAGE_SIZE;
                if run[0] {
                    punch_hole(image, at..end)?;
                    zero_pages += run.len() as u64;
                }
                at = end;
            }
            start += length as u64;
        }
    }
    Ok(zero_pages)
}

#[cfg(test)]
mod tests;
