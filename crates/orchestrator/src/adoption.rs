//! Takes over the VM of a running sandbox from an earlier process of ours, in attempts.
//!
//! ```text
//! network ─▶ VMM ─▶ vCPUs run? else resume ─▶ guest answers, and is greeted if its programs may stand still ─▶ adopted
//!    └─────────┴────────────┴───────────┴─▶ not now: what was taken over stays, another attempt after a pause
//!    └─ does not exist ┴─ its process is gone ─▶ lost
//! ```
//!
//! Only the end of the process (or of its network, without which nobody can reach the guest again) makes a sandbox lost. A
//! VMM or guest that does not answer may do so later, so it is left alone until the sandbox's time is over.

use crate::error::LossCause;
use crate::greeting;
use crate::guest_channel::GuestChannel;
use crate::journal::{Loss, Tenancy, VmRecord};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::sandbox_task::loss_cause;
use crate::stage::{Cause, timed};
use crate::vm::Vm;
use aenv_network::{NetworkError, Slot};
use aenv_vmm::{Machine, VmmError};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Pauses between attempts.
pub(crate) const PAUSES: GrowingPause =
    GrowingPause::new(Duration::from_millis(500), Duration::from_secs(60));

/// How long it is waited for a guest whose programs stand still to let them go: they do so by themselves later.
pub(crate) const LET_GO: Duration = Duration::from_secs(5);

/// What the attempts have taken over so far.
#[derive(Clone, Default)]
pub(crate) struct Held {
    pub(crate) slot: Option<Slot>,
    /// None again when the VMM did not do what it was asked: the next attempt connects anew.
    pub(crate) machine: Option<Arc<dyn Machine>>,
    /// The guest was found stopped, and has not been told the time since.
    stood_still: bool,
}

impl Held {
    /// Of a VM of this process whose guest may stand still.
    pub(crate) fn of_stopped(vm: &Vm) -> Self {
        Self { slot: vm.slot.clone(), machine: vm.machine.clone(), stood_still: true }
    }

    /// Its guest may not have been told the time since it runs again.
    pub(crate) fn of_guest_that_stood_still(self) -> Self {
        Self { stood_still: true, ..self }
    }
}

/// The VM of a sandbox that is paused or was being resumed, as it is, and whether its guest runs; none when it is gone.
pub(crate) async fn find(node: &Node, record: &VmRecord) -> Result<Option<(Held, bool)>, Cause> {
    if record.process.is_none() {
        return Ok(None);
    }
    let found = async {
        let slot = take_slot(node, record).await?;
        let machine = take_machine(node, record, &slot).await?;
        let running = timed(node.settings.deadlines.step, machine.is_running()).await.0;
        let running = running.map_err(Trouble::NotNow)?;
        Ok((Held { slot: Some(slot), machine: Some(machine), stood_still: false }, running))
    };
    match found.await {
        Ok(found) => Ok(Some(found)),
        Err(Trouble::Lost(_)) => Ok(None),
        Err(Trouble::NotNow(cause)) => Err(cause),
    }
}

/// Why a sandbox was not adopted.
pub(crate) enum Trouble {
    /// It is gone.
    Lost(Loss),
    /// Something does not answer, and may do so later.
    NotNow(Cause),
}

/// How an attempt ended.
pub(crate) struct Attempt {
    pub(crate) held: Held,
    pub(crate) result: Result<(), Trouble>,
}

/// An attempt that is under way, or waits for its moment.
pub(crate) type Pending = Pin<Box<dyn Future<Output = Attempt> + Send>>;

/// Tries once to take over what is not held yet.
pub(crate) async fn attempt(node: &Node, record: &VmRecord, tenancy: &Tenancy, mut held: Held) -> Attempt {
    let result = advance(node, record, tenancy, &mut held).await;
    Attempt { held, result }
}

/// Another attempt after a pause.
pub(crate) fn later(
    node: &Arc<Node>,
    record: &VmRecord,
    tenancy: &Tenancy,
    held: Held,
    pause: Duration,
) -> Pending {
    let (node, record, tenancy) = (Arc::clone(node), record.clone(), tenancy.clone());
    Box::pin(async move {
        tokio::time::sleep(pause).await;
        attempt(&node, &record, &tenancy, held).await
    })
}

/// Makes sure at the end of this process, in a moment, that a guest runs and its programs do. The next process tries on.
pub(crate) async fn hurried(node: &Node, vm: &Vm, tenancy: &Tenancy) {
    let attempt = attempt(node, &vm.record, tenancy, Held::of_stopped(vm));
    let error = match tokio::time::timeout(LET_GO, attempt).await {
        Ok(Attempt { result: Ok(()), .. }) => return,
        Ok(Attempt { result: Err(Trouble::Lost(loss)), .. }) => loss.detail,
        Ok(Attempt { result: Err(Trouble::NotNow(cause)), .. }) => cause.to_string(),
        Err(_) => Cause::Hung(LET_GO).to_string(),
    };
    tracing::warn!(sandbox = %vm.record.id, %error, "a guest may stand still until the next process adopts it");
}

async fn advance(node: &Node, record: &VmRecord, tenancy: &Tenancy, held: &mut Held) -> Result<(), Trouble> {
    let slot = match &held.slot {
        Some(slot) => slot.clone(),
        None => held.slot.insert(take_slot(node, record).await?).clone(),
    };
    let machine = match &held.machine {
        Some(machine) => Arc::clone(machine),
        None => Arc::clone(held.machine.insert(take_machine(node, record, &slot).await?)),
    };
    let channel = GuestChannel::new(&slot);
    tokio::select! {
        // What is gone does not answer either.
        biased;
        exit = machine.wait() => Err(lost(crate::sandbox_task::loss_cause(exit.cause), exit.detail)),
        woken = wake(node, &channel, tenancy, held) => woken,
    }
}

async fn take_slot(node: &Node, record: &VmRecord) -> Result<Slot, Trouble> {
    let name = record
        .slot
        .as_ref()
        .ok_or_else(|| lost(LossCause::VmmCrashed, "its record names no network".to_owned()))?;
    match timed(node.settings.deadlines.step, node.parts.slots.adopt(name)).await.0 {
        Ok(slot) => Ok(slot),
        Err(cause @ Cause::Network(NetworkError::NotFound(_))) => {
            Err(lost(LossCause::VmmCrashed, format!("its network is gone: {cause}")))
        }
        Err(cause) => Err(Trouble::NotNow(cause)),
    }
}

async fn take_machine(node: &Node, record: &VmRecord, slot: &Slot) -> Result<Arc<dyn Machine>, Trouble> {
    let process = record
        .process
        .as_ref()
        .ok_or_else(|| lost(LossCause::VmmCrashed, "its record names no process".to_owned()))?;
    let placement = node.placement(record, slot);
    let adopted = timed(node.settings.deadlines.step, node.parts.vmm.adopt(&record.spec, process, placement));
    adopted.await.0.map(Arc::from).map_err(|cause| match cause {
        Cause::Vmm(VmmError::Gone { cause, detail, .. }) => {
            lost(loss_cause(cause), format!("its VMM ended while the node was away: {detail}"))
        }
        cause => Trouble::NotNow(cause),
    })
}

/// Makes sure that the guest runs, knows the time if it stood still, and answers.
async fn wake(
    node: &Node,
    channel: &GuestChannel,
    tenancy: &Tenancy,
    held: &mut Held,
) -> Result<(), Trouble> {
    let deadlines = &node.settings.deadlines;
    if let Err(cause) = make_run(node, held).await {
        held.machine = None;
        return Err(Trouble::NotNow(cause));
    }
    let silent = |error| Trouble::NotNow(Cause::Guest(error));
    channel.wait_until_healthy(deadlines.greeting).await.map_err(silent)?;
    if held.stood_still {
        channel.init(&greeting::again(tenancy), deadlines.init).await.map_err(silent)?;
        held.stood_still = false;
    }
    Ok(())
}

async fn make_run(node: &Node, held: &mut Held) -> Result<(), Cause> {
    let Some(machine) = &held.machine else { return Ok(()) };
    let limit = node.settings.deadlines.step;
    if !timed(limit, machine.is_running()).await.0? {
        held.stood_still = true;
        timed(limit, machine.resume()).await.0?;
    }
    Ok(())
}

fn lost(cause: LossCause, detail: String) -> Trouble {
    Trouble::Lost(Loss { cause, detail })
}
