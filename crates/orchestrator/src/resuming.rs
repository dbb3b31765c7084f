//! Makes a paused sandbox run again.
//!
//! ```text
//!                     VMM stands by
//! Resuming (journal) ───────────────▶ let it run ─▶ init ───────────────────────────────────────────▶ Running   hot
//!     │ none                              │ failed: undone, and begun again without it
//!     ├─ memory fits here?
//!     │    └─▶ turn ─▶ slot ∥ memory image ∥ disk anew ─▶ prepare ─▶ load ─▶ let it run ─▶ init ─────▶ Running   cold
//!     └─ no memory was kept, or a boot was asked for
//!          └─▶ turn, memory ─▶ slot ∥ disk anew ─▶ boot ─▶ guest daemon answers ─▶ init, as of a new one ────▶ Running   boot
//! failed: its VMM is ended, its network released ─▶ Paused, as it was
//! ```
//!
//! The disk is made anew from what was sealed before every VMM that is started: whatever a guest wrote that came to nothing is
//! not seen by the next. Runs beside the sandbox's task, on a copy of the VM that the task takes over at the end.

use crate::admission::Permit;
use crate::disks::MemoryChain;
use crate::error::Error;
use crate::greeting;
use crate::journal::{MemoryBinding, Present, Save, Start, Tenancy};
use crate::lifecycle::{self, Event};
use crate::node::Node;
use crate::pausing::STATE;
use crate::sandbox_task::end_after;
use crate::saving;
use crate::stage::{Cause, Failure, Stages, timed};
use crate::view::{PauseMode, ResumeRequest, Tier};
use crate::vm::{Vm, file_error};
use aenv_vmm::CaptureFiles;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A resume to be made.
pub(crate) struct Resuming {
    pub(crate) node: Arc<Node>,
    pub(crate) vm: Vm,
    pub(crate) tenancy: Tenancy,
    pub(crate) request: ResumeRequest,
    /// A kill or a shutdown.
    pub(crate) cancelled: CancellationToken,
}

/// How a resume ended.
pub(crate) struct ResumeEnd {
    pub(crate) vm: Vm,
    pub(crate) tenancy: Tenancy,
    /// When its time is over, and what served it.
    pub(crate) result: Result<(Instant, Tier), Error>,
    pub(crate) stages: Stages,
    /// Of one that failed: the VMM that stood by is gone, and another may be started.
    pub(crate) again: bool,
}

/// What a guest is made to run from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Memory,
    Disk,
}

impl Resuming {
    pub(crate) async fn run(mut self) -> ResumeEnd {
        let mut stages = Stages::default();
        let was_hot = self.vm.machine.is_some();
        let result = self.resume(&mut stages).await;
        if let Err(error) = &result {
            tracing::warn!(sandbox = %self.vm.record.id, %error, "not resumed");
            // What is killed is removed anyway; what a shutdown leaves is for the next process.
            if !self.cancelled.is_cancelled() {
                self.undo().await;
            }
        }
        let again = result.is_err() && was_hot && self.vm.machine.is_none();
        let Self { vm, tenancy, .. } = self;
        ResumeEnd { vm, tenancy, result, stages, again }
    }

    async fn resume(&mut self, stages: &mut Stages) -> Result<(Instant, Tier), Error> {
        let told = |failure: Failure| failure.into_error("resuming a sandbox");
        let save = self.vm.record.saves.last().cloned().ok_or_else(|| {
            told(Failure::new("journal", Cause::Unexpected("nothing of it was saved".to_owned())))
        })?;
        let way =
            if self.request.reboot || save.mode == PauseMode::Filesystem { Way::Disk } else { Way::Memory };
        let hot = way == Way::Memory && self.vm.machine.is_some();
        if way == Way::Memory && !hot {
            self.check_fits(&save)?;
        }
        self.begin(stages).await.map_err(told)?;
        if hot {
            return self.wake(way, stages).await.map(|deadline| (deadline, Tier::Hot)).map_err(told);
        }
        self.start_and_wake(&save, way, stages).await.map(|deadline| (deadline, Tier::Cold)).map_err(told)
    }

    async fn start_and_wake(
        &mut self,
        save: &Save,
        way: Way,
        stages: &mut Stages,
    ) -> Result<Instant, Failure> {
        let node = Arc::clone(&self.node);
        // The one that stands by although a boot is wanted.
        self.vm.release(&node).await.map_err(|cause| Failure { stage: "release", cause })?;
        self.forget_later_saves(save.number).await?;
        let Permit { place: _place, memory } = self.turn(&node, stages).await?;
        self.vm.memory = memory;
        let image = self.make_room(save, way, stages).await?;
        self.start(save, image, stages).await?;
        if way == Way::Memory {
            self.vm.load(&node, stages).await?;
        }
        self.wake(way, stages).await
    }

    /// What was saved after the state that counts now, and was dropped (after a fall-back), may still keep the disk from going
    /// back. The background removes it as well: whoever comes second finds nothing.
    async fn forget_later_saves(&self, number: u64) -> Result<(), Failure> {
        let record = &self.vm.record;
        for later in record.saves.dropped.iter().filter(|dropped| **dropped > number) {
            saving::forget(&self.node, &record.id, *later)
                .await
                .map_err(|cause| Failure { stage: "forget", cause })?;
        }
        Ok(())
    }

    fn check_fits(&self, save: &Save) -> Result<(), Error> {
        match difference(&save.binding, &self.node.binding) {
            None => Ok(()),
            Some(reason) => Err(Error::Incompatible { id: self.vm.record.id.clone(), reason }),
        }
    }

    async fn begin(&mut self, stages: &mut Stages) -> Result<(), Failure> {
        let mut record = self.vm.record.clone();
        record.phase = next(record.phase, Event::Resume)?;
        // Its time, which was over when it was paused: the next process may find that it runs.
        let (_, end_at) = end_after(self.request.timeout);
        record.tenancy = Some(Tenancy { end_at, ..self.tenancy.clone() });
        stages.run("journal", self.node.settings.deadlines.step, self.node.journal.put(&record)).await?;
        self.vm.record = record;
        Ok(())
    }

    async fn turn(&self, node: &Node, stages: &mut Stages) -> Result<Permit, Failure> {
        let asked = Instant::now();
        let bytes = self.vm.record.memory_bytes();
        let permit = self.unless_cancelled("admission", node.admission.for_caller(bytes)).await?;
        stages.add("admission", asked.elapsed());
        Ok(permit)
    }

    /// Takes a network, makes the disk anew and, for a restore, a file of the whole memory.
    async fn make_room(
        &mut self,
        save: &Save,
        way: Way,
        stages: &mut Stages,
    ) -> Result<Option<(PathBuf, MemoryChain)>, Failure> {
        let (id, limit) = (self.vm.record.id.clone(), self.node.settings.deadlines.step);
        let run_dir = self.node.dir.sandbox_run(&id);
        // Sockets and logs of the VMM before.
        let emptied = match tokio::fs::remove_dir_all(&run_dir).await {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => tokio::fs::create_dir_all(&run_dir).await,
        };
        emptied.map_err(|source| {
            Failure::new("disk", file_error(format!("cannot empty {}", run_dir.display()), source))
        })?;
        let bytes = self.vm.record.disk_mib.saturating_mul(1 << 20);
        // All run to their end even when one fails, so that what was made is known.
        let ((slot, slot_time), (disk, disk_time), (image, image_time)) = tokio::join!(
            timed(limit, self.node.parts.slots.acquire()),
            timed(limit, self.node.disks.make_anew(&id, &save.disk, bytes)),
            timed(self.node.settings.deadlines.memory, self.memory_image(save, way)),
        );
        stages.add("slot", slot_time);
        stages.add("disk", disk_time);
        stages.add("memory", image_time);
        let slot = slot.map_err(|cause| Failure { stage: "slot", cause });
        if let Ok(slot) = &slot {
            self.vm.record.slot = Some(slot.name.clone());
            self.vm.slot = Some(slot.clone());
        }
        self.vm.record.disk = Some(disk.map_err(|cause| Failure { stage: "disk", cause })?);
        slot?;
        let image = image.map_err(|cause| Failure { stage: "memory", cause })?;
        self.vm.note(&self.node).await?;
        self.go_on("prepare")?;
        Ok(image)
    }

    /// The memory of a save as one file.
    async fn memory_image(&self, save: &Save, way: Way) -> Result<Option<(PathBuf, MemoryChain)>, Cause> {
        if way == Way::Disk {
            return Ok(None);
        }
        let stored = save
            .memory
            .as_ref()
            .ok_or_else(|| Cause::Unexpected("its memory is not stored yet".to_owned()))?;
        let name = self.vm.save_name(save.number);
        let bytes = self.vm.record.memory_bytes();
        let path = self.node.disks.memory_image(&name, &stored.chain, bytes).await?;
        Ok(Some((path, stored.chain.clone())))
    }

    async fn start(
        &mut self,
        save: &Save,
        image: Option<(PathBuf, MemoryChain)>,
        stages: &mut Stages,
    ) -> Result<(), Failure> {
        if !self.tenancy.internet_access {
            let (name, limit) = (&self.vm.slot("deny_egress")?.name, self.node.settings.deadlines.step);
            stages.run("deny_egress", limit, self.node.parts.slots.deny_egress(name)).await?;
        }
        let record = &self.vm.record;
        let placement = self.node.placement(record, self.vm.slot("prepare")?);
        let (vmm, spec, limit) = (&self.node.parts.vmm, &record.spec, self.node.settings.deadlines.step);
        let (machine, start) = match image {
            Some((memory, chain)) => {
                let state = self.node.dir.sandbox_save(&record.id, save.number).join(STATE);
                let files = CaptureFiles { memory, state };
                let machine = stages.run("prepare", limit, vmm.prepare(spec, &files, placement)).await?;
                (machine, Start { chain, save: Some(save.number), snapshot: None })
            }
            None => (stages.run("boot", limit, vmm.boot(spec, placement)).await?, Start::default()),
        };
        self.vm.record.process = Some(machine.record().clone());
        self.vm.record.present = Present { start: Some(start), captured: None };
        self.vm.machine = Some(Arc::from(machine));
        self.vm.note(&self.node).await?;
        self.go_on("load")
    }

    /// Lets the guest run and tells it the time, and who it is if it booted.
    async fn wake(&mut self, way: Way, stages: &mut Stages) -> Result<Instant, Failure> {
        let deadlines = &self.node.settings.deadlines;
        if way == Way::Memory {
            self.unless_cancelled("resume", self.vm.resume(&self.node, stages)).await?;
        }
        let channel = self.vm.channel()?;
        // Boxed: what waits for a guest is large.
        let greeted = Box::pin(async {
            let init = match way {
                Way::Memory => greeting::again(&self.tenancy),
                Way::Disk => {
                    let answered = channel.wait_until_healthy(deadlines.boot);
                    stages.run("guest", deadlines.boot, answered).await?;
                    let record = &self.vm.record;
                    greeting::of_sandbox(&record.id, &record.template_id, &self.tenancy)
                        .map_err(|error| Failure::new("init", error))?
                }
            };
            stages.run("init", deadlines.init, channel.init(&init, deadlines.init)).await
        });
        self.unless_cancelled("init", self.vm.while_alive("init", greeted)).await?;
        let (deadline, end_at) = end_after(self.request.timeout);
        let tenancy = Tenancy { end_at, ..self.tenancy.clone() };
        let mut record = self.vm.record.clone();
        record.phase = next(record.phase, Event::Resumed)?;
        record.tenancy = Some(tenancy.clone());
        record.saves.drop_unneeded(&record.present);
        stages.run("journal", deadlines.step, self.node.journal.put(&record)).await?;
        (self.vm.record, self.tenancy) = (record, tenancy);
        Ok(deadline)
    }

    /// Paused again, as it was.
    async fn undo(&mut self) {
        let node = Arc::clone(&self.node);
        let Ok(phase) = lifecycle::next(self.vm.record.phase, Event::ResumeFailed) else { return };
        self.vm.record.phase = phase;
        self.vm.record.tenancy = Some(self.tenancy.clone());
        if let Err(cause) = self.vm.release(&node).await {
            tracing::warn!(sandbox = %self.vm.record.id, error = %cause, "what a resume that failed left could not be removed; trying again");
            if let Err(failure) = self.vm.note(&node).await {
                // The row says Resuming: the next process comes to the same end.
                tracing::warn!(sandbox = %self.vm.record.id, %failure, "that a resume failed could not be journalled");
            }
        }
    }

    fn go_on(&self, stage: &'static str) -> Result<(), Failure> {
        if self.cancelled.is_cancelled() { Err(Failure::new(stage, Cause::Cancelled)) } else { Ok(()) }
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

fn next(phase: lifecycle::Phase, event: Event) -> Result<lifecycle::Phase, Failure> {
    lifecycle::next(phase, event).map_err(|refusal| {
        Failure::new("journal", Cause::Unexpected(format!("it cannot be resumed: {refusal:?}")))
    })
}

/// What a memory was made with that is not here.
pub(crate) fn difference(made: &MemoryBinding, here: &MemoryBinding) -> Option<String> {
    let parts = [
        ("driver", &made.vmm.driver, &here.vmm.driver),
        ("VMM version", &made.vmm.version, &here.vmm.version),
        ("accelerator", &made.vmm.accelerator, &here.vmm.accelerator),
        ("processor model", &made.vmm.cpu_model, &here.vmm.cpu_model),
        ("guest kernel", &made.kernel_sha256, &here.kernel_sha256),
        ("initial RAM filesystem", &made.initramfs_sha256, &here.initramfs_sha256),
    ];
    let differs = parts.into_iter().filter(|(_, made, here)| made != here);
    let texts: Vec<_> = differs
        .map(|(what, made, here)| format!("it was saved with {what} {made}, here is {here}"))
        .collect();
    (!texts.is_empty()).then(|| texts.join("; "))
}
