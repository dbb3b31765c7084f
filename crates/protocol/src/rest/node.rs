//! What a node has, and what of it is taken. Ours alone: E2B's API has nothing like it.

use serde::{Deserialize, Serialize};

/// Answer to `GET /node`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Bytes of memory that guests may have together; absent when that is not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
    /// Bytes of memory of all guests whose VM is kept: running, starting, standbys, and paused ones that are hot.
    pub memory_committed_bytes: u64,
    /// Bytes of memory that the host has left; absent when it does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_available_bytes: Option<u64>,
    /// VMs that only wait for somebody give way while less is left; 0: never.
    pub memory_low_bytes: u64,
    /// VMs that are being started.
    pub starting: usize,
    /// How many may be at once.
    pub max_starting: usize,
    /// Requests that wait for a place or for memory.
    pub waiting: usize,
    /// Sandboxes that run.
    pub running: usize,
    /// Sandboxes that are paused.
    pub paused: usize,
    /// Those of them whose VM stands by, so that a resume is hot.
    pub hot: usize,
    /// Standbys of both kinds, of all templates.
    pub standbys: usize,
}
