//! Pauses a running sandbox: saves its state while the guest stands still, and nothing else.
//!
//! ```text
//! room? ─▶ flush, by the guest daemon ─▶ Capturing(k), streams broken ─▶ stop ─▶ devices, changed pages ∥ seal of the disk
//!    │          │ no answer, and that      │                              │          │
//!    │          │ is not good enough       │            failed, cancelled │          ▼
//!    ▼          ▼                          ▼                              ▼       Paused(k): the point of no return
//! Running    Running              Running, its guest stood still: adopted like one of an earlier process
//! ```
//!
//! What remains of a pause that came to nothing is among the dropped saves from the beginning, and removed like them. A VMM
//! with a log of writes has emptied it by then: that its next capture is of no use without this one is journalled first.
//!
//! A snapshot of a sandbox that runs is taken in the same way, but for its end: the same commit says that the sandbox runs, that the
//! save is there, and that a snapshot claims it; the guest goes on at once, and no stream into it is broken.
//!
//! Runs beside the sandbox's task, on a copy of the VM that the task takes over at the end.

use crate::adoption::LET_GO;
use crate::error::Error;
use crate::greeting;
use crate::guest_channel::GuestError;
use crate::journal::{Save, SnapshotRecord, Start, Tenancy};
use crate::lifecycle::{self, Event};
use crate::node::Node;
use crate::stage::{Cause, Failure, Stages, timed};
use crate::template;
use crate::view::{Durability, PauseMode, PauseRequest, SandboxView};
use crate::vm::{Vm, file_error};
use aenv_vmm::{CaptureBase, CaptureFiles, CaptureReport};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Name of the file with the changed pages in the directory of a save.
pub(crate) const CHANGES: &str = "changes";
/// Name of the file with the devices in the directory of a save.
pub(crate) const STATE: &str = "state";

/// A pause to be made.
pub(crate) struct Pausing {
    pub(crate) node: Arc<Node>,
    pub(crate) vm: Vm,
    pub(crate) tenancy: Tenancy,
    pub(crate) request: PauseRequest,
    /// Of a snapshot: the guest goes on afterwards.
    pub(crate) snapshot: Option<SnapshotRecord>,
    /// What callers see as soon as the guest cannot be reached any more.
    pub(crate) view: SandboxView,
    /// Breaks the streams into the guest.
    pub(crate) ended: CancellationToken,
    /// A kill or a shutdown: gives up the step under way.
    pub(crate) cancelled: CancellationToken,
}

/// How a pause ended.
pub(crate) struct PauseEnd {
    pub(crate) vm: Vm,
    pub(crate) tenancy: Tenancy,
    pub(crate) result: Result<(), Error>,
    pub(crate) stages: Stages,
    /// The snapshot that was taken, or was to be.
    pub(crate) snapshot: Option<SnapshotRecord>,
    /// Of one that failed, and of a snapshot: the guest may stand still.
    pub(crate) stood_still: bool,
}

/// A pause whose guest is about to be stopped.
struct Begun {
    number: u64,
    captured_before: Option<u64>,
    flushed: bool,
    since: Instant,
    saved_at: jiff::Timestamp,
}

impl Pausing {
    pub(crate) async fn run(mut self) -> PauseEnd {
        let mut stages = Stages::default();
        let mut stood_still = false;
        // Boxed: what waits for a guest is large.
        let result = Box::pin(self.save(&mut stages, &mut stood_still)).await;
        if let Err(error) = &result {
            tracing::warn!(sandbox = %self.vm.record.id, %error, "not paused");
            self.undo().await;
            if !stood_still {
                self.let_programs_go().await;
            }
        }
        let told = |error| if self.node.stopping.is_cancelled() { Error::ShuttingDown } else { error };
        let result = result.map_err(told);
        let Self { vm, tenancy, snapshot, .. } = self;
        PauseEnd { vm, tenancy, result, stages, snapshot, stood_still }
    }

    async fn save(&mut self, stages: &mut Stages, stood_still: &mut bool) -> Result<(), Error> {
        let told = |failure: Failure| failure.into_error("pausing a sandbox");
        self.node.admission.check_room(&self.node.dir).map_err(told)?;
        let flushed = self.flush(stages).await?;
        let captured_before = self.captured_before();
        let number = self.begin(stages).await.map_err(told)?;
        if self.snapshot.is_none() {
            self.node.table.show(self.view.clone(), None);
            self.ended.cancel();
        }
        *stood_still = true;
        let (since, saved_at) = (Instant::now(), jiff::Timestamp::now());
        let begun = Begun { number, captured_before, flushed, since, saved_at };
        let save = self.stop_and_capture(&begun, stages).await.map_err(told)?;
        self.commit(save, &begun, stages).await.map_err(told)?;
        if self.snapshot.is_some() {
            *stood_still = !self.go_on(stages).await;
        }
        Ok(())
    }

    /// Lets the guest run again, and tells it the time; tells whether that is sure.
    async fn go_on(&self, stages: &mut Stages) -> bool {
        let limit = self.node.settings.deadlines.init;
        let goes_on = async {
            self.vm.resume(&self.node, stages).await?;
            let channel = self.vm.channel()?;
            stages.run("init", limit, channel.init(&greeting::again(&self.tenancy), limit)).await
        };
        let result = self.vm.while_alive("resume", goes_on).await;
        if let Err(failure) = &result {
            tracing::warn!(sandbox = %self.vm.record.id, %failure, "whether the guest goes on after a snapshot is not known yet");
        }
        result.is_ok()
    }

    /// The save that the next capture may lie over.
    fn captured_before(&self) -> Option<u64> {
        let record = &self.vm.record;
        let bytes = record.spec.memory_mib.saturating_mul(1 << 20);
        record.present.captured.filter(|_| !record.saves.is_backlog_full(bytes))
    }

    /// Has the guest daemon write everything to the disk; tells whether it did.
    async fn flush(&self, stages: &mut Stages) -> Result<bool, Error> {
        let needed = self.request.require_healthy_guest || self.request.mode == PauseMode::Filesystem;
        let channel = self.vm.channel().map_err(|failure| failure.into_error("pausing a sandbox"))?;
        let limit = self.node.settings.deadlines.sync;
        let flushed = async {
            let start = Instant::now();
            let flushed = channel.sync(self.tenancy.access_token.as_deref(), limit).await;
            stages.add("sync", start.elapsed());
            flushed.map_err(|error| Failure::new("sync", error))
        };
        match self.unless_cancelled("sync", self.vm.while_alive("sync", flushed)).await {
            Ok(()) => Ok(true),
            Err(Failure { cause: Cause::Guest(error), .. }) if needed => {
                Err(Error::GuestUnresponsive { id: self.vm.record.id.clone(), reason: unhealthy(&error) })
            }
            Err(Failure { cause: Cause::Guest(error), .. }) => {
                tracing::warn!(sandbox = %self.vm.record.id, %error, "the guest did not flush its disk before its pause; what it had not written is in its memory only");
                Ok(false)
            }
            Err(failure) => Err(failure.into_error("pausing a sandbox")),
        }
    }

    /// Journals that a state is about to be saved, and makes the directory for it.
    async fn begin(&mut self, stages: &mut Stages) -> Result<u64, Failure> {
        let record = &mut self.vm.record;
        record.phase = lifecycle::next(record.phase, Event::Pause)
            .map_err(|refusal| unexpected("journal", format!("it cannot be paused: {refusal:?}")))?;
        if self.request.mode == PauseMode::Full {
            record.present.captured = None;
        }
        let number = record.saves.begin();
        let limit = self.node.settings.deadlines.step;
        stages.run("journal", limit, self.node.journal.put(&self.vm.record)).await?;
        let directory = self.node.dir.sandbox_save(&self.vm.record.id, number);
        tokio::fs::create_dir_all(&directory).await.map_err(|source| {
            Failure::new("capture", file_error(format!("cannot make {}", directory.display()), source))
        })?;
        Ok(number)
    }

    async fn stop_and_capture(&self, begun: &Begun, stages: &mut Stages) -> Result<Save, Failure> {
        let Begun { number, captured_before, flushed, saved_at, .. } = *begun;
        let (step, memory) = (self.node.settings.deadlines.step, self.node.settings.deadlines.memory);
        let machine = self.vm.machine("stop")?;
        self.unless_cancelled("stop", stages.run("stop", step, machine.stop())).await?;
        let name = self.vm.save_name(number);
        let both = async {
            tokio::join!(
                timed(memory, self.capture(number, captured_before)),
                timed(step, self.node.disks.seal(&name)),
            )
        };
        let both = async { Ok(both.await) };
        let ((report, capture_time), (disk, seal_time)) = self.unless_cancelled("capture", both).await?;
        stages.add("capture", capture_time);
        stages.add("seal", seal_time);
        let report = report.map_err(|cause| Failure { stage: "capture", cause })?;
        let disk = disk.map_err(|cause| Failure { stage: "seal", cause })?;
        let over = match report.as_ref().map(|report| report.base) {
            Some(CaptureBase::PreviousCapture) => captured_before,
            _ => None,
        };
        Ok(Save {
            number,
            saved_at,
            mode: self.request.mode,
            durability: Durability::Process,
            binding: self.node.binding.clone(),
            disk: disk.base,
            disk_bytes: disk.stored_bytes,
            start: self.start(),
            over,
            memory: None,
            report,
            stopped: Duration::ZERO,
            flushed,
            claims: self.snapshot.iter().map(|snapshot| snapshot.id.clone()).collect(),
        })
    }

    async fn capture(
        &self,
        number: u64,
        captured_before: Option<u64>,
    ) -> Result<Option<CaptureReport>, Cause> {
        if self.request.mode == PauseMode::Filesystem {
            return Ok(None);
        }
        let directory = self.node.dir.sandbox_save(&self.vm.record.id, number);
        let files = files_in(&directory);
        let machine = self.vm.machine("capture").map_err(|failure| failure.cause)?;
        let report = machine.capture_changes(&files).await?;
        if let Some(reason) = &report.whole_because {
            tracing::info!(sandbox = %self.vm.record.id, number, reason, "all of the memory is saved");
        }
        if report.base != CaptureBase::PreviousCapture || captured_before.is_some() {
            return Ok(Some(report));
        }
        // The capture that these changes belong to came to nothing.
        for path in [&files.memory, &files.state] {
            tokio::fs::remove_file(path)
                .await
                .map_err(|source| file_error(format!("cannot remove {}", path.display()), source))?;
        }
        Ok(Some(machine.capture(&files).await?))
    }

    /// What the present VMM was started from.
    fn start(&self) -> Start {
        let record = &self.vm.record;
        record.present.start.clone().unwrap_or_else(|| {
            let template = self.node.dir.template(&record.template_id);
            let image = record.capture_key.as_ref().map(|key| template::memory_of_capture(&template, key));
            let chain = crate::disks::MemoryChain { image, layers: Vec::new() };
            Start { chain, save: None, snapshot: None }
        })
    }

    /// Journals the save: from here on it is paused, or has a snapshot.
    async fn commit(&mut self, save: Save, begun: &Begun, stages: &mut Stages) -> Result<(), Failure> {
        let mut record = self.vm.record.clone();
        let event = if self.snapshot.is_some() { Event::Copied } else { Event::Saved };
        record.phase = lifecycle::next(record.phase, event)
            .map_err(|refusal| unexpected("journal", format!("it cannot be paused: {refusal:?}")))?;
        if save.mode == PauseMode::Full {
            record.present.captured = Some(save.number);
        }
        let end_at = if self.snapshot.is_some() { self.tenancy.end_at } else { save.saved_at };
        let tenancy = Tenancy { end_at, ..self.tenancy.clone() };
        record.tenancy = Some(tenancy.clone());
        if let Some(snapshot) = &mut self.snapshot {
            snapshot.created_at = save.saved_at;
        }
        record.saves.keep(Save { stopped: begun.since.elapsed(), ..save });
        record.saves.drop_unneeded(&record.present);
        let limit = self.node.settings.deadlines.step;
        let journalled = async {
            match &self.snapshot {
                Some(snapshot) => {
                    self.node.journal.put_with_snapshots(&record, std::slice::from_ref(snapshot)).await
                }
                None => self.node.journal.put(&record).await,
            }
        };
        stages.run("journal", limit, journalled).await?;
        (self.vm.record, self.tenancy) = (record, tenancy);
        self.confirm(begun.number).await;
        Ok(())
    }

    /// Tells the VMM that its next capture may build on this one.
    async fn confirm(&self, number: u64) {
        let Some(machine) = self.vm.machine.as_ref().filter(|_| self.request.mode == PauseMode::Full) else {
            return;
        };
        let files = files_in(&self.node.dir.sandbox_save(&self.vm.record.id, number));
        let confirmed = timed(self.node.settings.deadlines.step, machine.confirm_capture(&files)).await.0;
        if let Err(error) = confirmed {
            tracing::warn!(sandbox = %self.vm.record.id, %error, "the next capture of this VM will be whole");
        }
    }

    /// The sandbox runs, as far as the journal is concerned; what was begun stays among the dropped saves.
    async fn undo(&mut self) {
        let record = &mut self.vm.record;
        let Ok(phase) = lifecycle::next(record.phase, Event::PauseFailed) else { return };
        record.phase = phase;
        if let Err(error) = self.node.journal.put(&self.vm.record).await {
            // The row says Capturing: the next process comes to the same end.
            tracing::warn!(sandbox = %self.vm.record.id, %error, "that a pause came to nothing could not be journalled");
        }
    }

    /// Nothing came of it before the guest was stopped, but its programs stand still since the flush. A kill is not held up by
    /// that; the end of the node is, for a moment, since the guest lives on.
    async fn let_programs_go(&self) {
        let killed = async {
            self.cancelled.cancelled().await;
            if self.node.stopping.is_cancelled() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = let_programs_go(&self.node, &self.vm, &self.tenancy) => {}
            () = killed => {}
        }
    }

    /// A step that may be given up in the middle: whatever it made is known already.
    async fn unless_cancelled<T>(
        &self,
        stage: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            done = work => done,
            () = self.cancelled.cancelled() => Err(Failure::new(stage, Cause::Cancelled)),
        }
    }
}

/// Greets a guest that runs, so that its programs do.
async fn let_programs_go(node: &Node, vm: &Vm, tenancy: &Tenancy) {
    let limit = node.settings.deadlines.init.min(LET_GO);
    let greeted = async {
        let init = greeting::again(tenancy);
        vm.channel()?.init(&init, limit).await.map_err(|error| Failure::new("init", error))
    };
    // One that died does not answer.
    if let Err(failure) = vm.while_alive("init", greeted).await {
        tracing::warn!(sandbox = %vm.record.id, %failure, "its programs go on after a while by themselves");
    }
}

/// Where a save's memory, before it is stored, and devices lie.
pub(crate) fn files_in(directory: &Path) -> CaptureFiles {
    CaptureFiles { memory: directory.join(CHANGES), state: directory.join(STATE) }
}

fn unhealthy(error: &GuestError) -> String {
    match error {
        GuestError::Refused { status, .. } if *status == http::StatusCode::NOT_FOUND => {
            "it is of a version that cannot flush the disk".to_owned()
        }
        error => error.to_string(),
    }
}

fn unexpected(stage: &'static str, reason: String) -> Failure {
    Failure::new(stage, Cause::Unexpected(reason))
}
