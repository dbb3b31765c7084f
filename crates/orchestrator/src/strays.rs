//! Removes what has this node's names but is in no record: VMMs, then their networks, disks and directories.
//!
//! Done once before anything is adopted. What resists does not keep the node from starting: it is tried again in the
//! background, with growing pauses. By then the node makes VMs of its own, so such an attempt reads the records anew, and
//! is made while no VM is being started: whatever lives then and is in no record is a stray.

use crate::journal::VmRecord;
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::settings::StartError;
use crate::stage::{Cause, timed};
use crate::vm::file_error;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Pauses between attempts.
const PAUSES: GrowingPause = GrowingPause::new(Duration::from_secs(1), Duration::from_secs(300));
/// How long one step of a background attempt may keep callers from starting VMs.
const BACKGROUND_LIMIT: Duration = Duration::from_secs(5);

/// What is still to be removed.
struct Strays {
    processes: bool,
    networks: bool,
    disks: bool,
    directories: Vec<PathBuf>,
}

/// Removes strays: now, and what resists in the background. `keep` are the VMs that live on, `half` those that are removed
/// by their records.
///
/// # Errors
/// When the directory of sandboxes cannot be listed.
pub(crate) async fn sweep(node: &Arc<Node>, keep: &[&VmRecord], half: &[VmRecord]) -> Result<(), StartError> {
    let known: BTreeSet<&str> = keep.iter().copied().chain(half).map(|record| record.id.as_str()).collect();
    let entries = std::fs::read_dir(node.dir.sandboxes())
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .map_err(|error| StartError::DataDir {
            action: "list",
            path: node.dir.sandboxes(),
            reason: error.to_string(),
        })?;
    let unknown =
        entries.iter().filter(|entry| !known.contains(entry.file_name().to_string_lossy().as_ref()));
    let directories = unknown.map(std::fs::DirEntry::path).collect();
    let mut strays = Strays { processes: true, networks: true, disks: true, directories };
    if let Err(cause) = strays.remove(node, keep, node.settings.deadlines.step).await {
        tracing::warn!(error = %cause, "something that is in no record could not be removed; trying again");
        node.tasks.spawn(until_gone(Arc::clone(node), strays));
    }
    Ok(())
}

/// Tries until nothing is left, or the node shuts down; then the next process goes on.
async fn until_gone(node: Arc<Node>, mut strays: Strays) {
    let mut pauses = PAUSES;
    loop {
        let pause = pauses.take();
        let attempt = async {
            tokio::time::sleep(pause).await;
            strays.remove_beside_others(&node).await
        };
        match node.stopping.run_until_cancelled(attempt).await {
            None => return,
            Some(Ok(())) => {
                tracing::info!("what was in no record is removed");
                return;
            }
            Some(Err(cause)) => {
                tracing::warn!(error = %cause, "something that is in no record could not be removed");
            }
        }
    }
}

impl Strays {
    async fn remove_beside_others(&mut self, node: &Node) -> Result<(), Cause> {
        let _alone = node.admission.for_nobody_else().await.map_err(|failure| failure.cause)?;
        let records = node.journal.all().await?;
        self.remove(node, &records.iter().collect::<Vec<_>>(), BACKGROUND_LIMIT).await
    }

    /// A network is used by its VMM, a disk and a directory too, so neither goes before all processes are gone.
    async fn remove(&mut self, node: &Node, keep: &[&VmRecord], limit: Duration) -> Result<(), Cause> {
        if self.processes {
            let names: Vec<String> = keep.iter().map(|record| node.vm_name(&record.id)).collect();
            let prefix = format!("{}-", node.settings.instance);
            let ended = timed(limit, node.parts.vmm.reap_strays(&prefix, &names)).await.0?;
            if !ended.is_empty() {
                tracing::info!(vmms = ?ended, "ended VMMs that are in no record");
            }
            self.processes = false;
        }
        if self.networks {
            let slots: Vec<_> = keep.iter().filter_map(|record| record.slot.clone()).collect();
            let swept = timed(limit, node.parts.slots.sweep(&slots)).await.0?;
            if !swept.is_empty() {
                tracing::info!(slots = ?swept, "removed networks that are in no record");
            }
            self.networks = false;
        }
        if self.disks {
            let ids = keep.iter().map(|record| record.id.clone()).collect();
            let swept = timed(limit, node.disks.sweep(&ids)).await.0?;
            if !swept.is_empty() {
                tracing::info!(disks = ?swept, "removed disks that are in no record");
            }
            self.disks = false;
        }
        while let Some(path) = self.directories.last() {
            match tokio::fs::remove_dir_all(path).await {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file_error(format!("cannot remove {}", path.display()), error));
                }
                _ => {
                    tracing::info!(path = %path.display(), "removed a sandbox directory that is in no record");
                }
            }
            self.directories.pop();
        }
        Ok(())
    }
}
