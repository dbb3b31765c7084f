//! Writing a log anew that has become much longer than what it says: a guest that writes and discards for months would
//! fill the host with records.
//!
//! ```text
//!   ‖ fdatasync(data) ─▶ NAME.log.new: header, session, states of all blocks, commit ─▶ fdatasync ─▶ rename ─▶ fsync(directory) ‖
//! ```
//! Writers wait between ‖, so everything the new log says is covered by its commit. A crash leaves the old log, or the new
//! one, and both say the same. It happens once per doubling, so that its cost is a small part of the writing.
//!
//! Owns nothing. Must run in the turn of a flush, so that no commit goes into a log that is left.

use super::log::{Log, LogEnd, Record};
use super::{BlockState, BootId, Directory, Top, lock, log_name, remove_if_there};
use crate::StorageError;
use crate::raw_file::{after_failure, failed};
use std::sync::atomic::Ordering;

/// A log of fewer bytes is left alone.
pub(super) const FIRST_LIMIT: u64 = 8 << 20;
/// A new log must be shorter by this factor.
const WORTH: u64 = 4;

impl Top {
    /// Whether the log has grown enough to look at it. The next look comes when it has doubled.
    pub(crate) fn log_may_be_wasteful(&self) -> bool {
        self.log_bytes() >= self.log_limit.load(Ordering::Relaxed)
    }

    /// Lets the next flush look at the log, however short it is.
    #[cfg(test)]
    pub(crate) fn look_at_log_with_next_flush(&self) {
        self.log_limit.store(0, Ordering::Relaxed);
    }

    /// Flushes, and writes the log anew if that makes it much shorter, or `always`. `pause` keeps writers away as long as
    /// what it returns lives; the top must not be sealed meanwhile.
    ///
    /// When only the new log cannot be made, the old one goes on as it was, and who waits for the flush is served.
    pub(crate) fn rewrite_log<G>(
        &self,
        directory: &dyn Directory,
        name: &str,
        boot: &BootId,
        always: bool,
        pause: impl FnOnce() -> G,
    ) -> Result<(), StorageError> {
        let mut rewritten = Ok(());
        self.flushes.join(|| {
            // Whatever becomes of the log: others may wait for this round as for any other. It also brings most of the data
            // to the disk, so that writers wait for little.
            self.flush_now()?;
            let before = self.log_bytes();
            // Before the attempt: one that fails is not made again with every flush.
            self.look_again_behind(before);
            let runs =
                self.map.runs(0..self.map.blocks()).filter(|run| run.state != BlockState::Absent).count()
                    as u64;
            if always || before / WORTH > runs * 16 {
                let _paused = pause();
                match self.rewrite_now(directory, name, boot) {
                    Err(error @ StorageError::NotDurable { .. }) => return Err(error),
                    outcome => rewritten = outcome,
                }
                self.look_again_behind(self.log_bytes());
            }
            Ok(())
        })?;
        rewritten
    }

    fn look_again_behind(&self, log_bytes: u64) {
        self.log_limit.store(FIRST_LIMIT.max(log_bytes * 2), Ordering::Relaxed);
    }

    fn rewrite_now(&self, directory: &dyn Directory, name: &str, boot: &BootId) -> Result<(), StorageError> {
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(self.not_durable("an earlier flush failed"));
        }
        self.sync(&*self.data)?;
        let new_name = new_log_name(name);
        let replaced = self.write_new_log(directory, &new_name, boot).and_then(|log| {
            let renamed = directory.rename(&new_name, &log_name(name));
            renamed.map_err(|error| failed("replace", &self.log_path, error))?;
            Ok(log)
        });
        match replaced {
            Ok(log) => *lock(&self.log) = log,
            Err(error) => {
                // It may have taken the last room there was.
                let removed = remove_if_there(directory, &new_name);
                after_failure(
                    removed.map_err(|error| failed("remove", &directory.path().join(new_name), error)),
                );
                return Err(error);
            }
        }
        // Later commits go into the new log: it must be found.
        directory.sync().map_err(|error| {
            self.flush_failed.store(true, Ordering::Release);
            self.not_durable(&error.to_string())
        })
    }

    /// The log under its new name, durable. What cannot be made durable is of no consequence as long as nobody uses it.
    fn write_new_log(
        &self,
        directory: &dyn Directory,
        new_name: &str,
        boot: &BootId,
    ) -> Result<Log, StorageError> {
        let written = (|| {
            remove_if_there(directory, new_name)?;
            let file = directory.create(new_name)?;
            file.write_all_at(&self.identity.encode(), 0)?;
            let mut log = Log { file, end: LogEnd::of_new_log(&self.identity) };
            log.append(&Record::Session { boot: *boot, session: rand::random() })?;
            let runs = self.map.runs(0..self.map.blocks()).filter(|run| run.state != BlockState::Absent);
            log.append_ranges(&runs.collect::<Vec<_>>())?;
            let covers = log.end.last_change;
            log.append(&Record::Commit { covers })?;
            log.end.committed = covers;
            log.file.sync_data()?;
            Ok(log)
        })();
        written.map_err(|error| failed("write", &directory.path().join(new_name), error))
    }
}

/// The name of a log that is being written anew.
pub(super) fn new_log_name(name: &str) -> String {
    format!("{name}.log.new")
}
