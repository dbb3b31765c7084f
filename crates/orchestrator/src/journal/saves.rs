//! What the journal holds of the states that a sandbox was saved in, and which of them are still needed. Pure.
//!
//! ```text
//! saves    1 ── 2 ── 3     the last one is what a resume uses; numbers are never used twice
//!          │    │    └ durability process: its memory is still a file of changes
//!          │    └ needed: those changes lie over its memory, or the VMM was started from it, or it is the last that is `local`
//!          └ needed by nothing: dropped
//! dropped  numbers of which something may still be stored
//! ```
//! A number is among the dropped ones before anything is stored for it, and becomes a save when all of it is there: whatever
//! a killed node leaves of a pause is removed like any other save that is needed no more.

use crate::disks::{Base, MemoryChain, MemoryLayer};
use crate::error::LossCause;
use crate::view::{Durability, PauseMode};
use aenv_vmm::{CaptureBase, CaptureReport, Identity};
use serde::{Deserialize, Serialize};
use std::time::Duration;

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
}

/// What a VMM was started from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Its memory.
    pub(crate) chain: MemoryChain,
    /// The save whose memory that is; none for a template's capture or a boot.
    pub(crate) save: Option<u64>,
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
    /// Make all else of a save durable.
    MakeLocal(u64),
}

impl Save {
    /// Whether its memory is still a file of changes.
    pub(crate) fn is_memory_pending(&self) -> bool {
        self.mode == PauseMode::Full && self.memory.is_none()
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
        self.kept.iter().map(|save| save.number).chain(self.dropped.iter().copied()).collect()
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
        // What is laid over an earlier one has a higher number.
        for save in self.kept.iter().rev() {
            if needed.contains(&save.number) && save.is_memory_pending() {
                needed.extend(save.over.into_iter().chain(save.start.save));
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
        let store = pending.map(|save| Step::StoreMemory(save.number)).or_else(last);
        let forget = Some(Step::Forget(self.dropped.clone())).filter(|_| !self.dropped.is_empty());
        match failed {
            None | Some(Step::Forget(_)) => store.or(forget),
            Some(Step::StoreMemory(_) | Step::MakeLocal(_)) => forget.or(store),
        }
    }

    /// The stored memory that a save's memory differs little from: that of the one before it, else what its VMM started from.
    pub(crate) fn below(&self, save: &Save) -> MemoryChain {
        let before = self.kept.iter().rev().filter(|other| other.number < save.number);
        let stored = before.filter_map(|other| other.memory.as_ref()).map(|layer| layer.chain.clone()).next();
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
mod tests {
    use super::*;
    use std::path::PathBuf;

    pub(crate) fn save(number: u64, durability: Durability, over: Option<u64>) -> Save {
        let chain = MemoryChain { image: Some(PathBuf::from(format!("m{number}"))), layers: Vec::new() };
        Save {
            number,
            saved_at: jiff::Timestamp::UNIX_EPOCH,
            mode: PauseMode::Full,
            durability,
            binding: MemoryBinding {
                vmm: Identity {
                    driver: "fake".to_owned(),
                    version: "1".to_owned(),
                    accelerator: "tcg".to_owned(),
                    cpu_model: "fake".to_owned(),
                },
                kernel_sha256: "k".to_owned(),
                initramfs_sha256: "i".to_owned(),
            },
            disk: Base::File(PathBuf::from("disk")),
            start: Start::default(),
            over,
            memory: (durability >= Durability::Local).then_some(MemoryLayer { chain, stored_bytes: 1 }),
            report: None,
            stopped: Duration::ZERO,
            flushed: true,
        }
    }

    fn kept(saves: &Saves) -> Vec<u64> {
        saves.kept.iter().map(|save| save.number).collect()
    }

    fn of(saves: Vec<Save>) -> Saves {
        let last_number = saves.last().map_or(0, |save| save.number);
        Saves { kept: saves, last_number, ..Saves::default() }
    }

    #[test]
    fn the_last_local_one_stays_until_a_later_one_is() {
        use Durability::{Local, Process};
        let mut saves = of(vec![save(1, Local, None), save(2, Process, None), save(3, Process, None)]);
        saves.drop_unneeded(&Present::default());
        assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![1, 3], &[2][..]));
        assert_eq!(saves.next_step(None), Some(Step::StoreMemory(3)));
        assert_eq!(saves.next_step(Some(&Step::StoreMemory(3))), Some(Step::Forget(vec![2])));
        assert_eq!(saves.next_step(Some(&Step::Forget(vec![2]))), Some(Step::StoreMemory(3)));
        saves.dropped.clear();
        assert_eq!(saves.next_step(Some(&Step::StoreMemory(3))), Some(Step::StoreMemory(3)));
        saves.get_mut(3).unwrap().memory = save(3, Local, None).memory;
        assert_eq!(saves.next_step(None), Some(Step::MakeLocal(3)));
        saves.get_mut(3).unwrap().durability = Local;
        saves.drop_unneeded(&Present::default());
        assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![3], &[1][..]));
        saves.dropped.clear();
        assert_eq!(saves.next_step(None), None);
    }

    #[test]
    fn what_is_laid_over_others_keeps_them_until_it_is_stored() {
        use Durability::Process;
        let mut saves =
            of(vec![save(1, Process, None), save(2, Process, Some(1)), save(3, Process, Some(2))]);
        saves.drop_unneeded(&Present::default());
        assert_eq!(kept(&saves), [1, 2, 3]);
        assert_eq!(saves.next_step(None), Some(Step::StoreMemory(1)), "the lowest first");
        for number in [1, 2] {
            saves.get_mut(number).unwrap().memory = save(number, Durability::Local, None).memory;
        }
        saves.drop_unneeded(&Present::default());
        assert_eq!(kept(&saves), [2, 3]);
    }

    #[test]
    fn what_a_vmm_was_started_from_stays() {
        use Durability::Local;
        let mut saves = of(vec![save(1, Local, None), save(2, Local, None)]);
        let start = Start { chain: MemoryChain::default(), save: Some(1) };
        let present = Present { start: Some(start), captured: None };
        saves.drop_unneeded(&present);
        assert_eq!(kept(&saves), [1, 2]);
        saves.drop_unneeded(&Present::default());
        assert_eq!(kept(&saves), [2]);
    }

    #[test]
    fn a_number_is_dropped_until_it_is_kept_and_never_used_twice() {
        let mut saves = Saves::default();
        assert_eq!((saves.begin(), saves.numbers()), (1, vec![1]));
        assert_eq!(saves.next_step(None), Some(Step::Forget(vec![1])));
        saves.dropped.clear();
        assert_eq!(saves.begin(), 2);
        saves.keep(save(2, Durability::Process, None));
        assert_eq!((kept(&saves), saves.dropped.len()), (vec![2], 0));
    }

    #[test]
    fn a_fallback_drops_what_came_later() {
        use Durability::{Local, Process};
        let mut saves = of(vec![save(1, Local, None), save(2, Process, None)]);
        assert!(!saves.clone().fall_back(LossCause::HostRestarted, |_| false));
        assert!(saves.fall_back(LossCause::HostRestarted, Save::is_local));
        assert_eq!((kept(&saves), saves.dropped.as_slice()), (vec![1], &[2][..]));
        assert_eq!(saves.fallback, Some(LossCause::HostRestarted));
        assert_eq!(saves.begin(), 3);
        saves.keep(save(3, Process, None));
        assert_eq!(saves.fallback, None);
    }
}
