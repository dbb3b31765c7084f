//! What a sandbox is made from: a template's capture, or a snapshot.

use crate::journal::{Role, VmRecord};
use crate::node::Node;
use crate::snapshot::{SnapshotStart, SnapshotUse};
use crate::standby::{OnDemand, StandbyPool};
use crate::template::{Capture, Template};
use crate::vm::{Origin, new_record};
use aenv_protocol::ids::SandboxId;
use std::sync::Arc;

/// One of them, ready to be started from.
#[derive(Clone)]
pub(crate) enum Source {
    Template { template: Arc<Template>, capture: Arc<Capture> },
    Snapshot(Arc<SnapshotStart>),
}

impl Source {
    /// What is shown of it in logs.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Template { template, .. } => template.file.name.clone(),
            Self::Snapshot(start) => start.name(),
        }
    }

    /// Memory of the guest.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self {
            Self::Template { template, .. } => template.memory_bytes(),
            Self::Snapshot(start) => start.memory_bytes(),
        }
    }

    /// The record of a sandbox that is made from it without a standby.
    pub(crate) fn new_record(&self, id: SandboxId) -> VmRecord {
        match self {
            Self::Template { template, capture } => {
                new_record(id, Role::Sandbox, template, Some(capture.key.clone()))
            }
            Self::Snapshot(start) => start.new_record(id),
        }
    }

    /// What the VM is made of.
    pub(crate) fn origin(&self) -> Origin<'_> {
        match self {
            Self::Template { capture, .. } => capture.origin(),
            Self::Snapshot(start) => start.origin(),
        }
    }

    /// Whether the guest boots.
    pub(crate) fn boots(&self) -> bool {
        matches!(self, Self::Snapshot(start) if start.boots())
    }

    /// What the guest daemon demands until it is greeted.
    pub(crate) fn access_token(&self) -> Option<&str> {
        match self {
            Self::Template { .. } => None,
            Self::Snapshot(start) => start.access_token(),
        }
    }

    /// What has to stay as long as the VM lives.
    pub(crate) fn used(&self) -> Option<Arc<SnapshotUse>> {
        match self {
            Self::Template { .. } => None,
            Self::Snapshot(start) => Some(start.used()),
        }
    }

    /// Its standbys; none where there never are any: children of a fork are all made at once, and a guest that boots gains nothing.
    pub(crate) fn pool(&self) -> Option<&StandbyPool> {
        match self {
            Self::Template { template, .. } => Some(&template.pool),
            Self::Snapshot(_) => self.on_demand().map(|standbys| &standbys.pool),
        }
    }

    /// Of a snapshot, if it may have standbys.
    pub(crate) fn on_demand(&self) -> Option<&OnDemand> {
        match self {
            Self::Template { .. } => None,
            Self::Snapshot(start) => start.standbys(),
        }
    }

    /// Somebody wants a sandbox of it.
    pub(crate) fn note_start(&self, node: &Arc<Node>) {
        if let Some(standbys) = self.on_demand() {
            standbys.note_start(node, self);
        }
    }

    /// A sandbox was made from it.
    pub(crate) fn count_sandbox(&self) {
        if let Self::Template { template, .. } = self {
            template.count_sandbox();
        }
    }
}
