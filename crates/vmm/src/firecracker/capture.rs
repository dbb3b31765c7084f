//! Writes memory and device state of a stopped Firecracker machine to files of the caller.
//!
//! Owns the capture directory of a jail and the knowledge of what the memory is made of. Firecracker writes the pages that
//! were dirtied since its previous snapshot, and forgets them; so what it writes is worth something only together with
//! everything since the start:
//!
//! ```text
//! start            base (zeros or the restored image)
//! changes ─▶ c1    base ◀ c1                    c1 goes to the caller; its file is kept open
//! whole   ─▶ w     base ◀ c1 ◀ (new changes)    blocks are shared, not copied, where the filesystem can
//! changes ─▶ c2    w ◀ c2
//! ```
//!
//! When a link is lost (a capture failed half-way, the VM was adopted after a capture) the next one is whole, and asks
//! Firecracker for all of the memory.

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

/// Made before the first capture: from then on a later process of ours cannot know what the memory is made of.
const CAPTURED: &str = "captured";
/// Files kept open for a later whole capture; when there are more, Firecracker writes all of the memory instead.
const MOST_CHANGES: usize = 16;
/// Memory looked at at a time.
const BATCH_BYTES: u64 = 1 << 20;

/// What a machine's memory is made of, besides the pages dirtied since the previous capture.
#[derive(Debug)]
pub(super) enum Lineage {
    /// The base, then each of the changes over it.
    Known {
        /// The image; zeros when absent.
        base: Option<File>,
        /// Oldest first.
        changes: Vec<File>,
        /// Whether there was a capture since the start.
        captured: bool,
    },
    /// It cannot be told.
    Lost,
}

impl Lineage {
    /// Of a machine that has just been started, from zeros or from an image.
    pub(super) fn started(base: Option<File>) -> Self {
        Self::Known { base, changes: Vec::new(), captured: false }
    }

    /// Of a machine that an earlier process of ours started.
    pub(super) fn adopted(run_dir: &Path, pid: u32, memory_bytes: u64) -> io::Result<Self> {
        if marker(run_dir).try_exists()? {
            return Ok(Self::Lost);
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
        Ok(Self::started(base))
    }

    /// What Firecracker is to be asked for.
    pub(super) fn snapshot(&self) -> Snapshot {
        match self {
            Self::Known { changes, .. } if changes.len() < MOST_CHANGES => Snapshot::Diff,
            Self::Known { .. } | Self::Lost => Snapshot::Full,
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
    /// The pages that the guest wrote since the previous capture.
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
        compose(None, std::slice::from_ref(&source), target)?;
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
    pub(super) lineage: Lineage,
    pub(super) snapshot: Snapshot,
    pub(super) content: Content,
    /// Size of the guest's memory.
    pub(super) memory_bytes: u64,
    /// How long Firecracker took; it writes both files in one command.
    pub(super) written_in: Duration,
}

impl Written {
    /// Puts the files where the caller wants them. Blocks. Returns what the memory is made of from now on.
    pub(super) fn finish(self) -> io::Result<(CaptureReport, Lineage)> {
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
        let (base, lineage) = match (self.snapshot, self.lineage) {
            (Snapshot::Diff, Lineage::Known { base, mut changes, captured }) => {
                if self.content == Content::Changes {
                    self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                    changes.push(File::open(target)?);
                    let since = if captured { CaptureBase::PreviousCapture } else { CaptureBase::Start };
                    (since, Lineage::Known { base, changes, captured: true })
                } else {
                    if base.is_none() && changes.is_empty() {
                        self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                    } else {
                        changes.push(changed);
                        compose(base.as_ref(), &changes, target)?;
                        std::fs::remove_file(self.directory.path(name::MEMORY))?;
                    }
                    (CaptureBase::Nothing, whole(target)?)
                }
            }
            (Snapshot::Full | Snapshot::Diff, _) => {
                counts.zero_pages = punch_zeros(&changed)?;
                self.directory.take(name::MEMORY, target, self.memory_bytes)?;
                (CaptureBase::Nothing, whole(target)?)
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
        Ok((report, lineage))
    }
}

#[derive(Debug, Clone, Copy)]
struct Counts {
    changed_pages: u64,
    zero_pages: u64,
}

fn whole(image: &Path) -> io::Result<Lineage> {
    Ok(Lineage::Known { base: Some(File::open(image)?), changes: Vec::new(), captured: true })
}

fn pages(extents: &[std::ops::Range<u64>]) -> u64 {
    extents.iter().map(|extent| (extent.end - extent.start) / PAGE_SIZE).sum()
}

/// Makes a new file of `base` with each of `changes` laid over it.
fn compose(base: Option<&File>, changes: &[File], target: &Path) -> io::Result<()> {
    let image = OpenOptions::new().read(true).write(true).create_new(true).open(target)?;
    if let Some(base) = base {
        reflink(base, &image, target).map_err(|error| match error {
            ReflinkError::Io(error) => error,
            unsupported @ ReflinkError::Unsupported { .. } => {
                io::Error::new(io::ErrorKind::Unsupported, unsupported)
            }
        })?;
    }
    for change in changes {
        if base.is_none() {
            image.set_len(change.metadata()?.len())?;
        }
        for extent in data_extents(change)? {
            let (mut from, mut to) = (extent.start, extent.start);
            while from < extent.end {
                let rest = usize::try_from(extent.end - from).map_err(io::Error::other)?;
                // Shares blocks where the filesystem can, and copies in the kernel where it cannot.
                let copied =
                    rustix::fs::copy_file_range(change, Some(&mut from), &image, Some(&mut to), rest)?;
                if copied == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
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
