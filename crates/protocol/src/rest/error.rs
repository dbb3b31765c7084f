//! The one shape of every error answer.

use serde::{Deserialize, Serialize};

/// Body of every answer that is not a success. E2B's JavaScript client decides by `code`, not by the HTTP status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// The HTTP status once more.
    pub code: u16,
    /// For people: what failed, on what, what to do.
    pub message: String,
    /// For programs: one of [`code`], or the cause a sandbox was lost by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_code: Option<String>,
}

/// Values of [`ApiError::error_code`].
pub mod code {
    /// The node has no room: try another one, or later. E2B's word.
    pub const CAPACITY: &str = "sandbox_capacity_unavailable";
    /// Something of ours or of the host failed. E2B's word.
    pub const INTERNAL: &str = "internal_server_error";
    /// The guest daemon does not answer, and the request needs it. E2B's word.
    pub const GUEST_UNRESPONSIVE: &str = "sandbox_snapshot_guest_agent_unresponsive";
    /// The memory was saved by a host that differs from this one. E2B's word.
    pub const NO_COMPATIBLE_NODE: &str = "sandbox_no_compatible_node";
    /// The sandbox is paused, and the request needs one that runs. Ours.
    pub const PAUSED: &str = "sandbox_paused";
    /// The template is known but cannot be used yet.
    pub const TEMPLATE_NOT_READY: &str = "template_not_ready";
    /// Something that the node needs does not answer now: try later. Ours.
    pub const UNAVAILABLE: &str = "service_unavailable";
    /// The node is about to stop.
    pub const SHUTTING_DOWN: &str = "node_shutting_down";
}
