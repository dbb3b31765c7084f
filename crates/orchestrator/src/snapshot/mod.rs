//! Snapshots: states of sandboxes that are kept for themselves, and that any number of sandboxes are started from.
//!
//! ```text
//! sandbox, running or paused ─ save, claimed by the snapshot ─ stored ─ handed over ─▶ snapshot ─▶ sandboxes
//!                               (pausing.rs)                   (saving.rs)              └ deleted: gone with the last VMM
//!                                                                                         that maps its memory
//! ```
//! Owns what is known of each, and how many VMs map its memory. What a snapshot is made of belongs to the [store of
//! disks](crate::disks); its devices lie in its own directory. Which save is handed over when is for the task of its source.

mod removal;
mod starting;

pub(crate) use removal::{forget_unclaimed, remove_when_unused, settle};
pub(crate) use starting::{SnapshotStart, start_of};

use crate::error::Error;
use crate::journal::{Purpose, SnapshotRecord};
use crate::node::Node;
use crate::standby::OnDemand;
use crate::view::{SnapshotState, SnapshotView};
use aenv_protocol::ids::TemplateId;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use tokio::sync::{OnceCell, watch};

/// Name of the file with the devices in the directory of a snapshot.
pub(crate) const STATE: &str = "state";
/// Letters of the id of a snapshot or a template. Source: [`crate::random::snapshot_id`].
const ID_LENGTH: usize = 21;
/// The tag of a name that has none.
pub(crate) const DEFAULT_TAG: &str = "default";

/// One snapshot.
pub(crate) struct Snapshot {
    record: RwLock<SnapshotRecord>,
    /// Held while it is journalled anew.
    changing: tokio::sync::Mutex<()>,
    /// The file that shows its memory, once somebody needed it.
    memory: OnceCell<PathBuf>,
    /// VMs that map its memory, or are about to.
    users: watch::Sender<usize>,
    /// How often it was journalled anew.
    changes: watch::Sender<u64>,
    /// Why it was withdrawn, when it was.
    withdrawn: OnceLock<Error>,
    /// VMs that were made of it before anyone asked.
    pub(crate) standbys: OnDemand,
}

/// One VM that maps the memory of a snapshot, or is about to: as long as it is there, that stays.
pub(crate) struct SnapshotUse {
    snapshot: Arc<Snapshot>,
}

/// Those of one node.
#[derive(Default)]
pub(crate) struct Snapshots {
    entries: RwLock<BTreeMap<TemplateId, Arc<Snapshot>>>,
    /// Held while a name may pass from one to another, and while what may have a name is deleted; before [`Snapshot::change`].
    naming: tokio::sync::Mutex<()>,
}

impl Snapshots {
    /// Those of an earlier process. What it made for a fork was for callers who are gone.
    pub(crate) fn new(records: Vec<SnapshotRecord>) -> Self {
        let entry = |mut record: SnapshotRecord| {
            record.is_deleted |= record.purpose == Purpose::Fork;
            (record.id.clone(), Arc::new(Snapshot::new(record)))
        };
        Self { entries: RwLock::new(records.into_iter().map(entry).collect()), ..Self::default() }
    }

    /// Enters one that was just journalled.
    pub(crate) fn enter(&self, record: SnapshotRecord) -> Arc<Snapshot> {
        let (id, snapshot) = (record.id.clone(), Arc::new(Snapshot::new(record)));
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.insert(id, Arc::clone(&snapshot));
        snapshot
    }

    pub(crate) fn get(&self, id: &TemplateId) -> Option<Arc<Snapshot>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// All of them, those that are to go included.
    pub(crate) fn all(&self) -> Vec<Arc<Snapshot>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn forget(&self, id: &TemplateId) {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// Waits until nobody else changes what has which name.
    pub(crate) async fn naming(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.naming.lock().await
    }

    /// The one that has this name, other than `id`, as far as it is stored and not to go.
    pub(crate) fn named(&self, name: &(String, String), id: &TemplateId) -> Option<Arc<Snapshot>> {
        let is_it = |record: &SnapshotRecord| {
            let is_other = record.id != *id && !record.is_deleted;
            is_other && record.parts.is_some() && record.name.as_ref() == Some(name)
        };
        self.all().into_iter().find(|snapshot| snapshot.read(is_it))
    }

    /// The one that callers mean by an id or a name, an optional tag included, in letters of either case. An id comes first.
    pub(crate) fn find(&self, asked: &str) -> Option<Arc<Snapshot>> {
        let asked = asked.to_ascii_lowercase();
        let (text, tag) = asked.split_once(':').unwrap_or((&asked, DEFAULT_TAG));
        let id = text.parse().ok().filter(|_| tag == DEFAULT_TAG);
        if let Some(found) = id.and_then(|id| self.get(&id)).filter(|found| found.read(is_shown)) {
            return Some(found);
        }
        let has_name = |record: &SnapshotRecord| {
            let name = record.name.as_ref();
            is_shown(record) && name.is_some_and(|name| (name.0.as_str(), name.1.as_str()) == (text, tag))
        };
        let meant = self.all().into_iter().filter(|snapshot| snapshot.read(has_name));
        // One that is still being stored takes the name over when it is.
        meant.max_by_key(|snapshot| snapshot.read(|record| (record.parts.is_some(), record.created_at)))
    }

    /// Those that callers see.
    pub(crate) fn views(&self) -> Vec<SnapshotView> {
        let shown = self.all().into_iter().filter(|snapshot| snapshot.read(is_shown));
        shown.map(|snapshot| snapshot.view()).collect()
    }
}

impl Snapshot {
    fn new(record: SnapshotRecord) -> Self {
        Self {
            record: RwLock::new(record),
            changing: tokio::sync::Mutex::default(),
            memory: OnceCell::new(),
            users: watch::Sender::new(0),
            changes: watch::Sender::new(0),
            withdrawn: OnceLock::new(),
            standbys: OnDemand::new(),
        }
    }

    /// Looks at its record.
    pub(crate) fn read<T>(&self, look: impl FnOnce(&SnapshotRecord) -> T) -> T {
        look(&self.record.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Its record, as it is in the journal.
    pub(crate) fn record(&self) -> SnapshotRecord {
        self.read(SnapshotRecord::clone)
    }

    /// Takes over what was journalled.
    pub(crate) fn replace(&self, record: SnapshotRecord) {
        *self.record.write().unwrap_or_else(PoisonError::into_inner) = record;
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Takes over that it is to go because it cannot be stored; whoever waits for it is told `why`.
    pub(crate) fn withdraw(&self, record: SnapshotRecord, why: Error) {
        self.withdrawn.get_or_init(|| why);
        self.replace(record);
    }

    /// What somebody is told who wanted it, if it is to go.
    pub(crate) fn gone(&self) -> Option<Error> {
        let gone = |record: &SnapshotRecord| {
            record.is_deleted.then(|| Error::TemplateNotFound(record.id.to_string()))
        };
        self.read(gone).map(|gone| self.withdrawn.get().cloned().unwrap_or(gone))
    }

    /// Whether it has parts of its own, or is to go: whoever took it waits for that.
    pub(crate) fn is_settled(&self) -> bool {
        self.read(|record| record.parts.is_some() || record.is_deleted)
    }

    /// Waits until it is.
    pub(crate) async fn settled(&self) {
        let mut changes = self.changes.subscribe();
        // The sender is ours: it cannot be gone.
        let _gone = changes.wait_for(|_| self.is_settled()).await;
    }

    /// Waits until nobody else journals it anew.
    pub(crate) async fn change(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// One more VM that maps its memory.
    pub(crate) fn take(self: &Arc<Self>) -> Arc<SnapshotUse> {
        self.users.send_modify(|users| *users += 1);
        Arc::new(SnapshotUse { snapshot: Arc::clone(self) })
    }

    async fn unused(&self) {
        let mut users = self.users.subscribe();
        // The sender is ours: it cannot be gone.
        let _gone = users.wait_for(|users| *users == 0).await;
    }

    pub(crate) fn view(&self) -> SnapshotView {
        self.read(|record| SnapshotView {
            id: record.id.clone(),
            name: record.name.clone(),
            state: if record.parts.is_some() { SnapshotState::Ready } else { SnapshotState::Storing },
            source: record.source.clone(),
            template_id: record.template_id.clone(),
            template_name: record.template_name.clone(),
            created_at: record.created_at,
            mode: record.mode,
            vcpus: record.spec.vcpus,
            memory_mib: record.spec.memory_mib,
            disk_mib: record.disk_mib,
            stored_bytes: record.stored_bytes,
            users: *self.users.borrow(),
            standbys: self.standbys.ready(),
        })
    }
}

impl Drop for SnapshotUse {
    fn drop(&mut self) {
        self.snapshot.users.send_modify(|users| *users = users.saturating_sub(1));
    }
}

fn is_shown(record: &SnapshotRecord) -> bool {
    record.purpose == Purpose::Kept && !record.is_deleted
}

/// Whether a name could be taken for the id of a snapshot or a template, of one that is still to be made, too.
pub(crate) fn is_like_id(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() == ID_LENGTH && name.starts_with(['s', 't']) && name.bytes().all(is_letter)
}

/// Deletes a snapshot for callers: it goes when nothing uses it.
pub(crate) async fn delete(node: &Arc<Node>, snapshot: &Arc<Snapshot>) -> Result<(), Error> {
    let _naming = node.snapshots.naming().await;
    let _alone = snapshot.change().await;
    let mut record = snapshot.record();
    if record.is_deleted {
        return Err(Error::TemplateNotFound(record.id.to_string()));
    }
    record.is_deleted = true;
    node.journal.put_snapshot_durably(&record).await.map_err(|error| Error::Internal {
        context: format!("deleting snapshot {}", record.id),
        reason: error.to_string(),
    })?;
    let has_parts = record.parts.is_some();
    tracing::info!(snapshot = %record.id, "snapshot deleted");
    snapshot.replace(record);
    // They map its memory.
    snapshot.standbys.close();
    // One that is still to be handed something is removed by who would hand it over.
    if has_parts {
        node.tasks.spawn(remove_when_unused(Arc::clone(node), Arc::clone(snapshot)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
