//! The group of one VM: start processes in it, read what happened, kill, remove.
//!
//! Owns the group's descriptor and not the group: it stays when this is dropped.

use super::{CgroupsError, Limits};
use aenv_sys::cgroup::Directory;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// What happened to a group's memory since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryEvents {
    /// Times the group was at its limit with nothing left to reclaim.
    pub oom: u64,
    /// Processes of the group that an OOM killer ended, whosever limit it was.
    pub oom_kill: u64,
    /// Times the group was about to go over its limit; reclaim helped, or an OOM followed.
    pub max: u64,
    /// Times it was throttled at `memory.high`.
    pub high: u64,
}

/// Whose memory ran out when a process was killed for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutOfMemory {
    /// The group reached its own limit.
    OwnLimit,
    /// A group above it or the whole host ran out; this one was the victim chosen.
    Elsewhere,
}

impl MemoryEvents {
    /// Says whether a death by SIGKILL was the OOM killer's. To be asked only of a process that *did* die by SIGKILL, with
    /// events read after its death and before the group's removal.
    #[must_use]
    pub fn out_of_memory(self) -> Option<OutOfMemory> {
        match self {
            Self { oom_kill: 0, .. } => None,
            Self { oom: 0, .. } => Some(OutOfMemory::Elsewhere),
            Self { .. } => Some(OutOfMemory::OwnLimit),
        }
    }
}

/// How often and how long a group had to wait for its CPU quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Throttling {
    /// Periods of 100 ms in which it used up its quota.
    pub periods: u64,
    /// Microseconds it waited, added up over its threads' CPUs.
    pub microseconds: u64,
}

/// The control group of one VM.
#[derive(Debug)]
pub struct Group {
    directory: Directory,
}

impl AsFd for Group {
    /// The directory, as `clone3` with `CLONE_INTO_CGROUP` takes it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Group {
    pub(super) fn new(directory: Directory) -> Self {
        Self { directory }
    }

    /// Opens the group at a path that was recorded earlier: a VM's group stays where it was made, also when the next node
    /// chooses another parent. `None` when it is gone.
    ///
    /// # Errors
    /// The system's error.
    pub fn at(path: &Path) -> Result<Option<Self>, CgroupsError> {
        match Directory::open(path) {
            Ok(directory) => Ok(Some(Self { directory })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Sets limits; those of block devices that are not named stay. Lowering the memory limit below what is in use kills.
    ///
    /// # Errors
    /// The first limit that the kernel refuses; the ones before it are set.
    pub fn set(&self, limits: &Limits) -> Result<(), CgroupsError> {
        for (file, value) in limits.settings() {
            // A kernel that does not account swap has no such file; `Cgroups::limits_swap` tells.
            if file == "memory.swap.max" && !self.directory.has(file)? {
                continue;
            }
            self.directory.write(file, &value)?;
        }
        Ok(())
    }

    /// Moves a running process with its threads into the group. What it allocated before is not charged here: better start
    /// it in the group.
    ///
    /// # Errors
    /// The system's error.
    pub fn add(&self, pid: u32) -> Result<(), CgroupsError> {
        Ok(self.directory.add(pid)?)
    }

    /// Processes that run in it.
    ///
    /// # Errors
    /// The system's error.
    pub fn processes(&self) -> Result<Vec<u32>, CgroupsError> {
        Ok(self.directory.processes()?)
    }

    /// What happened to its memory.
    ///
    /// # Errors
    /// The system's error.
    pub fn events(&self) -> Result<MemoryEvents, CgroupsError> {
        let keys = ["oom", "oom_kill", "max", "high"];
        let [oom, oom_kill, max, high] = self.directory.counters("memory.events", keys)?;
        Ok(MemoryEvents { oom, oom_kill, max, high })
    }

    /// Bytes in use at the highest moment. `None` before Linux 5.19, which does not keep it.
    ///
    /// # Errors
    /// The system's error.
    pub fn memory_peak(&self) -> Result<Option<u64>, CgroupsError> {
        match self.directory.has("memory.peak")? {
            true => Ok(Some(self.directory.number("memory.peak")?)),
            false => Ok(None),
        }
    }

    /// Threads and processes that were refused for the limit.
    ///
    /// # Errors
    /// The system's error.
    pub fn refused_processes(&self) -> Result<u64, CgroupsError> {
        let [refused] = self.directory.counters("pids.events", ["max"])?;
        Ok(refused)
    }

    /// How much the CPU quota held it back.
    ///
    /// # Errors
    /// The system's error.
    pub fn throttling(&self) -> Result<Throttling, CgroupsError> {
        let [periods, microseconds] =
            self.directory.counters("cpu.stat", ["nr_throttled", "throttled_usec"])?;
        Ok(Throttling { periods, microseconds })
    }

    /// Ends everything in it with SIGKILL, forks included. It exits a little later.
    ///
    /// # Errors
    /// The system's error.
    pub fn kill(&self) -> Result<(), CgroupsError> {
        Ok(self.directory.kill()?)
    }

    /// Removes the group, and waits for what is just exiting in it. Its counters are gone then. No error when it was removed
    /// already.
    ///
    /// # Errors
    /// When processes stay in it, or the system's error.
    pub async fn remove(&self) -> Result<(), CgroupsError> {
        Ok(self.directory.remove().await?)
    }

    /// Removes a group that was never used.
    pub(super) fn discard_empty(&self) -> Result<(), CgroupsError> {
        Ok(self.directory.remove_empty()?)
    }
}
