//! Merging sealed tops, on a thread of low priority: those of long chains, since each top costs a look-up for every block that
//! none above has, and those that store the same blocks again and again. Tops that a record of another disk or image names, or
//! may name, and those above, are never touched: who names one alone wants the disk to be able to go back to it, whatever it is
//! made of below.
//!
//! Owns nothing. Seals, reads and writes go on meanwhile; a removal waits for the end.

use super::Service;
use super::table::{DiskEntry, DiskLife};
use super::tops::name_of;
use crate::locks::lock;
use aenv_storage::StorageError;
use aenv_storage::block_service::Name;
use aenv_storage::layered_disk::{Compaction, DiskUsage, LayeredDisk};
use aenv_storage::top::SealedTop;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Chains of at most this many tops are left alone, unless they waste room.
const LONG: usize = 16;
/// The newest tops, which are most likely to be looked for by a child, stay as they are.
const NEWEST: usize = 4;
/// A disk wastes room that stores more than so many times what its quota counts.
const WASTEFUL: u64 = 2;
/// Priority of the thread among all processes; 19 is the lowest.
const NICENESS: i32 = 15;

/// Starts the thread, which pauses between two looks at all disks; it ends with the service.
pub(crate) fn start(service: &Arc<Service>, pause: Duration) -> std::io::Result<()> {
    let service = Arc::downgrade(service);
    std::thread::Builder::new().name("compaction".to_owned()).spawn(move || run(&service, pause)).map(drop)
}

fn run(service: &Weak<Service>, pause: Duration) {
    // Of this thread alone.
    if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
        tracing::warn!(%error, "compaction runs with the priority of everything else");
    }
    let mut written = WrittenTops::new();
    loop {
        std::thread::sleep(pause);
        match service.upgrade() {
            Some(service) => written = service.compact_disks(&written),
            None => return,
        }
    }
}

/// Which top each disk wrote when it was looked at. One that writes the same at the next look was not sealed meanwhile.
type WrittenTops = HashMap<Name, [u8; 16]>;

/// What is to be merged of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// Reads have a long way.
    Long,
    /// Much of what it stores is hidden. Only of a disk that is not sealed just now: whoever seals it again and again and makes
    /// something of each seal needs the tops as they are.
    Wasteful,
}

impl Reason {
    fn of(usage: &DiskUsage, rests: bool) -> Option<Self> {
        let is_wasteful = usage.stored_bytes > usage.charged_bytes.saturating_mul(WASTEFUL);
        match usage.sealed_tops {
            tops if tops > LONG => Some(Self::Long),
            // Two of them, and the newest.
            3.. if rests && is_wasteful => Some(Self::Wasteful),
            _ => None,
        }
    }

    /// Merges the oldest of so many tops, at most `free` of them.
    fn merge(self, disk: &LayeredDisk, tops: usize, free: usize) -> Result<Compaction, StorageError> {
        match self {
            Self::Long => disk.compact(free.min(tops - NEWEST)),
            // The newest stays: its seal may still be asked for, and what it stores is most likely to be written again.
            Self::Wasteful => disk.compact_for_room(free.min(tops - 1)),
        }
    }
}

impl Service {
    /// Looks at all disks once; `before` is what the last look returned.
    fn compact_disks(&self, before: &WrittenTops) -> WrittenTops {
        let mut now = WrittenTops::new();
        let (entries, held) = {
            let table = lock(&self.table);
            (table.disks.values().cloned().collect::<Vec<Arc<DiskEntry>>>(), table.all_tops_used_by_others())
        };
        for entry in entries {
            let _compacting = lock(&entry.compacting);
            let disk = match &*lock(&entry.life) {
                DiskLife::Live { disk, .. } => Arc::clone(disk),
                _ => continue,
            };
            if let Err(error) = disk.remove_merged_tops() {
                tracing::warn!(disk = %entry.name, %error, "files of merged tops cannot be removed for now");
            }
            let (usage, written) = (disk.usage(), disk.current_top_id());
            let rests = before.get(&entry.name) == Some(&written);
            now.insert(entry.name.clone(), written);
            let Some(reason) = Reason::of(&usage, rests) else { continue };
            // Nothing is free if the oldest one is held, as it stays as long as others are made of it.
            let is_held = |top: &Arc<SealedTop>| {
                let held = held.get(&entry.name);
                held.is_some_and(|held| name_of(top).is_ok_and(|name| held.contains(&name)))
            };
            if disk.sealed_tops().first().is_some_and(is_held) {
                continue;
            }
            // A guest that waits for room has none to spare for a copy.
            if !self.exports.stalled().is_empty() {
                continue;
            }
            let used = {
                let table = lock(&self.table);
                if table.has_unreadable() {
                    continue;
                }
                table.tops_used_by_others(&entry.name)
            };
            let is_free = |top: &Arc<SealedTop>| name_of(top).is_ok_and(|name| !used.contains(&name));
            let free = disk.sealed_tops().iter().take_while(|top| is_free(top)).count();
            let tops = usage.sealed_tops;
            match reason.merge(&disk, tops, free) {
                Ok(Compaction::Merged { freed_bytes }) => {
                    tracing::info!(disk = %entry.name, tops, freed_bytes, ?reason, "merged old tops");
                }
                Ok(Compaction::NothingToDo | Compaction::Held) => {}
                Err(error) => tracing::warn!(disk = %entry.name, %error, "old tops cannot be merged"),
            }
        }
        now
    }
}
