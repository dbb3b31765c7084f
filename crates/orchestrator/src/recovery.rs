//! What a node does first: puts in order what its last process left.
//!
//! | found in the journal                    | done                                                                  |
//! |-----------------------------------------|-----------------------------------------------------------------------|
//! | sandbox, running                        | adopted; lost, with the cause, when its VM or guest does not answer    |
//! | sandbox, running, before a host restart | lost (`HostRestarted`)                                                |
//! | sandbox, lost                           | kept until its time is over, what it held is removed again            |
//! | standby, preparation, anything half-made or half-ended | removed                                                |
//!
//! What the journal does not know (VMMs, networks, directories with our names) is removed before anything is adopted.

use crate::clearing;
use crate::error::LossCause;
use crate::greeting;
use crate::guest_channel::GuestChannel;
use crate::journal::{Loss, Role, Tenancy, VmRecord};
use crate::lifecycle::Phase;
use crate::node::Node;
use crate::sandbox_task::{QUEUE, SandboxTask, end_after, remaining};
use crate::settings::StartError;
use crate::stage::{Cause, timed};
use crate::vm::Vm;
use aenv_vmm::{Machine, VmmError};
use std::collections::BTreeSet;
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
    sweep(node, &keep, &half).await?;
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

/// Removes what has our names but is in no record.
async fn sweep(node: &Node, keep: &[&VmRecord], half: &[VmRecord]) -> Result<(), StartError> {
    let fail = |context: &str, reason: String| StartError::Recovery { context: context.to_owned(), reason };
    let names: Vec<String> = keep.iter().map(|record| node.vm_name(&record.id)).collect();
    let prefix = format!("{}-", node.settings.instance);
    let ended = node
        .parts
        .vmm
        .reap_strays(&prefix, &names)
        .await
        .map_err(|error| fail("ending VMMs that are not in the journal", error.to_string()))?;
    let slots: Vec<_> = keep.iter().filter_map(|record| record.slot.clone()).collect();
    let swept = node
        .parts
        .slots
        .sweep(&slots)
        .await
        .map_err(|error| fail("removing networks that are not in the journal", error.to_string()))?;
    let known: BTreeSet<&str> = keep.iter().copied().chain(half).map(|record| record.id.as_str()).collect();
    let entries = std::fs::read_dir(node.dir.sandboxes())
        .and_then(Iterator::collect::<std::io::Result<Vec<_>>>)
        .map_err(|error| fail("listing sandbox directories", error.to_string()))?;
    for entry in entries {
        if known.contains(entry.file_name().to_string_lossy().as_ref()) {
            continue;
        }
        let path = entry.path();
        tracing::info!(path = %path.display(), "removing a sandbox directory that is in no record");
        std::fs::remove_dir_all(&path)
            .map_err(|error| fail(&format!("removing {}", path.display()), error.to_string()))?;
    }
    if !ended.is_empty() || !swept.is_empty() {
        tracing::info!(vmms = ?ended, slots = ?swept, "removed what is in no record");
    }
    Ok(())
}

/// Starts the task of a sandbox of an earlier process.
async fn take_over(node: &Arc<Node>, record: VmRecord, rebooted: bool) {
    let Some(tenancy) = record.tenancy.clone() else { return };
    let mut vm = Vm::new(record);
    if vm.record.phase == Phase::Running {
        let lost = if rebooted {
            Some(Loss { cause: LossCause::HostRestarted, detail: "the host was restarted".to_owned() })
        } else {
            adopt(node, &mut vm, &tenancy).await.err()
        };
        match lost {
            None => tracing::info!(sandbox = %vm.record.id, "adopted"),
            Some(loss) => {
                tracing::warn!(sandbox = %vm.record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
                vm.record.phase = Phase::Lost;
                vm.record.loss = Some(loss);
                if let Err(error) = node.journal.put(&vm.record).await {
                    tracing::warn!(sandbox = %vm.record.id, %error, "the loss of a sandbox could not be journalled");
                }
            }
        }
    }
    let (deadline, _) = end_after(remaining(tenancy.end_at));
    let (sender, commands) = mpsc::channel(QUEUE);
    node.table.begin(&vm.record.id, sender);
    let task = SandboxTask::new(Arc::clone(node), vm, tenancy, deadline, commands);
    node.tasks.spawn(task.run());
}

async fn adopt(node: &Node, vm: &mut Vm, tenancy: &Tenancy) -> Result<(), Loss> {
    let limit = node.settings.deadlines.step;
    let lost = |cause, detail: String| Loss { cause, detail };
    let (Some(process), Some(slot)) = (&vm.record.process, &vm.record.slot) else {
        return Err(lost(LossCause::VmmCrashed, "its record names no process or no network".to_owned()));
    };
    let slot = timed(limit, node.parts.slots.adopt(slot))
        .await
        .0
        .map_err(|cause| lost(LossCause::VmmCrashed, format!("its network is gone: {cause}")))?;
    let placement = node.placement(&vm.record.id, &slot);
    vm.slot = Some(slot);
    let machine = match timed(limit, node.parts.vmm.adopt(&vm.record.spec, process, placement)).await.0 {
        Ok(machine) => Arc::<dyn Machine>::from(machine),
        Err(Cause::Vmm(VmmError::Gone { detail, .. })) => {
            return Err(lost(
                LossCause::VmmKilled,
                format!("its VMM ended while the node was away: {detail}"),
            ));
        }
        Err(cause) => {
            return Err(lost(LossCause::VmmCrashed, format!("its VMM cannot be controlled: {cause}")));
        }
    };
    vm.machine = Some(Arc::clone(&machine));
    let channel = vm.channel().map_err(|failure| lost(LossCause::GuestUnresponsive, failure.to_string()))?;
    tokio::select! {
        answer = wake(node, &machine, &channel, tenancy) => {
            answer.map_err(|cause| lost(LossCause::GuestUnresponsive, cause.to_string()))
        }
        exit = machine.wait() => Err(lost(crate::sandbox_task::loss_cause(exit.cause), exit.detail)),
    }
}

/// Makes sure that the guest runs, knows the time if it stood still, and answers.
async fn wake(
    node: &Node,
    machine: &Arc<dyn Machine>,
    channel: &GuestChannel,
    tenancy: &Tenancy,
) -> Result<(), Cause> {
    let deadlines = &node.settings.deadlines;
    let running = timed(deadlines.step, machine.is_running()).await.0?;
    if !running {
        timed(deadlines.step, machine.resume()).await.0?;
    }
    channel.wait_until_healthy(deadlines.greeting).await?;
    if !running {
        channel.init(&greeting::again(tenancy), deadlines.init).await?;
    }
    Ok(())
}
