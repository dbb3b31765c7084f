//! What every task of one node shares. Holds, does not decide.

use crate::admission::Admission;
use crate::data_dir::DataDir;
use crate::disks::Disks;
use crate::journal::{Journal, MemoryBinding, VmRecord};
use crate::settings::{Parts, Settings};
use crate::snapshot::Snapshots;
use crate::table::SandboxTable;
use crate::template::Template;
use crate::vm::Vm;
use aenv_network::Slot;
use aenv_protocol::envd::ROOT_BYTES_ARGUMENT;
use aenv_protocol::ids::SandboxId;
use aenv_vmm::{BootSource, Placement};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// State shared by the tasks of one node.
pub(crate) struct Node {
    pub(crate) settings: Settings,
    pub(crate) parts: Parts,
    pub(crate) dir: DataDir,
    pub(crate) disks: Arc<dyn Disks>,
    pub(crate) journal: Journal,
    pub(crate) table: SandboxTable,
    pub(crate) snapshots: Snapshots,
    /// Read once, at the start.
    pub(crate) templates: Vec<Arc<Template>>,
    /// What memory is made with here.
    pub(crate) binding: MemoryBinding,
    pub(crate) admission: Admission,
    /// Cancelled when the node shuts down.
    pub(crate) stopping: CancellationToken,
    /// Cancelled when nothing new is to be begun any more.
    pub(crate) draining: CancellationToken,
    /// Every task of this node.
    pub(crate) tasks: TaskTracker,
    pub(crate) lifecycles: AtomicU64,
}

impl Node {
    /// Name under which the VMM of `id` runs.
    pub(crate) fn vm_name(&self, id: &SandboxId) -> String {
        format!("{}-{id}", self.settings.instance)
    }

    /// Where the VMM of a VM runs.
    pub(crate) fn placement(&self, record: &VmRecord, slot: &Slot) -> Placement {
        let id = &record.id;
        // A guest that boots is told how large its root is to be: the disk may be larger.
        let root = record.root_bytes.map(|bytes| format!("{ROOT_BYTES_ARGUMENT}={bytes}"));
        Placement {
            name: self.vm_name(id),
            run_dir: self.dir.sandbox_run(id),
            netns: slot.netns.clone(),
            tap: slot.tap.clone(),
            user: slot.user,
            disk: record.disk.clone().unwrap_or_else(|| self.dir.sandbox_disk(id)),
            boot: BootSource {
                kernel: self.settings.guest.kernel.clone(),
                initramfs: self.settings.guest.initramfs.clone(),
                guest_arguments: Vec::from_iter(root),
            },
        }
    }

    /// A VM of an earlier process, as far as its record tells. What it needs of a snapshot stays.
    pub(crate) fn vm_of(&self, record: VmRecord) -> Vm {
        let needed = record.needed_snapshot().and_then(|id| self.snapshots.get(id));
        let mut vm = Vm::new(record);
        vm.snapshot = needed.map(|snapshot| snapshot.take());
        vm
    }

    /// A number no other lifecycle of this process has.
    pub(crate) fn next_lifecycle(&self) -> u64 {
        self.lifecycles.fetch_add(1, Ordering::Relaxed)
    }
}
