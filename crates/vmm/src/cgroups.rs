//! Limits of VMM processes: one control group (version 2) per VM, below one parent group per node.
//!
//! Owns the descriptors of the groups it opened. Decides where the parent is and which limits are written; how much a VM
//! may use, and when a group is made and removed, is the caller's business.
//!
//! ```text
//!  explicit      MOUNT/<path the operator named>/<vm>
//!  delegated     MOUNT/…/<our unit>/node            this process, moved out of the unit's own group first
//!                                   vms/<vm>        stay when the node ends, and are found again by the next one
//!  no systemd    MOUNT/aenv-<instance>/<vm>
//! ```
//!
//! A group that enables controllers for its children must hold no processes, hence `node`. It also cannot be *entered*
//! again by a restarted unit: the unit sets `DelegateSubgroup=node`, so that systemd starts the node there.
//!
//! Where limits cannot be had, [`Outcome::Unusable`] says why and what to do, nothing is changed, and VMs run without.
//!
//! Calls block for as long as the kernel needs for a file of a few bytes; only removal waits.

mod group;
mod limits;
mod parent;

pub use group::{Group, MemoryEvents, OutOfMemory, Throttling};
pub use limits::{IoLimit, Limits};
pub use parent::Plan;

use aenv_sys::cgroup::{CgroupError, Directory};
use parent::{Host, IO};
use std::io;
use std::path::{Path, PathBuf};

/// Whether limits can be had.
#[derive(Debug)]
pub enum Outcome<T = Cgroups> {
    /// Yes, with this.
    Usable(T),
    /// No; VMs run without limits.
    Unusable {
        /// Why not.
        reason: String,
        /// What a person can do about it.
        advice: String,
    },
}

/// Why groups could not be prepared or used.
#[derive(Debug, thiserror::Error)]
pub enum CgroupsError {
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] CgroupError),
    /// The group the operator named cannot serve.
    #[error("the cgroup {} cannot hold the groups of VMs: {reason}; {advice}", group.display())]
    Explicit {
        /// As it was named.
        group: PathBuf,
        /// Why not.
        reason: String,
        /// What to do.
        advice: String,
    },
    /// Not a name of one group: it could reach elsewhere or meet the name of a control file.
    #[error("{0:?} cannot name a cgroup: use letters, digits, - and _")]
    Name(String),
    /// Limits of block I/O were asked for where the controller is absent.
    #[error("the cgroup {} has no controller io: enable it in the groups above, or set no I/O limit", parent.display())]
    NoIo {
        /// The parent of all VM groups.
        parent: PathBuf,
    },
}

/// The prepared parent of all VM groups of a node.
#[derive(Debug)]
pub struct Cgroups {
    parent: Directory,
    plan: Plan,
    limits_swap: bool,
}

impl Cgroups {
    /// Chooses the parent of all VM groups, makes it, and enables the controllers on the way to it. May move this process
    /// into the child `node` of its group. Safe to repeat, also by the next node while VMs of the last one run.
    ///
    /// `explicit` is a path below the mount point that an operator named; then there is no other choice.
    ///
    /// # Errors
    /// When the kernel refuses a step, or `explicit` cannot serve.
    pub fn prepare(instance: &str, explicit: Option<&Path>) -> Result<Outcome, CgroupsError> {
        Self::prepare_on(&Host::look()?, instance, explicit)
    }

    fn prepare_on(host: &Host, instance: &str, explicit: Option<&Path>) -> Result<Outcome, CgroupsError> {
        let plan = match host.plan(instance, explicit)? {
            Outcome::Usable(plan) => plan,
            Outcome::Unusable { reason, advice } => return Ok(Outcome::Unusable { reason, advice }),
        };
        let parent = plan.carry_out(host.pid)?;
        // Absent where the kernel does not account swap.
        let limits_swap = parent.has("memory.swap.max")?;
        tracing::info!(
            parent = %parent.path().display(), controllers = plan.controllers().join(" "), limits_swap,
            "limits of sandboxes are enforced"
        );
        Ok(Outcome::Usable(Self { parent, plan, limits_swap }))
    }

    /// Says what [`prepare`](Self::prepare) would do, and changes nothing.
    ///
    /// # Errors
    /// As `prepare`, as far as it can be foreseen.
    pub fn inspect(instance: &str, explicit: Option<&Path>) -> Result<Outcome<Plan>, CgroupsError> {
        Host::look()?.plan(instance, explicit)
    }

    /// The directory in which the groups of VMs are made.
    #[must_use]
    pub fn parent(&self) -> &Path {
        self.parent.path()
    }

    /// The parent as a path below the mount point, as the jailer takes it (`--parent-cgroup`).
    #[must_use]
    pub fn parent_below_mount(&self) -> &Path {
        self.plan.below_mount()
    }

    /// Controllers of VM groups: cpu, memory, pids, and io where the host has it.
    #[must_use]
    pub fn controllers(&self) -> &[String] {
        self.plan.controllers()
    }

    /// Whether [`Limits::memory_swap_max`] is enforced; not so where the kernel does not account swap.
    #[must_use]
    pub fn limits_swap(&self) -> bool {
        self.limits_swap
    }

    /// Makes the group of a VM and sets its limits. Nothing stays when that fails.
    ///
    /// A group that is there already is an error and not used again: its counters tell of another VM's death.
    ///
    /// # Errors
    /// A bad name, an existing group, a limit the kernel refuses, or an I/O limit without the controller.
    pub fn make(&self, vm_name: &str, limits: &Limits) -> Result<Group, CgroupsError> {
        let name = checked_name(vm_name)?;
        if !limits.io.is_empty() && !self.controllers().iter().any(|controller| controller == IO) {
            return Err(CgroupsError::NoIo { parent: self.parent().to_owned() });
        }
        let group = Group::new(Directory::create(&self.parent().join(name))?);
        if let Err(error) = group.set(limits) {
            group.discard_empty()?;
            return Err(error);
        }
        Ok(group)
    }

    /// The group of a VM that an earlier node started. `None` when there is none: it was started without limits, or below
    /// another parent (see [`Group::at`]).
    ///
    /// # Errors
    /// A bad name, or the system's error.
    pub fn open(&self, vm_name: &str) -> Result<Option<Group>, CgroupsError> {
        match Directory::open(&self.parent().join(checked_name(vm_name)?)) {
            Ok(directory) => Ok(Some(Group::new(directory))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the groups whose names begin with `prefix` and are not in `keep`, and kills what runs in them. Returns their
    /// names.
    ///
    /// # Errors
    /// The first failure, after all others were tried.
    pub async fn sweep(&self, prefix: &str, keep: &[String]) -> Result<Vec<String>, CgroupsError> {
        let mut doomed = Vec::new();
        let mut failure = None;
        for name in self.parent.children()? {
            if !name.starts_with(prefix) || keep.contains(&name) {
                continue;
            }
            match self
                .open(&name)
                .and_then(|group| group.map(|group| group.kill().map(|()| group)).transpose())
            {
                Ok(Some(group)) => doomed.push((name, group)),
                Ok(None) => {}
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        // All are killed before the first is waited for.
        let mut removed = Vec::new();
        for (name, group) in doomed {
            match group.remove().await {
                Ok(()) => removed.push(name),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if !removed.is_empty() {
            tracing::info!(groups = removed.join(" "), "groups of VMs that are not kept were removed");
        }
        failure.map_or(Ok(removed), Err)
    }
}

/// A dot would allow `..` and the names of control files, a slash other places.
fn checked_name(name: &str) -> Result<&str, CgroupsError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    match !name.is_empty() && name.len() <= 255 && name.bytes().all(allowed) {
        true => Ok(name),
        false => Err(CgroupsError::Name(name.to_owned())),
    }
}

#[cfg(test)]
mod tests;
