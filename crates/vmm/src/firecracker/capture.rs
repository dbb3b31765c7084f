//! Writes memory and device state of a stopped Firecracker machine to files of the caller.
//!
//! Owns the capture directory of a jail and the knowledge of what is known of the memory. Firecracker writes the pages that its
//! log says were dirtied since its previous snapshot, and forgets them. From the second time on the log lacks frames that were
//! received: these pages are found in the VMM's process (docs/decisions/2026-11-30-firecracker-driver.md).
//!
//! ```text
//! started    changes ─▶ the log, over the base (zeros or the restored image)
//!            whole   ─▶ base ◀ the log                         blocks are shared, not copied, where the filesystem can
//! captured   changes ─▶ the log ◀ what else was written in the VMM's process, over the previous capture, if that is kept
//! otherwise  whole   ─▶ all of the memory, by Firecracker
//! ```
//!
//! Two files in the run directory tell a later process of ours what was captured:
//!
//! | file | holds | then |
//! |---|---|---|
//! | none | | nothing was captured |
//! | `capturing` | nothing | a capture was cut short, or writes are not known here |
//! | `capturing` | the path of a capture | it is complete; whether anybody keeps it is not known until it is confirmed |
//! | `captured` | the path of a capture | it is kept |
//! | `captured` | nothing | as written by earlier versions, which did not find what the log lacks |

use super::guest_memory::{self, GuestMemory};
use super::jail::on_path;
use super::requests::{Snapshot, name};
use crate::driver::{CaptureBase, CaptureReport};
use crate::partial::PartialFiles;
use aenv_sys::file::{ReflinkError, data_extents, punch_hole, reflink};
use aenv_sys::memory::{self, PAGE_SIZE};
use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of a capture that is being made, or that nobody has confirmed.
const CAPTURING: &str = "capturing";
/// Of the last capture that was confirmed.
const CAPTURED: &str = "captured";
/// Memory looked at at a time.
const BATCH_BYTES: u64 = 1 << 20;

/// What is known of a machine's memory.
#[derive(Debug)]
pub(super) enum Lineage {
    /// The pages dirtied so far, over this image; over zeros when there is none.
    Started(Option<File>),
    /// What was written since the last capture.
    Captured {
        /// Its memory file.
        memory: PathBuf,
        /// Whether the caller keeps it.
        confirmed: bool,
    },
    /// Nothing, for this reason.
    Lost(Cow<'static, str>),
}

impl Lineage {
    /// Of a machine that an earlier process of ours started.
    pub(super) fn adopted(run_dir: &Path, pid: u32, memory_bytes: u64) -> io::Result<Self> {
        for (name, confirmed) in [(CAPTURING, false), (CAPTURED, true)] {
            match path_in(&run_dir.join(name))? {
                Some(path) if path.as_os_str().is_empty() => {
                    return Ok(Self::Lost(
                        "the capture before was cut short, or could not be built on".into(),
                    ));
                }
                Some(memory) => return Ok(Self::Captured { memory, confirmed }),
                None => {}
            }
        }
        Ok(match GuestMemory::find(pid, memory_bytes)? {
            Some(memory) => Self::Started(memory.open_image()?),
            None => Self::Lost(NOT_FOUND.into()),
        })
    }

    /// What Firecracker is to be asked for; and why, if that is all of the memory. `are_writes_known`: whether it can be found out
    /// what was written in the VMM's process since the last capture.
    pub(super) fn snapshot(&self, content: Content, are_writes_known: bool) -> (Snapshot, Option<String>) {
        let reason = match self {
            Self::Started(_) => return (Snapshot::Diff, None),
            Self::Captured { .. } if content == Content::Whole => "all of it is wanted",
            Self::Captured { confirmed: false, .. } => "whether the capture before is kept is not known",
            Self::Captured { .. } if !are_writes_known => NOT_FOUND,
            Self::Captured { .. } => return (Snapshot::Diff, None),
            Self::Lost(reason) => reason,
        };
        (Snapshot::Full, Some(reason.to_owned()))
    }

    /// The caller keeps the capture whose memory file is `memory`; of another one than the last nothing is noted.
    pub(super) fn confirm(&mut self, run_dir: &Path, memory: &Path) -> io::Result<()> {
        if let Self::Captured { memory: last, confirmed } = self
            && last == memory
            && !*confirmed
        {
            std::fs::rename(run_dir.join(CAPTURING), run_dir.join(CAPTURED))?;
            *confirmed = true;
        }
        Ok(())
    }
}

/// Why what was written is not known.
pub(super) const NOT_FOUND: &str = "where the guest's memory lies in Firecracker's process cannot be told";
/// The same of a kernel without what is needed.
pub(super) const NOT_KEPT: &str = "Firecracker's log of writes lacks received frames, and this kernel does not tell what else \
                                   a process wrote (CONFIG_MEM_SOFT_DIRTY)";

/// The files that tell of captures.
pub(super) fn markers(run_dir: &Path) -> [PathBuf; 2] {
    [CAPTURING, CAPTURED].map(|name| run_dir.join(name))
}

/// From now on, and until it is [`finished`], a later process of ours cannot know what was written since when.
pub(super) fn begun(run_dir: &Path) -> io::Result<()> {
    File::create(run_dir.join(CAPTURING)).map(drop)
}

/// What is known is what was written since the capture whose memory file is `memory`.
fn finished(run_dir: &Path, memory: &Path) -> io::Result<()> {
    // In one write: whoever reads it finds all or nothing.
    std::fs::write(run_dir.join(CAPTURING), memory.as_os_str().as_encoded_bytes())
}

/// The path in a file; `None` when there is no such file.
fn path_in(file: &Path) -> io::Result<Option<PathBuf>> {
    match std::fs::read(file) {
        Ok(bytes) => Ok(Some(PathBuf::from(OsString::from_vec(bytes)))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the memory file is to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// All of the memory.
    Whole,
    /// The pages that were written since the previous capture or the start; all of the memory where that cannot be told.
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
    /// Where it is told that there was a capture.
    pub(super) run_dir: PathBuf,
    /// As it was when Firecracker was asked, by [`Lineage::snapshot`].
    pub(super) lineage: Lineage,
    pub(super) snapshot: Snapshot,
    /// Why all of the memory was asked for.
    pub(super) whole_because: Option<String>,
    pub(super) content: Content,
    /// Where it can be found out what was written in the VMM's process, or why it cannot.
    pub(super) memory: Result<GuestMemory, &'static str>,
    /// Size of the guest's memory.
    pub(super) memory_bytes: u64,
    /// How long Firecracker took; it writes both files in one command.
    pub(super) written_in: Duration,
}

impl Written {
    /// Puts the files where the caller wants them, and tells what is known from now on. Blocks.
    pub(super) fn finish(self) -> io::Result<(CaptureReport, Lineage)> {
        let started = Instant::now();
        let changed = OpenOptions::new().read(true).write(true).open(self.directory.path(name::MEMORY))?;
        let length = changed.metadata()?.len();
        if length != self.memory_bytes {
            let what =
                format!("Firecracker wrote {length} bytes of memory, the guest has {}", self.memory_bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        let unlogged_pages = self.add_unlogged(&changed)?;
        let mut tracking_time = started.elapsed();
        let changed_pages = pages(&data_extents(&changed)?);
        let (base, zero_pages) = self.place(&changed)?;
        self.directory.take(name::STATE, &self.partial.files().state, LONGEST_STATE)?;
        let forgetting = Instant::now();
        let lineage = self.begin_anew()?;
        tracking_time += forgetting.elapsed();
        let report = CaptureReport {
            base,
            whole_because: self.whole_because.filter(|_| self.content == Content::Changes),
            changed_pages,
            unlogged_pages,
            zero_pages,
            state_bytes: std::fs::metadata(&self.partial.files().state)?.len(),
            state_time: self.written_in,
            memory_time: started.elapsed(),
            tracking_time,
        };
        self.partial.complete();
        Ok((report, lineage))
    }

    /// Adds to what Firecracker wrote the pages that its log lacks; returns how many. Nothing has been written to the memory since,
    /// neither by the guest nor by the VMM, whose thread for devices does nothing but its API's commands while the guest is paused.
    fn add_unlogged(&self, changed: &File) -> io::Result<u64> {
        if self.snapshot == Snapshot::Full || matches!(self.lineage, Lineage::Started(_)) {
            return Ok(0);
        }
        let memory = self.memory.as_ref().map_err(|reason| io::Error::other(*reason))?;
        let logged = data_extents(changed)?;
        memory.verify(&logged, changed)?;
        let unlogged = guest_memory::without(&memory.writes()?, &logged);
        memory.copy(&unlogged, changed)?;
        Ok(pages(&unlogged))
    }

    /// Gives the caller its memory file; returns what it is complete with, and how many zero pages became holes.
    fn place(&self, changed: &File) -> io::Result<(CaptureBase, u64)> {
        let target = &self.partial.files().memory;
        let take = || self.directory.take(name::MEMORY, target, self.memory_bytes);
        Ok(match (self.snapshot, &self.lineage, self.content) {
            (Snapshot::Full, ..) => {
                let zero_pages = punch_zeros(changed)?;
                take()?;
                (CaptureBase::Nothing, zero_pages)
            }
            (Snapshot::Diff, Lineage::Started(_), Content::Changes) => {
                take()?;
                (CaptureBase::Start, 0)
            }
            (Snapshot::Diff, Lineage::Started(Some(base)), Content::Whole) => {
                compose(Some(base), changed, target)?;
                std::fs::remove_file(self.directory.path(name::MEMORY))?;
                (CaptureBase::Nothing, 0)
            }
            (Snapshot::Diff, Lineage::Started(None), Content::Whole) => {
                take()?;
                (CaptureBase::Nothing, 0)
            }
            (Snapshot::Diff, Lineage::Captured { .. }, Content::Changes) => {
                take()?;
                (CaptureBase::PreviousCapture, 0)
            }
            (Snapshot::Diff, Lineage::Captured { .. } | Lineage::Lost(_), _) => {
                let what = "the changes that Firecracker wrote are changes of something unknown";
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        })
    }

    /// The next capture may build on this one, if it can be found out what is written from now on.
    fn begin_anew(&self) -> io::Result<Lineage> {
        match &self.memory {
            Ok(memory) => {
                memory.forget_writes()?;
                let memory = self.partial.files().memory.clone();
                finished(&self.run_dir, &memory)?;
                Ok(Lineage::Captured { memory, confirmed: false })
            }
            Err(reason) => Ok(Lineage::Lost((*reason).into())),
        }
    }
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
