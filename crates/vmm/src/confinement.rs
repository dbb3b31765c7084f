//! How much of the host one VMM process may use: the same for every driver.
//!
//! Owns the parent of all VM groups, and through [`Confined`] the group of one VM. Where the host has no usable control
//! groups there is nothing to own, and VMs run without limits: whoever starts the node says so once.
//!
//! ```text
//! launch:  make group ─▶ process born in it ─▶ Confined ─┬─ VM ends ─▶ memory events say whether it was killed for memory
//!                                                        └─ kill    ─▶ group removed
//! next node:  open group by the name of the VM           strays:  every group that no kept VM has is killed and removed
//! ```

use crate::cgroups::{Cgroups, CgroupsError, Group, IoLimit, Limits, OutOfMemory};
use crate::driver::{MachineSpec, VmmError};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What limits the VMMs of one node.
#[derive(Debug, Clone, Default)]
pub struct Confinement {
    cgroups: Option<Arc<Cgroups>>,
    io: Vec<IoLimit>,
}

impl Confinement {
    /// With a control group per VM, and these limits of block devices in each.
    #[must_use]
    pub fn new(cgroups: Cgroups, io: Vec<IoLimit>) -> Self {
        Self { cgroups: Some(Arc::new(cgroups)), io }
    }

    /// Without limits: the host has no usable control groups.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::default()
    }

    /// A group for a VM that is about to start; what an earlier VM of that name left is removed. `overhead_mib` is what
    /// the VMM needs beside the guest's memory.
    pub(crate) async fn make(
        &self,
        vm_name: &str,
        spec: &MachineSpec,
        overhead_mib: u64,
    ) -> Result<Confined, VmmError> {
        let Some(cgroups) = &self.cgroups else { return Ok(Confined::of(None)) };
        let failed = |error| failed(vm_name, &error);
        if let Some(left) = cgroups.open(vm_name).map_err(failed)? {
            left.kill().map_err(failed)?;
            left.remove().await.map_err(failed)?;
        }
        let mut limits = Limits::for_machine(spec.vcpus, spec.memory_mib, overhead_mib);
        limits.io.clone_from(&self.io);
        let group = cgroups.make(vm_name, &limits).map_err(failed)?;
        Ok(Confined::of(Some(group)))
    }

    /// The group of a VM that an earlier node started; it has none where that node had no control groups.
    pub(crate) fn open(&self, vm_name: &str) -> Result<Confined, VmmError> {
        let Some(cgroups) = &self.cgroups else { return Ok(Confined::of(None)) };
        let confined = Confined::of(cgroups.open(vm_name).map_err(|error| failed(vm_name, &error))?);
        confined.keep();
        Ok(confined)
    }

    /// Removes the groups of VMs whose names begin with `prefix` and that are not kept, with what runs in them.
    pub(crate) async fn sweep(&self, prefix: &str, keep: &[String]) -> Result<(), VmmError> {
        match &self.cgroups {
            Some(cgroups) => {
                cgroups.sweep(prefix, keep).await.map(drop).map_err(|error| failed(prefix, &error))
            }
            None => Ok(()),
        }
    }
}

fn failed(name: &str, error: &CgroupsError) -> VmmError {
    VmmError::Io {
        context: format!("cannot limit the resources of VM {name}"),
        source: std::io::Error::other(error.to_string()),
    }
}

/// The limits of one VM. Dropped before it was kept, it ends the VM and removes its group: a start that is given up.
#[derive(Debug)]
pub(crate) struct Confined {
    group: Option<Arc<Group>>,
    kept: AtomicBool,
}

impl Confined {
    fn of(group: Option<Group>) -> Self {
        Self { group: group.map(Arc::new), kept: AtomicBool::new(false) }
    }

    /// The VM lives on when this is dropped.
    pub(crate) fn keep(&self) {
        self.kept.store(true, Ordering::Relaxed);
    }

    /// What the process is to be born in.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.group.as_deref().map(AsFd::as_fd)
    }

    /// Whose memory ran out, if a process of the VM was killed for memory. To be asked before the removal.
    pub(crate) fn out_of_memory(&self) -> Result<Option<OutOfMemory>, VmmError> {
        let Some(group) = &self.group else { return Ok(None) };
        let events = group.events().map_err(|error| failed(&group.path().display().to_string(), &error))?;
        Ok(events.out_of_memory())
    }

    /// Ends what still runs in the group, and the group.
    pub(crate) async fn remove(&self) -> Result<(), VmmError> {
        let Some(group) = &self.group else { return Ok(()) };
        let failed = |error| failed(&group.path().display().to_string(), &error);
        group.kill().map_err(failed)?;
        group.remove().await.map_err(failed)
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        let Some(group) = self.group.take().filter(|_| !self.kept.load(Ordering::Relaxed)) else { return };
        // Without a runtime the next sweep finds it.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let removed = match group.kill() {
                Ok(()) => group.remove().await,
                Err(error) => Err(error),
            };
            if let Err(error) = removed {
                tracing::error!(group = %group.path().display(), %error, "cannot remove the control group of a start that was given up");
            }
        });
    }
}
