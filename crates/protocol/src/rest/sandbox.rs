//! Sandboxes: what creates, lists, shows and prolongs them.

use super::pause::{PauseMode, SavedState};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Body of `POST /sandboxes` and `POST /v2/sandboxes`. A field that is absent has the default of its route.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NewSandbox {
    /// Template id or name, an optional `:tag` included.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Life time in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Whether the end of the life time pauses instead of kills.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause: Option<bool>,
    /// Whether such a pause keeps the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_pause_memory: Option<bool>,
    /// Whether traffic wakes a paused sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_resume: Option<AutoResume>,
    /// Whether the guest daemon demands a token; `POST /sandboxes` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secure: Option<bool>,
    /// Whether the guest may reach anything outside. The one field of the API in snake case.
    #[serde(default, rename = "allow_internet_access", skip_serializing_if = "Option::is_none")]
    pub allow_internet_access: Option<bool>,
    /// Network policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Map<String, Value>>,
    /// Caller's labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Environment of every process in the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
    /// MCP servers to start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mcp: Option<Map<String, Value>>,
    /// Identity tokens to inject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iam: Option<Map<String, Value>>,
    /// Volumes to mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mounts: Option<Vec<Value>>,
}

/// Value of [`NewSandbox::auto_resume`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutoResume {
    /// Whether it is on.
    pub enabled: bool,
}

/// How to reach a sandbox: answer to create and connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    /// Template it was made from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Without meaning, but required by client models.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// Protocol version of the guest daemon: clients gate features by it.
    pub envd_version: String,
    /// Template's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Token the guest daemon demands; absent when it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Domain of the sandbox's host names; absent leaves it to the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// State of a sandbox in an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxState {
    /// Answers.
    Running,
    /// Stands still; its state is saved, or just being saved.
    Paused,
    /// Died by itself. Ours alone: E2B's clients do not know it, so it is shown only to those that ask for it.
    Lost,
}

/// One line of `GET /sandboxes` and `GET /v2/sandboxes`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListedSandbox {
    /// Template it was made from.
    #[serde(rename = "templateID")]
    pub template_id: String,
    /// Its id.
    #[serde(rename = "sandboxID")]
    pub sandbox_id: String,
    /// Without meaning, but required by client models.
    #[serde(rename = "clientID")]
    pub client_id: String,
    /// When it began to run.
    pub started_at: jiff::Timestamp,
    /// When its life time ends.
    pub end_at: jiff::Timestamp,
    /// Virtual CPUs.
    pub cpu_count: u32,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// Size of the root disk in MiB.
    #[serde(rename = "diskSizeMB")]
    pub disk_size_mb: u64,
    /// Its state.
    pub state: SandboxState,
    /// Protocol version of the guest daemon.
    pub envd_version: String,
    /// Template's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Caller's labels.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// Whether it was paused although its guest daemon did not answer: what its programs had not flushed is in its memory
    /// only. Absent means no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_unresponsive_at_pause: Option<bool>,
    /// The sandbox whose state it was started from, if that was a snapshot or a fork. Ours alone.
    #[serde(default, rename = "parentID", skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<String>,
    /// Why it was lost; only when `state` is `lost`. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_reason: Option<String>,
    /// Evidence of the loss for people; only when `state` is `lost`. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_detail: Option<String>,
}

/// Answer to `GET /sandboxes/{id}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxDetail {
    /// What a list shows of it.
    #[serde(flatten)]
    pub listed: ListedSandbox,
    /// Token the guest daemon demands; absent when it is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub envd_access_token: Option<String>,
    /// Domain of the sandbox's host names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Whether the guest may reach anything outside.
    pub allow_internet_access: bool,
    /// What happens at the end of its life time.
    pub lifecycle: SandboxLifecycle,
    /// What its pause kept; only when `state` is `paused` and it is saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_mode: Option<PauseMode>,
    /// The state it was saved in last, also of one that runs again. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub saved: Option<SavedState>,
    /// Why the guest does not go on when it uses its disk: `disk_waits_for_room`, `block_service_away`. It goes on by itself.
    /// Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_reason: Option<String>,
    /// Evidence of the wait for people. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_detail: Option<String>,
}

/// What happens at the end of a life time, and afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxLifecycle {
    /// Whether traffic wakes it.
    pub auto_resume: bool,
    /// What the end of the life time does.
    pub on_timeout: OnTimeout,
}

/// What the end of a life time does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnTimeout {
    /// The sandbox is gone.
    Kill,
    /// The sandbox is paused.
    Pause,
}

/// Body of `POST /sandboxes/{id}/timeout`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeoutRequest {
    /// Life time from now in seconds; it may be shorter than what is left. Zero and less end the sandbox.
    pub timeout: i64,
}

/// Body of `POST /sandboxes/{id}/refreshes`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefreshRequest {
    /// Life time left at least after the call, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_create_body_of_the_python_client_is_read_and_unknown_fields_are_tolerated() {
        let body = r#"{"templateID":"base","timeout":300,"metadata":{},"envVars":{"A":"b"},
                       "allow_internet_access":true,"fromTheFuture":{"x":1}}"#;
        let request: NewSandbox = serde_json::from_str(body).unwrap();
        assert_eq!(request.template_id, "base");
        assert_eq!(request.allow_internet_access, Some(true));
        assert_eq!(request.env_vars.unwrap()["A"], "b");
    }

    #[test]
    fn a_detail_has_every_field_the_python_model_requires() {
        let detail = SandboxDetail {
            listed: ListedSandbox {
                template_id: "t".into(),
                sandbox_id: "i1".into(),
                client_id: "c".into(),
                started_at: jiff::Timestamp::UNIX_EPOCH,
                end_at: jiff::Timestamp::UNIX_EPOCH,
                cpu_count: 2,
                memory_mb: 512,
                disk_size_mb: 1024,
                state: SandboxState::Running,
                envd_version: "0.6.13".into(),
                alias: None,
                metadata: BTreeMap::new(),
                envd_unresponsive_at_pause: None,
                parent_id: None,
                lost_reason: None,
                lost_detail: None,
            },
            envd_access_token: None,
            domain: None,
            allow_internet_access: true,
            lifecycle: SandboxLifecycle { auto_resume: false, on_timeout: OnTimeout::Kill },
            pause_mode: None,
            saved: None,
            wait_reason: None,
            wait_detail: None,
        };
        let json = serde_json::to_value(&detail).unwrap();
        for field in [
            "templateID",
            "sandboxID",
            "clientID",
            "startedAt",
            "endAt",
            "envdVersion",
            "cpuCount",
            "memoryMB",
            "diskSizeMB",
            "state",
        ] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["startedAt"], "1970-01-01T00:00:00Z");
        assert_eq!(json["lifecycle"], serde_json::json!({"autoResume": false, "onTimeout": "kill"}));
        assert_eq!(serde_json::from_value::<SandboxDetail>(json).unwrap(), detail);
    }
}
