//! Pausing and resuming: bodies of the requests, and what is told of a saved state.

use serde::{Deserialize, Serialize};

/// Body of `POST /sandboxes/{id}/pause`; may be absent as a whole.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PauseBody {
    /// Whether the memory is kept; if not, the guest boots when it is resumed. Absent means it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// Whether a guest whose daemon does not answer is left running and the request refused. Absent means it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub require_healthy_guest: Option<bool>,
    /// What the answer waits for; absent means `process`. Ours alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durability: Option<Durability>,
}

/// Body of `POST …/connect` and of `POST /sandboxes/{id}/resume`. `POST /sandboxes/{id}/connect` demands the timeout, the
/// others have defaults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectRequest {
    /// Life time left at least after the call, in seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Whether a paused sandbox goes on from its memory; `false` boots its disk. Nothing to one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<bool>,
    /// The same wish in the word that E2B's newer API has for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_resume: Option<OnResume>,
}

/// How a paused sandbox is resumed, where its memory shall not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnResume {
    /// Its disk is booted.
    Reboot,
}

/// What a saved state survives; each level includes those before it. Ours alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// The death of every process of the node.
    Process,
    /// The loss of power of the node's host.
    Local,
    /// The loss of that host.
    Published,
}

impl Durability {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Local => "local",
            Self::Published => "published",
        }
    }
}

/// What a pause kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PauseMode {
    /// Memory and disk.
    Full,
    /// The disk alone: the guest boots when it is resumed.
    Filesystem,
}

impl PauseMode {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Filesystem => "filesystem",
        }
    }
}

/// The state that a sandbox was saved in last. Ours alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedState {
    /// 1 for the first pause of the sandbox.
    pub number: u64,
    /// When its guest was stopped.
    pub saved_at: jiff::Timestamp,
    /// What was kept.
    pub mode: PauseMode,
    /// What it survives by now.
    pub durability: Durability,
    /// How a resume would be served now: `hot`, `warm` or `cold`.
    pub tier: String,
    /// Layers of memory above the template's.
    pub memory_layers: u64,
    /// Bytes that this save added to the layers of memory; absent until known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Bytes that the sandbox's disk stored then, beyond its template's; absent where disks share blocks by their filesystem.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// How long the guest stood still for it, in milliseconds.
    pub stopped_ms: f64,
    /// Whether all that the guest had written was flushed to its disk.
    pub flushed: bool,
    /// Why this is not the last state that the sandbox had, in the words of `lostReason`; absent when it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// What is still being done for it, or why that fails; absent when nothing is left to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    /// Why that fails, while it does, in the words of `error_code`, or `block_service_away`. It is tried again, and `durability`
    /// tells what is true meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Bytes of memory that wait to be stored, in files beside the layers; absent when there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unstored_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn bodies_of_every_client_are_read() {
        let pause = |text: &str| serde_json::from_str::<PauseBody>(text).unwrap();
        assert_eq!(pause("{}"), PauseBody::default());
        let of_python = pause(r#"{"memory":false,"requireHealthyGuest":true,"fromTheFuture":1}"#);
        assert_eq!((of_python.memory, of_python.require_healthy_guest), (Some(false), Some(true)));
        assert_eq!(pause(r#"{"durability":"local"}"#).durability, Some(Durability::Local));
        assert!(serde_json::from_str::<PauseBody>(r#"{"durability":"forever"}"#).is_err());
        let old = serde_json::from_str::<ConnectRequest>(r#"{"timeout":15,"autoPause":true}"#).unwrap();
        assert_eq!(old, ConnectRequest { timeout: Some(15), ..ConnectRequest::default() });
        let reboot = ConnectRequest { on_resume: Some(OnResume::Reboot), ..ConnectRequest::default() };
        assert_eq!(serde_json::to_value(reboot).unwrap(), json!({"onResume": "reboot"}));
    }

    #[test]
    fn words_are_those_on_the_wire() {
        for level in [Durability::Process, Durability::Local, Durability::Published] {
            assert_eq!(serde_json::to_value(level).unwrap(), level.as_str());
        }
        for mode in [PauseMode::Full, PauseMode::Filesystem] {
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.as_str());
        }
    }
}
