//! What goes into the orchestrator and what callers see of it. Nothing here is persisted.

use crate::error::LossCause;
use aenv_protocol::ids::{SandboxId, TemplateId};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A checked wish for a new sandbox.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// Template id or name, an optional `:tag` included, as the caller wrote it.
    pub template: String,
    /// Life time from the moment the sandbox runs.
    pub timeout: Duration,
    /// Caller's labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    /// Whether the guest daemon must demand an access token.
    pub secure: bool,
    /// Whether the guest may reach anything outside.
    pub internet_access: bool,
}

/// How ready the thing was that served a create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// A standby was claimed whose guest was restored, greeted and stopped.
    Hot,
    /// A standby was claimed whose VMM process had only to load the capture.
    Warm,
    /// Everything was made for this request.
    Cold,
}

impl Tier {
    /// `hot`, `warm` or `cold`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// One timed part of an operation, in order of execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Name, a token of `[a-z_]`.
    pub name: &'static str,
    /// How long it took.
    pub duration: Duration,
}

/// Answer to a create.
#[derive(Debug, Clone)]
pub struct Created {
    /// The running sandbox.
    pub sandbox: SandboxView,
    /// What served it.
    pub tier: Tier,
    /// Where the time went.
    pub stages: Vec<Stage>,
}

/// Visible state of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxState {
    /// Being made; not yet listed.
    Starting,
    /// Answers.
    Running,
    /// Being ended; no longer listed.
    Killing,
    /// Died by itself; kept until its time is over.
    Lost {
        /// Typed cause.
        cause: LossCause,
        /// Evidence for people.
        detail: String,
    },
}

/// A sandbox as callers see it: a copy of one moment.
#[derive(Debug, Clone)]
pub struct SandboxView {
    /// Its id.
    pub id: SandboxId,
    /// Template it was made from.
    pub template_id: TemplateId,
    /// Template's name.
    pub template_name: String,
    /// State at that moment.
    pub state: SandboxState,
    /// When it began to run.
    pub started_at: jiff::Timestamp,
    /// When it will be killed.
    pub end_at: jiff::Timestamp,
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Size of the root disk in MiB.
    pub disk_mib: u64,
    /// Caller's labels.
    pub metadata: BTreeMap<String, String>,
    /// Token the guest daemon demands, if secured.
    pub access_token: Option<String>,
    /// Whether the guest may reach anything outside.
    pub internet_access: bool,
}

/// Visible state of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateState {
    /// Its capture is being made.
    Preparing,
    /// Sandboxes can be made from it.
    Ready,
    /// Its capture could not be made.
    Failed(String),
}

/// A template as callers see it.
#[derive(Debug, Clone)]
pub struct TemplateView {
    /// Its id.
    pub id: TemplateId,
    /// Its name.
    pub name: String,
    /// State at that moment.
    pub state: TemplateState,
    /// Virtual CPUs of its sandboxes.
    pub vcpus: u32,
    /// Memory of its sandboxes in MiB.
    pub memory_mib: u64,
    /// Size of the root disk in MiB.
    pub disk_mib: u64,
    /// Bytes its files occupy on this node.
    pub stored_bytes: u64,
    /// When it was made.
    pub created_at: jiff::Timestamp,
    /// How many sandboxes were made from it since the node started.
    pub spawn_count: u64,
    /// Hot standbys waiting to be claimed.
    pub standbys: usize,
    /// Warm standbys waiting to be claimed.
    pub warm: usize,
}

/// Why a guest that runs does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitCause {
    /// The host has no room for what it writes. It goes on by itself when there is room again.
    DiskWaitsForRoom,
    /// The block service does not answer: whoever reads or writes the disk waits for its next start.
    BlockServiceAway,
}

/// What a guest waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// Typed cause.
    pub cause: WaitCause,
    /// Evidence for people.
    pub detail: String,
}

/// What was removed, because no sandbox, capture or template is made of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Disks of captures that are gone.
    pub captures: u64,
    /// Layer files.
    pub layers: u64,
    /// Directories that belonged to no disk.
    pub directories: u64,
    /// What the file system stored for layer files and directories, in bytes.
    pub bytes: u64,
}

/// Opens TCP connections into one sandbox.
#[async_trait::async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Connects to a port of the guest.
    ///
    /// # Errors
    /// `ConnectionRefused` when nothing listens there; others when the guest does not answer.
    async fn dial(&self, port: u16) -> std::io::Result<tokio::net::TcpStream>;
}

/// How to reach a running sandbox. Valid for one lifecycle: a sandbox that was killed never gets the same route again.
#[derive(Clone)]
pub struct Route {
    /// Which sandbox.
    pub id: SandboxId,
    /// Different for every start of the same sandbox; pools of connections are keyed by it.
    pub lifecycle: u64,
    /// Opens connections.
    pub dialer: Arc<dyn Dial>,
    /// Cancelled when the lifecycle ends: every stream must then be **broken**, not ended.
    pub ended: CancellationToken,
    /// Token for checking signed file URLs.
    pub access_token: Option<String>,
    /// Guest's address, for logs.
    pub guest_address: IpAddr,
}
