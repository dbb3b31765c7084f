//! The host's memory: measured for the orchestrator, and the limits that follow from it where none were set.

use crate::arguments::{Instance, ServeOptions};
use aenv_orchestrator::{HostMemory, MemoryReading};
use aenv_sys::cgroup::{Hierarchy, group_of};
use aenv_sys::host_memory::MemoryGauge;
use aenv_vmm::cgroups::{Cgroups, Outcome};
use anyhow::{Context as _, Result};
use std::path::PathBuf;

/// How often the host's memory is promised to guests. A guest that waits has little memory of its own, and shares the rest with
/// its siblings; but what it once wrote, its own page cache included, it keeps. So at two, guests may use half of what they have
/// on average; below the low-water mark those that only wait give way.
const OVERCOMMIT: u64 = 2;
/// The low-water mark is this part of the host's memory: what the node, the block service and a burst of all guests need until
/// those that wait have given way.
const LOW_DIVISOR: u64 = 20;
/// And at least this much.
const LOW_LEAST_BYTES: u64 = 256 << 20;

/// The memory that VMs of an instance can have.
pub(crate) struct Memory(MemoryGauge);

impl Memory {
    /// Looks for the control groups that limit it.
    pub(crate) fn of(instance: &Instance) -> Result<Self> {
        let Some(hierarchy) = Hierarchy::find().context("cannot look for control groups")? else {
            return Ok(Self(MemoryGauge::new(None)));
        };
        let group = vm_group(instance, &hierarchy)?;
        Ok(Self(MemoryGauge::new(group.as_deref().map(|group| (hierarchy.mount.as_path(), group)))))
    }

    /// Bytes that guests may have together.
    pub(crate) fn limit_bytes(&self, wished_mib: Option<u64>) -> Result<u64> {
        match wished_mib {
            Some(mib) => Ok(mib.saturating_mul(1 << 20)),
            None => Ok(self.total_bytes()?.saturating_mul(OVERCOMMIT)),
        }
    }

    /// Bytes below which VMs that only wait for somebody give way.
    pub(crate) fn low_bytes(&self, options: &ServeOptions) -> Result<u64> {
        match options.low_memory_mib {
            Some(mib) => Ok(mib.saturating_mul(1 << 20)),
            None => Ok((self.total_bytes()? / LOW_DIVISOR).max(LOW_LEAST_BYTES)),
        }
    }

    /// Bytes that there are.
    pub(crate) fn total_bytes(&self) -> Result<u64> {
        self.0.total_bytes().context("cannot tell how much memory there is")
    }
}

impl HostMemory for Memory {
    fn read(&self) -> std::io::Result<MemoryReading> {
        Ok(MemoryReading { available_bytes: self.0.available_bytes()?, stalled: self.0.stalled()? })
    }
}

/// The group that holds all VMs: their parent, or the node's own where they have no groups.
fn vm_group(instance: &Instance, hierarchy: &Hierarchy) -> Result<Option<PathBuf>> {
    let name = instance.instance.to_string();
    let outcome = Cgroups::inspect(&name, instance.vmm.cgroup.as_deref());
    if let Outcome::Usable(plan) = outcome.context("cannot look at the control groups of VMs")? {
        return Ok(Some(plan.parent()));
    }
    let own = group_of(std::process::id()).context("cannot find the node's control group")?;
    Ok(own.map(|group| hierarchy.mount.join(group)))
}
