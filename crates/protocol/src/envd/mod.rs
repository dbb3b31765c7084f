//! What the node, the command line and E2B's SDKs say to the guest daemon.
//!
//! The protocol is that of E2B's envd 0.6.13 (REST plus Connect RPC on one port); what is ours alone is marked.
//! Owns no state and performs no I/O.
//!
//! | module | what |
//! |---|---|
//! | this one | constants, bodies of `/init` |
//! | [`files`] | bodies of `/files`, `/metrics`, errors |
//! | [`signature`] | signed file URLs |
//! | [`process`] | generated: messages, [`process::Process`] (server trait), [`process::ProcessClient`] |
//! | [`filesystem`] | generated: messages, [`filesystem::Filesystem`] (server trait), [`filesystem::FilesystemClient`] |

pub mod files;
pub mod signature;

#[expect(
    missing_docs,
    clippy::allow_attributes_without_reason,
    clippy::semicolon_if_nothing_returned,
    reason = "generated"
)]
// The lint is silent in test builds, where the expectation would not be met.
#[cfg_attr(not(test), expect(clippy::wildcard_imports, reason = "generated"))]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/envd_services.rs"));
}
pub use generated::{filesystem, process};

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// TCP port of the guest daemon inside every guest. Source: E2B's SDKs.
pub const ENVD_PORT: u16 = 49983;
/// TCP port of the guest daemon's relay, ours alone: a connection whose first line is `<port>\n` is answered with `ok\n`
/// (or `refused\n` and the end of the stream) and then carried to `127.0.0.1:<port>` of the guest.
/// The node uses it to reach programs that listen on the guest's loopback only.
pub const RELAY_PORT: u16 = 49982;
/// The envd version we are compatible with, reported as `envdVersion`: E2B's SDKs gate features by it.
pub const ENVD_VERSION: &str = "0.6.13";
/// Name of the kernel argument, ours alone, by which the node tells a guest that boots how large its root filesystem is to
/// be, in bytes.
pub const ROOT_BYTES_ARGUMENT: &str = "aenv.root_bytes";
/// Header that carries a sandbox's access token.
pub const ACCESS_TOKEN_HEADER: &str = "x-access-token";

/// Body of `POST /sync`, sent by the node before it stops a guest; may be absent. Ours alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SyncRequest {
    /// Whether all programs stand still from then on, until the next `/init`.
    pub freeze: bool,
}

/// Body of `POST /init`, sent by the node after every boot and restore, before any user process runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InitRequest {
    /// Environment of every process started later; replaces what an earlier `/init` set.
    pub env_vars: BTreeMap<String, String>,
    /// Token that later requests must carry in [`ACCESS_TOKEN_HEADER`]; absent opens the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Host's realtime, RFC 3339 with nanoseconds. The guest's clock is stepped to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<String>,
    /// User of requests that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Directory of processes and paths that name none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// The identity this guest takes; absent leaves the one it has. Ours alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
}

/// What makes one restored guest different from its siblings. Ours alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// Shown as `E2B_SANDBOX_ID`.
    pub sandbox_id: String,
    /// Shown as `E2B_TEMPLATE_ID`.
    pub template_id: String,
    /// Kernel hostname and `/etc/hostname`.
    pub hostname: String,
    /// 32 lower-case hex digits for `/etc/machine-id`.
    pub machine_id: String,
    /// Base64 of at least 32 random bytes, credited to the kernel's random number generator.
    pub entropy: String,
}
