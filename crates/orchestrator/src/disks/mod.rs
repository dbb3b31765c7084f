//! Disks of VMs, behind one trait: what they are stored as, and how a VMM gets at them.
//!
//! ```text
//! base (a template's image, or what a capture kept) ─make─▶ disk of a VM ─keep─▶ base of a capture
//!                                                              │  └─remove
//!                                         base of a save ◀─seal┘
//!                                                └─hold─▶ stays, durably ─make_anew─▶ the disk holds exactly that again
//! ```
//!
//! The memory of a save is stored by the same store, as a chain: a flat file and layers over it. A save owns, by its
//! [name](SaveName), what was sealed, held and stored for it, until it is forgotten; its layer of memory until nobody lies on it.
//!
//! A snapshot is handed what a save consists of: from then on it is there whatever becomes of the save and of its VM. Layers are not
//! copied for it: a layer file goes with the last that is made of it.
//!
//! | implementation | a disk is | a base is | needs |
//! |---|---|---|---|
//! | [`ReflinkDisks`] | a sparse file that shares blocks with its base | a file | a filesystem that shares blocks |
//! | [`ServiceDisks`] | a layered disk of the block service, exported as a device or a FUSE file | layers, or a file | the block service |
//!
//! Every call may be repeated. Nothing here knows sandboxes, captures or templates beyond the names it is given.

mod block_service;
mod copy;
mod reflink;

pub(crate) use block_service::ServiceDisks;
pub(crate) use reflink::ReflinkDisks;

use crate::data_dir::DataDir;
use crate::settings::{DiskSettings, StartError};
use crate::stage::Cause;
use crate::template::ImageForm;
use crate::view::{Collected, Waiting};
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_storage::block_service::LayerRef;
use aenv_vmm::CaptureBase;
use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a disk starts as. Never changes while anything is made of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Base {
    /// A raw, sparse file.
    File(PathBuf),
    /// Layers of the block service, bottom to top.
    Layers(Vec<LayerRef>),
}

impl Base {
    /// As it is written down in `directory` of the data directory `data`, either of which may be moved together with what is in
    /// it.
    pub(crate) fn relative_to(&self, directory: &Path, data: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(path.strip_prefix(directory).unwrap_or(path).to_owned()),
            Self::Layers(layers) => {
                Self::Layers(layers.iter().map(|layer| layer.relative_to(data)).collect())
            }
        }
    }

    /// As it was written down there. Earlier versions wrote down layers with absolute paths.
    pub(crate) fn resolve(self, directory: &Path, data: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(directory.join(path)),
            Self::Layers(layers) => {
                Self::Layers(layers.into_iter().map(|layer| layer.resolve(data)).collect())
            }
        }
    }
}

/// The disk of a capture, as those who store it call it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CaptureName {
    /// Template that it is a capture of.
    pub(crate) template: TemplateId,
    /// The capture's key.
    pub(crate) key: String,
}

/// The state a VM was saved in by its `number`-th pause, as those who store its disk and memory call it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SaveName {
    /// Whose state.
    pub(crate) vm: SandboxId,
    /// Never used twice for one VM.
    pub(crate) number: u64,
}

/// The disk of a VM as it was at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SealedDisk {
    /// What a disk with this content is made of.
    pub(crate) base: Base,
    /// What is stored for the VM's disk beyond what that was made of, in bytes; none when the store cannot tell.
    pub(crate) stored_bytes: Option<u64>,
}

/// What the memory of a VM consists of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryChain {
    /// A flat file at the bottom; zeros when there is none.
    pub(crate) image: Option<PathBuf>,
    /// Layers over it, bottom to top.
    pub(crate) layers: Vec<PathBuf>,
}

/// What the memory of a save is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryParts {
    /// Memory as of the previous save: what the new layer is to lie on, if it can.
    pub(crate) below: MemoryChain,
    /// What the VMM was started from.
    pub(crate) start: MemoryChain,
    /// A flat sparse file; its data extents are the changed pages, zero pages among them are data.
    pub(crate) changes: PathBuf,
    /// What the changes are to be laid over: [`Start`](CaptureBase::Start) means `start`,
    /// [`PreviousCapture`](CaptureBase::PreviousCapture) means `below`, [`Nothing`](CaptureBase::Nothing) that they are whole.
    pub(crate) base: CaptureBase,
    /// Size of the memory.
    pub(crate) bytes: u64,
}

/// The memory of a save as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryLayer {
    /// All of it.
    pub(crate) chain: MemoryChain,
    /// What was stored for this save alone.
    pub(crate) stored_bytes: u64,
}

/// What a snapshot is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotParts {
    /// Its disk.
    pub(crate) disk: Base,
    /// Its memory; none when only the disk was kept.
    pub(crate) memory: Option<MemoryChain>,
}

/// A store of disks.
#[async_trait]
pub(crate) trait Disks: Send + Sync + 'static {
    /// Name of this kind of store: a capture can be used only by the kind that made it.
    fn kind(&self) -> &'static str;

    /// What disks can be made of.
    fn image_form(&self) -> ImageForm;

    /// Finds out whether disks can be made at all: now, not at the first sandbox.
    async fn check(&self) -> Result<(), StartError>;

    /// Makes the disk of a VM, private to it and at least `bytes` large; tells what the VMM is to open. The directory of the
    /// VM is there.
    async fn make(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause>;

    /// Keeps what is on the disk of a VM as the disk of a capture, durably, whose files are in `directory`. Nothing writes
    /// to it any more. The VM's disk is only good to be removed after it.
    async fn keep(&self, vm: &SandboxId, capture: &CaptureName, directory: &Path) -> Result<Base, Cause>;

    /// Whether what was kept for a capture is still there.
    async fn knows(&self, capture: &CaptureName) -> Result<bool, Cause>;

    /// Removes the disk of a VM, whose VMM has ended. No error when there is none.
    async fn remove(&self, vm: &SandboxId) -> Result<(), Cause>;

    /// Removes what belongs to a capture outside of its directory. No error when there is nothing.
    async fn forget_capture(&self, capture: &CaptureName) -> Result<(), Cause>;

    /// What the disk of a VM holds now, whose guest stands still: nothing is copied, nothing is durable. It stays readable
    /// until the disk is removed and the save forgotten. May be asked again, as long as the guest has not run since.
    async fn seal(&self, save: &SaveName) -> Result<SealedDisk, Cause>;

    /// Keeps what was sealed for a save stored, whatever becomes of the disk; durable when it returns.
    async fn hold(&self, save: &SaveName, base: &Base) -> Result<(), Cause>;

    /// Makes the disk of a VM hold exactly `base`: what was written since is dropped. No VMM uses the disk. Tells what the
    /// next one is to open.
    async fn make_anew(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause>;

    /// Stores the memory of a save; durable when it returns.
    async fn store_memory(&self, save: &SaveName, parts: &MemoryParts) -> Result<MemoryLayer, Cause>;

    /// A file with all of the memory of a save, of `bytes`, to be mapped by a VMM. It stays until the save is forgotten.
    async fn memory_image(&self, save: &SaveName, chain: &MemoryChain, bytes: u64) -> Result<PathBuf, Cause>;

    /// Removes what is stored for a save, but for its layer of memory. No error when there is nothing.
    async fn forget_save(&self, save: &SaveName) -> Result<(), Cause>;

    /// Removes the layer of memory that was stored for a save which is forgotten, unless it is one of `used`, which later saves of
    /// the same VM lie on; tells whether it is not. If a snapshot, or another VM, lies on it, it goes with the last of those. No
    /// error when there is none.
    async fn forget_layer(&self, save: &SaveName, used: &BTreeSet<PathBuf>) -> Result<bool, Cause>;

    /// Removes a layer of memory, whoever it was stored for, if nothing is made of it any more.
    async fn release_layer(&self, layer: &Path) -> Result<(), Cause>;

    /// Gives a snapshot what a save was stored as: durable when it returns, and there until the snapshot is forgotten. Tells what
    /// it is made of from now on.
    async fn hand_over(&self, snapshot: &TemplateId, parts: &SnapshotParts) -> Result<SnapshotParts, Cause>;

    /// A file with all of the memory of a snapshot, of `bytes`, to be mapped by VMMs. It stays until the snapshot is forgotten.
    async fn snapshot_memory(
        &self,
        snapshot: &TemplateId,
        chain: &MemoryChain,
        bytes: u64,
    ) -> Result<PathBuf, Cause>;

    /// Removes what only a snapshot needs. No VMM maps its memory. No error when there is nothing.
    async fn forget_snapshot(
        &self,
        snapshot: &TemplateId,
        parts: Option<&SnapshotParts>,
    ) -> Result<(), Cause>;

    /// What the guest of a VM waits for when it uses its disk.
    async fn waiting(&self, vm: &SandboxId) -> Result<Option<Waiting>, Cause>;

    /// Removes the disks of all VMs but `keep`; returns whose.
    async fn sweep(&self, keep: &BTreeSet<SandboxId>) -> Result<Vec<String>, Cause>;

    /// Removes what belongs to nothing that is `needed`, nor to one of the `snapshots`. What disks are made of stays.
    async fn collect(&self, needed: &Needed, snapshots: &ListSnapshots<'_>) -> Result<Collected, Cause>;
}

/// What a collection leaves alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Needed {
    /// Captures of templates.
    pub(crate) captures: BTreeSet<CaptureName>,
    /// Images of templates.
    pub(crate) images: BTreeSet<PathBuf>,
}

/// Lists the snapshots that there are. To be asked after what is stored was listed: one is known before anything is stored for it.
pub(crate) type ListSnapshots<'a> = dyn Fn() -> BTreeSet<TemplateId> + Send + Sync + 'a;

/// The store that the settings ask for.
pub(crate) fn open(settings: &DiskSettings, dir: &DataDir) -> Arc<dyn Disks> {
    match settings {
        DiskSettings::Reflink(copies) => Arc::new(ReflinkDisks::new(dir.clone(), *copies)),
        DiskSettings::Service(client) => Arc::new(ServiceDisks::new(client.as_ref().clone(), dir.layers())),
    }
}
