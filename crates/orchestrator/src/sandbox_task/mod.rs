//! The driver task of one sandbox, from the moment it runs (or is found lost) to its end.
//!
//! A sandbox of an earlier process whose adoption is not finished runs for callers; its task goes on trying.
//! Owns the VM, the sandbox's time and its place in the table. Requests queue to it; what it may do is decided by
//! [`next`](crate::lifecycle::next). It ends when the sandbox is gone, or at a shutdown, when the VM is left for the next process.
//!
//! | module | job |
//! |---|---|
//! | here | the loop: what happens, and who is told |
//! | [`transitions`] | pauses, resumes and releases: the one under way works on a copy of the VM, which is taken over at its end |
//! | [`snapshots`] | snapshots: taken, waited for |
//! | [`release`] | why the VMM of a paused sandbox goes |
//! | [`times`] | how long it may still run |
//! | [`background`] | what is still to be done for the saves, beside all that |
//! | [`view`] | what callers see |

mod background;
mod release;
mod snapshots;
mod times;
mod transitions;
mod view;

use crate::adoption::{self, Attempt, Held, Trouble};
use crate::clearing::{self, Remains, Row};
use crate::error::{Error, LossCause};
use crate::journal::{Loss, Tenancy};
use crate::lifecycle::{Event, Phase};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::view::{OnTimeout, PauseRequest, Paused, ResumeRequest, Resumed, SandboxView};
use crate::vm::Vm;
use aenv_vmm::{Exit, ExitCause, Machine};
use background::{Saving, SavingTrouble};
pub(crate) use release::GaveWay;
use release::Releaser;
use snapshots::SnapshotWaiter;
pub(crate) use snapshots::{SnapshotWish, Taken};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use times::NewTime;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use transitions::{Done, Kind, Pauser, Resumer, Waiter, Work};

/// Requests that may queue for one sandbox before callers wait.
pub(crate) const QUEUE: usize = 32;
/// Pauses between attempts at a pause at the end of a sandbox's time.
const AUTO_PAUSES: GrowingPause = GrowingPause::new(Duration::from_secs(1), Duration::from_secs(60));
/// Pauses between attempts at ending the VMM of a paused sandbox.
const RELEASE_PAUSES: GrowingPause = GrowingPause::new(Duration::from_secs(1), Duration::from_secs(60));
/// How long a sandbox is known that was lost and that nothing would have ended: one that was paused, or was to be paused at the
/// end of its time.
pub(crate) const LOST_FOR: Duration = Duration::from_secs(24 * 3600);
/// Stands for "never" where a time cannot be represented.
const FAR_FUTURE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Who wants a sandbox to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asker {
    /// Somebody who may have it resumed in any way.
    Caller,
    /// Requests for a program in it, which are not to boot it, nor wake one that is to sleep.
    Traffic,
}

/// What callers can ask of a sandbox. A dropped reply means that it is gone.
pub(crate) enum Command {
    /// End it; answered when its VM is gone.
    Kill(oneshot::Sender<Result<(), Error>>),
    /// Set the time that remains.
    SetTimeout(Duration, oneshot::Sender<Result<(), Error>>),
    /// Make sure that at least so much time remains.
    Extend(Duration, oneshot::Sender<Result<SandboxView, Error>>),
    /// Save its state and stop it.
    Pause(PauseRequest, oneshot::Sender<Result<Paused, Error>>),
    /// Keep its state for itself, whatever becomes of it.
    Snapshot(SnapshotWish, oneshot::Sender<Result<Taken, Error>>),
    /// Let it go on.
    Resume(ResumeRequest, Asker, oneshot::Sender<Result<Resumed, Error>>),
    /// End the VMM that stands by for it while it is paused.
    Release(oneshot::Sender<Result<(), Error>>),
    /// The same, because others need its memory: but not before what was saved is durable.
    GiveWay(oneshot::Sender<Result<GaveWay, Error>>),
}

type Reply<T> = oneshot::Sender<Result<T, Error>>;

/// The state of the task.
pub(crate) struct SandboxTask {
    node: Arc<Node>,
    vm: Vm,
    tenancy: Tenancy,
    deadline: Instant,
    commands: mpsc::Receiver<Command>,
    ended: CancellationToken,
    /// Removes what a lost sandbox held.
    clearing: Option<JoinHandle<()>>,
    /// The next attempt at adopting it, until it is adopted.
    adoption: Option<adoption::Pending>,
    adoption_pauses: GrowingPause,
    /// A pause, resume or release; nothing else changes the VM meanwhile.
    work: Option<(Kind, Work)>,
    /// Ends that work.
    cancel: CancellationToken,
    /// Whoever waits for the end of a sandbox that was working then.
    killer: Option<Reply<()>>,
    pauser: Option<Pauser>,
    resumers: Vec<Resumer>,
    releasers: Vec<Releaser>,
    /// Its VMM is to go when what was saved is durable, if it is still paused then.
    gives_way: bool,
    waiters: Vec<Waiter>,
    /// Times that were asked for during a snapshot: the copy of the record that it works on would undo them.
    postponed_times: Vec<NewTime>,
    /// Who waits for the copy of it that is being made.
    snapshotter: Option<Reply<Taken>>,
    snapshot_waiters: Vec<SnapshotWaiter>,
    /// A pause came to nothing, and whether the guest goes on is not known yet: if not, the state before that pause counts.
    interrupted: bool,
    /// Pauses at the end of its time that came to nothing, one after the other.
    failed_pauses: u32,
    auto_pauses: GrowingPause,
    /// Until when the VMM of a paused sandbox stands by.
    hot_until: Option<Instant>,
    release_pauses: GrowingPause,
    /// Background work on its saves.
    saving: Saving,
}

/// The moment `timeout` from now, on both clocks.
pub(crate) fn end_after(timeout: Duration) -> (Instant, jiff::Timestamp) {
    let timeout = timeout.min(FAR_FUTURE);
    let wall = jiff::SignedDuration::try_from(timeout)
        .ok()
        .and_then(|duration| jiff::Timestamp::now().checked_add(duration).ok())
        .unwrap_or(jiff::Timestamp::MAX);
    (Instant::now() + timeout, wall)
}

/// Whether the end of its time is not its end: whoever comes back later is to learn that it was lost.
pub(crate) fn outlives_its_time(tenancy: &Tenancy) -> bool {
    matches!(tenancy.on_timeout, OnTimeout::Pause(_))
}

/// What remains until a moment of the wall clock; zero when it is past.
pub(crate) fn remaining(end_at: jiff::Timestamp) -> Duration {
    Duration::try_from(end_at.duration_since(jiff::Timestamp::now())).unwrap_or(Duration::ZERO)
}

impl SandboxTask {
    /// For a VM that runs, or whose record says that it is lost; shows it to callers.
    pub(crate) fn new(
        node: Arc<Node>,
        vm: Vm,
        tenancy: Tenancy,
        deadline: Instant,
        commands: mpsc::Receiver<Command>,
    ) -> Self {
        let task = Self {
            node,
            vm,
            tenancy,
            deadline,
            commands,
            ended: CancellationToken::new(),
            clearing: None,
            adoption: None,
            adoption_pauses: adoption::PAUSES,
            work: None,
            cancel: CancellationToken::new(),
            killer: None,
            pauser: None,
            resumers: Vec::new(),
            releasers: Vec::new(),
            gives_way: false,
            waiters: Vec::new(),
            postponed_times: Vec::new(),
            snapshotter: None,
            snapshot_waiters: Vec::new(),
            interrupted: false,
            failed_pauses: 0,
            auto_pauses: AUTO_PAUSES,
            hot_until: None,
            release_pauses: RELEASE_PAUSES,
            saving: Saving::default(),
        };
        task.node.table.show(task.view(), task.route());
        task
    }

    /// Drives the sandbox to its end.
    pub(crate) async fn run(mut self) {
        match self.vm.record.phase {
            Phase::Lost => self.clear(),
            Phase::Paused => self.stand_by(),
            _ => {}
        }
        self.save_on(false);
        let mut death = death_of(self.vm.machine.clone());
        loop {
            let idle = self.work.is_none();
            let end = tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    // The table held the last sender: it has forgotten this sandbox.
                    None => self.kill(None),
                },
                done = work_of(&mut self.work) => {
                    self.done(done).await;
                    death = death_of(self.vm.machine.clone());
                    self.is_killed().then(|| self.killer.take())
                }
                exit = &mut death, if idle => {
                    death = death_of(None);
                    self.died(Loss { cause: loss_cause(exit.cause), detail: exit.detail }).await;
                    None
                }
                attempt = finished(&mut self.adoption) => {
                    self.go_on_adopting(attempt).await;
                    death = death_of(self.vm.machine.clone());
                    None
                }
                outcome = self.saving.done(), if idle => {
                    self.step_done(outcome).await;
                    None
                }
                () = tokio::time::sleep_until(self.deadline), if idle => self.expire().then_some(None),
                () = at(self.hot_until), if idle => {
                    self.begin_release();
                    None
                }
                () = self.node.stopping.cancelled() => return self.leave().await,
            };
            if let Some(reply) = end {
                return self.end(reply).await;
            }
        }
    }

    /// Leaves the sandbox to the next process, after what is under way has come to its next step. A guest that is to run does.
    async fn leave(mut self) {
        let stands_still = match &mut self.work {
            Some((_, work)) => match work.await {
                Done::Paused(end) | Done::Copied(end) => {
                    let is_to_run = end.snapshot.is_some() || end.result.is_err();
                    (end.stood_still && is_to_run).then_some((end.vm, end.tenancy))
                }
                Done::Resumed(_) | Done::Released(..) => None,
            },
            None => self.interrupted.then_some((self.vm, self.tenancy)),
        };
        if let Some((vm, tenancy)) = stands_still {
            adoption::hurried(&self.node, &vm, &tenancy).await;
        }
    }

    /// A token for the work that is begun.
    fn new_cancel(&mut self) -> CancellationToken {
        self.cancel = self.node.stopping.child_token();
        self.cancel.clone()
    }

    /// Whether it was killed while it was working.
    fn is_killed(&self) -> bool {
        self.cancel.is_cancelled() && !self.node.stopping.is_cancelled()
    }

    /// Ends it: now, or as soon as the work under way is given up.
    #[expect(clippy::option_option, reason = "whether it is to be ended, and who waits for that")]
    fn kill(&mut self, reply: Option<Reply<()>>) -> Option<Option<Reply<()>>> {
        if self.work.is_none() {
            return Some(reply);
        }
        self.node.table.remove(&self.vm.record.id);
        self.ended.cancel();
        self.commands.close();
        self.cancel.cancel();
        self.killer = reply.or(self.killer.take());
        None
    }

    /// It was adopted in the middle of a pause, or is to be.
    pub(crate) fn note_interrupted_pause(&mut self) {
        self.interrupted = true;
    }

    /// Goes on with an adoption that could not be finished at once.
    pub(crate) fn adopt_later(&mut self, held: Held) {
        let pause = self.adoption_pauses.take();
        self.adoption = Some(adoption::later(&self.node, &self.vm.record, &self.tenancy, held, pause));
    }

    async fn go_on_adopting(&mut self, Attempt { held, result }: Attempt) {
        self.adoption = None;
        let had_slot = self.vm.slot.is_some();
        (self.vm.slot, self.vm.machine) = (held.slot.clone(), held.machine.clone());
        if !had_slot {
            self.node.table.show(self.view(), self.route());
        }
        let id = &self.vm.record.id;
        match result {
            Ok(()) => {
                tracing::info!(sandbox = %id, "adopted");
                self.interrupted = false;
            }
            Err(Trouble::Lost(loss)) => self.died(loss).await,
            Err(Trouble::NotNow(cause)) => {
                tracing::warn!(sandbox = %id, error = %cause, "not adopted yet; trying again");
                self.adopt_later(held);
            }
        }
    }

    /// Carries out a command; tells whether the sandbox is to be ended, and who waits for that.
    async fn obey(&mut self, command: Command) -> Option<Option<oneshot::Sender<Result<(), Error>>>> {
        match command {
            Command::Kill(reply) => match self.allows(Event::Kill) {
                Ok(_) if !self.is_killed() => return self.kill(Some(reply)),
                Ok(_) => answer(reply, Err(Error::SandboxNotFound(self.vm.record.id.clone()))),
                Err(error) => answer(reply, Err(error)),
            },
            // Queued before a kill that waits for the work under way: a dropped reply says that it is gone.
            _ if self.is_killed() => {}
            Command::Pause(request, reply) => self.pause(request, reply),
            Command::Snapshot(wish, reply) => self.snapshot(wish, reply).await,
            Command::Resume(request, asker, reply) => self.resume(Resumer { request, asker, reply }).await,
            Command::Release(reply) => self.release(Releaser::Caller(reply)),
            Command::GiveWay(reply) => self.give_way(reply),
            Command::SetTimeout(timeout, reply) => self.set_time(NewTime::Set(timeout, reply)).await,
            Command::Extend(at_least, reply) => self.set_time(NewTime::Extend(at_least, reply)).await,
        }
        None
    }

    async fn lose(&mut self, loss: Loss) {
        let Ok(phase) = self.allows(Event::Died) else { return };
        self.adoption = None;
        self.stop_saving().await;
        self.fail_waiters(&SavingTrouble::other("the sandbox was lost"));
        self.leave_snapshot_waiters();
        let record = &mut self.vm.record;
        tracing::warn!(sandbox = %record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
        record.phase = phase;
        record.loss = Some(loss);
        if outlives_its_time(&self.tenancy) {
            (self.deadline, self.tenancy.end_at) = end_after(LOST_FOR);
            record.tenancy = Some(self.tenancy.clone());
        }
        self.node.table.show(self.view(), None);
        self.ended.cancel();
        if let Err(error) = self.node.journal.put(&self.vm.record).await {
            // The row says Running: the next process finds no VM and comes to the same end.
            tracing::warn!(sandbox = %self.vm.record.id, %error, "the loss of a sandbox could not be journalled");
        }
        self.clear();
    }

    /// Its VMM ended. One that only stood by is no loss.
    async fn died(&mut self, loss: Loss) {
        if self.vm.record.phase == Phase::Paused {
            tracing::warn!(sandbox = %self.vm.record.id, cause = ?loss.cause, detail = %loss.detail, "the VMM of a paused sandbox ended; it will be resumed from what was saved");
            self.vm.machine = None;
            self.begin_release();
            return self.node.table.update(self.view());
        }
        if self.interrupted { self.fall_back_or_lose(loss).await } else { self.lose(loss).await }
    }

    /// Removes in the background what a lost sandbox held.
    fn clear(&mut self) {
        let work = clearing::until_clear(Arc::clone(&self.node), Remains::of_vm(&self.vm), Row::Keep);
        self.vm.memory = None;
        self.clearing = Some(self.node.tasks.spawn(work));
    }

    async fn end(mut self, reply: Option<oneshot::Sender<Result<(), Error>>>) {
        let id = self.vm.record.id.clone();
        self.node.table.remove(&id);
        self.ended.cancel();
        // Whoever queued too late finds the queue closed.
        self.commands.close();
        self.adoption = None;
        self.stop_saving().await;
        self.leave_snapshot_waiters();
        clearing::note_end(&self.node, &mut self.vm).await;
        if let Some(clearing) = self.clearing.take() {
            // It may wait for long between its attempts, or in one; every step of it may be repeated, and is, below.
            clearing.abort();
            if let Err(error) = clearing.await
                && !error.is_cancelled()
            {
                tracing::error!(sandbox = %id, %error, "clearing task failed; clearing again");
            }
        }
        let ended = clearing::end_process(&self.node, &Remains::of_vm(&self.vm)).await;
        if ended.is_ok() {
            // Whoever is told that it is gone finds its memory free.
            self.vm.memory = None;
        }
        if let Some(reply) = reply {
            let result = ended.map_err(|cause| Error::Internal {
                context: format!("ending sandbox {id} (it is gone for callers, its removal is tried again)"),
                reason: cause.to_string(),
            });
            answer(reply, result);
        }
        clearing::discard(&self.node, self.vm).await;
        tracing::info!(sandbox = %id, "sandbox ended");
    }
}

/// The end of the work under way; never, when there is none.
async fn work_of(work: &mut Option<(Kind, Work)>) -> Done {
    match work {
        Some((_, work)) => work.await,
        None => std::future::pending().await,
    }
}

/// That moment; never, when there is none.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

type Death = Pin<Box<dyn Future<Output = Exit> + Send>>;

/// The end of a machine; never, when there is none.
fn death_of(machine: Option<Arc<dyn Machine>>) -> Death {
    Box::pin(async move {
        match machine {
            Some(machine) => machine.wait().await,
            None => std::future::pending().await,
        }
    })
}

/// The end of an attempt; never, when there is none.
async fn finished(adoption: &mut Option<adoption::Pending>) -> Attempt {
    match adoption {
        Some(attempt) => attempt.await,
        None => std::future::pending().await,
    }
}

/// Sends an answer; a caller that went away does not change what was done.
fn answer<T>(reply: oneshot::Sender<T>, result: T) {
    if reply.send(result).is_err() {
        tracing::debug!("the caller of a sandbox operation went away before its end");
    }
}

/// What a VM's end means for its sandbox.
pub(crate) fn loss_cause(cause: ExitCause) -> LossCause {
    match cause {
        ExitCause::GuestPanic => LossCause::GuestPanic,
        ExitCause::GuestShutdown => LossCause::GuestShutdown,
        // Killed without our asking for it: by someone else.
        ExitCause::VmmKilled | ExitCause::Killed => LossCause::VmmKilled,
        ExitCause::VmmCrashed => LossCause::VmmCrashed,
        ExitCause::OutOfMemory => LossCause::OutOfMemory,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_duration_overflows() {
        for timeout in [Duration::ZERO, Duration::MAX, Duration::from_secs(u64::MAX / 2)] {
            let (deadline, wall) = end_after(timeout);
            assert!(deadline >= Instant::now() - Duration::from_secs(1));
            assert!(wall >= jiff::Timestamp::now() - jiff::SignedDuration::from_secs(1));
        }
        assert_eq!(remaining(jiff::Timestamp::UNIX_EPOCH), Duration::ZERO);
        assert!(remaining(jiff::Timestamp::MAX) > Duration::from_secs(1));
    }
}
