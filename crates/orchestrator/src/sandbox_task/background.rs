//! The background work on a sandbox's saves: begun, taken over and journalled by the sandbox's task, one step at a time.
//!
//! A step works beside pauses and resumes; what came of it is taken over when none is under way, since those own the record.
//!
//! ```text
//! storing fails    what is dropped is removed at once, storing is tried again after a pause, or at once with the next save
//! removing fails   the same the other way round
//! ```

use super::SandboxTask;
use crate::error::{Error, Shortage};
use crate::journal::Step;
use crate::lifecycle::Phase;
use crate::pause::GrowingPause;
use crate::saving::{self, Outcome, Taken};
use crate::stage::Cause;
use crate::view::SaveTrouble;
use aenv_storage::block_service::ServiceError;
use tokio_util::sync::CancellationToken;

/// Why a step fails.
#[derive(Debug, Clone)]
pub(super) struct SavingTrouble {
    pub(super) cause: SaveTrouble,
    pub(super) reason: String,
}

impl SavingTrouble {
    pub(super) fn other(reason: &str) -> Self {
        Self { cause: SaveTrouble::Internal, reason: reason.to_owned() }
    }

    fn of(cause: &Cause) -> Self {
        let kind = match cause {
            cause if cause.is_no_room() => SaveTrouble::NoCapacity,
            Cause::Service(ServiceError::Unavailable { .. }) => SaveTrouble::BlockServiceAway,
            _ => SaveTrouble::Internal,
        };
        Self { cause: kind, reason: cause.to_string() }
    }

    /// What somebody is told who waited for the step.
    pub(super) fn to_error(&self, context: &str) -> Error {
        match self.cause {
            SaveTrouble::NoCapacity => {
                Error::NoCapacity(Shortage::Room(format!("{context}: {}", self.reason)))
            }
            SaveTrouble::BlockServiceAway => {
                Error::Unavailable { context: context.to_owned(), reason: self.reason.clone() }
            }
            SaveTrouble::Internal => {
                Error::Internal { context: context.to_owned(), reason: self.reason.clone() }
            }
        }
    }
}

/// The step under way, and how those before it ended.
pub(super) struct Saving {
    step: Option<saving::Pending>,
    cancel: CancellationToken,
    /// Ends the pause before it.
    hurry: CancellationToken,
    /// Somebody asked since the step under way was begun: it is tried again without one if it fails.
    prompt: bool,
    pauses: GrowingPause,
    /// The last step that failed.
    failed: Option<Step>,
    /// Why nothing can be stored, since when it fails.
    storing: Option<SavingTrouble>,
    /// The same of removals.
    removing: Option<SavingTrouble>,
}

impl Default for Saving {
    fn default() -> Self {
        Self {
            step: None,
            cancel: CancellationToken::new(),
            hurry: CancellationToken::new(),
            prompt: false,
            pauses: saving::PAUSES,
            failed: None,
            storing: None,
            removing: None,
        }
    }
}

impl Saving {
    /// The end of the step under way; never, when there is none.
    pub(super) async fn done(&mut self) -> Option<Outcome> {
        match &mut self.step {
            Some(step) => step.await.unwrap_or_else(|error| {
                tracing::error!(%error, "a step of a save ended early; it will be tried again");
                None
            }),
            None => std::future::pending().await,
        }
    }

    /// What keeps it from going on.
    pub(super) fn trouble(&self) -> Option<&SavingTrouble> {
        self.storing.as_ref().or(self.removing.as_ref())
    }

    fn trouble_of(&mut self, step: &Step) -> &mut Option<SavingTrouble> {
        match step {
            Step::Forget(_) => &mut self.removing,
            Step::StoreMemory(_) | Step::HandOver(..) | Step::MakeLocal(_) => &mut self.storing,
        }
    }

    fn failed(&mut self, step: Step, trouble: SavingTrouble) {
        *self.trouble_of(&step) = Some(trouble);
        self.failed = Some(step);
    }

    fn succeeded(&mut self, step: &Step) {
        *self.trouble_of(step) = None;
        if self.trouble().is_none() {
            (self.failed, self.pauses) = (None, saving::PAUSES);
        }
    }
}

impl SandboxTask {
    /// Begins the next step, if there is one and none is under way. One that failed waits before it is tried again, unless there is
    /// reason to try `now`.
    pub(super) fn save_on(&mut self, now: bool) {
        let alive = matches!(self.vm.record.phase, Phase::Running | Phase::Paused);
        if now {
            self.saving.hurry.cancel();
            (self.saving.prompt, self.saving.pauses) = (true, saving::PAUSES);
        }
        if !alive || self.is_killed() || self.saving.step.is_some() {
            return;
        }
        let Some(step) = self.vm.record.saves.next_step(self.saving.failed.as_ref()) else {
            self.saving.pauses = saving::PAUSES;
            return;
        };
        let again = self.saving.trouble_of(&step).is_some();
        let pause = (again && !self.saving.prompt).then(|| self.saving.pauses.take());
        self.saving.prompt &= !again;
        self.saving.cancel = self.node.stopping.child_token();
        self.saving.hurry = CancellationToken::new();
        let (hurry, cancelled) = (self.saving.hurry.clone(), self.saving.cancel.clone());
        self.saving.step = Some(saving::begin(&self.node, &self.vm.record, step, pause, hurry, cancelled));
    }

    /// Takes over what came of a step.
    pub(super) async fn step_done(&mut self, outcome: Option<Outcome>) {
        self.saving.step = None;
        // None after a shutdown, and when the step itself is broken: then there is no hurry.
        let Some(Outcome { step, result }) = outcome else {
            if !self.node.stopping.is_cancelled()
                && let Some(step) = self.vm.record.saves.next_step(None)
            {
                self.saving_failed(step, SavingTrouble::other("it ended early"));
            }
            return;
        };
        let applied = match result {
            Ok(taken) => self.apply(&step, taken).await,
            Err(cause) => Err(SavingTrouble::of(&cause)),
        };
        match applied {
            Ok(()) => {
                self.saving.succeeded(&step);
                if let Step::MakeLocal(number) = step {
                    tracing::info!(sandbox = %self.vm.record.id, number, "the saved state is durable");
                    saving::remove_changes(&self.node, &self.vm.record.id, number).await;
                    self.answer_waiters(number);
                }
                self.answer_snapshot_waiters();
                self.save_on(false);
            }
            Err(trouble) => {
                self.withdraw_snapshots(&step, &trouble).await;
                self.saving_failed(step, trouble);
            }
        }
        self.node.table.update(self.view());
        self.give_way_if_promised();
        if self.vm.record.phase == Phase::Paused && self.work.is_none() {
            self.begin_resume();
        }
    }

    /// Takes a step over into the record.
    async fn apply(&mut self, step: &Step, taken: Taken) -> Result<(), SavingTrouble> {
        let noted = saving::note(&self.node, &self.vm.record, step, taken).await;
        self.vm.record = noted.map_err(|cause| SavingTrouble::of(&cause))?;
        self.vm.let_snapshot_go();
        Ok(())
    }

    fn saving_failed(&mut self, step: Step, trouble: SavingTrouble) {
        tracing::warn!(sandbox = %self.vm.record.id, ?step, reason = trouble.reason, "a step of a save failed; trying again");
        // Whatever is not removed is in nobody's way; and who asked since this one was begun is answered by the next.
        if !matches!(step, Step::Forget(_)) && !self.saving.prompt {
            self.fail_waiters(&trouble);
            self.fail_resumers(&trouble.to_error("resuming a sandbox whose memory is still to be stored"));
        }
        self.saving.failed(step, trouble);
        self.save_on(false);
    }

    /// Gives up the step under way; all of it may be repeated.
    pub(super) async fn stop_saving(&mut self) {
        self.saving.cancel.cancel();
        if let Some(step) = self.saving.step.take()
            && let Err(error) = step.await
        {
            tracing::error!(sandbox = %self.vm.record.id, %error, "a step of a save ended early");
        }
        self.saving.cancel = CancellationToken::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_waits_learns_whether_to_try_again() {
        let away = || ServiceError::Unavailable { socket: "/s".into(), reason: "away".to_owned() };
        let told = |cause| SavingTrouble::of(&cause).to_error("storing");
        assert!(matches!(told(Cause::Service(away())), Error::Unavailable { .. }));
        assert!(matches!(told(Cause::NoCapacity(Shortage::Room(String::new()))), Error::NoCapacity(_)));
        assert!(matches!(told(Cause::Cancelled), Error::Internal { .. }));
    }
}
