//! All sandboxes of one node.
//!
//! Owns the journal, the records of sandboxes and templates, and the driver task of every sandbox. It decides; the HTTP
//! layer above only translates, the crates below only act on one thing each.

mod admission;
mod adoption;
mod capacity;
mod clearing;
mod create;
mod data_dir;
mod disks;
mod draining;
pub mod error;
mod fork;
mod garbage;
mod giving_way;
mod greeting;
mod guest_channel;
mod host_memory;
mod journal;
mod lifecycle;
mod node;
mod orchestrator;
mod pause;
mod pausing;
mod purge;
mod random;
mod recovery;
mod resuming;
mod sandbox_task;
mod saving;
pub mod settings;
mod snapshot;
mod source;
mod stage;
mod standby;
mod startup;
mod strays;
mod table;
mod template;
pub mod view;
mod vm;

pub use error::{Error, LossCause, Shortage};
pub use host_memory::{HostMemory, MemoryReading};
pub use orchestrator::Orchestrator;
pub use purge::{HeldDataDir, hold_data_dir};
pub use settings::{
    Deadlines, DiskCopies, DiskSettings, GuestArtifacts, JournalWatch, Parts, Settings, StartError,
};
pub use template::{ImportError, Imported, import_template};
pub use view::{
    Capacity, ChildRequest, Collected, CreateRequest, Created, Dial, Durability, ForkRequest, Forked,
    OnTimeout, PauseMode, PauseRequest, Paused, PausedAll, ResumeRequest, Resumed, Route, SandboxState,
    SandboxView, SaveTrouble, SavedView, SnapshotRequest, SnapshotState, SnapshotTaken, SnapshotView, Stage,
    TemplateState, TemplateView, Tier, WaitCause, Waiting,
};

/// Identity of the host's present boot, for [`Settings::host_boot_id`].
///
/// # Errors
/// When the kernel does not tell.
pub fn host_boot_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
