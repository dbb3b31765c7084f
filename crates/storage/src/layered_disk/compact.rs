//! Merging the oldest sealed tops of a disk into one, in the background.
//!
//! ```text
//!   name of the merged top recorded as removable, durable ─▶ states and data copied ─▶ sealed, durable
//!     ─▶ ‖ nobody else holds the old ones? swapped in the manifest, then in memory ‖ ─▶ manifest durable ─▶ old ones removed
//! ```
//! A crash anywhere leaves either the old tops with a removable new one, or the new one with removable old ones. Reads see
//! the same bytes before and after. Seals, reads and writes wait for the part between ‖ only.
//!
//! Owns nothing that lasts.

use super::manifest::{self, Manifest, TopName};
use super::open::is_free;
use super::{LayeredDisk, SealedTop, StackedImage, State, StorageError, Top, lock, remove_files};
use crate::BLOCK_BYTES;
use crate::raw_file::after_failure;
use crate::top::{BlockRange, BlockState, Shows, count_shown, run_of_tops};
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Blocks that are copied at once.
const COPY_BLOCKS: u64 = 256;
/// Ranges that are logged at once.
const BATCH_RANGES: usize = 4096;

/// How a compaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compaction {
    /// The tops are one now.
    Merged {
        /// Bytes that are not stored any more.
        freed_bytes: u64,
    },
    /// There are fewer than two tops to merge, or what [`LayeredDisk::compact_for_room`] would free is less than it copies.
    NothingToDo,
    /// Another disk, or another handle, stands on one of the tops: to merge them would store them twice.
    Held,
}

impl LayeredDisk {
    /// Merges the `oldest` sealed tops (fewer if there are fewer) into one.
    ///
    /// # Errors
    /// When the host cannot store it. The disk reads the same, on the old tops or on the merged one; what is not needed of
    /// them is removed by the next call.
    pub fn compact(&self, oldest: usize) -> Result<Compaction, StorageError> {
        let _one = lock(&self.compaction);
        self.remove_given_up()?;
        let old: Vec<Arc<SealedTop>> = self.sealed_tops().into_iter().take(oldest).collect();
        let [first, .., _] = old.as_slice() else { return Ok(Compaction::NothingToDo) };
        if held(&old)? {
            return Ok(Compaction::Held);
        }
        let (name, top) = {
            let _structure = lock(&self.structure);
            let (name, top) = self.new_top(first.top().identity().parent)?;
            let mut next = self.keeper.manifest();
            next.removable.push(name.clone());
            if let Err(error) = self.record(next, &[]) {
                after_failure(remove_files(&*self.directory, &name));
                return Err(error);
            }
            (name, top)
        };
        let merged = match self.merge(&old, &name, &top) {
            Ok(Some(merged)) => merged,
            Ok(None) => {
                self.give_up(&name)?;
                return Ok(Compaction::Held);
            }
            Err(error) => {
                after_failure(self.give_up(&name));
                return Err(error);
            }
        };
        // The disk stands on the merged top now, whatever happens to the old ones.
        let stored = old.iter().map(|top| top.stored_bytes()).sum::<u64>();
        let freed_bytes = stored - merged.stored_bytes();
        // Readers that are still in the old ones keep the files: those are removed later.
        drop(old);
        self.remove_given_up()?;
        Ok(Compaction::Merged { freed_bytes })
    }

    /// The same, but only if it frees at least as many bytes as it copies.
    ///
    /// # Errors
    /// As [`LayeredDisk::compact`].
    pub fn compact_for_room(&self, oldest: usize) -> Result<Compaction, StorageError> {
        {
            let old: Vec<Arc<SealedTop>> = self.sealed_tops().into_iter().take(oldest).collect();
            let stored = old.iter().map(|top| top.stored_bytes()).sum::<u64>();
            let maps = old.iter().rev().map(|top| top.top().map());
            let copied = count_shown(&maps, 0..self.size / BLOCK_BYTES) * BLOCK_BYTES;
            if stored.saturating_sub(copied) < copied.max(1) {
                return Ok(Compaction::NothingToDo);
            }
        }
        self.compact(oldest)
    }

    /// Removes files of merged tops that someone held when they were merged and nobody holds any more. Costs nothing when
    /// there are none: to be called now and then.
    ///
    /// # Errors
    /// When the host cannot make the manifest durable that does without them, or not remove them.
    pub fn remove_merged_tops(&self) -> Result<(), StorageError> {
        let _one = lock(&self.compaction);
        self.remove_given_up()
    }

    /// Makes the merged top and puts it in the place of the old ones; `None` when someone holds an old one.
    fn merge(
        &self,
        old: &[Arc<SealedTop>],
        name: &str,
        top: &Arc<Top>,
    ) -> Result<Option<Arc<SealedTop>>, StorageError> {
        self.keeper.settle()?;
        copy(old, top)?;
        top.seal(|| Ok(()))?;
        top.flush()?;
        let (directory, keeper) = (Arc::clone(&self.directory), Some(Arc::clone(&self.keeper)));
        let merged = Arc::new(SealedTop::hold(name.to_owned(), Arc::clone(top), directory, keeper)?);
        let _structure = lock(&self.structure);
        let mut next = self.keeper.manifest();
        next.sealed.splice(..old.len(), [TopName::new(name, &top.identity().id)]);
        next.removable.retain(|other| other != name);
        next.removable.extend(old.iter().map(|top| top.name().to_owned()));
        next.set_boot(&self.boot);
        manifest::write(&*self.directory, &next)?;
        Ok(self.swap_in(old, &merged, next)?.then_some(merged))
    }

    /// Puts the merged top in the place of the old ones; `false` when someone holds an old one.
    fn swap_in(
        &self,
        old: &[Arc<SealedTop>],
        merged: &Arc<SealedTop>,
        next: Manifest,
    ) -> Result<bool, StorageError> {
        // Until the end nobody gets a handle: of an old one no more, of the merged one not before the manifest names it.
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if held(old)? {
            return Ok(false);
        }
        self.keeper.publish(next, &[merged.top()])?;
        let mut tops = state.below.tops().to_vec();
        tops.splice(..old.len(), [Arc::clone(merged)]);
        let below = StackedImage::new(Arc::clone(&self.lower), tops);
        let current = Arc::clone(&state.current);
        *state = Arc::new(State { current_name: state.current_name.clone(), current, below });
        Ok(true)
    }

    /// Removes the files of a top that did not come to be.
    fn give_up(&self, name: &str) -> Result<(), StorageError> {
        remove_files(&*self.directory, name)?;
        self.forget(&[name])
    }

    /// Takes names of removed tops out of the manifest.
    fn forget(&self, names: &[&str]) -> Result<(), StorageError> {
        let _structure = lock(&self.structure);
        let mut next = self.keeper.manifest();
        next.removable.retain(|name| !names.contains(&name.as_str()));
        self.record(next, &[])
    }

    /// Removes tops that the manifest has given up, if nobody holds them. The manifest is made durable first, since an
    /// older one may name them. Whoever calls holds the compaction, so that none of them is being made.
    pub(super) fn remove_given_up(&self) -> Result<(), StorageError> {
        let names = self.keeper.manifest().removable;
        if names.is_empty() {
            return Ok(());
        }
        self.keeper.settle()?;
        let mut removed = Vec::new();
        for name in &names {
            if is_free(&*self.directory, name)? {
                remove_files(&*self.directory, name)?;
                removed.push(name.as_str());
            }
        }
        if removed.is_empty() { Ok(()) } else { self.forget(&removed) }
    }
}

/// Whether someone besides the disk's state and the caller, with one handle each, holds one of the tops. Who reads since
/// before the last seal counts as well.
fn held(tops: &[Arc<SealedTop>]) -> Result<bool, StorageError> {
    for top in tops {
        if Arc::strong_count(top) > 2 || !top.is_held_by_us_alone()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Fills `top` with what the old ones say together: of each block the uppermost that has it.
fn copy(old: &[Arc<SealedTop>], top: &Top) -> Result<(), StorageError> {
    let blocks = top.map().blocks();
    let mut buffer = vec![0; (COPY_BLOCKS * BLOCK_BYTES) as usize];
    let mut states = Vec::new();
    let mut position = 0;
    while position < blocks {
        let run = run_of_tops(old, position, blocks);
        let state = match run.shows {
            Shows::Data(owner) => {
                copy_data(owner, run.blocks.clone(), top, &mut buffer)?;
                Some(BlockState::Data)
            }
            Shows::Zeros => Some(BlockState::Zero),
            Shows::Below => None,
        };
        position = run.blocks.end;
        let count = run.blocks.end - run.blocks.start;
        states.extend(state.map(|state| BlockRange { first: run.blocks.start, count, state }));
        if states.len() == BATCH_RANGES {
            top.import_states(&std::mem::take(&mut states))?;
        }
    }
    top.import_states(&states)
}

fn copy_data(
    owner: &SealedTop,
    blocks: Range<u64>,
    top: &Top,
    buffer: &mut [u8],
) -> Result<(), StorageError> {
    let mut first = blocks.start;
    while first < blocks.end {
        let count = COPY_BLOCKS.min(blocks.end - first);
        let part = &mut buffer[..(count * BLOCK_BYTES) as usize];
        owner.read_changed(part, first * BLOCK_BYTES)?;
        top.import(part, first)?;
        first += count;
    }
    Ok(())
}
