//! Standbys: VMs made before anyone asks for them, in two degrees of readiness.
//!
//! A standby has no identity, environment, token or user process. Its life:
//!
//! ```text
//! slot ∥ disk ─▶ VMM process prepared ─▶ warm, in the pool ───────────────────────────┬─▶ taken by one create
//!                          │                     │                                    │   (the journal decides)
//!                          └─────────────────────┴▶ load ─▶ resume ─▶ GET /health,    │
//!                                  rehearsals ─▶ stop ─▶ hot, in the pool ────────────┘
//!     any failure, or its death in the pool ─▶ removed, replaced after a pause that grows with the failures in a row
//! ```
//!
//! Rehearsed, but not by those of a snapshot, are `/init` with nobody's name, whose settings the real one replaces, and a shell that ends at once: an
//! emulating VMM has then translated that code, the pages it touches are there, and the connection is kept. In a snapshot there are
//! programs, which stand still until the first `/init`: they are not to run before it is somebody's.
//! How many there are of a template is set; of a snapshot, [demand](OnDemand) tells.
//! The pool owns its standbys until they are taken. Standbys of an earlier process are removed, not adopted: nobody
//! waits for them, and their connections are gone. To the journal both kinds are the same: whole, and claimed once.

mod demand;
mod pool;

pub(crate) use demand::OnDemand;
pub(crate) use pool::{Readiness, StandbyPool, Targets};

use crate::admission::{Commitment, Permit, Purpose};
use crate::clearing;
use crate::greeting;
use crate::guest_channel::GuestChannel;
use crate::journal::{Role, VmRecord};
use crate::node::Node;
use crate::random;
use crate::source::Source;
use crate::stage::{Cause, Failure, Stages};
use crate::vm::Vm;
use aenv_protocol::ids::TemplateId;
use pool::Next;
use std::sync::Arc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Greetings rehearsed: the first one makes files, the second one changes them, as the real one will.
const GREETINGS_REHEARSED: usize = 2;

/// A VM that can become a sandbox.
pub(crate) struct Standby {
    pub(crate) vm: Vm,
    /// Of a hot one, with the connection of the greeting.
    pub(crate) channel: Arc<GuestChannel>,
    /// How far it is.
    pub(crate) readiness: Readiness,
    /// Ends the task that watches for its death in the pool.
    taken: CancellationToken,
}

/// Keeps the pool of a ready template, or of a snapshot, filled until then, at the latest until the node shuts down; removes what is
/// in it after that.
pub(crate) async fn keep_filled(node: Arc<Node>, source: Source, until: CancellationToken) {
    let Some(pool) = source.pool() else { return };
    while until.run_until_cancelled(pool.wanted()).await.is_some() {
        // Of a warm one that can be made hot it is counted already.
        let heats = pool.next(Instant::now()) == Next::Make(Readiness::Hot) && pool.len(Readiness::Warm) > 0;
        let bytes = if heats { 0 } else { source.memory_bytes() };
        let granted = tokio::select! {
            granted = node.admission.for_background(Purpose::Standby, bytes) => granted,
            // What is wanted may be another thing now, and need no memory.
            () = pool.changed() => continue,
            () = until.cancelled() => break,
        };
        let Permit { place, memory } = match granted {
            Ok(permit) => permit,
            Err(failure) => {
                // More memory than the node has.
                tracing::error!(source = %source.name(), error = %failure, "no standbys are made any more");
                break;
            }
        };
        // The turn may have come late: what is wanted now?
        let Next::Make(readiness) = pool.next(Instant::now()) else { continue };
        let warm = match readiness {
            Readiness::Hot => pool.take(Readiness::Warm),
            Readiness::Warm => None,
        };
        let made = match (warm, memory) {
            (Some(warm), _) => heat(&node, &source, warm).await,
            (None, Some(memory)) => make(&node, &source, readiness, memory).await,
            // Somebody took the one that was to be made hot.
            (None, None) => continue,
        };
        drop(place);
        match made {
            Ok(standby) => put(&node, &source, standby),
            Err(_) if until.is_cancelled() => break,
            Err(failure) => {
                let pause = pool.failed(readiness);
                tracing::warn!(
                    source = %source.name(), ?readiness, error = %failure, again_in = ?pause, "no standby could be made"
                );
            }
        }
    }
    while let Some(standby) = pool.take_best() {
        clearing::discard(&node, standby.vm).await;
    }
}

/// Puts a standby where it can be taken, and watches over it there.
pub(crate) fn put(node: &Arc<Node>, source: &Source, standby: Standby) {
    let Some(pool) = source.pool() else { return };
    let standby = Standby { taken: CancellationToken::new(), ..standby };
    let watcher = watch(Arc::clone(node), source.clone(), &standby);
    // In this order, or one that is dead already would never be found in the pool.
    pool.put(standby);
    node.tasks.spawn(watcher);
}

/// Makes a standby. What a failure leaves is removed.
async fn make(
    node: &Arc<Node>,
    source: &Source,
    readiness: Readiness,
    memory: Arc<Commitment>,
) -> Result<Standby, Failure> {
    let warm = prepare(node, source, memory).await?;
    match readiness {
        Readiness::Warm => Ok(warm),
        Readiness::Hot => heat(node, source, warm).await,
    }
}

/// Makes a warm standby.
async fn prepare(node: &Arc<Node>, source: &Source, memory: Arc<Commitment>) -> Result<Standby, Failure> {
    node.admission.check_room(&node.dir)?;
    let id = random::sandbox_id().map_err(|error| Failure::new("journal", error))?;
    let record = VmRecord { role: Role::Standby, ..source.new_record(id) };
    let mut vm = Vm::with_memory(record, Some(memory));
    vm.snapshot = source.used();
    match prepare_vm(node, &mut vm, source).await {
        Ok(channel) => {
            Ok(Standby { vm, channel, readiness: Readiness::Warm, taken: CancellationToken::new() })
        }
        Err(failure) => {
            clearing::discard(node, vm).await;
            Err(failure)
        }
    }
}

async fn prepare_vm(node: &Arc<Node>, vm: &mut Vm, source: &Source) -> Result<Arc<GuestChannel>, Failure> {
    let mut stages = Stages::default();
    vm.make(node, &source.origin(), &mut stages).await?;
    vm.started(node, &mut stages).await?;
    vm.channel()
}

/// Makes a warm standby hot. What a failure leaves is removed.
async fn heat(node: &Arc<Node>, source: &Source, warm: Standby) -> Result<Standby, Failure> {
    match load_and_greet(node, source, &warm).await {
        Ok(()) => Ok(Standby { readiness: Readiness::Hot, ..warm }),
        Err(failure) => {
            clearing::discard(node, warm.vm).await;
            Err(failure)
        }
    }
}

async fn load_and_greet(
    node: &Arc<Node>,
    source: &Source,
    Standby { vm, channel, .. }: &Standby,
) -> Result<(), Failure> {
    let mut stages = Stages::default();
    vm.load(node, &mut stages).await?;
    vm.resume(node, &mut stages).await?;
    let limit = node.settings.deadlines.greeting;
    let greeted = async {
        stages.run("greeting", limit, channel.wait_until_healthy(limit)).await?;
        match source {
            Source::Template { .. } => rehearse(channel, &vm.record.template_id, limit, &mut stages).await,
            Source::Snapshot(_) => Ok(()),
        }
    };
    tokio::select! {
        greeted = vm.while_alive("greeting", greeted) => greeted?,
        () = node.stopping.cancelled() => return Err(Failure::new("greeting", Cause::Cancelled)),
    }
    vm.stop(node, &mut stages).await
}

/// Has the guest do once what its first client will make it do. Nothing of it stays: the next `/init` replaces what this
/// one sets, and the shell has ended.
async fn rehearse(
    channel: &GuestChannel,
    template: &TemplateId,
    limit: std::time::Duration,
    stages: &mut Stages,
) -> Result<(), Failure> {
    for _ in 0..GREETINGS_REHEARSED {
        let init = greeting::rehearsal(template).map_err(|error| Failure::new("greeting", error))?;
        stages.run("greeting", limit, channel.init(&init, limit)).await?;
    }
    stages.run("greeting", limit, channel.rehearse_command(limit)).await?;
    // The first pause asks for it. A standby that cannot is as good for everything else.
    if let Err(error) = stages.run("sync", limit, channel.sync(None, limit)).await {
        tracing::warn!(%template, %error, "a standby could not rehearse the flush of a pause");
    }
    Ok(())
}

/// Removes a standby that dies in the pool. (Not `async fn`: it must not borrow the standby.)
fn watch(node: Arc<Node>, source: Source, standby: &Standby) -> impl Future<Output = ()> + use<> {
    let (machine, taken, id) =
        (standby.vm.machine.clone(), standby.taken.clone(), standby.vm.record.id.clone());
    async move {
        let Some(machine) = machine else { return };
        let exit = tokio::select! {
            exit = machine.wait() => exit,
            () = taken.cancelled() => return,
        };
        let Some(pool) = source.pool() else { return };
        if let Some(dead) = pool.remove(&id) {
            tracing::warn!(sandbox = %id, readiness = ?dead.readiness, cause = ?exit.cause, detail = %exit.detail, "a standby died; replacing it");
            pool.failed(dead.readiness);
            clearing::discard(&node, dead.vm).await;
        }
    }
}
