//! Standbys: VMs restored, greeted once and stopped, before anyone asks for them.
//!
//! A standby has no identity, environment, token or user process. Its life:
//!
//! ```text
//! restore ─▶ resume ─▶ GET /health, rehearsals ─▶ stop ─▶ in the pool ─▶ taken by one create (the journal decides)
//!     any failure, or its death in the pool ─▶ removed, replaced after a pause that grows with the failures in a row
//! ```
//!
//! Rehearsed are `/init` with nobody's name, whose settings the real one replaces, and a shell that ends at once: an
//! emulating VMM has then translated that code, the pages it touches are there, and the connection is kept.
//! The pool owns its standbys until they are taken. Standbys of an earlier process are removed, not adopted: nobody
//! waits for them, and their connections are gone.

use crate::clearing;
use crate::greeting;
use crate::guest_channel::GuestChannel;
use crate::journal::Role;
use crate::node::Node;
use crate::random;
use crate::stage::{Cause, Failure, Stages};
use crate::template::{Capture, Template};
use crate::vm::{Origin, Vm, new_record};
use aenv_protocol::ids::{SandboxId, TemplateId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Pause after the first failure in a row; doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Greetings rehearsed: the first one makes files, the second one changes them, as the real one will.
const GREETINGS_REHEARSED: usize = 2;

/// A stopped VM that can become a sandbox.
pub(crate) struct Standby {
    pub(crate) vm: Vm,
    /// With the connection of the greeting.
    pub(crate) channel: GuestChannel,
    /// Ends the task that watches for its death in the pool.
    taken: CancellationToken,
}

/// The standbys of one template.
pub(crate) struct StandbyPool {
    target: usize,
    ready: Mutex<VecDeque<Standby>>,
    changed: Notify,
    failures: AtomicU32,
}

impl StandbyPool {
    pub(crate) fn new(target: usize) -> Self {
        Self { target, ready: Mutex::default(), changed: Notify::new(), failures: AtomicU32::new(0) }
    }

    /// Standbys that can be taken.
    pub(crate) fn len(&self) -> usize {
        self.locked().len()
    }

    /// Takes the oldest standby; no one else gets it.
    pub(crate) fn take(&self) -> Option<Standby> {
        let standby = self.locked().pop_front()?;
        standby.taken.cancel();
        self.changed.notify_one();
        Some(standby)
    }

    /// A taken standby became a sandbox: the template is well.
    pub(crate) fn served(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }

    /// A standby died or did not answer.
    pub(crate) fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    fn pause(&self) -> Duration {
        match self.failures.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            failures => FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(16)).min(LONGEST_PAUSE),
        }
    }

    fn put(&self, standby: Standby) {
        self.locked().push_back(standby);
    }

    fn remove(&self, id: &SandboxId) -> Option<Standby> {
        let mut ready = self.locked();
        let index = ready.iter().position(|standby| standby.vm.record.id == *id)?;
        ready.remove(index)
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, VecDeque<Standby>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a ready template's pool filled until the node shuts down, then removes what is in it.
pub(crate) async fn keep_filled(node: Arc<Node>, template: Arc<Template>, capture: Arc<Capture>) {
    let pool = &template.pool;
    loop {
        let work = async {
            while pool.len() >= pool.target {
                pool.changed.notified().await;
            }
            tokio::time::sleep(pool.pause()).await;
        };
        tokio::select! {
            () = work => {}
            () = node.stopping.cancelled() => break,
        }
        match make(&node, &template, &capture).await {
            Ok(standby) => {
                let watcher = watch(Arc::clone(&node), Arc::clone(&template), &standby);
                // In this order, or one that is dead already would never be found in the pool.
                pool.put(standby);
                node.tasks.spawn(watcher);
            }
            Err(_) if node.stopping.is_cancelled() => break,
            Err(failure) => {
                pool.failed();
                tracing::warn!(
                    template = %template.file.name, error = %failure, again_in = ?pool.pause(), "no standby could be made"
                );
            }
        }
    }
    while let Some(standby) = pool.take() {
        clearing::discard(&node, standby.vm).await;
    }
}

async fn make(node: &Arc<Node>, template: &Template, capture: &Capture) -> Result<Standby, Failure> {
    let _permit = tokio::select! {
        permit = node.admission.for_background() => permit?,
        () = node.stopping.cancelled() => return Err(Failure::new("admission", Cause::Cancelled)),
    };
    node.admission.check_room(&node.dir)?;
    let id = random::sandbox_id().map_err(|error| Failure::new("journal", error))?;
    let mut vm = Vm::new(new_record(id, Role::Standby, template, Some(capture.key.clone())));
    match warm(node, &mut vm, capture).await {
        Ok(channel) => Ok(Standby { vm, channel, taken: CancellationToken::new() }),
        Err(failure) => {
            clearing::discard(node, vm).await;
            Err(failure)
        }
    }
}

async fn warm(node: &Arc<Node>, vm: &mut Vm, capture: &Capture) -> Result<GuestChannel, Failure> {
    let mut stages = Stages::default();
    vm.make(node, &Origin::Capture(capture), &mut stages).await?;
    vm.resume(node, &mut stages).await?;
    let channel = vm.channel()?;
    let limit = node.settings.deadlines.greeting;
    tokio::select! {
        greeted = stages.run("greeting", limit, channel.wait_until_healthy(limit)) => greeted?,
        () = node.stopping.cancelled() => return Err(Failure::new("greeting", Cause::Cancelled)),
    }
    rehearse(&channel, &vm.record.template_id, limit, &mut stages).await?;
    vm.stop(node, &mut stages).await?;
    vm.started(node, &mut stages).await?;
    Ok(channel)
}

/// Has the guest do once what its first client will make it do. Nothing of it stays: the next `/init` replaces what this
/// one sets, and the shell has ended.
async fn rehearse(
    channel: &GuestChannel,
    template: &TemplateId,
    limit: Duration,
    stages: &mut Stages,
) -> Result<(), Failure> {
    for _ in 0..GREETINGS_REHEARSED {
        let init = greeting::rehearsal(template).map_err(|error| Failure::new("greeting", error))?;
        stages.run("greeting", limit, channel.init(&init, limit)).await?;
    }
    stages.run("greeting", limit, channel.rehearse_command(limit)).await
}

/// Removes a standby that dies in the pool. (Not `async fn`: it must not borrow the standby.)
fn watch(node: Arc<Node>, template: Arc<Template>, standby: &Standby) -> impl Future<Output = ()> + use<> {
    let (machine, taken, id) =
        (standby.vm.machine.clone(), standby.taken.clone(), standby.vm.record.id.clone());
    async move {
        let Some(machine) = machine else { return };
        let exit = tokio::select! {
            exit = machine.wait() => exit,
            () = taken.cancelled() => return,
        };
        if let Some(dead) = template.pool.remove(&id) {
            tracing::warn!(sandbox = %id, cause = ?exit.cause, detail = %exit.detail, "a standby died; replacing it");
            clearing::discard(&node, dead.vm).await;
            template.pool.failed();
        }
    }
}
