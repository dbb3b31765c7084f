//! What can go wrong with a sandbox, coarse enough for a caller to act on.

use aenv_protocol::ids::{SandboxId, TemplateId};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Why a sandbox died without being asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossCause {
    /// The guest's kernel panicked.
    GuestPanic,
    /// The guest shut itself down or rebooted.
    GuestShutdown,
    /// The VMM was killed from outside, the host's OOM killer included.
    VmmKilled,
    /// The VMM ended by itself with an error.
    VmmCrashed,
    /// The kernel ended the VMM because the memory limit of its control group was reached, or the host's.
    OutOfMemory,
    /// The guest daemon did not answer after an adoption. Only in journals of earlier versions: such a sandbox is kept now.
    GuestUnresponsive,
    /// The host restarted: its VMMs are gone.
    HostRestarted,
}

/// What a node lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// Too much memory is promised to guests.
    #[error(
        "memory: {} MiB needed, {} MiB committed of {} MiB{}: end or pause sandboxes, or raise AENV_MEMORY_LIMIT_MIB",
        needed_bytes >> 20, committed_bytes >> 20, limit_bytes >> 20, in_vain("nothing gave way", *waited)
    )]
    Memory {
        /// Memory of the guest that was to start.
        needed_bytes: u64,
        /// Memory of all guests whose VM is kept.
        committed_bytes: u64,
        /// What may be committed.
        limit_bytes: u64,
        /// How long it was waited for; zero when not at all.
        waited: Duration,
    },
    /// Too many sandboxes are being started.
    #[error(
        "places: {starting} sandboxes are being started of {most} at once, and {waiting} wait{}",
        in_vain("no turn came", *waited)
    )]
    Places {
        /// Sandboxes that are being started.
        starting: usize,
        /// How many may be at once.
        most: usize,
        /// How many wait for that.
        waiting: usize,
        /// How long it was waited for; zero when not at all.
        waited: Duration,
    },
    /// A disk is full, or there are no networks left; the text says which and what to do.
    #[error("{0}")]
    Room(String),
}

fn in_vain(what: &str, waited: Duration) -> String {
    if waited.is_zero() { String::new() } else { format!(", and {what} within {waited:?}") }
}

/// Errors of the orchestrator. Each variant says what the caller should do next.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No such sandbox, or not any more: do not retry.
    #[error("Sandbox \"{0}\" doesn't exist or you don't have access to it")]
    SandboxNotFound(SandboxId),
    /// The sandbox died by itself: do not retry; the cause is typed.
    #[error("Sandbox \"{id}\" was lost: {detail}")]
    SandboxLost {
        /// Which sandbox.
        id: SandboxId,
        /// Typed cause.
        cause: LossCause,
        /// Evidence for people.
        detail: String,
    },
    /// No template of that name or id: do not retry.
    #[error("template {0:?} does not exist; `aenv template ls` lists those that do")]
    TemplateNotFound(String),
    /// The template exists but is still being prepared: retry later.
    #[error("template {name:?} is not ready: {reason}")]
    TemplateNotReady {
        /// Which template.
        name: String,
        /// What is being done, or why it failed.
        reason: String,
    },
    /// A value is out of its range: do not retry.
    #[error("{field}: {reason}")]
    InvalidArgument {
        /// Name of the offending field as the caller spelled it.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The sandbox is in a state that forbids this; the text says which.
    #[error("{0}")]
    Conflict(String),
    /// The sandbox is paused already.
    #[error("Sandbox \"{0}\" is already paused")]
    AlreadyPaused(SandboxId),
    /// The sandbox is paused, and what was asked needs one that runs: resume it first.
    #[error("Sandbox \"{0}\" is paused: resume it first")]
    IsPaused(SandboxId),
    /// The sandbox is just being paused or resumed: try again in a moment.
    #[error("Sandbox \"{0}\" is still transitioning. Try again in a moment.")]
    Transitioning(SandboxId),
    /// The guest daemon does not answer, and what was asked needs it.
    #[error("the guest daemon of sandbox {id} does not answer: {reason}")]
    GuestUnresponsive {
        /// Which sandbox.
        id: SandboxId,
        /// What was seen.
        reason: String,
    },
    /// Memory was saved by another driver, version or processor model than this node has. The disk can be booted.
    #[error(
        "the memory of sandbox {id} cannot be resumed here: {reason}; its disk can be booted (onResume: reboot)"
    )]
    Incompatible {
        /// Which sandbox.
        id: SandboxId,
        /// What differs.
        reason: String,
    },
    /// The memory of a snapshot was saved by another driver, version or processor model than this node has.
    #[error("the memory of snapshot {id} cannot be resumed here: {reason}")]
    SnapshotIncompatible {
        /// Which snapshot.
        id: TemplateId,
        /// What differs.
        reason: String,
    },
    /// The node or its host lacks something: retry elsewhere or later.
    #[error("no capacity on this node: {0}")]
    NoCapacity(Shortage),
    /// A service that the node needs does not answer now: retry later. The text names it.
    #[error("{context}: {reason}")]
    Unavailable {
        /// What was being done, on what.
        context: String,
        /// What does not answer.
        reason: String,
    },
    /// The node is shutting down: retry elsewhere.
    #[error("this node is shutting down")]
    ShuttingDown,
    /// Something of ours or of the host failed; the text names it.
    #[error("{context}: {reason}")]
    Internal {
        /// What was being done, on what.
        context: String,
        /// Cause chain.
        reason: String,
    },
}
