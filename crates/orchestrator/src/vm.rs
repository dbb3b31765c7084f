//! One VM with everything it holds, from its journal row to its process: the steps that make it, for every role.
//!
//! Each step notes in the journal what the next one will make. A step that fails leaves the rest to
//! [`clearing`](crate::clearing), which needs to know only this value.

use crate::admission::Commitment;
use crate::clearing::{self, Remains};
use crate::disks::{Base, SaveName};
use crate::error::Shortage;
use crate::guest_channel::GuestChannel;
use crate::journal::{Present, Role, Saves, VmRecord};
use crate::lifecycle::{self, Event, Phase};
use crate::node::Node;
use crate::snapshot::SnapshotUse;
use crate::stage::{Cause, Failure, Stages, timed};
use aenv_network::{Slot, SlotName};
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_vmm::{CaptureFiles, Machine, MachineSpec};
use std::sync::{Arc, Mutex, PoisonError};

/// A VM and what was made for it so far.
#[derive(Clone)]
pub(crate) struct Vm {
    /// As it is, or is about to be, in the journal.
    pub(crate) record: VmRecord,
    /// Its network, once taken.
    pub(crate) slot: Option<Slot>,
    /// Its VMM, once started.
    pub(crate) machine: Option<Arc<dyn Machine>>,
    /// The memory of its guest, for as long as there is a VMM, or one is being started.
    pub(crate) memory: Option<Arc<Commitment>>,
    /// The snapshot whose memory has to stay for it.
    pub(crate) snapshot: Option<Arc<SnapshotUse>>,
    /// The way to its guest daemon that was used last.
    channels: Arc<Mutex<Option<KeptChannel>>>,
}

/// A channel, and the network that it goes through: another network has another guest, or the same one restored elsewhere.
struct KeptChannel {
    slot: SlotName,
    channel: Arc<GuestChannel>,
}

/// What a VM is made from.
pub(crate) enum Origin<'a> {
    /// What was captured: memory, devices and disk.
    Capture {
        /// Memory and devices.
        files: &'a CaptureFiles,
        /// The disk as it was at the same moment.
        disk: &'a Base,
    },
    /// A disk, to be booted.
    Image(&'a Base),
}

impl Origin<'_> {
    fn disk(&self) -> &Base {
        match self {
            Self::Capture { disk, .. } => disk,
            Self::Image(base) => base,
        }
    }
}

impl Vm {
    /// Nothing is made yet, and no memory counted.
    pub(crate) fn new(record: VmRecord) -> Self {
        Self { record, slot: None, machine: None, memory: None, snapshot: None, channels: Arc::default() }
    }

    /// One that is to be made, with the memory that was granted for it.
    pub(crate) fn with_memory(record: VmRecord, memory: Option<Arc<Commitment>>) -> Self {
        Self { memory, ..Self::new(record) }
    }

    /// Takes a network, makes the disk and starts the VMM: prepared for a capture that is still to be loaded, or with a
    /// guest that boots.
    pub(crate) async fn make(
        &mut self,
        node: &Node,
        origin: &Origin<'_>,
        stages: &mut Stages,
    ) -> Result<(), Failure> {
        self.note(node).await?;
        self.make_room(node, origin.disk(), stages).await?;
        self.start(node, origin, stages).await
    }

    async fn make_room(&mut self, node: &Node, base: &Base, stages: &mut Stages) -> Result<(), Failure> {
        let id = &self.record.id;
        let run_dir = node.dir.sandbox_run(id);
        tokio::fs::create_dir_all(&run_dir).await.map_err(|source| {
            Failure::new("disk", file_error(format!("cannot make {}", run_dir.display()), source))
        })?;
        let limit = node.settings.deadlines.step;
        let bytes = self.record.disk_mib.saturating_mul(1 << 20);
        // Both run to their end even when one fails, so that what was made is known.
        let ((slot, slot_time), (disk, disk_time)) = tokio::join!(
            timed(limit, node.parts.slots.acquire()),
            timed(limit, node.disks.make(id, base, bytes)),
        );
        stages.add("slot", slot_time);
        stages.add("disk", disk_time);
        let slot = slot.map_err(|cause| Failure { stage: "slot", cause });
        if let Ok(slot) = &slot {
            self.record.slot = Some(slot.name.clone());
            self.slot = Some(slot.clone());
        }
        self.record.disk = Some(disk.map_err(|cause| Failure { stage: "disk", cause })?);
        slot?;
        self.note(node).await
    }

    async fn start(&mut self, node: &Node, origin: &Origin<'_>, stages: &mut Stages) -> Result<(), Failure> {
        let placement = node.placement(&self.record, self.slot("prepare")?);
        let (vmm, spec, limit) = (&node.parts.vmm, &self.record.spec, node.settings.deadlines.step);
        let machine = match origin {
            Origin::Capture { files, .. } => {
                stages.run("prepare", limit, vmm.prepare(spec, files, placement)).await?
            }
            Origin::Image(_) => stages.run("boot", limit, vmm.boot(spec, placement)).await?,
        };
        self.record.process = Some(machine.record().clone());
        self.machine = Some(Arc::from(machine));
        self.note(node).await
    }

    /// Loads the capture the VMM was prepared for; the vCPUs are stopped after it.
    pub(crate) async fn load(&self, node: &Node, stages: &mut Stages) -> Result<(), Failure> {
        stages.run("load", node.settings.deadlines.step, self.machine("load")?.load()).await
    }

    /// Does something with the guest; fails as soon as the VM ends.
    pub(crate) async fn while_alive<T>(
        &self,
        stage: &'static str,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        let machine = self.machine(stage)?;
        tokio::select! {
            done = work => done,
            exit = machine.wait() => {
                let reason = format!("the VM ended ({:?}): {}", exit.cause, exit.detail);
                Err(Failure::new(stage, Cause::Unexpected(reason)))
            }
        }
    }

    /// Lets the vCPUs run.
    pub(crate) async fn resume(&self, node: &Node, stages: &mut Stages) -> Result<(), Failure> {
        stages.run("resume", node.settings.deadlines.step, self.machine("resume")?.resume()).await
    }

    /// Stops the vCPUs.
    pub(crate) async fn stop(&self, node: &Node, stages: &mut Stages) -> Result<(), Failure> {
        stages.run("stop", node.settings.deadlines.step, self.machine("stop")?.stop()).await
    }

    /// The channel to the guest. Its connection outlives a stop of the guest, so that neither a pause nor a resume has to open one.
    pub(crate) fn channel(&self) -> Result<Arc<GuestChannel>, Failure> {
        let slot = self.slot("init")?;
        let mut kept = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = kept.as_ref().filter(|kept| kept.slot == slot.name) {
            return Ok(Arc::clone(&kept.channel));
        }
        let channel = Arc::new(GuestChannel::new(slot));
        *kept = Some(KeptChannel { slot: slot.name.clone(), channel: Arc::clone(&channel) });
        Ok(channel)
    }

    /// Journals that everything was made and the guest answered.
    pub(crate) async fn started(&mut self, node: &Node, stages: &mut Stages) -> Result<(), Failure> {
        self.record.phase = lifecycle::next(self.record.phase, Event::Started).map_err(|refusal| {
            Failure::new("journal", Cause::Unexpected(format!("it cannot start: {refusal:?}")))
        })?;
        stages.run("journal", node.settings.deadlines.step, node.journal.put(&self.record)).await
    }

    /// The network, which a VM that was made has.
    pub(crate) fn slot(&self, stage: &'static str) -> Result<&Slot, Failure> {
        self.slot
            .as_ref()
            .ok_or_else(|| Failure::new(stage, Cause::Unexpected("it has no network yet".to_owned())))
    }

    /// The machine, which a VM that was made has.
    pub(crate) fn machine(&self, stage: &'static str) -> Result<&Arc<dyn Machine>, Failure> {
        self.machine
            .as_ref()
            .ok_or_else(|| Failure::new(stage, Cause::Unexpected("it has no VMM yet".to_owned())))
    }

    /// Ends the VMM and releases the network of a sandbox that is paused, or about to be again: its disk and saves stay.
    pub(crate) async fn release(&mut self, node: &Node) -> Result<(), Cause> {
        clearing::end_process(node, &Remains::of_vm(self)).await?;
        (self.machine, self.memory) = (None, None);
        if let Some(slot) = &self.record.slot {
            timed(node.settings.deadlines.step, node.parts.slots.release(slot)).await.0?;
        }
        self.slot = None;
        *self.channels.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let mut record = self.record.clone();
        (record.slot, record.process, record.present) = (None, None, Present::default());
        record.saves.drop_unneeded(&record.present);
        node.journal.put(&record).await?;
        self.record = record;
        self.let_snapshot_go();
        Ok(())
    }

    /// Lets a snapshot go that it does not need any more.
    pub(crate) fn let_snapshot_go(&mut self) {
        if self.record.needed_snapshot().is_none() {
            self.snapshot = None;
        }
    }

    /// What those who store it call the save of this number.
    pub(crate) fn save_name(&self, number: u64) -> SaveName {
        SaveName { vm: self.record.id.clone(), number }
    }

    /// Journals the record as it is.
    pub(crate) async fn note(&self, node: &Node) -> Result<(), Failure> {
        node.journal.put(&self.record).await.map_err(|error| Failure::new("journal", error))
    }
}

/// The record of a VM of which nothing is made yet.
pub(crate) fn new_record(
    id: SandboxId,
    role: Role,
    template: &crate::template::Template,
    capture_key: Option<String>,
) -> VmRecord {
    let spec = MachineSpec { vcpus: template.file.vcpus, memory_mib: template.file.memory_mib };
    VmRecord {
        role,
        capture_key,
        disk_mib: template.disk_mib,
        root_bytes: template.file.disk_mib.map(|mib| mib.saturating_mul(1 << 20)),
        ..blank_record(id, spec, template.file.id.clone(), template.file.name.clone())
    }
}

/// The record of a sandbox of which nothing is made yet, nor is known what it will be made from.
pub(crate) fn blank_record(
    id: SandboxId,
    spec: MachineSpec,
    template_id: TemplateId,
    template_name: String,
) -> VmRecord {
    VmRecord {
        id,
        role: Role::Sandbox,
        phase: Phase::Starting,
        template_id,
        template_name,
        capture_key: None,
        parent: None,
        spec,
        disk_mib: 0,
        root_bytes: None,
        disk: None,
        slot: None,
        process: None,
        tenancy: None,
        loss: None,
        saves: Saves::default(),
        present: Present::default(),
    }
}

/// A failed call on a file.
pub(crate) fn file_error(context: String, source: std::io::Error) -> Cause {
    if source.kind() == std::io::ErrorKind::StorageFull {
        Cause::NoCapacity(Shortage::Room(format!("{context}: {source}")))
    } else {
        Cause::File { context, source }
    }
}
