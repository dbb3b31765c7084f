//! Merging long chains of sealed tops, on a thread of low priority: each top costs a look-up for every block that none above
//! has. Tops that a record of another disk or image names, or may name, and those above, are never touched: who names one alone
//! wants the disk to be able to go back to it, whatever it is made of below.
//!
//! Owns nothing. Seals, reads and writes go on meanwhile; a removal waits for the end.

use super::Service;
use super::table::{DiskEntry, DiskLife};
use super::tops::name_of;
use crate::locks::lock;
use aenv_storage::layered_disk::Compaction;
use aenv_storage::top::SealedTop;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Chains of at most this many tops are left alone.
const LONG: usize = 16;
/// The newest tops, which are most likely to be looked for by a child, stay as they are.
const NEWEST: usize = 4;
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
    loop {
        std::thread::sleep(pause);
        match service.upgrade() {
            Some(service) => service.compact_long_chains(),
            None => return,
        }
    }
}

impl Service {
    fn compact_long_chains(&self) {
        let entries: Vec<Arc<DiskEntry>> = lock(&self.table).disks.values().cloned().collect();
        for entry in entries {
            let _compacting = lock(&entry.compacting);
            let disk = match &*lock(&entry.life) {
                DiskLife::Live { disk, .. } => Arc::clone(disk),
                _ => continue,
            };
            if let Err(error) = disk.remove_merged_tops() {
                tracing::warn!(disk = %entry.name, %error, "files of merged tops cannot be removed for now");
            }
            let tops = disk.usage().sealed_tops;
            // A guest that waits for room has none to spare for a copy.
            if tops <= LONG || !self.exports.stalled().is_empty() {
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
            match disk.compact(free.min(tops - NEWEST)) {
                Ok(Compaction::Merged { freed_bytes }) => {
                    tracing::info!(disk = %entry.name, tops, freed_bytes, "merged old tops");
                }
                Ok(Compaction::NothingToDo | Compaction::Held) => {}
                Err(error) => tracing::warn!(disk = %entry.name, %error, "old tops cannot be merged"),
            }
        }
    }
}
