//! What can go wrong with a sandbox, coarse enough for a caller to act on.

use aenv_protocol::ids::SandboxId;
use serde::{Deserialize, Serialize};

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
    /// The host lacks room: retry elsewhere or later.
    #[error("no capacity on this node: {0}")]
    NoCapacity(String),
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
