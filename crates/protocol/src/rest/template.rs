//! Templates: what lists them and finds one by name.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One line of `GET /templates` and `GET /v2/templates`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Template {
    /// Its id.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Id of the build that is in use.
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Virtual CPUs of its sandboxes.
    pub cpu_count: u32,
    /// Memory of its sandboxes in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Size of the root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Whether everyone may use it.
    pub public: bool,
    /// Names without a namespace.
    pub aliases: Vec<String>,
    /// Names.
    pub names: Vec<String>,
    /// When it was made.
    pub created_at: jiff::Timestamp,
    /// When it was last changed.
    pub updated_at: jiff::Timestamp,
    /// Who made it; always `null`: a node has no users.
    pub created_by: Option<Value>,
    /// When a sandbox was last made from it; `null` when not known.
    pub last_spawned_at: Option<jiff::Timestamp>,
    /// Sandboxes made from it since the node started.
    pub spawn_count: u64,
    /// Builds it had.
    pub build_count: u32,
    /// Protocol version of the guest daemon.
    pub envd_version: String,
    /// Whether it can be used.
    pub build_status: TemplateBuildStatus,
    /// Hot standbys that wait to be claimed. Ours alone.
    #[serde(default)]
    pub standbys: usize,
    /// Warm standbys that wait to be claimed. Ours alone.
    #[serde(default)]
    pub warm: usize,
    /// Bytes its files occupy on this node. Ours alone.
    #[serde(default)]
    pub stored_bytes: u64,
    /// Why `buildStatus` is `error`. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Whether a template can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TemplateBuildStatus {
    /// Not begun.
    Waiting,
    /// Being made.
    Building,
    /// Can be used.
    Ready,
    /// Could not be made.
    Error,
}

/// Answer to `GET /templates/aliases/{alias}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateAlias {
    /// Id of the template with that name.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Whether everyone may use it.
    pub public: bool,
}
