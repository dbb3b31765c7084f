//! What the journal holds, one record per VM of this node, whatever its role.
//!
//! The payload is JSON: fields may be added with `#[serde(default)]`; a change of meaning raises
//! [`SCHEMA_VERSION`](super::SCHEMA_VERSION).

use super::saves::{Present, Saves};
use crate::error::LossCause;
use crate::lifecycle::Phase;
use crate::view::OnTimeout;
use aenv_network::SlotName;
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_vmm::{MachineSpec, ProcessRecord};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// What a VM is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Made for a caller.
    Sandbox,
    /// Waits to become a sandbox.
    Standby,
    /// Boots a template in order to capture it.
    Preparation,
}

impl Role {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Standby => "standby",
            Self::Preparation => "preparation",
        }
    }
}

impl Phase {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Capturing => "capturing",
            Self::Paused => "paused",
            Self::Resuming => "resuming",
            Self::Lost => "lost",
            Self::Killing => "killing",
        }
    }
}

/// What makes a VM a caller's sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tenancy {
    /// When it began to run; the moment of the request until then.
    pub(crate) started_at: jiff::Timestamp,
    /// When it is to be ended.
    pub(crate) end_at: jiff::Timestamp,
    /// How long its creator wished it to live; zero in records of earlier versions.
    #[serde(default)]
    pub(crate) life_time: Duration,
    /// Caller's labels.
    pub(crate) metadata: BTreeMap<String, String>,
    /// Environment given to the guest daemon; kept so that a guest can be told again.
    pub(crate) env_vars: BTreeMap<String, String>,
    /// Token the guest daemon demands.
    pub(crate) access_token: Option<String>,
    /// Whether the guest may reach anything outside.
    pub(crate) internet_access: bool,
    /// What becomes of it when its time is over.
    #[serde(default)]
    pub(crate) on_timeout: OnTimeout,
    /// Whether traffic wakes it when it is paused.
    #[serde(default)]
    pub(crate) auto_resume: bool,
}

/// How a sandbox died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loss {
    /// Typed cause.
    pub(crate) cause: LossCause,
    /// Evidence for people.
    pub(crate) detail: String,
}

/// Everything the node must know of a VM to adopt it or to remove it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    /// Names every resource of it.
    pub(crate) id: SandboxId,
    /// What it is for.
    pub(crate) role: Role,
    /// Where it stands.
    pub(crate) phase: Phase,
    /// Template it is made from.
    pub(crate) template_id: TemplateId,
    /// That template's name.
    pub(crate) template_name: String,
    /// Capture it was restored from; none while a template is being prepared.
    pub(crate) capture_key: Option<String>,
    /// The sandbox whose state it was started from, if that was a snapshot or a fork.
    #[serde(default)]
    pub(crate) parent: Option<SandboxId>,
    /// Its virtual hardware.
    pub(crate) spec: MachineSpec,
    /// Size of its root filesystem.
    pub(crate) disk_mib: u64,
    /// To what size its guest is to grow the root filesystem, in bytes, if it boots and its template says so.
    #[serde(default)]
    pub(crate) root_bytes: Option<u64>,
    /// What its VMM opens as its disk, once made.
    #[serde(default)]
    pub(crate) disk: Option<PathBuf>,
    /// Its network, once taken.
    pub(crate) slot: Option<SlotName>,
    /// Its VMM, once started.
    pub(crate) process: Option<ProcessRecord>,
    /// Of a sandbox only.
    pub(crate) tenancy: Option<Tenancy>,
    /// Of a lost sandbox only.
    pub(crate) loss: Option<Loss>,
    /// The states it was saved in.
    #[serde(default)]
    pub(crate) saves: Saves,
    /// What must be known of its present VMM to save its memory.
    #[serde(default)]
    pub(crate) present: Present,
}

impl VmRecord {
    /// The snapshot whose memory has to stay for it: its VMM maps it, or changes that are still to be stored lie over it.
    pub(crate) fn needed_snapshot(&self) -> Option<&TemplateId> {
        let pending = self.saves.kept.iter().filter(|save| save.is_memory_pending()).map(|save| &save.start);
        self.present.start.iter().chain(pending).find_map(|start| start.snapshot.as_ref())
    }

    /// Memory of its guest.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.spec.memory_mib.saturating_mul(1 << 20)
    }
}
