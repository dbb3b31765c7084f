//! What goes into the orchestrator and what callers see of it. Nothing here is persisted.

use crate::error::LossCause;
use aenv_protocol::ids::{SandboxId, TemplateId};
use serde::{Deserialize, Serialize};
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
    /// What becomes of it when its time is over.
    pub on_timeout: OnTimeout,
    /// Whether traffic wakes it when it is paused.
    pub auto_resume: bool,
}

/// What becomes of a sandbox when its time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It is ended.
    #[default]
    Kill,
    /// It is paused.
    Pause(PauseMode),
}

/// What a pause keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseMode {
    /// Memory and disk: processes go on where they were.
    #[default]
    Full,
    /// The disk only: the guest boots when it is resumed.
    Filesystem,
}

/// What saved state survives. Each level includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Durability {
    /// The death of every process of ours.
    #[default]
    Process,
    /// The loss of power of this host.
    Local,
    /// The loss of this host.
    Published,
}

/// How a sandbox is to be paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PauseRequest {
    /// What is kept.
    pub mode: PauseMode,
    /// What the answer waits for.
    pub durability: Durability,
    /// Whether a guest whose daemon does not answer is not to be paused; else only what it flushed by itself is sure to be
    /// on its disk (all of it is in its memory).
    pub require_healthy_guest: bool,
}

/// Answer to a pause.
#[derive(Debug, Clone)]
pub struct Paused {
    /// The paused sandbox.
    pub sandbox: SandboxView,
    /// Where the time went.
    pub stages: Vec<Stage>,
}

/// How a paused sandbox is to be resumed. One that runs gets the time only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResumeRequest {
    /// Life time that remains at least, from the moment it runs.
    pub timeout: Duration,
    /// Boot from the disk, although there is memory.
    pub reboot: bool,
}

/// Answer to a resume.
#[derive(Debug, Clone)]
pub struct Resumed {
    /// The running sandbox.
    pub sandbox: SandboxView,
    /// Whether it ran already; then nothing was done but to its time.
    pub was_running: bool,
    /// What served it.
    pub tier: Tier,
    /// Where the time went.
    pub stages: Vec<Stage>,
}

/// The state that a sandbox was saved in last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedView {
    /// 1 for the first pause of the sandbox.
    pub number: u64,
    /// When its guest was stopped.
    pub saved_at: jiff::Timestamp,
    /// What was kept.
    pub mode: PauseMode,
    /// What it survives by now.
    pub durability: Durability,
    /// What is still being done for it, or why that fails; none when nothing is left to do.
    pub pending: Option<String>,
    /// Why that fails, while it does; it is tried again.
    pub trouble: Option<SaveTrouble>,
    /// Bytes of memory that wait to be stored, in files of changes: of this save, and of earlier ones that it lies over.
    pub unstored_bytes: u64,
    /// How a resume would be served now.
    pub tier: Tier,
    /// Layers of memory above the template's.
    pub memory_layers: usize,
    /// What this save added to the memory's layers, in bytes, once known.
    pub memory_bytes: Option<u64>,
    /// What the sandbox's disk stored then, beyond its template's, in bytes; none when its store cannot tell.
    pub disk_bytes: Option<u64>,
    /// How long the guest stood still for it.
    pub stopped: Duration,
    /// Whether all that the guest had written was flushed to the disk.
    pub flushed: bool,
    /// Why this is not the last state that the sandbox had; none when it is.
    pub fallback: Option<LossCause>,
}

/// Why a saved state does not become durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaveTrouble {
    /// The host has no room.
    NoCapacity,
    /// The block service does not answer.
    BlockServiceAway,
    /// Anything else.
    Internal,
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
    /// Stands still; its state is saved or just being saved.
    Paused,
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
    /// The sandbox whose state it was started from, if that was a snapshot or a fork.
    pub parent: Option<SandboxId>,
    /// State at that moment.
    pub state: SandboxState,
    /// When it began to run.
    pub started_at: jiff::Timestamp,
    /// When it will be killed.
    pub end_at: jiff::Timestamp,
    /// How long its creator wished it to live.
    pub life_time: Duration,
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
    /// What becomes of it when its time is over.
    pub on_timeout: OnTimeout,
    /// Whether traffic wakes it when it is paused.
    pub auto_resume: bool,
    /// Whether traffic may wake it as it is now: it is paused, or just being paused, with its memory.
    pub woken_by_traffic: bool,
    /// Whether it is just being paused or resumed.
    pub is_changing: bool,
    /// The state it was saved in last; also of one that runs again. None while it is being paused: what counts then is not known yet.
    pub saved: Option<SavedView>,
}

/// A checked wish for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRequest {
    /// A name and a tag, by which it can be asked for; whoever had them before loses them.
    pub name: Option<(String, String)>,
    /// What is kept. Of a paused sandbox no more than was.
    pub mode: PauseMode,
}

/// Visible state of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotState {
    /// It was taken, and is being stored.
    Storing,
    /// Sandboxes can be started from it, and it survives the loss of power.
    Ready,
}

/// A snapshot as callers see it.
#[derive(Debug, Clone)]
pub struct SnapshotView {
    /// Its id, which stands where a template's can.
    pub id: TemplateId,
    /// Its name and tag.
    pub name: Option<(String, String)>,
    /// State at that moment.
    pub state: SnapshotState,
    /// Whose state it is.
    pub source: SandboxId,
    /// What that sandbox was started from.
    pub template_id: TemplateId,
    /// That one's name.
    pub template_name: String,
    /// When the guest was stopped for it.
    pub created_at: jiff::Timestamp,
    /// What was kept.
    pub mode: PauseMode,
    /// Virtual CPUs of what is started from it.
    pub vcpus: u32,
    /// Memory of that in MiB.
    pub memory_mib: u64,
    /// Size of its root disk in MiB.
    pub disk_mib: u64,
    /// Bytes of memory that were stored for it alone.
    pub stored_bytes: u64,
    /// VMs that map its memory now, standbys among them.
    pub users: usize,
    /// Standbys waiting to be claimed.
    pub standbys: usize,
}

/// Answer to a snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotTaken {
    /// The snapshot.
    pub snapshot: SnapshotView,
    /// How long the guest stood still; zero of a paused one.
    pub stopped: Duration,
    /// Where the time went until the guest went on.
    pub stages: Vec<Stage>,
}

/// A checked wish for children of a sandbox, which go on from the state that it has now.
#[derive(Debug, Clone)]
pub struct ForkRequest {
    /// Life time of each child that has none of its own.
    pub timeout: Duration,
    /// What is asked for each of them.
    pub children: Vec<ChildRequest>,
}

/// What is asked for one child of a fork. What is not given is as of the parent.
#[derive(Debug, Clone, Default)]
pub struct ChildRequest {
    /// Labels, instead of the parent's.
    pub metadata: Option<BTreeMap<String, String>>,
    /// Its life time, instead of that of all.
    pub timeout: Option<Duration>,
    /// Environment, over the parent's.
    pub env_vars: BTreeMap<String, String>,
}

/// Answer to a fork.
#[derive(Debug, Clone)]
pub struct Forked {
    /// Of each child: that it runs, or why not.
    pub children: Vec<Result<Created, crate::error::Error>>,
    /// How long the parent's guest stood still; zero of a paused one.
    pub stopped: Duration,
    /// Where the time went until all children ran.
    pub stages: Vec<Stage>,
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

/// What a node has for sandboxes, and what of it is taken, at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes of memory that guests may have together; none when that is not limited.
    pub memory_limit_bytes: Option<u64>,
    /// Bytes of memory of all guests whose VM is kept.
    pub committed_bytes: u64,
    /// Bytes of memory that the host has left; none when it does not tell.
    pub available_bytes: Option<u64>,
    /// Below so many available bytes, VMs that only wait for somebody give way; zero: never.
    pub low_memory_bytes: u64,
    /// VMs that are being started.
    pub starting: usize,
    /// How many may be at once.
    pub max_starting: usize,
    /// Callers that wait for a place or for memory.
    pub waiting: usize,
    /// Sandboxes that run.
    pub running: usize,
    /// Sandboxes that are paused.
    pub paused: usize,
    /// Those of them whose VM stands by, and holds its memory.
    pub hot: usize,
    /// Standbys of both kinds.
    pub standbys: usize,
}

/// What came of pausing all sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PausedAll {
    /// Sandboxes whose saved state survives the loss of power, those that were paused before included.
    pub paused: usize,
    /// Sandboxes of which that is not known: they run on, or are still being paused.
    pub left: usize,
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
