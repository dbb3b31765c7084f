//! Bodies of the guest daemon's REST answers.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Body of every refused REST request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The HTTP status once more: some clients read only the body.
    pub code: u16,
    /// What went wrong, for a person; a few texts are also matched by clients.
    pub message: String,
}

/// One element of the answer of `POST /files`: a file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WrittenFile {
    /// Absolute path.
    pub path: String,
    /// Last part of the path.
    pub name: String,
    /// Always `file`.
    #[serde(rename = "type")]
    pub kind: WrittenKind,
    /// Metadata that was stored with it, by lower-case key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WrittenKind {
    /// A regular file.
    File,
}

/// Answer of `GET /metrics`: use of the guest's resources now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// When it was measured, Unix seconds by the guest's clock.
    pub ts: i64,
    /// Processors.
    pub cpu_count: u32,
    /// Share of the processors' time that was used since the previous request, 0 to 100.
    pub cpu_used_pct: f32,
    /// Bytes of memory.
    pub mem_total: u64,
    /// Bytes of memory that cannot be had at once.
    pub mem_used: u64,
    /// Bytes of memory that hold file contents.
    pub mem_cache: u64,
    /// `mem_total` in MiB.
    pub mem_total_mib: u64,
    /// `mem_used` in MiB.
    pub mem_used_mib: u64,
    /// Bytes of the root filesystem.
    pub disk_total: u64,
    /// Bytes used of the root filesystem.
    pub disk_used: u64,
}
