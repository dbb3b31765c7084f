//! What is still to be done for the saves of a sandbox after its pause was answered: one step at a time, in the background.
//!
//! ```text
//! dropped saves ─▶ removed
//! changes       ─▶ memory, stored and durable
//! claimed save  ─▶ `local`, as below ─▶ handed to its snapshot, durable ─▶ journalled so that it survives a power cut
//! devices, hold of the disk ─▶ durable ─▶ journalled so that it survives a power cut: `local` ─▶ changes removed
//! ```
//!
//! Which step is next is for [`Saves::next_step`](crate::journal::Saves::next_step) to say; what came of it is journalled by the
//! sandbox's task. Every step may be repeated, and be given up in the middle.

use crate::disks::{MemoryLayer, MemoryParts, SaveName, SnapshotParts};
use crate::error::{Error, Shortage};
use crate::journal::{SnapshotRecord, Step, VmRecord};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::pausing::{CHANGES, STATE};
use crate::snapshot::{self, Snapshot};
use crate::stage::{Cause, timed};
use crate::view::{Durability, PauseMode};
use crate::vm::file_error;
use aenv_protocol::ids::{SandboxId, TemplateId};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Pauses between attempts.
pub(crate) const PAUSES: GrowingPause =
    GrowingPause::new(Duration::from_millis(500), Duration::from_secs(60));

/// What a step that succeeded did.
pub(crate) enum Taken {
    /// Removed saves; the layers of memory of these are still needed.
    Forgotten { lower: Vec<u64> },
    /// Stored a memory.
    Stored(MemoryLayer),
    /// Gave a snapshot what it is made of; none when it is not wanted any more.
    HandedOver(Option<SnapshotParts>),
    /// Made a save durable.
    Durable,
}

/// What came of a step.
pub(crate) struct Outcome {
    pub(crate) step: Step,
    pub(crate) result: Result<Taken, Cause>,
}

/// A step that is under way, or waits for its moment.
pub(crate) type Pending = tokio::task::JoinHandle<Option<Outcome>>;

/// Begins a step after a pause, which ends early when there is hurry; it comes to nothing when it is cancelled.
pub(crate) fn begin(
    node: &Arc<Node>,
    record: &VmRecord,
    step: Step,
    pause: Option<Duration>,
    hurry: CancellationToken,
    cancelled: CancellationToken,
) -> Pending {
    let (shared, record) = (Arc::clone(node), record.clone());
    let work = async move {
        if let Some(pause) = pause {
            hurry.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
        let result = take(&shared, &record, &step).await;
        Outcome { step, result }
    };
    node.tasks.spawn(async move { cancelled.run_until_cancelled(work).await })
}

pub(crate) async fn take(node: &Node, record: &VmRecord, step: &Step) -> Result<Taken, Cause> {
    let limit = node.settings.deadlines.step;
    match step {
        Step::Forget(numbers) => {
            forget_all(node, &record.id, numbers).await?;
            let used = record.saves.used_layers(&record.present);
            let all: Vec<u64> = record.saves.lower.iter().chain(numbers).copied().collect();
            Ok(Taken::Forgotten { lower: forget_layers(node, &record.id, &all, &used).await? })
        }
        Step::StoreMemory(number) => {
            let parts = parts(node, record, *number)?;
            let name = SaveName { vm: record.id.clone(), number: *number };
            let stored = timed(node.settings.deadlines.memory, node.disks.store_memory(&name, &parts));
            Ok(Taken::Stored(stored.await.0?))
        }
        Step::HandOver(number, id) => hand_over(node, record, *number, id).await.map(Taken::HandedOver),
        Step::MakeLocal(number) => {
            let save = record.saves.get(*number).ok_or_else(|| gone(*number))?;
            let name = SaveName { vm: record.id.clone(), number: *number };
            timed(limit, node.disks.hold(&name, &save.disk)).await.0?;
            let directory = node.dir.sandbox_save(&record.id, *number);
            // A capture of nothing but the disk has none.
            let state = save.report.is_some().then(|| directory.join(STATE));
            let synced = tokio::task::spawn_blocking(move || sync(&directory, state.as_deref()));
            synced.await.map_err(|error| Cause::Unexpected(error.to_string()))??;
            Ok(Taken::Durable)
        }
    }
}

/// Gives a snapshot of its own what a save was stored as.
async fn hand_over(
    node: &Node,
    record: &VmRecord,
    number: u64,
    id: &TemplateId,
) -> Result<Option<SnapshotParts>, Cause> {
    let wanted = node.snapshots.get(id).map(|snapshot| snapshot.record());
    let Some(wanted) = wanted.filter(|snapshot| !snapshot.is_deleted) else { return Ok(None) };
    if wanted.parts.is_some() {
        // By whoever worked on another copy of this record, and has perhaps removed since what was there to be handed over.
        return Ok(wanted.parts);
    }
    let save = record.saves.get(number).ok_or_else(|| gone(number))?;
    let stored = save.memory.as_ref().map(|memory| memory.chain.clone());
    let memory = stored.filter(|_| wanted.mode == PauseMode::Full);
    let directory = node.dir.snapshot(id);
    if memory.is_some() {
        let (from, to) = (node.dir.sandbox_save(&record.id, number).join(STATE), directory.clone());
        let copied = tokio::task::spawn_blocking(move || copy_state(&from, &to));
        copied.await.map_err(|error| Cause::Unexpected(error.to_string()))??;
    }
    let parts = SnapshotParts { disk: save.disk.clone(), memory };
    let handed = timed(node.settings.deadlines.memory, node.disks.hand_over(id, &parts)).await.0?;
    Ok(Some(handed))
}

/// Copies the devices of a save, some KiB, durably.
fn copy_state(from: &Path, directory: &Path) -> Result<(), Cause> {
    let to = directory.join(snapshot::STATE);
    let copied = std::fs::create_dir_all(directory)
        .and_then(|()| std::fs::copy(from, &to))
        .and_then(|_| std::fs::File::open(&to)?.sync_all())
        // Its own name, and that of its directory.
        .and_then(|()| {
            directory.ancestors().take(2).try_for_each(|path| std::fs::File::open(path)?.sync_all())
        });
    copied.map_err(|source| file_error(format!("cannot copy {} to {}", from.display(), to.display()), source))
}

/// Journals what a step did; gives the record as it is then.
pub(crate) async fn note(
    node: &Arc<Node>,
    record: &VmRecord,
    step: &Step,
    taken: Taken,
) -> Result<VmRecord, Cause> {
    let mut record = record.clone();
    match (step, taken) {
        (Step::Forget(numbers), Taken::Forgotten { lower }) => record.saves.forgotten(numbers, lower),
        (Step::StoreMemory(number), Taken::Stored(memory)) => {
            if let Some(save) = record.saves.get_mut(*number) {
                save.memory = Some(memory);
            }
        }
        (Step::HandOver(number, id), Taken::HandedOver(parts)) => {
            return note_handed_over(node, record, *number, id, parts).await;
        }
        (Step::MakeLocal(number), Taken::Durable) => {
            if let Some(save) = record.saves.get_mut(*number) {
                save.durability = save.durability.max(Durability::Local);
            }
        }
        (step, _) => return Err(Cause::Unexpected(format!("{step:?} did something else"))),
    }
    record.saves.drop_unneeded(&record.present);
    // All of this is as durable as it is said to be.
    match step {
        Step::MakeLocal(_) => node.journal.put_durably(&record).await?,
        Step::Forget(_) | Step::StoreMemory(_) | Step::HandOver(..) => node.journal.put(&record).await?,
    }
    Ok(record)
}

/// The claim goes, and the snapshot has parts of its own, in one commit. With it goes the name of who had it before.
async fn note_handed_over(
    node: &Arc<Node>,
    mut record: VmRecord,
    number: u64,
    id: &TemplateId,
    parts: Option<SnapshotParts>,
) -> Result<VmRecord, Cause> {
    let stored_bytes =
        record.saves.get(number).and_then(|save| save.memory.as_ref()).map(|it| it.stored_bytes);
    record.saves.drop_claim(id);
    record.saves.drop_unneeded(&record.present);
    let Some(found) = node.snapshots.get(id) else {
        node.journal.put(&record).await?;
        return Ok(record);
    };
    // Two that are handed over at once, or one while the name's present owner is deleted: one after the other.
    let _naming = node.snapshots.naming().await;
    let _alone = found.change().await;
    let mut new = found.record();
    let name = new.name.clone().filter(|_| !new.is_deleted);
    let before = name.and_then(|name| node.snapshots.named(&name, id));
    match parts {
        // It has them, and what they take is known.
        Some(_) if new.parts.is_some() => {}
        Some(parts) => (new.parts, new.stored_bytes) = (Some(parts), stored_bytes.unwrap_or(0)),
        None => new.is_deleted = true,
    }
    let mut changed = vec![new.clone()];
    changed.extend(before.as_ref().map(|before| SnapshotRecord { name: None, ..before.record() }));
    node.journal.put_with_snapshots_durably(&record, &changed).await?;
    if let (Some(before), Some(unnamed)) = (before, changed.pop().filter(|last| last.id != *id)) {
        before.replace(unnamed);
    }
    let is_deleted = new.is_deleted;
    found.replace(new);
    if is_deleted {
        node.tasks.spawn(snapshot::remove_when_unused(Arc::clone(node), Arc::clone(&found)));
    }
    Ok(record)
}

/// Gives all snapshots that claim a save of this VM what they are to have: before what it leaves is removed. Those for which there
/// is no room are withdrawn: their source would take room for ever else.
pub(crate) async fn hand_over_all(node: &Arc<Node>, record: &mut VmRecord) -> Result<(), Cause> {
    drop_settled_claims(node, record).await?;
    while let Some(step) = record.saves.next_claim() {
        let taken = match take(node, record, &step).await {
            Err(cause) if cause.is_no_room() => return withdraw_all(node, record, &cause).await,
            taken => taken?,
        };
        *record = note(node, record, &step, taken).await?;
    }
    Ok(())
}

/// Drops the claims of snapshots that want nothing: they were deleted, or have all they need. The record may be older than that.
async fn drop_settled_claims(node: &Arc<Node>, record: &mut VmRecord) -> Result<(), Cause> {
    let claims =
        record.saves.kept.iter().flat_map(|save| save.claims.iter().map(|id| (save.number, id.clone())));
    for (number, id) in claims.collect::<Vec<_>>() {
        let found = node.snapshots.get(&id);
        let (has_parts, is_deleted) = found.map_or((false, true), |found| {
            found.read(|snapshot| (snapshot.parts.is_some(), snapshot.is_deleted))
        });
        if has_parts {
            record.saves.drop_claim(&id);
        } else if is_deleted {
            *record = note_handed_over(node, record.clone(), number, &id, None).await?;
        }
    }
    Ok(())
}

/// Snapshots of a VM that ends, and that cannot be stored, are none.
async fn withdraw_all(node: &Arc<Node>, record: &mut VmRecord, cause: &Cause) -> Result<(), Cause> {
    let mut without = record.clone();
    let mut withdrawn = Vec::new();
    for id in record.saves.claims() {
        without.saves.drop_claim(id);
        withdrawn.extend(node.snapshots.get(id));
    }
    without.saves.drop_unneeded(&without.present);
    let deleted = |snapshot: &Arc<Snapshot>| SnapshotRecord { is_deleted: true, ..snapshot.record() };
    let records: Vec<SnapshotRecord> = withdrawn.iter().map(deleted).collect();
    node.journal.put_with_snapshots_durably(&without, &records).await?;
    *record = without;
    for (snapshot, record) in withdrawn.into_iter().zip(records) {
        tracing::warn!(snapshot = %record.id, source = %record.source, error = %cause, "there is no room to store a snapshot whose source ended; it is withdrawn");
        let reason = format!("storing snapshot {}, whose source ended: {cause}", record.id);
        snapshot.withdraw(record, Error::NoCapacity(Shortage::Room(reason)));
        node.tasks.spawn(snapshot::remove_when_unused(Arc::clone(node), snapshot));
    }
    Ok(())
}

/// Removes what is stored for saves, but for their layers of memory. All are tried, whatever fails.
pub(crate) async fn forget_all(node: &Node, vm: &SandboxId, numbers: &[u64]) -> Result<(), Cause> {
    let mut failed = Ok(());
    for number in numbers {
        failed = failed.and(forget(node, vm, *number).await);
    }
    failed
}

/// Removes what is stored for a save, but for its layer of memory. Its files go even if the store removes nothing: they may be
/// large.
pub(crate) async fn forget(node: &Node, vm: &SandboxId, number: u64) -> Result<(), Cause> {
    let name = SaveName { vm: vm.clone(), number };
    let forgotten = timed(node.settings.deadlines.step, node.disks.forget_save(&name)).await.0;
    let directory = node.dir.sandbox_save(vm, number);
    let removed = match tokio::fs::remove_dir_all(&directory).await {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(file_error(format!("cannot remove {}", directory.display()), source))
        }
        _ => Ok(()),
    };
    forgotten.and(removed)
}

/// Removes the layers of memory of saves that are forgotten; tells which of them are `used`. After all that is made of them is
/// gone. All are tried, whatever fails.
pub(crate) async fn forget_layers(
    node: &Node,
    vm: &SandboxId,
    numbers: &[u64],
    used: &BTreeSet<PathBuf>,
) -> Result<Vec<u64>, Cause> {
    let (mut lower, mut failed) = (Vec::new(), Ok(()));
    for number in numbers {
        let name = SaveName { vm: vm.clone(), number: *number };
        match timed(node.settings.deadlines.step, node.disks.forget_layer(&name, used)).await.0 {
            Ok(true) => {}
            Ok(false) => lower.push(*number),
            Err(cause) => failed = failed.and(Err(cause)),
        }
    }
    failed.map(|()| lower)
}

/// Removes the changes of a save whose memory is stored, and said to be.
pub(crate) async fn remove_changes(node: &Node, vm: &SandboxId, number: u64) {
    let path = node.dir.sandbox_save(vm, number).join(CHANGES);
    match tokio::fs::remove_file(&path).await {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            // It goes with the save, or at the next start.
            tracing::warn!(path = %path.display(), %error, "the changes of a stored memory could not be removed");
        }
        _ => {}
    }
}

fn parts(node: &Node, record: &VmRecord, number: u64) -> Result<MemoryParts, Cause> {
    let save = record.saves.get(number).ok_or_else(|| gone(number))?;
    let report = save
        .report
        .as_ref()
        .ok_or_else(|| Cause::Unexpected(format!("nothing is known of the capture of save {number}")))?;
    Ok(MemoryParts {
        below: record.saves.below(save),
        start: save.start.chain.clone(),
        changes: node.dir.sandbox_save(&record.id, number).join(CHANGES),
        base: report.base,
        bytes: record.memory_bytes(),
    })
}

fn gone(number: u64) -> Cause {
    Cause::Unexpected(format!("there is no save {number}"))
}

/// Makes the devices of a save durable, and the names of its files, up to the directory of all sandboxes.
fn sync(directory: &Path, state: Option<&Path>) -> Result<(), Cause> {
    // The directory, that of all saves, that of the sandbox, and that of all sandboxes.
    for path in state.into_iter().chain(directory.ancestors().take(4)) {
        std::fs::File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|source| file_error(format!("cannot sync {}", path.display()), source))?;
    }
    Ok(())
}
