//! What the orchestrator is started with. Values only: read from files and environment by the program, never here.

use crate::host_memory::HostMemory;
use aenv_network::Slots;
use aenv_vmm::Vmm;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The crates that act, as the orchestrator sees them.
#[derive(Clone)]
pub struct Parts {
    /// Makes machines.
    pub vmm: Arc<dyn Vmm>,
    /// Makes networks.
    pub slots: Arc<dyn Slots>,
    /// Measures the host's memory.
    pub memory: Arc<dyn HostMemory>,
    /// Is shown every commit of the journal. None but where a test ends the node at one of them.
    pub journal: Option<Arc<dyn JournalWatch>>,
}

/// Looks at the commits of the journal, on the journal's own thread: while it looks, nothing is written. When it breaks off,
/// nothing ever is any more and the data directory is free, as if the process had been killed at that moment.
pub trait JournalWatch: Send + Sync {
    /// Something is about to be written.
    fn before_commit(&self) -> ControlFlow<()>;

    /// It is written, and whoever wanted it may know already.
    fn after_commit(&self) -> ControlFlow<()>;
}

/// Files every guest of this node boots from.
#[derive(Debug, Clone)]
pub struct GuestArtifacts {
    /// Kernel image in the form the VMM driver wants.
    pub kernel: PathBuf,
    /// Initial RAM filesystem whose `/init` is the guest daemon.
    pub initramfs: PathBuf,
}

/// What to do when the data directory's filesystem cannot share blocks between files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskCopies {
    /// Refuse to start: a full copy of a disk per sandbox is never what an operator expects.
    ReflinkOnly,
    /// Copy the data of every disk. Slow and large; for tests and for tiny images.
    FullCopyAllowed,
}

/// How disks are stored.
#[derive(Debug, Clone)]
pub enum DiskSettings {
    /// As files of the data directory that share blocks.
    Reflink(DiskCopies),
    /// By the block service, which works on the same data directory.
    Service(Box<aenv_storage::block_service::Client>),
}

/// How long each kind of step may take before it counts as failed.
#[derive(Debug, Clone)]
pub struct Deadlines {
    /// From the start of a boot to the first answer of the guest daemon.
    pub boot: Duration,
    /// First answer of the guest daemon after a restore or an adoption.
    pub greeting: Duration,
    /// `/init` of a sandbox.
    pub init: Duration,
    /// One call of the VMM or network crates; they have tighter limits of their own, this one only catches a hang.
    pub step: Duration,
    /// How long a create or a cold resume may wait for its turn, and for memory.
    pub queue: Duration,
    /// How long a booted guest is left alone before its capture, so that its start-up work is done.
    pub settle: Duration,
    /// The guest daemon's flush of everything that was written, before a pause.
    pub sync: Duration,
    /// Writing a guest's memory to a file, or making a layer of that: it depends on its size.
    pub memory: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            boot: Duration::from_secs(120),
            greeting: Duration::from_secs(20),
            init: Duration::from_secs(20),
            step: Duration::from_secs(60),
            queue: Duration::from_secs(30),
            settle: Duration::from_millis(500),
            sync: Duration::from_secs(5),
            memory: Duration::from_secs(300),
        }
    }
}

/// How this node is to behave.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this node on its host, 1 to 4 characters of a-z and 0-9: part of the name of every resource.
    pub instance: String,
    /// Directory with everything this node keeps.
    pub data_dir: PathBuf,
    /// Files every guest boots from.
    pub guest: GuestArtifacts,
    /// Identity of the host's present boot, see [`crate::host_boot_id`]: VMs of another boot are gone.
    pub host_boot_id: String,
    /// Hot standbys to keep for every ready template: restored, greeted and stopped.
    pub standbys: usize,
    /// Warm standbys to keep for every ready template, besides the hot ones: VMM processes that are ready to load its
    /// capture. A create without a hot standby takes one, and hot ones are made from them.
    pub warm: usize,
    /// Cold starts that may be under way at once.
    pub max_starting: usize,
    /// Callers that may wait for that, or for memory; others are refused at once.
    pub max_waiting: usize,
    /// Memory, in bytes, that guests may have together whose VMM is kept: those that run, start or resume, standbys, and paused
    /// ones whose VMM stands by.
    pub memory_limit_bytes: u64,
    /// Standbys and the VMMs of paused sandboxes give way while the host has less memory available than so many bytes, or
    /// everything on it waits for memory; zero: never.
    pub low_memory_bytes: u64,
    /// Longest life time a caller may ask for.
    pub max_timeout: Duration,
    /// Creates are refused while the data directory has fewer bytes free than this.
    pub min_free_bytes: u64,
    /// How long the stopped VMM of a paused sandbox is kept, so that a resume only has to let it run.
    pub hot_for: Duration,
    /// A VMM without a log of writes hands over all that was written since it was started. When that is more, it is not kept
    /// after the pause: the next one begins with nothing written.
    pub fresh_after_bytes: u64,
    /// How disks are stored.
    pub disks: DiskSettings,
    /// Limits of the steps.
    pub deadlines: Deadlines,
}

impl Settings {
    /// Settings with defaults for a small host.
    #[must_use]
    pub fn new(instance: &str, data_dir: PathBuf, guest: GuestArtifacts, host_boot_id: String) -> Self {
        Self {
            instance: instance.to_owned(),
            data_dir,
            guest,
            host_boot_id,
            standbys: 2,
            warm: 2,
            max_starting: 3,
            max_waiting: 256,
            memory_limit_bytes: u64::MAX,
            low_memory_bytes: 0,
            max_timeout: Duration::from_secs(24 * 3600),
            min_free_bytes: 512 << 20,
            hot_for: Duration::from_secs(600),
            fresh_after_bytes: 256 << 20,
            disks: DiskSettings::Reflink(DiskCopies::ReflinkOnly),
            deadlines: Deadlines::default(),
        }
    }
}

/// Why a node cannot start on a data directory.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another node process uses the directory.
    #[error(
        "data directory {0} is in use by another node process: stop that one, or choose another directory"
    )]
    InUse(PathBuf),
    /// A setting is out of its range.
    #[error("setting {name}: {reason}")]
    Setting {
        /// Which setting.
        name: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file of the data directory cannot be used.
    #[error("cannot {action} {path}: {reason}")]
    DataDir {
        /// What was being done.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The store of disks cannot be used.
    #[error("disks: {0}")]
    Disks(String),
    /// The journal cannot be opened or read.
    #[error("journal {path}: {reason}")]
    Journal {
        /// The journal's file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// What an earlier process left cannot be put in order.
    #[error("cannot recover from the last run: {context}: {reason}")]
    Recovery {
        /// What was being done.
        context: String,
        /// Why it failed.
        reason: String,
    },
}
