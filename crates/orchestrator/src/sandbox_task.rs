//! The driver task of one sandbox, from the moment it runs (or is found lost) to its end.
//!
//! A sandbox of an earlier process whose adoption is not finished runs for callers; its task goes on trying.
//! Owns the VM, the sandbox's time and its place in the table. Requests queue to it; what it may do is decided by
//! [`lifecycle::next`]. It ends when the sandbox is gone, or at a shutdown, when the VM is left for the next process.

use crate::adoption::{self, Attempt, Held, Trouble};
use crate::clearing::{self, Remains, Row};
use crate::error::{Error, LossCause};
use crate::guest_channel::GuestDialer;
use crate::journal::{Loss, Tenancy};
use crate::lifecycle::{self, Event, Phase, Refusal};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::view::{PauseRequest, Paused, ResumeRequest, Resumed, Route, SandboxState, SandboxView};
use crate::vm::Vm;
use aenv_vmm::{Exit, ExitCause, Machine};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Requests that may queue for one sandbox before callers wait.
pub(crate) const QUEUE: usize = 32;
/// Stands for "never" where a time cannot be represented.
const FAR_FUTURE: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

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
    /// Let it go on.
    Resume(ResumeRequest, oneshot::Sender<Result<Resumed, Error>>),
}

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
        };
        task.node.table.show(task.view(), task.route());
        task
    }

    /// The sandbox as it is now.
    pub(crate) fn view(&self) -> SandboxView {
        let record = &self.vm.record;
        let state = match (&record.phase, &record.loss) {
            (Phase::Lost, Some(loss)) => {
                SandboxState::Lost { cause: loss.cause, detail: loss.detail.clone() }
            }
            (Phase::Running, _) => SandboxState::Running,
            (Phase::Starting, _) => SandboxState::Starting,
            (Phase::Lost | Phase::Killing, _) => SandboxState::Killing,
        };
        SandboxView {
            id: record.id.clone(),
            template_id: record.template_id.clone(),
            template_name: record.template_name.clone(),
            state,
            started_at: self.tenancy.started_at,
            end_at: self.tenancy.end_at,
            vcpus: record.spec.vcpus,
            memory_mib: record.spec.memory_mib,
            disk_mib: record.disk_mib,
            metadata: self.tenancy.metadata.clone(),
            access_token: self.tenancy.access_token.clone(),
            internet_access: self.tenancy.internet_access,
            on_timeout: self.tenancy.on_timeout,
            auto_resume: self.tenancy.auto_resume,
            saved: None,
        }
    }

    fn route(&self) -> Option<Route> {
        let slot = self.vm.slot.as_ref().filter(|_| self.vm.record.phase == Phase::Running)?;
        Some(Route {
            id: self.vm.record.id.clone(),
            lifecycle: self.node.next_lifecycle(),
            dialer: Arc::new(GuestDialer::new(slot)),
            ended: self.ended.clone(),
            access_token: self.tenancy.access_token.clone(),
            guest_address: slot.guest_address.into(),
        })
    }

    /// Drives the sandbox to its end.
    pub(crate) async fn run(mut self) {
        if self.vm.record.phase == Phase::Lost {
            self.release();
        }
        let mut death = death_of(self.vm.machine.clone());
        loop {
            let end = tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.obey(command).await,
                    // The table held the last sender: it has forgotten this sandbox.
                    None => Some(None),
                },
                exit = &mut death => {
                    death = death_of(None);
                    self.lose(Loss { cause: loss_cause(exit.cause), detail: exit.detail }).await;
                    None
                }
                attempt = finished(&mut self.adoption) => {
                    self.go_on_adopting(attempt).await;
                    death = death_of(self.vm.machine.clone());
                    None
                }
                () = tokio::time::sleep_until(self.deadline) => self.allows(Event::Expired).is_ok().then_some(None),
                () = self.node.stopping.cancelled() => return,
            };
            if let Some(reply) = end {
                return self.end(reply).await;
            }
        }
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
            Ok(()) => tracing::info!(sandbox = %id, "adopted"),
            Err(Trouble::Lost(loss)) => self.lose(loss).await,
            Err(Trouble::NotNow(cause)) => {
                tracing::warn!(sandbox = %id, error = %cause, "not adopted yet; trying again");
                self.adopt_later(held);
            }
        }
    }

    fn allows(&self, event: Event) -> Result<Phase, Error> {
        let id = &self.vm.record.id;
        lifecycle::next(self.vm.record.phase, event).map_err(|refusal| {
            match (refusal, &self.vm.record.loss) {
                (Refusal::Lost, Some(loss)) => {
                    Error::SandboxLost { id: id.clone(), cause: loss.cause, detail: loss.detail.clone() }
                }
                _ => Error::SandboxNotFound(id.clone()),
            }
        })
    }

    /// Carries out a command; tells whether the sandbox is to be ended, and who waits for that.
    async fn obey(&mut self, command: Command) -> Option<Option<oneshot::Sender<Result<(), Error>>>> {
        match command {
            Command::Kill(reply) => match self.allows(Event::Kill) {
                Ok(_) => return Some(Some(reply)),
                Err(error) => answer(reply, Err(error)),
            },
            Command::Pause(_, reply) => answer(reply, Err(Error::Conflict("not there yet".to_owned()))),
            Command::Resume(_, reply) => answer(reply, Err(Error::Conflict("not there yet".to_owned()))),
            Command::SetTimeout(timeout, reply) => {
                let result = self.change_end(timeout).await;
                answer(reply, result);
            }
            Command::Extend(at_least, reply) => {
                let left = self.deadline.saturating_duration_since(Instant::now());
                let result = match self.allows(Event::ChangeTime) {
                    Ok(_) if left < at_least => self.change_end(at_least).await,
                    Ok(_) => Ok(()),
                    Err(error) => Err(error),
                };
                answer(reply, result.map(|()| self.view()));
            }
        }
        None
    }

    async fn change_end(&mut self, timeout: Duration) -> Result<(), Error> {
        self.allows(Event::ChangeTime)?;
        let (deadline, end_at) = end_after(timeout);
        let mut record = self.vm.record.clone();
        let tenancy = Tenancy { end_at, ..self.tenancy.clone() };
        record.tenancy = Some(tenancy.clone());
        self.node.journal.put(&record).await.map_err(|error| Error::Internal {
            context: format!("changing the time of sandbox {}", record.id),
            reason: error.to_string(),
        })?;
        (self.vm.record, self.tenancy, self.deadline) = (record, tenancy, deadline);
        self.node.table.update(self.view());
        Ok(())
    }

    async fn lose(&mut self, loss: Loss) {
        let Ok(phase) = self.allows(Event::Died) else { return };
        self.adoption = None;
        let record = &mut self.vm.record;
        tracing::warn!(sandbox = %record.id, cause = ?loss.cause, detail = %loss.detail, "sandbox lost");
        record.phase = phase;
        record.loss = Some(loss);
        self.node.table.show(self.view(), None);
        self.ended.cancel();
        if let Err(error) = self.node.journal.put(&self.vm.record).await {
            // The row says Running: the next process finds no VM and comes to the same end.
            tracing::warn!(sandbox = %self.vm.record.id, %error, "the loss of a sandbox could not be journalled");
        }
        self.release();
    }

    /// Removes in the background what a lost sandbox held.
    fn release(&mut self) {
        let work = clearing::until_clear(Arc::clone(&self.node), Remains::of_vm(&self.vm), Row::Keep);
        self.clearing = Some(self.node.tasks.spawn(work));
    }

    async fn end(mut self, reply: Option<oneshot::Sender<Result<(), Error>>>) {
        let id = self.vm.record.id.clone();
        self.node.table.remove(&id);
        self.ended.cancel();
        // Whoever queued too late finds the queue closed.
        self.commands.close();
        self.adoption = None;
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
