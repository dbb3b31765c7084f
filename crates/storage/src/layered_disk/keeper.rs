//! The books of an open disk: its manifest, and what of it is not durable yet.
//!
//! ```text
//!   record (seal, compact, quota) ──▶ disk.pending.json, no fsync        settled ──record──▶ pending
//!   settle (flush)                ──▶ everything named is flushed, then disk.json takes its place    ──▶ settled
//! ```
//! Owns the manifest files. Must not change tops, except to flush them. Order of locks: settling → book.

use super::manifest::{self, DURABLE, Manifest, PENDING};
use crate::top::{Directory, Top, lock};
use crate::{StorageError, raw_file::failed};
use std::io;
use std::sync::{Arc, Mutex};

#[derive(Debug)]
pub(crate) struct Keeper {
    directory: Arc<dyn Directory>,
    book: Mutex<Book>,
    settling: Mutex<()>,
}

#[derive(Debug)]
pub(super) struct Book {
    pub(super) manifest: Manifest,
    /// Counts manifests.
    generation: u64,
    /// Whether the pending file holds the manifest, rather than the durable one.
    pending: bool,
    /// Tops the pending manifest names that may not be durable.
    unsettled: Vec<Arc<Top>>,
    /// Whether the directory was synced by this process: an earlier one may have died between a rename and its sync.
    names_are_durable: bool,
    /// An fsync failed: what is on the disk is unknown.
    failed: bool,
}

impl Keeper {
    /// `unsettled` are the tops a pending manifest names, if it is pending.
    pub(super) fn new(
        directory: Arc<dyn Directory>,
        manifest: Manifest,
        pending: bool,
        unsettled: Vec<Arc<Top>>,
    ) -> Self {
        let book =
            Book { manifest, generation: 0, pending, unsettled, names_are_durable: false, failed: false };
        Self { directory, book: Mutex::new(book), settling: Mutex::new(()) }
    }

    pub(super) fn manifest(&self) -> Manifest {
        lock(&self.book).manifest.clone()
    }

    /// Makes the manifest that [`manifest::write`] wrote the disk's; one rename. `tops` are those it names that older
    /// ones did not, or whose seal they did not know.
    pub(super) fn publish(&self, manifest: Manifest, tops: &[&Arc<Top>]) -> Result<(), StorageError> {
        let mut book = lock(&self.book);
        manifest::publish(&*self.directory)?;
        for top in tops {
            if !book.unsettled.iter().any(|other| Arc::ptr_eq(other, top)) {
                book.unsettled.push(Arc::clone(top));
            }
        }
        book.manifest = manifest;
        book.generation += 1;
        book.pending = true;
        Ok(())
    }

    /// Counts a top among those that may not be durable.
    pub(super) fn add_unsettled(&self, top: &Arc<Top>) {
        lock(&self.book).unsettled.push(Arc::clone(top));
    }

    /// Returns when the manifest, and all tops it names, survive the loss of power.
    pub(crate) fn settle(&self) -> Result<(), StorageError> {
        let _turn = lock(&self.settling);
        loop {
            let (generation, tops) = {
                let book = lock(&self.book);
                if book.failed {
                    return Err(self.not_durable("an earlier flush failed"));
                }
                if !book.pending {
                    if book.names_are_durable {
                        return Ok(());
                    }
                    break;
                }
                (book.generation, book.unsettled.clone())
            };
            tops.iter().try_for_each(|top| top.flush())?;
            let pending = self.directory.path().join(PENDING);
            let opened = self.directory.open(PENDING).map_err(|error| failed("open", &pending, error))?;
            self.synced(opened.sync_data())?;
            self.synced(self.directory.sync())?;
            let mut book = lock(&self.book);
            if book.generation != generation {
                // Another manifest came meanwhile, and the pending file is that one.
                continue;
            }
            let renamed = self.directory.rename(PENDING, DURABLE);
            renamed.map_err(|error| failed("replace", &self.directory.path().join(DURABLE), error))?;
            book.pending = false;
            book.unsettled.clear();
            // The rename is to be made durable.
            book.names_are_durable = false;
            break;
        }
        self.synced(self.directory.sync())?;
        lock(&self.book).names_are_durable = true;
        Ok(())
    }

    fn synced(&self, outcome: io::Result<()>) -> Result<(), StorageError> {
        outcome.map_err(|error| {
            lock(&self.book).failed = true;
            self.not_durable(&error.to_string())
        })
    }

    fn not_durable(&self, reason: &str) -> StorageError {
        StorageError::NotDurable { path: self.directory.path().to_owned(), reason: reason.to_owned() }
    }
}
