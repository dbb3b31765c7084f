//! Going back to what a disk was when one of its tops was sealed.
//!
//! ```text
//!   files of a new top ─▶ manifest written aside ─▶ ‖ rename manifest ─▶ swap in memory ‖ ─▶ manifest durable
//!     ─▶ files of the dropped tops removed
//! ```
//! The new manifest calls the dropped tops removable, so a crash after the rename leaves them to whoever opens the disk next; one
//! before it leaves the disk as it was. A power cut leaves what the last flush knew: nothing is removed before that is the new
//! manifest. Writers wait for the part between ‖.
//!
//! Owns nothing that lasts.

use super::manifest::TopName;
use super::{LayeredDisk, StackedImage, State, StorageError, Top, lock, remove_files};
use crate::BLOCK_BYTES;
use crate::top::count_shown;
use std::sync::{Arc, PoisonError};

/// How a disk went back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rewound {
    /// What was written after the seal is gone.
    Dropped {
        /// Bytes that are not stored any more.
        freed_bytes: u64,
    },
    /// Nothing was written since.
    NothingToDo,
    /// The disk has no such sealed top.
    Unknown,
}

impl LayeredDisk {
    /// Makes the disk what it was when the top `id` was sealed. Nobody may use the disk, or stand on a later top, meanwhile.
    ///
    /// # Errors
    /// When the host cannot store it. Then the disk is as it was, or has gone back already: to be asked again.
    pub fn rewind(&self, id: &[u8; 16]) -> Result<Rewound, StorageError> {
        let _one = lock(&self.compaction);
        let freed_bytes = {
            let _structure = lock(&self.structure);
            let state = self.state();
            let tops = state.below.tops();
            let Some(kept) = tops.iter().position(|top| top.id() == *id).map(|position| position + 1) else {
                return Ok(Rewound::Unknown);
            };
            let map = state.current.map();
            if kept == tops.len() && map.data_blocks() == 0 && map.zero_blocks() == 0 {
                return Ok(Rewound::NothingToDo);
            }
            let (name, top) = self.new_top(*id)?;
            let freed_bytes = tops[kept..].iter().map(|top| top.stored_bytes()).sum::<u64>()
                + map.data_blocks() * BLOCK_BYTES;
            match self.swap_back(&state, kept, &name, &top) {
                Ok(()) => freed_bytes,
                Err(error) => {
                    remove_files(&*self.directory, &name)?;
                    return Err(error);
                }
            }
        };
        self.remove_given_up()?;
        Ok(Rewound::Dropped { freed_bytes })
    }

    /// Puts `top` on the lowest `kept` tops; all others are given up.
    fn swap_back(&self, state: &State, kept: usize, name: &str, top: &Arc<Top>) -> Result<(), StorageError> {
        let mut next = self.keeper.manifest();
        let dropped = std::mem::replace(&mut next.current, TopName::new(name, &top.identity().id));
        let later: Vec<TopName> = next.sealed.drain(kept..).chain([dropped]).collect();
        next.removable.extend(later.into_iter().map(|top| top.name));
        let below = StackedImage::new(Arc::clone(&self.lower), state.below.tops()[..kept].to_vec());
        // The new top has nothing yet; what the others show may be more than before, where the later ones said zeros.
        let charged = count_shown(&below.maps(), 0..top.map().blocks());
        let next_state = Arc::new(State { current_name: name.to_owned(), current: Arc::clone(top), below });
        let _alone = self.gate.write().unwrap_or_else(PoisonError::into_inner);
        self.record(next, &[top])?;
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = next_state;
        self.allowance.set_used(charged * BLOCK_BYTES);
        Ok(())
    }
}
