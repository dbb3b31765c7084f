//! Removes what a VM leaves: its process, its network, its saves (after snapshots that claim one were handed it), its disk, its
//! directory, its journal row, in this order.
//!
//! Every step may be repeated, and is until it succeeds: an error is logged, tried again with growing pauses, and for as
//! long as anything is left the row stays in the journal, so that the next process goes on where this one was killed.

use crate::admission::Commitment;
use crate::journal::VmRecord;
use crate::lifecycle::{self, Event, Phase};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::saving;
use crate::snapshot::SnapshotUse;
use crate::stage::{Cause, timed};
use crate::vm::{Vm, file_error};
use aenv_network::SlotName;
use aenv_protocol::ids::SandboxId;
use aenv_vmm::Machine;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Pauses between attempts.
const PAUSES: GrowingPause = GrowingPause::new(Duration::from_millis(500), Duration::from_secs(60));

/// What a VM may have left.
pub(crate) struct Remains {
    id: SandboxId,
    machine: Option<Arc<dyn Machine>>,
    slot: Option<SlotName>,
    saves: Vec<u64>,
    /// As it is in the journal.
    record: VmRecord,
    /// The snapshot whose memory has to stay for it.
    snapshot: Option<Arc<SnapshotUse>>,
    /// Counted until its process has ended.
    memory: Option<Arc<Commitment>>,
}

impl Remains {
    /// Of a VM, of this process or an earlier one.
    pub(crate) fn of_vm(vm: &Vm) -> Self {
        Self {
            id: vm.record.id.clone(),
            machine: vm.machine.clone(),
            slot: vm.record.slot.clone(),
            saves: vm.record.saves.numbers(),
            record: vm.record.clone(),
            snapshot: vm.snapshot.clone(),
            memory: vm.memory.clone(),
        }
    }
}

/// Whether the journal row goes with the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Row {
    /// Of a lost sandbox: callers still ask for it.
    Keep,
    /// Of all others.
    Remove,
}

/// Ends the VMM.
pub(crate) async fn end_process(node: &Node, remains: &Remains) -> Result<(), Cause> {
    let limit = node.settings.deadlines.step;
    if let Some(machine) = &remains.machine {
        timed(limit, machine.kill()).await.0?;
    } else {
        // A start that failed or hung may have left a process without telling us.
        let ended = timed(limit, node.parts.vmm.reap_strays(&node.vm_name(&remains.id), &[])).await.0?;
        if !ended.is_empty() {
            tracing::warn!(sandbox = %remains.id, "ended the VMM of a start that was not finished");
        }
    }
    Ok(())
}

/// One attempt at removing everything.
async fn attempt(node: &Arc<Node>, remains: &mut Remains, row: Row) -> Result<(), Cause> {
    end_process(node, remains).await?;
    remains.memory = None;
    if let Some(slot) = &remains.slot {
        timed(node.settings.deadlines.step, node.parts.slots.release(slot)).await.0?;
    }
    // Boxed: it is large, and seldom needed.
    Box::pin(saving::hand_over_all(node, &mut remains.record)).await?;
    remains.snapshot = None;
    let layers = remains.record.saves.used_layers(&remains.record.present);
    saving::forget_all(node, &remains.id, &remains.saves).await?;
    saving::forget_layers(node, &remains.id, &remains.saves, &BTreeSet::new()).await?;
    for layer in &layers {
        // Perhaps it was the last that lay on what others had stored.
        timed(node.settings.deadlines.step, node.disks.release_layer(layer)).await.0?;
    }
    timed(node.settings.deadlines.step, node.disks.remove(&remains.id)).await.0?;
    let directory = node.dir.sandbox(&remains.id);
    match tokio::fs::remove_dir_all(&directory).await {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(file_error(format!("cannot remove {}", directory.display()), source));
        }
        _ => {}
    }
    if row == Row::Remove {
        node.journal.remove(&remains.id).await?;
    }
    Ok(())
}

/// Tries until everything is removed, or the node shuts down; then the next process goes on.
pub(crate) async fn until_clear(node: Arc<Node>, mut remains: Remains, row: Row) {
    let mut pauses = PAUSES;
    while let Err(cause) = attempt(&node, &mut remains, row).await {
        let pause = pauses.take();
        tracing::warn!(sandbox = %remains.id, error = %cause, again_in = ?pause, "something of a VM could not be removed");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = node.stopping.cancelled() => return,
        }
    }
}

/// Journals that a VM is being ended.
pub(crate) async fn note_end(node: &Node, vm: &mut Vm) {
    let event = if vm.record.phase == Phase::Starting { Event::StartFailed } else { Event::Kill };
    // Refused only when its end is journalled already.
    let Ok(phase) = lifecycle::next(vm.record.phase, event) else { return };
    vm.record.phase = phase;
    if let Err(error) = node.journal.put(&vm.record).await {
        // The row says an earlier phase: the next process adopts what still lives, and undoes the rest just the same.
        tracing::warn!(sandbox = %vm.record.id, %error, "the end of a VM could not be journalled");
    }
}

/// Removes a VM: once while the caller waits, what resists in the background.
pub(crate) async fn discard(node: &Arc<Node>, mut vm: Vm) {
    note_end(node, &mut vm).await;
    let mut remains = Remains::of_vm(&vm);
    drop(vm);
    if let Err(cause) = attempt(node, &mut remains, Row::Remove).await {
        tracing::warn!(sandbox = %remains.id, error = %cause, "something of a VM could not be removed; trying again");
        node.tasks.spawn(until_clear(Arc::clone(node), remains, Row::Remove));
    }
}
