//! What the journal holds of snapshots: states of sandboxes that are kept for themselves, and that sandboxes can be started from.
//!
//! ```text
//! claimed ──────────▶ handed over ──────────▶ deleted ──────────▶ (none)
//!   a save of its       has parts of its        is shown to nobody;
//!   source names it     own; may be started     goes when no VMM maps it
//! ```
//! The claim is written together with the save that it is on, and taken from it together with the parts: whatever is killed in
//! between, the snapshot is the save's, or its own.

use super::saves::MemoryBinding;
use crate::disks::SnapshotParts;
use crate::view::PauseMode;
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_vmm::MachineSpec;
use serde::{Deserialize, Serialize};

/// What a snapshot is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// Callers asked for it: it stays until they delete it.
    Kept,
    /// Children of a fork are made of it; it is deleted as soon as they are.
    Fork,
}

/// Everything that must be known of a snapshot to start sandboxes from it, or to remove it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    /// Names every resource of it, and is what callers start sandboxes from.
    pub(crate) id: TemplateId,
    /// What it is for.
    pub(crate) purpose: Purpose,
    /// By what else it can be asked for: a name and a tag.
    #[serde(default)]
    pub(crate) name: Option<(String, String)>,
    /// Whose state it is.
    pub(crate) source: SandboxId,
    /// What that sandbox was started from: a template, or another snapshot.
    pub(crate) template_id: TemplateId,
    /// That one's name.
    pub(crate) template_name: String,
    /// When its guest was stopped.
    pub(crate) created_at: jiff::Timestamp,
    /// What was kept.
    pub(crate) mode: PauseMode,
    /// The virtual hardware of what is started from it.
    pub(crate) spec: MachineSpec,
    /// Size of the root filesystem.
    pub(crate) disk_mib: u64,
    /// As of the source's record.
    #[serde(default)]
    pub(crate) root_bytes: Option<u64>,
    /// What its memory was made with.
    pub(crate) binding: MemoryBinding,
    /// What its guest daemon demands until it is greeted.
    pub(crate) access_token: Option<String>,
    /// What it is made of, once that is its own.
    #[serde(default)]
    pub(crate) parts: Option<SnapshotParts>,
    /// What was stored for it alone, in bytes, as far as that is known.
    #[serde(default)]
    pub(crate) stored_bytes: u64,
    /// It is to go.
    #[serde(default)]
    pub(crate) is_deleted: bool,
}

impl SnapshotRecord {
    /// Memory of its guest.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.spec.memory_mib.saturating_mul(1 << 20)
    }
}
