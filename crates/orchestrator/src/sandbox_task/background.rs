//! The background work on a sandbox's saves: begun, taken over and journalled by the sandbox's task, one step at a time.
//!
//! A step works beside pauses and resumes; what came of it is taken over when none is under way, since those own the record.

use super::SandboxTask;
use crate::error::Error;
use crate::journal::{JournalError, Step, VmRecord};
use crate::lifecycle::Phase;
use crate::saving::{self, Outcome};
use crate::view::Durability;
use tokio_util::sync::CancellationToken;

impl SandboxTask {
    /// Begins the next step, if there is one and none is under way. After a failure it waits, unless somebody does.
    pub(super) fn save_on(&mut self, now: bool) {
        let alive = matches!(self.vm.record.phase, Phase::Running | Phase::Paused);
        if now
            && self.saving_trouble.is_some()
            && let Some(step) = self.saving.take()
        {
            // It may wait for long before it does anything; all of it may be repeated.
            step.abort();
        }
        if !alive || self.is_killed() || self.saving.is_some() {
            return;
        }
        let Some(step) = self.vm.record.saves.next_step(self.failed_step.as_ref()) else {
            self.saving_pauses = saving::PAUSES;
            return;
        };
        let failed = self.saving_trouble.is_some();
        let pause = if failed && !now { Some(self.saving_pauses.take()) } else { None };
        self.saving_cancel = self.node.stopping.child_token();
        let cancelled = self.saving_cancel.clone();
        self.saving = Some(saving::begin(&self.node, &self.vm.record, step, pause, cancelled));
    }

    /// Takes over what came of a step.
    pub(super) async fn step_done(&mut self, outcome: Option<Outcome>) {
        self.saving = None;
        // None after a shutdown, and when the step itself is broken: then there is no hurry.
        let Some(Outcome { step, result }) = outcome else {
            if !self.node.stopping.is_cancelled() {
                self.saving_failed(None, "it ended early".to_owned());
            }
            return;
        };
        let applied = match result {
            Ok(memory) => {
                let mut record = self.vm.record.clone();
                match &step {
                    Step::Forget(numbers) => record.saves.dropped.retain(|number| !numbers.contains(number)),
                    Step::StoreMemory(number) => {
                        if let Some(save) = record.saves.get_mut(*number) {
                            save.memory = memory;
                        }
                    }
                    Step::MakeLocal(number) => {
                        if let Some(save) = record.saves.get_mut(*number) {
                            save.durability = save.durability.max(Durability::Local);
                        }
                    }
                }
                record.saves.drop_unneeded(&record.present);
                self.journal_step(&step, record).await.map_err(|error| error.to_string())
            }
            Err(cause) => Err(cause.to_string()),
        };
        match applied {
            Ok(()) => {
                (self.failed_step, self.saving_trouble) = (None, None);
                self.saving_pauses = saving::PAUSES;
                if let Step::MakeLocal(number) = step {
                    tracing::info!(sandbox = %self.vm.record.id, number, "the saved state is durable");
                    saving::remove_changes(&self.node, &self.vm.record.id, number).await;
                    self.answer_waiters(number);
                }
                self.save_on(false);
            }
            Err(reason) => self.saving_failed(Some(step), reason),
        }
        self.node.table.update(self.view());
        self.give_way_if_promised();
        if self.vm.record.phase == Phase::Paused && self.work.is_none() {
            self.begin_resume();
        }
    }

    /// All of this is as durable as it is said to be.
    async fn journal_step(&mut self, step: &Step, record: VmRecord) -> Result<(), JournalError> {
        match step {
            Step::MakeLocal(_) => self.node.journal.put_durably(&record).await?,
            Step::Forget(_) | Step::StoreMemory(_) => self.node.journal.put(&record).await?,
        }
        self.vm.record = record;
        Ok(())
    }

    fn saving_failed(&mut self, step: Option<Step>, reason: String) {
        tracing::warn!(sandbox = %self.vm.record.id, ?step, reason, "a step of a save failed; trying again");
        // Whatever is not removed is in nobody's way.
        if !matches!(step, Some(Step::Forget(_))) {
            self.fail_waiters(&reason);
            let context = "resuming a sandbox whose memory is still to be stored".to_owned();
            self.fail_resumers(&Error::Internal { context, reason: reason.clone() });
        }
        (self.failed_step, self.saving_trouble) = (step, Some(reason));
        self.save_on(false);
    }

    /// Gives up the step under way; all of it may be repeated.
    pub(super) async fn stop_saving(&mut self) {
        self.saving_cancel.cancel();
        if let Some(step) = self.saving.take()
            && let Err(error) = step.await
        {
            tracing::error!(sandbox = %self.vm.record.id, %error, "a step of a save ended early");
        }
        self.saving_cancel = CancellationToken::new();
    }
}
