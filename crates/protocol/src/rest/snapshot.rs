//! Snapshots and forks: bodies of the requests and answers.

use super::error::ApiError;
use super::pause::PauseMode;
use super::sandbox::Sandbox;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Body of `POST /sandboxes/{id}/snapshots`; may be absent as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSnapshot {
    /// A name, an optional `:tag` included, by which the snapshot can be asked for. A snapshot that had them before loses them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether the memory is kept; if not, what is started from it boots. Absent means it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
}

/// A snapshot: answer to `POST /sandboxes/{id}/snapshots`, line of `GET /snapshots`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// Stands where a template's id can.
    #[serde(rename = "snapshotID")]
    pub snapshot_id: String,
    /// Its name, with its tag if that is another than `default`; none when it has none.
    pub names: Vec<String>,
    /// The sandbox whose state it is. Ours alone, as all that follows.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// What that sandbox was started from: a template, or a snapshot.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// That one's name.
    pub alias: String,
    /// When the guest was stopped for it.
    pub created_at: jiff::Timestamp,
    /// What was kept.
    pub mode: PauseMode,
    /// `ready`, or `storing` until it can be started from and survives the loss of power.
    pub state: SnapshotState,
    /// Virtual CPUs of what is started from it.
    pub cpu_count: u32,
    /// Memory of that in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Size of its root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Bytes of memory that were stored for it alone.
    pub stored_bytes: u64,
    /// Virtual machines that map its memory now, standbys among them.
    pub users: usize,
    /// Standbys that the next sandboxes of it are made from; there are some while it is often started from.
    #[serde(default)]
    pub standbys: usize,
}

/// Where a snapshot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    /// It was taken and is being stored.
    Storing,
    /// It can be started from.
    Ready,
}

/// Body of `POST /sandboxes/{id}/fork`; may be absent as a whole.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ForkBody {
    /// Life time of each child in seconds; absent means 15.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// How many children, 1 to 100; absent means one, or as many as are described.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<i64>,
    /// What is asked for each child, in order; either none or all of them. Ours alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<ChildBody>,
}

/// What is asked for one child of a fork. Ours alone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ChildBody {
    /// Labels instead of the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Its life time in seconds, instead of that of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Environment of processes that are started from now on, over the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
}

/// One child of a fork in the answer: the sandbox, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ForkedChild {
    /// It runs.
    Sandbox(Sandbox),
    /// It could not be started; the others are not touched.
    Error(ApiError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_child_is_a_sandbox_or_an_error() {
        let error = ApiError { code: 503, message: "full".to_owned(), error_code: None };
        let value = serde_json::to_value(ForkedChild::Error(error)).unwrap();
        assert_eq!(value, json!({"error": {"code": 503, "message": "full"}}));
        let body = json!({"timeout": 60, "count": 2});
        let read: ForkBody = serde_json::from_value(body.clone()).unwrap();
        assert_eq!((read.timeout, read.count, read.children.len()), (Some(60), Some(2), 0));
        assert_eq!(serde_json::to_value(read).unwrap(), body);
    }
}
