//! What a sandbox is started from, when that is a snapshot.

use super::{STATE, Snapshot, SnapshotUse};
use crate::disks::Base;
use crate::error::Error;
use crate::journal::{Purpose, SnapshotRecord, Start, VmRecord};
use crate::node::Node;
use crate::resuming::difference;
use crate::stage::{Failure, timed};
use crate::standby::OnDemand;
use crate::view::PauseMode;
use crate::vm::{Origin, blank_record};
use aenv_protocol::ids::SandboxId;
use aenv_vmm::CaptureFiles;
use std::sync::Arc;

/// A snapshot that a VM is started from.
pub(crate) struct SnapshotStart {
    used: Arc<SnapshotUse>,
    record: SnapshotRecord,
    disk: Base,
    /// None when the guest is to boot.
    memory: Option<(CaptureFiles, Start)>,
}

/// Finds out whether and how a sandbox can be started from a snapshot.
pub(crate) async fn start_of(node: &Node, snapshot: &Arc<Snapshot>) -> Result<SnapshotStart, Error> {
    // First, so that it stays from here on.
    let used = snapshot.take();
    if let Some(gone) = snapshot.gone() {
        // Deleted since it was found.
        return Err(gone);
    }
    let record = snapshot.record();
    let Some(parts) = record.parts.clone() else {
        let name = record.id.to_string();
        return Err(Error::TemplateNotReady { name, reason: "it is still being stored".to_owned() });
    };
    let memory = match (record.mode, parts.memory) {
        (PauseMode::Filesystem, _) | (_, None) => None,
        (PauseMode::Full, Some(chain)) => {
            if let Some(reason) = difference(&record.binding, &node.binding) {
                return Err(Error::SnapshotIncompatible { id: record.id, reason });
            }
            let export = || async {
                let exported = node.disks.snapshot_memory(&record.id, &chain, record.memory_bytes());
                timed(node.settings.deadlines.memory, exported).await.0
            };
            let memory = snapshot.memory.get_or_try_init(export).await;
            let memory = memory.map_err(|cause| {
                Failure::new("memory", cause).into_error("starting a sandbox from a snapshot")
            })?;
            let state = node.dir.snapshot(&record.id).join(STATE);
            let start = Start { chain, save: None, snapshot: Some(record.id.clone()) };
            Some((CaptureFiles { memory: memory.clone(), state }, start))
        }
    };
    Ok(SnapshotStart { used, disk: parts.disk, memory, record })
}

impl SnapshotStart {
    /// What is shown of it in logs.
    pub(crate) fn name(&self) -> String {
        self.record.id.to_string()
    }

    /// Of one that callers see, and whose guests are restored.
    pub(crate) fn standbys(&self) -> Option<&OnDemand> {
        let may_have = self.record.purpose == Purpose::Kept && !self.boots();
        may_have.then_some(&self.used.snapshot.standbys)
    }

    /// Memory of the guest.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.record.memory_bytes()
    }

    /// What the guest daemon demands until it is greeted; nothing when it has just booted.
    pub(crate) fn access_token(&self) -> Option<&str> {
        self.record.access_token.as_deref().filter(|_| self.memory.is_some())
    }

    /// Whether the guest boots.
    pub(crate) fn boots(&self) -> bool {
        self.memory.is_none()
    }

    /// As long as the VM lives.
    pub(crate) fn used(&self) -> Arc<SnapshotUse> {
        Arc::clone(&self.used)
    }

    /// What the VM is made of.
    pub(crate) fn origin(&self) -> Origin<'_> {
        match &self.memory {
            Some((files, _)) => Origin::Capture { files, disk: &self.disk },
            None => Origin::Image(&self.disk),
        }
    }

    /// The record of a sandbox that is made from it. A child of a fork is of the template that its parent is of.
    pub(crate) fn new_record(&self, id: SandboxId) -> VmRecord {
        let record = &self.record;
        let (template_id, template_name) = match record.purpose {
            Purpose::Fork => (record.template_id.clone(), record.template_name.clone()),
            Purpose::Kept => {
                let name = record.name.as_ref().map_or_else(|| record.id.to_string(), |name| name.0.clone());
                (record.id.clone(), name)
            }
        };
        let mut new = blank_record(id, record.spec.clone(), template_id, template_name);
        (new.disk_mib, new.root_bytes) = (record.disk_mib, record.root_bytes);
        new.parent = Some(record.source.clone());
        let start = self.memory.as_ref().map_or_else(Start::default, |(_, start)| start.clone());
        new.present.start = Some(start);
        new
    }
}
