//! A writable disk: an image, sealed tops on it, and the current top, in one directory.
//!
//! ```text
//!              ┌───────────────┐  reads and writes
//!   this disk  │ current top   │  seal: becomes the uppermost sealed one, and a new one takes its place
//!              ├───────────────┤
//!              │ sealed tops   │  shared with children as a StackedImage; compact merges the oldest
//!              ├───────────────┤
//!   not ours   │ lower image   │  layers, or the stack of a parent
//!              └───────────────┘
//!
//!   seal:  files of the new top ─▶ manifest written aside ─▶ ‖ `sealed` record ─▶ rename manifest ─▶ swap in memory ‖
//!          a crash after the record: the next process finds a sealed top as current one, and makes a new one
//!          a crash before it:        the new top's files are strays, and are removed
//!          ‖ … ‖ is the only part that writers wait for; readers wait for the swap alone
//! ```
//! What the loss of power leaves is the manifest of the last flush, with every top as of its last commit (see
//! [`crate::top`] and the manifest's module).
//!
//! Owns its directory. Must not know how it is exported. Order of locks: compaction → structure → turn of a flush → gate → state
//! → the keeper's.

mod compact;
mod keeper;
mod manifest;
mod open;
mod rewind;
#[cfg(test)]
mod tests;

use crate::raw_file::{after_failure, failed};
use crate::top::{
    Allowance, BootId, Directory, HostDirectory, Identity, Lock, SealedTop, StackedImage, StoredFile, Top,
    lock, read_clipped, remove_files, remove_if_there,
};
use crate::{BLOCK_BYTES, BlockDevice, Image, StorageError};
pub use compact::Compaction;
pub(crate) use keeper::Keeper;
use manifest::{Manifest, TopName, number_of, top_name};
pub use rewind::Rewound;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A disk that is open. Dropping it flushes nothing: what was written stays until the host loses its power.
#[derive(Debug)]
pub struct LayeredDisk {
    directory: Arc<dyn Directory>,
    boot: BootId,
    lower: Arc<dyn Image>,
    lower_is_durable: AtomicBool,
    size: u64,
    keeper: Arc<Keeper>,
    allowance: Allowance,
    /// Serialises what changes the list of tops.
    structure: Mutex<()>,
    /// One compaction at a time, without keeping seals away.
    compaction: Mutex<()>,
    /// Held shared by whoever writes the current top, alone by a seal.
    gate: RwLock<()>,
    state: RwLock<Arc<State>>,
    next_number: AtomicU64,
    /// Held as long as the disk is open.
    _lock: Arc<dyn StoredFile>,
}

/// The tops at one moment.
#[derive(Debug)]
struct State {
    current_name: String,
    current: Arc<Top>,
    below: StackedImage,
}

/// What a disk stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskUsage {
    /// Bytes of blocks in all tops, as often as there are tops that have them.
    pub stored_bytes: u64,
    /// Bytes of different blocks of which the tops show data, whichever of them; what the quota limits.
    pub charged_bytes: u64,
    /// What may be charged, in bytes.
    pub quota: u64,
    /// Blocks of the current top that have data.
    pub data_blocks: u64,
    /// Blocks of the current top that are zeros by record.
    pub zero_blocks: u64,
    /// Bytes of the current top's log.
    pub log_bytes: u64,
    /// Number of sealed tops.
    pub sealed_tops: usize,
}

impl LayeredDisk {
    /// Makes a disk of `size` bytes in `directory`, which is made when only its last part is not there. All tops together may show
    /// `quota` bytes of data. Not durable before the first flush.
    ///
    /// # Errors
    /// When there is a disk already, the size is impossible or less than that of `lower`, or the host cannot.
    pub fn create(
        directory: &Path,
        lower: Arc<dyn Image>,
        size: u64,
        quota: u64,
        boot: &BootId,
    ) -> Result<Self, StorageError> {
        match std::fs::create_dir(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed("make", directory, error));
            }
            _ => {}
        }
        Self::create_in(Arc::new(HostDirectory::new(directory)), lower, size, quota, boot)
    }

    /// Opens the disk in `directory` on the image it was made on. Everything that was acknowledged is there if `boot`, that
    /// of the running kernel, is the one it was written in; everything that was flushed otherwise.
    ///
    /// # Errors
    /// [`StorageError::InUse`] when it is open elsewhere, [`StorageError::NeverDurable`] when the host lost its power
    /// before the first flush, [`StorageError::Damaged`] when its files are not what they were.
    pub fn open(directory: &Path, lower: Arc<dyn Image>, boot: &BootId) -> Result<Self, StorageError> {
        Self::open_in(Arc::new(HostDirectory::new(directory)), lower, boot)
    }

    /// Removes the disk in `directory`, which nobody may have open. Sealed tops that others stand on stay, and are
    /// returned: call again when they are free. Only who has a top open counts: open the children first. No error when there
    /// is no disk.
    ///
    /// # Errors
    /// [`StorageError::InUse`] when it is open, or the system's error.
    pub fn remove(directory: &Path) -> Result<Vec<PathBuf>, StorageError> {
        open::remove(directory)
    }

    /// Ends all changes to the current top and begins a new one. Returns the sealed top, which survives the death of this
    /// process; [`SealedTop::make_durable`] makes it survive more. Takes the same time whatever the top stores.
    ///
    /// # Errors
    /// When the host has no room for the files of a new top: then nothing has changed.
    pub fn seal(&self) -> Result<Arc<SealedTop>, StorageError> {
        let _structure = lock(&self.structure);
        let state = self.state();
        let (name, top) = self.new_top(state.current.identity().id)?;
        let sealed = self.seal_into(&state, &name, &top);
        if sealed.is_err() {
            after_failure(remove_files(&*self.directory, &name));
        }
        sealed
    }

    fn seal_into(&self, state: &State, name: &str, top: &Arc<Top>) -> Result<Arc<SealedTop>, StorageError> {
        let mut next = self.keeper.manifest();
        if next.sealed.len() >= manifest::MAXIMUM_TOPS {
            let (name, reason) = (self.directory.path().display().to_string(), "it has too many sealed tops");
            return Err(StorageError::Unsupported { name, reason: reason.to_owned() });
        }
        next.sealed.push(next.current);
        next.current = TopName::new(name, &top.identity().id);
        next.set_boot(&self.boot);
        manifest::write(&*self.directory, &next)?;
        let directory = Arc::clone(&self.directory);
        let keeper = Some(Arc::clone(&self.keeper));
        let sealed =
            SealedTop::hold(state.current_name.clone(), Arc::clone(&state.current), directory, keeper)?;
        let sealed = Arc::new(sealed);
        let mut tops = state.below.tops().to_vec();
        tops.push(Arc::clone(&sealed));
        let below = StackedImage::new(Arc::clone(&self.lower), tops);
        let next_state = Arc::new(State { current_name: name.to_owned(), current: Arc::clone(top), below });

        let _alone = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        state.current.seal(|| self.keeper.publish(next, &[&state.current, top]))?;
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = next_state;
        Ok(sealed)
    }

    /// Id of the top that is written now: what [`SealedTop::id`] will be once it is sealed.
    #[must_use]
    pub fn current_top_id(&self) -> [u8; 16] {
        self.state().current.identity().id
    }

    /// The sealed tops, from bottom to top.
    #[must_use]
    pub fn sealed_tops(&self) -> Vec<Arc<SealedTop>> {
        // Cloned under the lock that a compaction looks for holders with.
        self.state.read().unwrap_or_else(PoisonError::into_inner).below.tops().to_vec()
    }

    /// Everything but the current top, for a child to stand on: seal first, so that it has what was written.
    #[must_use]
    pub fn sealed_image(&self) -> StackedImage {
        StackedImage::new(Arc::clone(&self.lower), self.sealed_tops())
    }

    /// What it stores.
    #[must_use]
    pub fn usage(&self) -> DiskUsage {
        let state = self.state();
        let sealed_bytes = state.below.tops().iter().map(|top| top.stored_bytes()).sum::<u64>();
        DiskUsage {
            stored_bytes: sealed_bytes + state.current.map().data_blocks() * BLOCK_BYTES,
            charged_bytes: self.allowance.used(),
            quota: self.allowance.quota(),
            data_blocks: state.current.map().data_blocks(),
            zero_blocks: state.current.map().zero_blocks(),
            log_bytes: state.current.log_bytes(),
            sealed_tops: state.below.tops().len(),
        }
    }

    /// Changes how many bytes of data all tops may show. Durable with the next flush. Less than they do is allowed: then only
    /// what is there may be overwritten.
    ///
    /// # Errors
    /// When the host cannot store it.
    pub fn set_quota(&self, quota: u64) -> Result<(), StorageError> {
        let _structure = lock(&self.structure);
        let mut next = self.keeper.manifest();
        next.quota = quota;
        self.record(next, &[])?;
        self.allowance.set_quota(quota);
        Ok(())
    }

    /// Writes and publishes a manifest. Whoever calls holds the structure.
    fn record(&self, mut next: Manifest, tops: &[&Arc<Top>]) -> Result<(), StorageError> {
        next.set_boot(&self.boot);
        manifest::write(&*self.directory, &next)?;
        self.keeper.publish(next, tops)
    }

    /// Writes the log of the current top anew if that is worth it, or `always`.
    fn rewrite_log(&self, always: bool) -> Result<(), StorageError> {
        let _structure = lock(&self.structure);
        let state = self.state();
        let pause = || self.gate.write().unwrap_or_else(PoisonError::into_inner);
        state.current.rewrite_log(&*self.directory, &state.current_name, &self.boot, always, pause)
    }

    fn new_top(&self, parent: [u8; 16]) -> Result<(String, Arc<Top>), StorageError> {
        let name = top_name(self.next_number.fetch_add(1, Ordering::Relaxed));
        let identity = Identity { id: rand::random(), parent, size: self.size };
        let top = Top::create(&*self.directory, &name, identity, &self.boot)?;
        Ok((name, Arc::new(top)))
    }

    fn state(&self) -> Arc<State> {
        Arc::clone(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<Range<u64>, StorageError> {
        match offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(offset..end),
            _ => {
                let name = self.directory.path().display().to_string();
                Err(StorageError::OutOfRange { name, offset, length, size: self.size })
            }
        }
    }

    /// Runs an operation on the current top, which is not sealed before it ends.
    fn change<T>(
        &self,
        operation: impl FnOnce(&State) -> Result<T, StorageError>,
    ) -> Result<T, StorageError> {
        let _shared = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        operation(&self.state())
    }

    fn zero_part(&self, range: Range<u64>, state: &State) -> Result<(), StorageError> {
        if range.is_empty() {
            return Ok(());
        }
        let zeros = vec![0; (range.end - range.start) as usize];
        state.current.write_at(&zeros, range.start, &state.below, &self.allowance)
    }
}

/// The blocks that lie in a byte range as a whole.
fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let first = range.start.div_ceil(BLOCK_BYTES);
    first..(range.end / BLOCK_BYTES).max(first)
}

impl BlockDevice for LayeredDisk {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        self.check_range(offset, buffer.len() as u64)?;
        let state = self.state();
        state.current.read_at(buffer, offset, |part, position| read_clipped(&state.below, part, position))
    }

    fn write_at(&self, data: &[u8], offset: u64) -> Result<(), StorageError> {
        self.check_range(offset, data.len() as u64)?;
        self.change(|state| state.current.write_at(data, offset, &state.below, &self.allowance))
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        let range = self.check_range(offset, length)?;
        self.change(|state| state.current.clear(whole_blocks(&range), &state.below, &self.allowance))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), StorageError> {
        let range = self.check_range(offset, length)?;
        let blocks = whole_blocks(&range);
        self.change(|state| {
            if blocks.is_empty() {
                return self.zero_part(range.clone(), state);
            }
            self.zero_part(range.start..blocks.start * BLOCK_BYTES, state)?;
            state.current.clear(blocks.clone(), &state.below, &self.allowance)?;
            self.zero_part(blocks.end * BLOCK_BYTES..range.end, state)
        })
    }

    fn flush(&self) -> Result<(), StorageError> {
        // Before anything else: what is written later need not be covered, and may be in a newer top.
        let state = self.state();
        if !self.lower_is_durable.load(Ordering::Acquire) {
            self.lower.make_durable()?;
            self.lower_is_durable.store(true, Ordering::Release);
        }
        self.keeper.settle()?;
        state.current.flush()?;
        if !state.current.log_may_be_wasteful() {
            return Ok(());
        }
        match self.rewrite_log(false) {
            Err(error @ StorageError::NotDurable { .. }) => Err(error),
            // The flush has succeeded: a full host, say, is no reason to let the guest wait for a shorter log.
            Err(error) => {
                tracing::warn!(%error, "a log that has grown long cannot be written anew for now");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}
