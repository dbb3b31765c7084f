//! What the journal holds of the states that a sandbox was saved in, and which of them are still needed. Pure.
//!
//! ```text
//! saves    1 ── 2 ── 3     the last one is what a resume uses; numbers are never used twice
//!          │    │    └ durability process: its memory is still a file of changes
//!          │    └ needed: those changes lie over its memory, or the VMM was started from it, or it is the last that is `local`,
//!          │      or a snapshot claims it
//!          └ needed by nothing: dropped
//! dropped  numbers of which something may still be stored
//! lower    numbers of which only the layer of memory is left, which others lie on
//! ```
//! A number is among the dropped ones before anything is stored for it, and becomes a save when all of it is there: whatever
//! a killed node leaves of a pause is removed like any other save that is needed no more.

use crate::disks::{Base, MemoryChain, MemoryLayer};
use crate::error::LossCause;
use crate::view::{Durability, PauseMode};
use aenv_protocol::ids::TemplateId;
use aenv_vmm::{CaptureBase, CaptureReport, Identity};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// Size of a page of every guest.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// So many saves may wait for their memory to be stored, each laid over the one before.
const MOST_PENDING: usize = 16;

/// What a memory can be resumed with only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryBinding {
    /// Driver, version, accelerator, processor model.
    pub(crate) vmm: Identity,
    /// Of the guest's kernel, in hex.
    pub(crate) kernel_sha256: String,
    /// Of the initial RAM filesystem, in hex.
    pub(crate) initramfs_sha256: String,
}

/// The state that a sandbox was saved in once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Save {
    /// Names it, and its directory.
    pub(crate) number: u64,
    /// When its guest was stopped.
    pub(crate) saved_at: jiff::Timestamp,
    /// What was kept.
    pub(crate) mode: PauseMode,
    /// What it survives by now.
    pub(crate) durability: Durability,
    /// What its memory was made with.
    pub(crate) binding: MemoryBinding,
    /// The disk at that moment.
    pub(crate) disk: Base,
    /// What was stored for it then, beyond its template's, in bytes; none when that is not known.
    #[serde(default)]
    pub(crate) disk_bytes: Option<u64>,
    /// What its VMM had been started from.
    pub(crate) start: Start,
    /// The save whose memory its changes lie over, if not over what its VMM had been started from.
    pub(crate) over: Option<u64>,
    /// Its memory, once it is stored; until then there is a file of changes.
    pub(crate) memory: Option<MemoryLayer>,
    /// What the capture of memory and devices reported.
    pub(crate) report: Option<CaptureReport>,
    /// How long the guest stood still until all of it was journalled.
    pub(crate) stopped: Duration,
    /// Whether all that the guest had written was flushed to the disk before.
    pub(crate) flushed: bool,
    /// Snapshots that are still to be handed what it is stored as.
    #[serde(default)]
    pub(crate) claims: Vec<TemplateId>,
}

/// What a VMM was started from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Its memory.
    pub(crate) chain: MemoryChain,
    /// The save whose memory that is; none for a template's capture or a boot.
    pub(crate) save: Option<u64>,
    /// The snapshot whose memory that is.
    #[serde(default)]
    pub(crate) snapshot: Option<TemplateId>,
}

/// What is known of the present VMM process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Present {
    /// What it was started from; none means the capture of the record's template.
    #[serde(default)]
    pub(crate) start: Option<Start>,
    /// The save that was its last capture. None too when that capture came to nothing: changes since it are of no use.
    #[serde(default)]
    pub(crate) captured: Option<u64>,
}

/// All saves of a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saves {
    /// Those that are whole, by their numbers.
    #[serde(default)]
    pub(crate) kept: Vec<Save>,
    /// Numbers of those that are not (any more).
    #[serde(default)]
    pub(crate) dropped: Vec<u64>,
    /// Numbers of those that are gone but for the layer of memory that was stored for them: others lie on it.
    #[serde(default)]
    pub(crate) lower: Vec<u64>,
    /// The last number that was given.
    #[serde(default)]
    pub(crate) last_number: u64,
    /// Why the last save is not the last state that was known to callers.
    #[serde(default)]
    pub(crate) fallback: Option<LossCause>,
}

/// Background work on the saves of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Remove what is stored for dropped saves.
    Forget(Vec<u64>),
    /// Store the memory of a save.
    StoreMemory(u64),
    /// Hand a save to the first snapshot that claims it.
    HandOver(u64, TemplateId),
    /// Make all else of a save durable.
    MakeLocal(u64),
}

impl Save {
    /// Whether its memory is still a file of changes.
    pub(crate) fn is_memory_pending(&self) -> bool {
        self.mode == PauseMode::Full && self.memory.is_none()
    }

    fn changed_bytes(&self) -> u64 {
        self.report.as_ref().map_or(0, |report| report.changed_pages.saturating_mul(PAGE_BYTES))
    }

    fn is_local(&self) -> bool {
        self.durability >= Durability::Local
    }
}

impl Saves {
    /// The one that a resume uses.
    pub(crate) fn last(&self) -> Option<&Save> {
        self.kept.last()
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Save> {
        self.kept.iter().find(|save| save.number == number)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Save> {
        self.kept.iter_mut().find(|save| save.number == number)
    }

    /// A number for the next save, of which nothing is stored yet.
    pub(crate) fn begin(&mut self) -> u64 {
        self.last_number += 1;
        self.dropped.push(self.last_number);
        self.last_number
    }

    /// Makes a save that was begun the last one.
    pub(crate) fn keep(&mut self, save: Save) {
        self.dropped.retain(|number| *number != save.number);
        self.kept.push(save);
        self.fallback = None;
    }

    /// Numbers of all of which something may be stored.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        let gone = self.dropped.iter().chain(&self.lower).copied();
        self.kept.iter().map(|save| save.number).chain(gone).collect()
    }

    /// Layers of memory that are needed: by the saves that there are, by those whose memory is still to be stored, and by the VMM.
    pub(crate) fn used_layers(&self, present: &Present) -> BTreeSet<PathBuf> {
        let stored = self.kept.iter().filter_map(|save| save.memory.as_ref()).map(|memory| &memory.chain);
        let pending = self.kept.iter().filter(|save| save.is_memory_pending()).map(|save| &save.start.chain);
        let mapped = present.start.iter().map(|start| &start.chain);
        stored.chain(pending).chain(mapped).flat_map(|chain| chain.layers.iter().cloned()).collect()
    }

    /// Flat files that memories lie on: as of [`Self::used_layers`].
    pub(crate) fn images<'a>(&'a self, present: &'a Present) -> impl Iterator<Item = &'a PathBuf> {
        let stored = self.kept.iter().filter_map(|save| save.memory.as_ref()).map(|memory| &memory.chain);
        let starts = self.kept.iter().map(|save| &save.start.chain);
        let mapped = present.start.iter().map(|start| &start.chain);
        stored.chain(starts).chain(mapped).filter_map(|chain| chain.image.as_ref())
    }

    /// Takes note that dropped saves were removed, and of whom the layer of memory stays.
    pub(crate) fn forgotten(&mut self, numbers: &[u64], lower: Vec<u64>) {
        self.dropped.retain(|number| !numbers.contains(number));
        self.lower = lower;
    }

    /// Whether the changes that are not stored yet have become too many to add to them: more than all of a memory of `bytes`, or
    /// many. Then the next capture is to be whole, so that nothing needs those before it.
    pub(crate) fn is_backlog_full(&self, bytes: u64) -> bool {
        let pending = || self.kept.iter().filter(|save| save.is_memory_pending());
        pending().count() >= MOST_PENDING || pending().map(Save::changed_bytes).sum::<u64>() > bytes
    }

    /// What the files of changes that are not stored yet hold.
    pub(crate) fn unstored_bytes(&self) -> u64 {
        self.kept.iter().filter(|save| save.is_memory_pending()).map(Save::changed_bytes).sum()
    }

    /// Goes back to the last save that is `usable`; false when there is none.
    pub(crate) fn fall_back(&mut self, cause: LossCause, usable: impl Fn(&Save) -> bool) -> bool {
        let Some(found) = self.kept.iter().rposition(usable) else { return false };
        let later = self.kept.split_off(found + 1);
        self.dropped.extend(later.iter().map(|save| save.number));
        self.fallback = Some(cause);
        true
    }

    /// Drops what nothing needs any more.
    pub(crate) fn drop_unneeded(&mut self, present: &Present) {
        let mut needed: Vec<u64> = Vec::new();
        needed.extend(self.last().map(|save| save.number));
        needed.extend(self.kept.iter().rfind(|save| save.is_local()).map(|save| save.number));
        needed.extend(present.start.as_ref().and_then(|start| start.save));
        needed.extend(self.kept.iter().filter(|save| !save.claims.is_empty()).map(|save| save.number));
        // What is laid over an earlier one has a higher number.
        for save in self.kept.iter().rev() {
            if needed.contains(&save.number) && save.is_memory_pending() {
                needed.extend(save.over.into_iter().chain(save.start.save));
                // What its layer is laid on, also by an attempt at storing it whose answer was lost.
                needed.extend(self.stored_before(save).map(|below| below.number));
            }
        }
        let (kept, dropped) =
            std::mem::take(&mut self.kept).into_iter().partition(|save| needed.contains(&save.number));
        self.kept = kept;
        let dropped: Vec<Save> = dropped;
        self.dropped.extend(dropped.iter().map(|save| save.number));
    }

    /// What is to be done next in the background. After a failure something else, if there is any: neither a store without room
    /// nor one that does not forget keeps the other from being done.
    pub(crate) fn next_step(&self, failed: Option<&Step>) -> Option<Step> {
        let pending = self.kept.iter().find(|save| save.is_memory_pending());
        let last = || self.last().filter(|save| !save.is_local()).map(|save| Step::MakeLocal(save.number));
        let store = pending.map(|save| Step::StoreMemory(save.number));
        let store = store.or_else(|| self.claimed_and_not_local()).or_else(|| self.hand_over()).or_else(last);
        let forget = Some(Step::Forget(self.dropped.clone())).filter(|_| !self.dropped.is_empty());
        match failed {
            None | Some(Step::Forget(_)) => store.or(forget),
            Some(Step::StoreMemory(_) | Step::HandOver(..) | Step::MakeLocal(_)) => forget.or(store),
        }
    }

    /// What is left to be done before nothing but this sandbox needs its saves.
    pub(crate) fn next_claim(&self) -> Option<Step> {
        let claimed = self.kept.iter().rfind(|save| !save.claims.is_empty())?;
        let until = |save: &&Save| save.number <= claimed.number && save.is_memory_pending();
        let pending = self.kept.iter().find(until).map(|save| Step::StoreMemory(save.number));
        pending.or_else(|| self.hand_over())
    }

    /// What a snapshot is handed, the sandbox must be able to go back to: its disk could not go back to something older any more,
    /// which that snapshot would keep the rest of.
    fn claimed_and_not_local(&self) -> Option<Step> {
        let claimed = self.kept.iter().find(|save| !save.claims.is_empty() && !save.is_local())?;
        Some(Step::MakeLocal(claimed.number))
    }

    fn hand_over(&self) -> Option<Step> {
        let stored = self.kept.iter().filter(|save| !save.is_memory_pending());
        stored.filter_map(|save| Some(Step::HandOver(save.number, save.claims.first()?.clone()))).next()
    }

    /// A snapshot has what it needs, or is not wanted any more.
    pub(crate) fn drop_claim(&mut self, snapshot: &TemplateId) {
        for save in &mut self.kept {
            save.claims.retain(|claim| claim != snapshot);
        }
    }

    /// The power was cut: what is not durable is not to be handed to anybody.
    pub(crate) fn drop_claims_not_local(&mut self) {
        self.kept.iter_mut().filter(|save| !save.is_local()).for_each(|save| save.claims.clear());
    }

    /// Snapshots that cannot be had while this step fails.
    pub(crate) fn claims_behind(&self, step: &Step) -> Vec<TemplateId> {
        let claims_of = |is_behind: &dyn Fn(&Save) -> bool| {
            self.kept.iter().filter(|save| is_behind(save)).flat_map(|save| save.claims.clone()).collect()
        };
        match step {
            // The lowest is stored first, and those above may lie on it.
            Step::StoreMemory(number) => {
                claims_of(&|save| save.number >= *number && save.is_memory_pending())
            }
            Step::MakeLocal(number) => claims_of(&|save| save.number == *number),
            Step::HandOver(_, snapshot) => vec![snapshot.clone()],
            Step::Forget(_) => Vec::new(),
        }
    }

    /// Snapshots that are still to be handed something.
    pub(crate) fn claims(&self) -> impl Iterator<Item = &TemplateId> {
        self.kept.iter().flat_map(|save| &save.claims)
    }

    fn stored_before(&self, save: &Save) -> Option<&Save> {
        self.kept.iter().rev().find(|other| other.number < save.number && other.memory.is_some())
    }

    /// The stored memory that a save's memory differs little from: that of the one before it, else what its VMM started from.
    pub(crate) fn below(&self, save: &Save) -> MemoryChain {
        let before = self.stored_before(save).and_then(|other| other.memory.as_ref());
        let stored = before.map(|layer| layer.chain.clone());
        match save.report.as_ref().map(|report| report.base) {
            Some(CaptureBase::PreviousCapture) => {
                let over =
                    save.over.and_then(|number| self.get(number)).and_then(|over| over.memory.as_ref());
                over.map(|layer| layer.chain.clone()).unwrap_or_default()
            }
            _ => stored.unwrap_or_else(|| save.start.chain.clone()),
        }
    }
}

#[cfg(test)]
mod tests;
