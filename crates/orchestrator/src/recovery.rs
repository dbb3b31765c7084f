//! What a node does first: puts in order what its last process left.
//!
//! | found in the journal                    | done                                                                  |
//! |-----------------------------------------|-----------------------------------------------------------------------|
//! | sandbox, running                        | adopted; lost, with the cause, when its process is gone; when it does |
//! |                                         | not answer, kept, and adoption is tried again in the background       |
//! | sandbox, running, before a host restart | lost (`HostRestarted`)                                                |
//! | sandbox, capturing                      | as one that runs; when its process is gone, paused as its last save   |
//! |                                         | is, if there is one                                                   |
//! | sandbox, paused                         | paused; its VMM goes on standing by if it lives and stands still      |
//! | sandbox, resuming                       | runs, if its guest does and answers; else paused                      |
//! | sandbox, one of these three, before a   | paused as the last save that is `local`; lost (`HostRestarted`) when  |
//! | host restart                            | there is none                                                         |
//! | snapshot that is to be handed a save which is not `local`, before a host restart | removed                       |
//! | sandbox, lost                           | kept until its time is over, what it held is removed again            |
//! | standby, preparation, anything half-made or half-ended | removed                                                |
//!
//! What the journal does not know (VMMs, networks, directories with our names) is removed before anything is adopted, or
//! else in the background: see [`strays`].

use crate::adoption::{self, Attempt, Held, Trouble};
use crate::clearing;
use crate::error::LossCause;
use crate::journal::{Loss, Present, Role, Save, Start, Tenancy, VmRecord};
use crate::lifecycle::{self, Event, Phase};
use crate::node::Node;
use crate::sandbox_task::{LOST_FOR, QUEUE, SandboxTask, end_after, outlives_its_time, remaining};
use crate::saving;
use crate::settings::StartError;
use crate::snapshot;
use crate::strays;
use crate::view::Durability;
use crate::vm::Vm;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Puts everything in order; the tasks of adopted sandboxes run when this returns.
pub(crate) async fn recover(
    node: &Arc<Node>,
    records: Vec<VmRecord>,
    rebooted: bool,
) -> Result<(), StartError> {
    let mut records = records;
    if rebooted {
        // What they would be handed may be there in part only. Nobody was told that they are there.
        records.iter_mut().for_each(|record| record.saves.drop_claims_not_local());
    }
    let (sandboxes, half): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| {
        record.role == Role::Sandbox
            && !matches!(record.phase, Phase::Starting | Phase::Killing)
            && record.tenancy.is_some()
    });
    let mut sandboxes = sandboxes;
    for record in &mut sandboxes {
        settle(node, record, rebooted).await;
    }
    let all: Vec<&VmRecord> = sandboxes.iter().chain(&half).collect();
    snapshot::forget_unclaimed(node, &all).await?;
    let keep: Vec<&VmRecord> = sandboxes.iter().filter(|record| record.phase != Phase::Lost).collect();
    strays::sweep(node, &keep, &half).await?;
    for record in &half {
        tracing::info!(sandbox = %record.id, role = ?record.role, phase = ?record.phase, "removing what the last process left");
    }
    let cleared = half.iter().map(|record| {
        // Awaited so that a start returns with a clean host; what resists is tried again in the background.
        clearing::discard(node, node.vm_of(record.clone()))
    });
    futures_util::future::join_all(cleared).await;
    let adopted = sandboxes.into_iter().map(|record| take_over(node, record));
    futures_util::future::join_all(adopted).await;
    Ok(())
}

/// Finds out where a sandbox stands, as far as that can be known without its VMM.
async fn settle(node: &Node, record: &mut VmRecord, rebooted: bool) {
    let before = record.clone();
    let capturing = record.phase == Phase::Capturing;
    if rebooted && record.phase != Phase::Lost {
        // All that ran is gone, and so is all that was not durable.
        let was_saved = record.phase != Phase::Running;
        (record.slot, record.process, record.present) = (None, None, Present::default());
        let is_local = |save: &Save| save.durability >= Durability::Local;
        let event = if !was_saved {
            Event::Died
        } else if !capturing && record.saves.last().is_some_and(is_local) {
            // Nothing is lost.
            Event::ResumeFailed
        } else if record.saves.fall_back(LossCause::HostRestarted, is_local) {
            tracing::warn!(sandbox = %record.id, "the host was restarted; the sandbox is as its last durable save is");
            Event::FellBack
        } else {
            Event::SavesGone
        };
        // Refused for one that is paused already.
        record.phase = lifecycle::next(record.phase, event).unwrap_or(record.phase);
        if record.phase == Phase::Lost {
            let loss = Loss { cause: LossCause::HostRestarted, detail: "the host was restarted".to_owned() };
            tracing::warn!(sandbox = %record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
            record.loss = Some(loss);
            if let Some(tenancy) = &mut record.tenancy
                && (was_saved || outlives_its_time(tenancy))
            {
                // Its time stood still, or would have: whoever comes back for it is to learn what became of it.
                tenancy.end_at = end_after(LOST_FOR).1;
            }
        }
    }
    if record.phase == Phase::Paused {
        pause_again(record);
        for save in record.saves.kept.iter().filter(|save| save.memory.is_some()) {
            saving::remove_changes(node, &record.id, save.number).await;
        }
    }
    if *record != before
        && let Err(error) = node.journal.put(record).await
    {
        // The row says what it said before: the next process comes to the same end.
        tracing::warn!(sandbox = %record.id, %error, "where a sandbox stands could not be journalled");
    }
}

/// Starts the task of a sandbox of an earlier process.
async fn take_over(node: &Arc<Node>, record: VmRecord) {
    let Some(tenancy) = record.tenancy.clone() else { return };
    let mut vm = node.vm_of(record);
    if matches!(vm.record.phase, Phase::Running | Phase::Capturing) || vm.record.process.is_some() {
        // Until its task, or what follows here, has ended the VMM.
        vm.memory = Some(node.admission.adopt(vm.record.memory_bytes()));
    }
    let mut unfinished = None;
    let capturing = vm.record.phase == Phase::Capturing;
    match vm.record.phase {
        Phase::Running | Phase::Capturing => unfinished = adopt_running(node, &mut vm, &tenancy).await,
        Phase::Paused | Phase::Resuming => adopt_saved(node, &mut vm, &tenancy).await,
        Phase::Starting | Phase::Lost | Phase::Killing => {}
    }
    let tenancy = vm.record.tenancy.clone().unwrap_or(tenancy);
    let (deadline, _) = end_after(remaining(tenancy.end_at));
    let (sender, commands) = mpsc::channel(QUEUE);
    node.table.begin(&vm.record.id, sender);
    let mut task = SandboxTask::new(Arc::clone(node), vm, tenancy, deadline, commands);
    if let Some(held) = unfinished {
        if capturing {
            task.note_interrupted_pause();
        }
        task.adopt_later(held);
    }
    node.tasks.spawn(task.run());
}

/// Adopts a VM whose guest runs, or was stopped for a pause of which nothing counts. What is held, when another attempt is
/// needed.
async fn adopt_running(node: &Node, vm: &mut Vm, tenancy: &Tenancy) -> Option<Held> {
    let capturing = vm.record.phase == Phase::Capturing;
    if capturing {
        vm.record.phase = Phase::Running;
        note(node, vm).await;
    }
    // Its programs may stand still although its vCPUs run: a flush before a pause is not in the journal. They go on when it is greeted.
    let held = Held::default().of_guest_that_stood_still();
    let Attempt { held, result } = adoption::attempt(node, &vm.record, tenancy, held).await;
    (vm.slot, vm.machine) = (held.slot.clone(), held.machine.clone());
    match result {
        Ok(()) => tracing::info!(sandbox = %vm.record.id, "adopted"),
        Err(Trouble::Lost(loss)) if capturing && vm.record.saves.fall_back(loss.cause, |_| true) => {
            tracing::warn!(sandbox = %vm.record.id, cause = ?loss.cause, detail = %loss.detail, "the VMM died during a pause; the sandbox is as its last save is");
            pause_again(&mut vm.record);
            release(node, vm).await;
        }
        Err(Trouble::Lost(loss)) => note_loss(node, vm, loss).await,
        Err(Trouble::NotNow(cause)) => {
            tracing::warn!(sandbox = %vm.record.id, error = %cause, "not adopted yet; trying again in the background");
            return Some(held);
        }
    }
    None
}

/// A sandbox whose saved state counts: its VMM stands by, if it can, or runs, if a resume had come so far.
async fn adopt_saved(node: &Node, vm: &mut Vm, tenancy: &Tenancy) {
    let resuming = vm.record.phase == Phase::Resuming;
    let is_captured = vm.record.present.captured.is_some()
        && vm.record.present.captured == vm.record.saves.last().map(|save| save.number);
    // A guest that booted has perhaps not been told who it is.
    let booted = vm.record.present.start == Some(Start::default());
    match adoption::find(node, &vm.record).await {
        Ok(Some((held, true))) if resuming && !booted => {
            let Attempt { held, result } =
                adoption::attempt(node, &vm.record, tenancy, held.of_guest_that_stood_still()).await;
            if result.is_ok() {
                (vm.slot, vm.machine) = (held.slot, held.machine);
                vm.record.phase = Phase::Running;
                tracing::info!(sandbox = %vm.record.id, "a resume of the last process is finished");
                return note(node, vm).await;
            }
        }
        // Nothing has run since the capture.
        Ok(Some((held, false))) if is_captured => {
            (vm.slot, vm.machine) = (held.slot, held.machine);
            if resuming {
                pause_again(&mut vm.record);
                note(node, vm).await;
            }
            return;
        }
        Ok(_) => {}
        Err(cause) => {
            tracing::warn!(sandbox = %vm.record.id, error = %cause, "the VMM of a paused sandbox does not answer; it will be resumed from what was saved");
        }
    }
    pause_again(&mut vm.record);
    release(node, vm).await;
}

/// It is as it was saved: its time ended then.
fn pause_again(record: &mut VmRecord) {
    record.phase = Phase::Paused;
    let saved_at = record.saves.last().map(|save| save.saved_at);
    if let (Some(tenancy), Some(saved_at)) = (&mut record.tenancy, saved_at) {
        tenancy.end_at = saved_at;
    }
}

/// Ends the VMM of a paused sandbox; what resists is left to its task.
async fn release(node: &Node, vm: &mut Vm) {
    if let Err(cause) = vm.release(node).await {
        tracing::warn!(sandbox = %vm.record.id, error = %cause, "the VMM of a paused sandbox could not be ended; trying again");
        note(node, vm).await;
    }
}

async fn note(node: &Node, vm: &Vm) {
    if let Err(failure) = vm.note(node).await {
        // The row says what it said before: the next process comes to the same end.
        tracing::warn!(sandbox = %vm.record.id, %failure, "where a sandbox stands could not be journalled");
    }
}

async fn note_loss(node: &Node, vm: &mut Vm, loss: Loss) {
    tracing::warn!(sandbox = %vm.record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
    vm.record.phase = Phase::Lost;
    vm.record.loss = Some(loss);
    if let Some(tenancy) = vm.record.tenancy.as_mut().filter(|tenancy| outlives_its_time(tenancy)) {
        tenancy.end_at = end_after(LOST_FOR).1;
    }
    note(node, vm).await;
}
