//! Removes what is stored for snapshots that were deleted, or never finished. Tried until it succeeds: until then the row stays in
//! the journal, and the next process goes on.

use super::Snapshot;
use crate::journal::VmRecord;
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::settings::StartError;
use crate::stage::{Cause, timed};
use crate::vm::file_error;
use aenv_protocol::ids::TemplateId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Pauses between attempts.
const PAUSES: GrowingPause = GrowingPause::new(Duration::from_millis(500), Duration::from_secs(60));

/// Removes a deleted snapshot as soon as no VM maps its memory; ends early when the node shuts down.
pub(crate) async fn remove_when_unused(node: Arc<Node>, snapshot: Arc<Snapshot>) {
    let _stopping = node.stopping.run_until_cancelled(snapshot.unused()).await;
    // VMs go on when the node stops; it is only their tasks that are gone then.
    if node.stopping.is_cancelled() {
        return;
    }
    let mut pauses = PAUSES;
    while let Err(cause) = remove(&node, &snapshot).await {
        let pause = pauses.take();
        let id = snapshot.read(|record| record.id.clone());
        tracing::warn!(snapshot = %id, error = %cause, again_in = ?pause, "something of a snapshot could not be removed");
        if node.stopping.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
            return;
        }
    }
}

/// One attempt at removing everything.
async fn remove(node: &Node, snapshot: &Snapshot) -> Result<(), Cause> {
    let record = snapshot.record();
    let limit = node.settings.deadlines.step;
    timed(limit, node.disks.forget_snapshot(&record.id, record.parts.as_ref())).await.0?;
    let directory = node.dir.snapshot(&record.id);
    match tokio::fs::remove_dir_all(&directory).await {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(file_error(format!("cannot remove {}", directory.display()), source));
        }
        _ => {}
    }
    node.journal.remove_snapshot(&record.id).await?;
    node.snapshots.forget(&record.id);
    tracing::info!(snapshot = %record.id, "snapshot removed");
    Ok(())
}

/// Goes on with what the last process was removing, after VMs that live on were found. What is still to be handed something is
/// removed by who would hand it over.
pub(crate) fn settle(node: &Arc<Node>) {
    for snapshot in node.snapshots.all() {
        if snapshot.read(|record| record.is_deleted && record.parts.is_some()) {
            node.tasks.spawn(remove_when_unused(Arc::clone(node), snapshot));
        }
    }
}

/// Forgets snapshots that nothing will ever be handed to, and what lies in no snapshot's directory.
///
/// # Errors
/// When the directory of snapshots cannot be listed.
pub(crate) async fn forget_unclaimed(node: &Node, records: &[&VmRecord]) -> Result<(), StartError> {
    let snapshots = &node.snapshots;
    let claimed: BTreeSet<&TemplateId> = records.iter().flat_map(|record| record.saves.claims()).collect();
    for snapshot in snapshots.all() {
        let record = snapshot.record();
        if record.parts.is_none() && !claimed.contains(&record.id) {
            tracing::warn!(snapshot = %record.id, source = %record.source, "a snapshot was lost before it was stored");
            if let Err(cause) = remove(node, &snapshot).await {
                tracing::warn!(snapshot = %record.id, error = %cause, "something of a snapshot could not be removed; the next start tries again");
            }
        }
    }
    let known: BTreeSet<String> =
        snapshots.all().iter().map(|snapshot| snapshot.read(|record| record.id.to_string())).collect();
    let directory = node.dir.snapshots();
    let unusable = |action, error: std::io::Error| StartError::DataDir {
        action,
        path: directory.clone(),
        reason: error.to_string(),
    };
    for entry in std::fs::read_dir(&directory).map_err(|error| unusable("list", error))? {
        let path = entry.map_err(|error| unusable("list", error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if known.contains(&name) {
            continue;
        }
        match std::fs::remove_dir_all(&path) {
            Ok(()) => tracing::info!(path = %path.display(), "removed what was left of a snapshot"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "what was left of a snapshot could not be removed");
            }
        }
    }
    Ok(())
}
