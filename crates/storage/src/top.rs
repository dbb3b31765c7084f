//! The writable top of a disk: a sparse data file in place, and a log of which blocks it has.
//!
//! ```text
//! NAME.data   byte V of the disk lies at byte V; blocks that are not `data` are holes (or leftovers nobody looks at)
//! NAME.log    changes of state, see `log`; read back by `recovery`
//!
//!             write                        discard, write_zeroes
//!   absent ────────────▶ data ◀──────────────────────────────────▶ zero       (absent instead of zero where nothing
//!   (below shows)         │ ▲  write: logs nothing                            below could show through)
//!                         └─┘
//!
//!   write     data file ─▶ log ─▶ state in memory ─▶ reply       no fsync: survives our death, not the loss of power
//!   discard   log ─▶ state in memory ─▶ hole in the data file    a hole never precedes the record that allows it
//!   FLUSH     fdatasync(data) ─▶ commit record that covers every record written before it ─▶ fdatasync(log)
//!   seal      `sealed` record; from then on nothing changes, and any number of disks may read it
//! ```
//! A block becomes data only when all of it was written since it last was not (partial writes read the rest from below
//! first), so leftovers of a void write never show. State follows the log, so whoever sees `data` and overwrites it knows
//! that the record is before any commit that could cover the write.
//!
//! Locks, in this order: region (1 MiB; shared to overwrite data, alone to change states) → log. A failed fdatasync
//! leaves the top unflushable ([`StorageError::NotDurable`]): the kernel forgets such errors and would claim success.
//!
//! Owns the two files. Must not know the disk's other tops: they are handed in, as what lies below.

mod allowance;
mod boot;
mod change;
mod files;
mod flush;
mod log;
mod map;
mod recovery;
mod rewrite;
mod sealed;
#[cfg(test)]
pub(crate) mod simulation;
mod stacked;

use crate::raw_file::{after_failure, failed};
use crate::{BLOCK_BYTES, Image, StorageError};
pub(crate) use allowance::Allowance;
pub use boot::BootId;
pub(crate) use files::{Directory, HostDirectory, Lock, StoredFile, remove_if_there};
use flush::FlushQueue;
pub(crate) use log::{Identity, TopId, size_is_valid};
use log::{Log, LogEnd, Record};
pub(crate) use map::{BlockMap, BlockRange, BlockState, count_shown};
use recovery::{Failure, recover};
pub use sealed::SealedTop;
pub use stacked::StackedImage;
pub(crate) use stacked::{Shows, run_of_tops};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Locks of regions; regions share them.
const REGION_LOCKS: usize = 64;

#[derive(Debug)]
pub(crate) struct Top {
    identity: Identity,
    data_path: PathBuf,
    log_path: PathBuf,
    data: Arc<dyn StoredFile>,
    map: BlockMap,
    log: Mutex<Log>,
    /// Bytes of the log from which on it may be worth to write it anew.
    log_limit: AtomicU64,
    regions: Box<[RwLock<()>]>,
    flushes: FlushQueue,
    /// Counts operations that ended; what a flush must cover.
    changes: AtomicU64,
    flushed_changes: AtomicU64,
    flush_failed: AtomicBool,
}

/// How a top is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To be written: a session begins, if the last one is of another boot.
    Write,
    /// Only read; its log gets nothing but commits.
    Read,
}

/// A top that was opened, and whether its log says that it is sealed. A sealed one is never written, whatever was asked.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) top: Top,
    pub(crate) sealed: bool,
}

impl Top {
    /// Makes a new, empty top. Nothing of it is durable before the first flush.
    pub(crate) fn create(
        directory: &dyn Directory,
        name: &str,
        identity: Identity,
        boot: &BootId,
    ) -> Result<Self, StorageError> {
        let (data_path, log_path) = paths(directory, name);
        if !size_is_valid(identity.size) {
            let reason = format!(
                "{} bytes are no size of a disk: a multiple of {BLOCK_BYTES} up to 8 TiB",
                identity.size
            );
            return Err(StorageError::Unsupported { name: data_path.display().to_string(), reason });
        }
        let made = (|| {
            let data =
                directory.create(&data_name(name)).map_err(|error| failed("make", &data_path, error))?;
            let log_file =
                directory.create(&log_name(name)).map_err(|error| failed("make", &log_path, error))?;
            data.set_length(identity.size).map_err(|error| failed("make", &data_path, error))?;
            // Without holes discarding would free nothing; better to know it now.
            data.punch_hole(0..BLOCK_BYTES).map_err(|error| failed("make a hole in", &data_path, error))?;
            log_file
                .write_all_at(&identity.encode(), 0)
                .map_err(|error| failed("write", &log_path, error))?;
            let map = BlockMap::new(identity.size / BLOCK_BYTES);
            let end = LogEnd::of_new_log(&identity);
            let top = Self::assemble(identity, data_path.clone(), log_path.clone(), data, log_file, map, end);
            top.begin_session(boot)?;
            Ok(top)
        })();
        if made.is_err() {
            after_failure(remove_files(directory, name));
        }
        made
    }

    /// Opens a top as the process finds it that runs in `boot`.
    pub(crate) fn open(
        directory: &dyn Directory,
        name: &str,
        access: Access,
        boot: &BootId,
    ) -> Result<Opened, StorageError> {
        let (data_path, log_path) = paths(directory, name);
        let log_file = directory.open(&log_name(name)).map_err(|error| failed("open", &log_path, error))?;
        let data = directory.open(&data_name(name)).map_err(|error| failed("open", &data_path, error))?;
        let recovered =
            recover(&*log_file, &log_path.display().to_string(), boot).map_err(|failure| match failure {
                Failure::Storage(error) => error,
                Failure::System(error) => failed("read", &log_path, error),
            })?;
        let length = data.length().map_err(|error| failed("open", &data_path, error))?;
        if length != recovered.identity.size {
            let reason = format!("it has {length} bytes, and its log speaks of {}", recovered.identity.size);
            return Err(StorageError::Damaged { name: data_path.display().to_string(), reason });
        }
        let top = Self::assemble(
            recovered.identity,
            data_path,
            log_path,
            data,
            log_file,
            recovered.map,
            // Nobody knows whether the last commit reached the disk: the first flush makes another.
            LogEnd { committed: 0, ..recovered.end },
        );
        if access == Access::Write && !recovered.sealed {
            let new_log = rewrite::new_log_name(name);
            let removed = remove_if_there(directory, &new_log);
            removed.map_err(|error| failed("remove", &directory.path().join(new_log), error))?;
            // What is behind the end, half a record or more, must not be kept; the chained CRCs would hold without this.
            let cut = lock(&top.log).file.set_length(recovered.end.position);
            cut.map_err(|error| failed("cut", &top.log_path, error))?;
            // Before the session: with its record the power counts as never lost, and nobody would look for leftovers.
            if recovered.power_was_lost {
                top.free_leftovers()?;
            }
            // A session tells boots apart, not processes: within a boot the log goes on, so that a host without room does
            // not keep a disk from being opened.
            if recovered.boot != Some(*boot) {
                top.begin_session(boot)?;
            }
        }
        Ok(Opened { top, sealed: recovered.sealed })
    }

    fn assemble(
        identity: Identity,
        data_path: PathBuf,
        log_path: PathBuf,
        data: Arc<dyn StoredFile>,
        log_file: Arc<dyn StoredFile>,
        map: BlockMap,
        end: LogEnd,
    ) -> Self {
        Self {
            identity,
            data_path,
            log_path,
            data,
            map,
            log: Mutex::new(Log { file: log_file, end }),
            log_limit: AtomicU64::new(rewrite::FIRST_LIMIT),
            regions: (0..REGION_LOCKS).map(|_| RwLock::new(())).collect(),
            flushes: FlushQueue::default(),
            // An earlier process may have written what it did not flush.
            changes: AtomicU64::new(1),
            flushed_changes: AtomicU64::new(0),
            flush_failed: AtomicBool::new(false),
        }
    }

    fn begin_session(&self, boot: &BootId) -> Result<(), StorageError> {
        let session = Record::Session { boot: *boot, session: rand::random() };
        lock(&self.log).append(&session).map_err(|error| self.log_failed(error))
    }

    /// Frees what the data file has of blocks that are not data: writes that a power cut made void.
    fn free_leftovers(&self) -> Result<(), StorageError> {
        let extents = self.data.data_extents().map_err(|error| failed("read", &self.data_path, error))?;
        for extent in extents {
            let blocks = extent.start / BLOCK_BYTES..extent.end.div_ceil(BLOCK_BYTES).min(self.map.blocks());
            for run in self.map.runs(blocks).filter(|run| run.state != BlockState::Data) {
                self.punch(run.blocks())?;
            }
        }
        Ok(())
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Virtual size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.identity.size
    }

    pub(crate) fn map(&self) -> &BlockMap {
        &self.map
    }

    /// Bytes of the log.
    pub(crate) fn log_bytes(&self) -> u64 {
        lock(&self.log).end.position
    }

    pub(crate) fn data_path(&self) -> &Path {
        &self.data_path
    }

    /// Fills the buffer; blocks of the top that are absent are asked of `below`, with the part of the buffer and the
    /// offset. The range must lie in the top.
    pub(crate) fn read_at(
        &self,
        buffer: &mut [u8],
        offset: u64,
        mut below: impl FnMut(&mut [u8], u64) -> Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        let end = offset + buffer.len() as u64;
        let mut position = offset;
        let mut rest = buffer;
        for run in self.map.runs(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES)) {
            let run_end = end.min(run.blocks().end * BLOCK_BYTES);
            let (part, after) = rest.split_at_mut((run_end - position) as usize);
            match run.state {
                BlockState::Data => {
                    let read = self.data.read_exact_at(part, position);
                    read.map_err(|error| failed("read", &self.data_path, error))?;
                }
                BlockState::Zero => part.fill(0),
                BlockState::Absent => below(part, position)?,
            }
            (rest, position) = (after, run_end);
        }
        Ok(())
    }

    /// Returns when everything whose call had ended before is durable.
    pub(crate) fn flush(&self) -> Result<(), StorageError> {
        self.flushes.join(|| self.flush_now())
    }

    fn flush_now(&self) -> Result<(), StorageError> {
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(self.not_durable("an earlier flush failed"));
        }
        let changes = self.changes.load(Ordering::Acquire);
        let (covers, committed) = {
            let end = lock(&self.log).end;
            (end.last_change, end.committed)
        };
        if changes == self.flushed_changes.load(Ordering::Acquire) && covers == committed {
            return Ok(());
        }
        self.sync(&*self.data)?;
        if covers > committed {
            // Records that came since `covers` may be of data that this fdatasync missed: the commit leaves them out.
            let commit = Record::Commit { covers };
            let file = {
                let mut log = lock(&self.log);
                log.append(&commit).map_err(|error| self.log_failed(error))?;
                Arc::clone(&log.file)
            };
            self.sync(&*file)?;
            lock(&self.log).end.committed = covers;
        }
        self.flushed_changes.store(changes, Ordering::Release);
        Ok(())
    }

    fn sync(&self, file: &dyn StoredFile) -> Result<(), StorageError> {
        file.sync_data().map_err(|error| {
            self.flush_failed.store(true, Ordering::Release);
            self.not_durable(&error.to_string())
        })
    }

    /// Ends all changes: appends the `sealed` record and calls `publish`, which makes a new top take this one's place.
    /// When either fails, the top goes on as if nothing had been. Nobody may be writing; a flush may run.
    pub(crate) fn seal(
        &self,
        publish: impl FnOnce() -> Result<(), StorageError>,
    ) -> Result<(), StorageError> {
        let _counted = self.count_change();
        // Held until the end, so that no commit gets behind a record that is taken back.
        let mut log = lock(&self.log);
        let before = log.end;
        log.append(&Record::Sealed).map_err(|error| self.log_failed(error))?;
        let published = publish();
        if published.is_err() {
            log.end = before;
            // Should this fail, the next record overwrites the last one; a crash before finds a top that is sealed.
            after_failure(log.file.set_length(before.position).map_err(|error| self.log_failed(error)));
        }
        published
    }

    /// Puts a run of another top in: for tops that are merged from others, before anybody knows them.
    pub(crate) fn import(&self, data: &[u8], first_block: u64) -> Result<(), StorageError> {
        self.write_data(data, first_block * BLOCK_BYTES)
    }

    /// States of what was imported.
    pub(crate) fn import_states(&self, changes: &[BlockRange]) -> Result<(), StorageError> {
        let _counted = self.count_change();
        self.change(changes)
    }

    /// Holds the files; `false` when another process or handle holds them in a way that excludes it.
    pub(crate) fn hold(&self, how: Lock) -> Result<bool, StorageError> {
        lock(&self.log).file.lock(how).map_err(|error| failed("lock", &self.log_path, error))
    }

    /// Appends a record of any kind with a right checksum, as nobody but a test does.
    #[cfg(test)]
    pub(crate) fn append_raw(&self, kind: u32, payload: &[u8]) {
        lock(&self.log).append_raw(kind, payload).unwrap();
    }

    fn count_change(&self) -> CountedChange<'_> {
        CountedChange(&self.changes)
    }

    fn log_failed(&self, error: io::Error) -> StorageError {
        failed("write", &self.log_path, error)
    }

    fn not_durable(&self, reason: &str) -> StorageError {
        StorageError::NotDurable { path: self.data_path.clone(), reason: reason.to_owned() }
    }
}

/// Counts an operation when it ends, whether it failed or not: a flush that begins then must cover it.
struct CountedChange<'a>(&'a AtomicU64);

impl Drop for CountedChange<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Reads what lies below a top that may be larger: what is behind the end of `below` is zeros.
pub(crate) fn read_clipped(below: &dyn Image, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
    let there = below.size().saturating_sub(offset).min(buffer.len() as u64);
    let (inside, behind) = buffer.split_at_mut(there as usize);
    behind.fill(0);
    if inside.is_empty() { Ok(()) } else { below.read_at(inside, offset) }
}

/// Locks even if another thread panicked with the lock: all that is guarded here is whole between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes the files of a top that may be gone already.
pub(crate) fn remove_files(directory: &dyn Directory, name: &str) -> Result<(), StorageError> {
    // The log last: while it is there, a sweep finds the top.
    for file in [data_name(name), rewrite::new_log_name(name), log_name(name)] {
        let path = directory.path().join(&file);
        remove_if_there(directory, &file).map_err(|error| failed("remove", &path, error))?;
    }
    Ok(())
}

pub(crate) fn data_name(name: &str) -> String {
    format!("{name}.data")
}

pub(crate) fn log_name(name: &str) -> String {
    format!("{name}.log")
}

fn paths(directory: &dyn Directory, name: &str) -> (PathBuf, PathBuf) {
    (directory.path().join(data_name(name)), directory.path().join(log_name(name)))
}
