//! What a node does first: puts in order what its last process left.
//!
//! | found in the journal                    | done                                                                  |
//! |-----------------------------------------|-----------------------------------------------------------------------|
//! | sandbox, running                        | adopted; lost, with the cause, when its process is gone; when it does |
//! |                                         | not answer, kept, and adoption is tried again in the background       |
//! | sandbox, running, before a host restart | lost (`HostRestarted`)                                                |
//! | sandbox, lost                           | kept until its time is over, what it held is removed again            |
//! | standby, preparation, anything half-made or half-ended | removed                                                |
//!
//! What the journal does not know (VMMs, networks, directories with our names) is removed before anything is adopted, or
//! else in the background: see [`strays`].

use crate::adoption::{self, Attempt, Held, Trouble};
use crate::clearing;
use crate::error::LossCause;
use crate::journal::{Loss, Role, VmRecord};
use crate::lifecycle::Phase;
use crate::node::Node;
use crate::sandbox_task::{QUEUE, SandboxTask, end_after, remaining};
use crate::settings::StartError;
use crate::strays;
use crate::vm::Vm;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Puts everything in order; the tasks of adopted sandboxes run when this returns.
pub(crate) async fn recover(
    node: &Arc<Node>,
    records: Vec<VmRecord>,
    rebooted: bool,
) -> Result<(), StartError> {
    let (sandboxes, half): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| {
        record.role == Role::Sandbox
            && matches!(record.phase, Phase::Running | Phase::Lost)
            && record.tenancy.is_some()
    });
    let keep: Vec<&VmRecord> =
        sandboxes.iter().filter(|record| record.phase == Phase::Running && !rebooted).collect();
    strays::sweep(node, &keep, &half).await?;
    for record in &half {
        tracing::info!(sandbox = %record.id, role = ?record.role, phase = ?record.phase, "removing what the last process left");
    }
    let cleared = half.iter().map(|record| {
        // Awaited so that a start returns with a clean host; what resists is tried again in the background.
        clearing::discard(node, Vm::new(record.clone()))
    });
    futures_util::future::join_all(cleared).await;
    let adopted = sandboxes.into_iter().map(|record| take_over(node, record, rebooted));
    futures_util::future::join_all(adopted).await;
    Ok(())
}

/// Starts the task of a sandbox of an earlier process.
async fn take_over(node: &Arc<Node>, record: VmRecord, rebooted: bool) {
    let Some(tenancy) = record.tenancy.clone() else { return };
    let mut vm = Vm::new(record);
    let mut unfinished = None;
    if vm.record.phase == Phase::Running && rebooted {
        let detail = "the host was restarted".to_owned();
        note_loss(node, &mut vm, Loss { cause: LossCause::HostRestarted, detail }).await;
    } else if vm.record.phase == Phase::Running {
        let Attempt { held, result } = adoption::attempt(node, &vm.record, &tenancy, Held::default()).await;
        (vm.slot, vm.machine) = (held.slot.clone(), held.machine.clone());
        match result {
            Ok(()) => tracing::info!(sandbox = %vm.record.id, "adopted"),
            Err(Trouble::Lost(loss)) => note_loss(node, &mut vm, loss).await,
            Err(Trouble::NotNow(cause)) => {
                tracing::warn!(sandbox = %vm.record.id, error = %cause, "not adopted yet; trying again in the background");
                unfinished = Some(held);
            }
        }
    }
    let (deadline, _) = end_after(remaining(tenancy.end_at));
    let (sender, commands) = mpsc::channel(QUEUE);
    node.table.begin(&vm.record.id, sender);
    let mut task = SandboxTask::new(Arc::clone(node), vm, tenancy, deadline, commands);
    if let Some(held) = unfinished {
        task.adopt_later(held);
    }
    node.tasks.spawn(task.run());
}

async fn note_loss(node: &Node, vm: &mut Vm, loss: Loss) {
    tracing::warn!(sandbox = %vm.record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
    vm.record.phase = Phase::Lost;
    vm.record.loss = Some(loss);
    if let Err(error) = node.journal.put(&vm.record).await {
        // The row says Running: the next process finds no VM and comes to the same end.
        tracing::warn!(sandbox = %vm.record.id, %error, "the loss of a sandbox could not be journalled");
    }
}
