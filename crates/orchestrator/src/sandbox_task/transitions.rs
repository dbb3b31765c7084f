//! Pauses, resumes and releases as the sandbox's task sees them: begun, waited for, answered.
//!
//! ```text
//! at most one is under way     a pause meanwhile        refused (transitioning), also while a snapshot is taken
//!                              a resume meanwhile       waits for it; all who wait are answered by one resume
//!                              a time meanwhile         refused (transitioning); during a snapshot it waits for its end
//!                              traffic meanwhile        as a resume, but what the pause left decides whether it may wake that
//!                              a kill meanwhile         cancels it between its steps, or in one that may be given up
//! ```

use super::background::SavingTrouble;
use super::{Asker, FAR_FUTURE, Reply, SandboxTask, answer};
use crate::adoption::{self, Held};
use crate::error::Error;
use crate::journal::{Loss, PAGE_BYTES};
use crate::lifecycle::{self, Event, Phase, Refusal};
use crate::pausing::{PauseEnd, Pausing};
use crate::resuming::{ResumeEnd, Resuming};
use crate::stage::Cause;
use crate::view::{
    Durability, OnTimeout, PauseMode, PauseRequest, Paused, ResumeRequest, Resumed, SandboxState,
    SandboxView, Stage, Tier,
};
use crate::vm::Vm;
use aenv_vmm::CaptureBase;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// So often a pause at the end of a sandbox's time is tried the way that was asked for. After that its memory is kept too,
/// which needs nothing of the guest.
const PAUSES_AS_ASKED: u32 = 3;

/// A pause, resume or release under way.
pub(super) type Work = Pin<Box<dyn Future<Output = Done> + Send>>;

/// Which of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pause,
    Snapshot,
    Resume,
    Release,
}

/// How it ended.
pub(super) enum Done {
    Paused(Box<PauseEnd>),
    Copied(Box<PauseEnd>),
    Resumed(Box<ResumeEnd>),
    Released(Box<Vm>, Result<(), Cause>),
}

/// Who waits for a pause, and for what.
pub(super) struct Pauser {
    durability: Durability,
    reply: Reply<Paused>,
}

/// Who waits until it runs.
pub(super) struct Resumer {
    pub(super) request: ResumeRequest,
    pub(super) asker: Asker,
    pub(super) reply: Reply<Resumed>,
}

/// Who waits until a save is durable.
pub(super) struct Waiter {
    number: u64,
    stages: Vec<Stage>,
    reply: Reply<Paused>,
}

impl SandboxTask {
    pub(super) fn pause(&mut self, request: PauseRequest, reply: Reply<Paused>) {
        let refused = match self.allows(Event::Pause) {
            Err(error) => Some(error),
            Ok(_) if request.durability > Durability::Local => {
                let reason = "this node has no repository to publish a state in".to_owned();
                Some(Error::InvalidArgument { field: "durability", reason })
            }
            // A sandbox that is still being adopted.
            Ok(_) if self.vm.machine.is_none() || self.adoption.is_some() => {
                Some(Error::Transitioning(self.vm.record.id.clone()))
            }
            Ok(_) => None,
        };
        if let Some(error) = refused {
            return answer(reply, Err(error));
        }
        self.pauser = Some(Pauser { durability: request.durability, reply });
        self.begin_pause(request);
    }

    /// Its time is over. Tells whether it is to be ended; else it is paused, however often that must be tried: nothing ends a
    /// sandbox that is to be kept.
    pub(super) fn expire(&mut self) -> bool {
        let OnTimeout::Pause(mode) = self.tenancy.on_timeout else {
            return self.allows(Event::Expired).is_ok();
        };
        match self.vm.record.phase {
            Phase::Running if self.vm.machine.is_some() && self.adoption.is_none() => {
                let mode = if self.failed_pauses < PAUSES_AS_ASKED { mode } else { PauseMode::Full };
                self.begin_pause(PauseRequest { mode, ..PauseRequest::default() });
                false
            }
            Phase::Running => {
                self.pause_later();
                false
            }
            _ => self.allows(Event::Expired).is_ok(),
        }
    }

    fn pause_later(&mut self) {
        self.failed_pauses += 1;
        self.deadline = Instant::now() + self.auto_pauses.take();
    }

    fn begin_pause(&mut self, request: PauseRequest) {
        let pausing = Pausing {
            node: Arc::clone(&self.node),
            vm: self.vm.clone(),
            tenancy: self.tenancy.clone(),
            request,
            snapshot: None,
            view: SandboxView {
                state: SandboxState::Paused,
                woken_by_traffic: self.tenancy.auto_resume && request.mode == PauseMode::Full,
                is_changing: true,
                saved: None,
                ..self.view()
            },
            ended: self.ended.clone(),
            cancelled: self.new_cancel(),
        };
        self.work = Some((Kind::Pause, Box::pin(async move { Done::Paused(Box::new(pausing.run().await)) })));
    }

    pub(super) async fn resume(&mut self, resumer: Resumer) {
        if self.work.is_some() {
            return self.resumers.push(resumer);
        }
        let Resumer { request, asker, reply } = resumer;
        match (self.vm.record.phase, self.allows(Event::Resume)) {
            (_, Err(error)) => answer(reply, Err(error)),
            (Phase::Running, Ok(_)) => {
                let result = self.extend(request.timeout).await;
                answer(reply, result.map(|()| self.resumed(true, Tier::Hot, Vec::new())));
            }
            (_, Ok(_)) => {
                self.resumers.push(Resumer { request, asker, reply });
                self.begin_resume();
                self.save_on(self.work.is_none());
            }
        }
    }

    /// Begins what those who wait want; later, when the memory is still to be stored and no VMM stands by.
    pub(super) fn begin_resume(&mut self) {
        self.turn_traffic_away();
        // Who asks for a boot comes first, and may have reason to: the memory does not come up.
        if let Some(index) = self.resumers.iter().position(|resumer| resumer.request.reboot) {
            self.resumers.swap(0, index);
        }
        let Some(Resumer { request, .. }) = self.resumers.first() else { return };
        let pending = self.vm.record.saves.last().is_some_and(crate::journal::Save::is_memory_pending);
        if pending && self.vm.machine.is_none() && !request.reboot {
            return self.save_on(false);
        }
        let resuming = Resuming {
            node: Arc::clone(&self.node),
            vm: self.vm.clone(),
            tenancy: self.tenancy.clone(),
            request: *request,
            cancelled: self.new_cancel(),
        };
        self.work =
            Some((Kind::Resume, Box::pin(async move { Done::Resumed(Box::new(resuming.run().await)) })));
        self.node.table.update(self.view());
    }

    /// Whether traffic may wake it while it is paused. What would have to boot is left asleep: its processes are gone, and whoever
    /// wakes it should know that.
    pub(super) fn is_woken_by_traffic(&self) -> bool {
        let has_memory = self.vm.record.saves.last().is_some_and(|save| save.mode == PauseMode::Full);
        self.tenancy.auto_resume && has_memory
    }

    /// Traffic that came while it was being paused does not undo a pause that is to last.
    fn turn_traffic_away(&mut self) {
        if self.is_woken_by_traffic() {
            return;
        }
        let by_traffic = |resumer: &mut Resumer| resumer.asker == Asker::Traffic;
        for Resumer { reply, .. } in self.resumers.extract_if(.., by_traffic) {
            answer(reply, Err(Error::IsPaused(self.vm.record.id.clone())));
        }
    }

    /// Ends the VMM that stands by.
    pub(super) fn begin_release(&mut self) {
        (self.hot_until, self.gives_way) = (None, false);
        let (node, mut vm) = (Arc::clone(&self.node), self.vm.clone());
        let release = async move {
            let result = vm.release(&node).await;
            Done::Released(Box::new(vm), result)
        };
        self.work = Some((Kind::Release, Box::pin(release)));
    }

    /// Takes over what came of the work.
    pub(super) async fn done(&mut self, done: Done) {
        self.work = None;
        let was_pause = matches!(done, Done::Paused(_));
        match done {
            Done::Paused(end) => self.pause_done(*end),
            Done::Copied(end) => self.copy_done(*end),
            Done::Resumed(end) => self.resume_done(*end).await,
            Done::Released(vm, result) => {
                self.vm = *vm;
                if let Err(cause) = &result {
                    let pause = self.release_pauses.take();
                    tracing::warn!(sandbox = %self.vm.record.id, error = %cause, again_in = ?pause, "the VMM of a paused sandbox could not be ended");
                    self.hot_until = Some(Instant::now() + pause);
                }
                self.node.table.update(self.view());
                for releaser in std::mem::take(&mut self.releasers) {
                    let told = |cause: &Cause| Error::Internal {
                        context: "ending the VMM of a paused sandbox".to_owned(),
                        reason: cause.to_string(),
                    };
                    releaser.answer(result.as_ref().copied().map_err(told));
                }
            }
        }
        if self.is_killed() || self.work.is_some() {
            return;
        }
        self.set_postponed_times().await;
        match self.vm.record.phase {
            Phase::Paused => self.begin_resume(),
            _ => self.answer_resumers_of_running().await,
        }
        // The changes take room, more with each pause; and somebody may wait for what is to be stored.
        self.save_on(was_pause || !self.resumers.is_empty());
    }

    fn pause_done(&mut self, end: PauseEnd) {
        let PauseEnd { vm, tenancy, result, stages, stood_still, .. } = end;
        (self.vm, self.tenancy) = (vm, tenancy);
        let pauser = self.pauser.take();
        match result {
            Ok(()) => self.paused(pauser, stages.into_vec()),
            Err(error) => {
                if self.is_killed() {
                    return;
                }
                if stood_still {
                    self.go_on_after_pause();
                }
                match pauser {
                    Some(pauser) => answer(pauser.reply, Err(error)),
                    None => self.pause_later(),
                }
            }
        }
    }

    /// Nothing came of a pause: the guest goes on, as far as it lives. Made sure of as for one of an earlier process, beside
    /// everything else.
    fn go_on_after_pause(&mut self) {
        self.ended = CancellationToken::new();
        self.node.table.show(self.view(), self.route());
        self.make_sure_it_runs();
    }

    /// Its guest may stand still.
    pub(super) fn make_sure_it_runs(&mut self) {
        self.interrupted = true;
        let held = Held::of_stopped(&self.vm);
        self.adoption =
            Some(adoption::later(&self.node, &self.vm.record, &self.tenancy, held, Duration::ZERO));
    }

    /// A VMM died while its state was being saved: the state before that counts, if there is one.
    pub(super) async fn fall_back_or_lose(&mut self, loss: Loss) {
        self.interrupted = false;
        let mut record = self.vm.record.clone();
        let phase = lifecycle::next(record.phase, Event::FellBack);
        let Some(phase) = phase.ok().filter(|_| record.saves.fall_back(loss.cause, |_| true)) else {
            return self.lose(loss).await;
        };
        tracing::warn!(sandbox = %record.id, cause = ?loss.cause, detail = %loss.detail, "the VMM died during a pause; the sandbox is as its last save is");
        record.phase = phase;
        if let Err(error) = self.node.journal.put(&record).await {
            // The row says Running: the next process finds no VM, and that it is lost.
            tracing::warn!(sandbox = %record.id, %error, "that a sandbox is as its last save is could not be journalled");
        }
        self.vm.record = record;
        (self.vm.machine, self.adoption) = (None, None);
        self.deadline = Instant::now() + FAR_FUTURE;
        self.ended.cancel();
        self.fail_waiters(&SavingTrouble::other("the sandbox is as an earlier save is"));
        self.node.table.show(self.view(), None);
        self.begin_release();
    }

    fn paused(&mut self, pauser: Option<Pauser>, stages: Vec<Stage>) {
        let record = &self.vm.record;
        let Some(save) = record.saves.last() else { return };
        tracing::info!(sandbox = %record.id, number = save.number, mode = ?save.mode, stopped = ?save.stopped, "sandbox paused");
        let changed = save.report.as_ref().filter(|report| report.base == CaptureBase::Start);
        let changed = changed.map_or(0, |report| report.changed_pages.saturating_mul(PAGE_BYTES));
        let keep = save.mode == PauseMode::Full && changed <= self.node.settings.fresh_after_bytes;
        let hot_for = if keep { self.node.settings.hot_for } else { Duration::ZERO };
        self.hot_until = Some(Instant::now() + hot_for.min(FAR_FUTURE));
        (self.failed_pauses, self.auto_pauses) = (0, super::AUTO_PAUSES);
        self.deadline = Instant::now() + FAR_FUTURE;
        let number = save.number;
        self.node.table.show(self.view(), None);
        match pauser {
            Some(Pauser { durability, reply }) if durability > Durability::Process => {
                self.waiters.push(Waiter { number, stages, reply });
            }
            Some(Pauser { reply, .. }) => answer(reply, Ok(Paused { sandbox: self.view(), stages })),
            None => {}
        }
    }

    async fn resume_done(&mut self, end: ResumeEnd) {
        let ResumeEnd { vm, tenancy, result, stages, again } = end;
        (self.vm, self.tenancy) = (vm, tenancy);
        if self.is_killed() {
            return;
        }
        match result {
            Ok((deadline, tier)) => {
                tracing::info!(sandbox = %self.vm.record.id, tier = tier.as_str(), "sandbox resumed");
                self.deadline = deadline;
                (self.hot_until, self.gives_way) = (None, false);
                self.ended = CancellationToken::new();
                self.node.table.show(self.view(), self.route());
                let resumers = std::mem::take(&mut self.resumers);
                let asked = |resumer: &Resumer| resumer.request.timeout;
                // The first one's time was journalled with the rest.
                let longest = resumers
                    .iter()
                    .map(asked)
                    .max()
                    .filter(|longest| resumers.first().map(asked).is_some_and(|first| *longest > first));
                let extended = match longest {
                    Some(longest) => self.change_end(longest).await,
                    None => Ok(()),
                };
                let stages = stages.into_vec();
                for Resumer { reply, .. } in resumers {
                    let resumed = self.resumed(false, tier, stages.clone());
                    answer(reply, extended.clone().map(|()| resumed));
                }
            }
            // `done` begins it.
            Err(_) if again => {}
            Err(error) => {
                let left = self.vm.record.process.is_some() || self.vm.record.slot.is_some();
                self.hot_until = left.then(|| Instant::now() + self.release_pauses.take());
                self.fail_resumers(&error);
            }
        }
        self.node.table.update(self.view());
    }

    pub(super) fn fail_resumers(&mut self, error: &Error) {
        for Resumer { reply, .. } in self.resumers.drain(..) {
            answer(reply, Err(error.clone()));
        }
    }

    /// The pause that they waited for came to nothing.
    async fn answer_resumers_of_running(&mut self) {
        for Resumer { request, reply, .. } in std::mem::take(&mut self.resumers) {
            let result = match self.allows(Event::Resume) {
                Ok(_) => self.extend(request.timeout).await,
                Err(error) => Err(error),
            };
            answer(reply, result.map(|()| self.resumed(true, Tier::Hot, Vec::new())));
        }
    }

    fn resumed(&self, was_running: bool, tier: Tier, stages: Vec<Stage>) -> Resumed {
        Resumed { sandbox: self.view(), was_running, tier, stages }
    }

    /// Answers those who waited until what was saved is durable.
    pub(super) fn answer_waiters(&mut self, local: u64) {
        let (there, waiting) = std::mem::take(&mut self.waiters).into_iter().partition(|w| w.number <= local);
        self.waiters = waiting;
        let there: Vec<Waiter> = there;
        for Waiter { stages, reply, .. } in there {
            answer(reply, Ok(Paused { sandbox: self.view(), stages }));
        }
    }

    pub(super) fn fail_waiters(&mut self, trouble: &SavingTrouble) {
        let id = &self.vm.record.id;
        let context =
            format!("sandbox {id} is paused, but its state is not durable yet; that is tried again");
        for Waiter { reply, .. } in self.waiters.drain(..) {
            answer(reply, Err(trouble.to_error(&context)));
        }
    }

    /// What an event leads to, or what its caller is told.
    pub(super) fn allows(&self, event: Event) -> Result<Phase, Error> {
        let id = &self.vm.record.id;
        // A release changes nothing that callers see.
        let changes = matches!(self.work, Some((Kind::Pause | Kind::Snapshot | Kind::Resume, _)));
        if changes && event != Event::Kill {
            return Err(Error::Transitioning(id.clone()));
        }
        lifecycle::next(self.vm.record.phase, event).map_err(|refusal| {
            match (refusal, &self.vm.record.loss) {
                (Refusal::Lost, Some(loss)) => {
                    Error::SandboxLost { id: id.clone(), cause: loss.cause, detail: loss.detail.clone() }
                }
                (Refusal::Paused, _) if event == Event::Pause => Error::AlreadyPaused(id.clone()),
                (Refusal::Paused, _) => Error::IsPaused(id.clone()),
                (Refusal::Transitioning, _) => Error::Transitioning(id.clone()),
                _ => Error::SandboxNotFound(id.clone()),
            }
        })
    }

    /// A paused sandbox: whether its VMM may stand by until then; a lost VMM or one that must go is released at once.
    pub(super) fn stand_by(&mut self) {
        let record = &self.vm.record;
        self.deadline = Instant::now() + FAR_FUTURE;
        self.hot_until = match (&self.vm.machine, record.process.is_some() || record.slot.is_some()) {
            (Some(_), _) => Some(Instant::now() + self.node.settings.hot_for.min(FAR_FUTURE)),
            (None, true) => Some(Instant::now()),
            (None, false) => None,
        };
    }
}
