//! The contract every VMM driver fulfils, and the values that cross it.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// Hardware address of every guest's network card. The same with every driver and in every namespace, since a restored guest
/// keeps what it had, and its namespace has a permanent neighbour entry for it.
pub(crate) const GUEST_MAC: &str = "02:fc:00:00:00:02";

/// What a memory capture is bound to: it can be restored only where all of this is the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// `qemu` or `firecracker`; `fake` in tests.
    pub driver: String,
    /// Version the VMM reports of itself.
    pub version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Named CPU model or template the guest sees.
    pub cpu_model: String,
}

/// The virtual hardware of one guest. The same spec must be used to boot and to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Guest memory in MiB.
    pub memory_mib: u64,
}

/// What a cold boot starts from.
#[derive(Debug, Clone)]
pub struct BootSource {
    /// Kernel image in the form the driver wants.
    pub kernel: PathBuf,
    /// Initial RAM filesystem whose `/init` is the guest daemon.
    pub initramfs: PathBuf,
    /// What the guest daemon is told by way of the kernel's arguments, one `name=value` each, without blanks. Of no
    /// concern to a restore: the guest has read them.
    pub guest_arguments: Vec<String>,
}

/// Where a VMM runs on this host. Everything named here exists before the call and is owned by the caller.
#[derive(Debug, Clone)]
pub struct Placement {
    /// Unique name, shown in the process list as `aenv-<name>`: strays are found by it.
    pub name: String,
    /// Private directory for sockets, logs and scratch files of this VMM.
    pub run_dir: PathBuf,
    /// Network namespace the VMM process is placed in.
    pub netns: PathBuf,
    /// Name of the persistent tap device inside that namespace.
    pub tap: String,
    /// Root disk, raw, writable, private to this VM: a regular file, also one that a FUSE server exports to every user, or
    /// a block device.
    pub disk: PathBuf,
    /// Kernel and initramfs; a restore needs them too, because some VMMs keep them in their machine description.
    pub boot: BootSource,
    /// User and group id the VMM runs under, which nothing else on this host has while the VM lives. The tap belongs to it.
    pub user: u32,
}

/// The files that make up one capture of a guest's memory and devices (the disk is the caller's).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureFiles {
    /// Guest memory: a flat sparse file of the guest's memory size, never written after the capture.
    pub memory: PathBuf,
    /// Device state without memory.
    pub state: PathBuf,
}

/// What the memory file of a capture is to be laid over to give the whole memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaptureBase {
    /// Nothing: it is whole.
    #[default]
    Nothing,
    /// What the machine was started from: the restored image, or zeros after a boot.
    Start,
    /// The previous capture of the same machine.
    PreviousCapture,
}

/// What a capture did and how long the parts took.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CaptureReport {
    /// What the memory file is complete with.
    #[serde(default)]
    pub base: CaptureBase,
    /// Why it is whole, when changes were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_because: Option<String>,
    /// Pages stored because the guest had written them since the base.
    pub changed_pages: u64,
    /// Of those, pages that are missing in the VMM's own log of writes, as frames that its network card received.
    #[serde(default)]
    pub unlogged_pages: u64,
    /// Of the changed pages, those that are all zero and were stored as holes.
    pub zero_pages: u64,
    /// Bytes of device state.
    pub state_bytes: u64,
    /// Time to save device state.
    pub state_time: Duration,
    /// Time to find and store changed pages.
    pub memory_time: Duration,
    /// Of that, time to find what the VMM's own log lacks, and to begin anew with what is found so.
    #[serde(default)]
    pub tracking_time: Duration,
}

/// What the caller journals so that the VM can be adopted after the caller's own death.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Host process id.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot (field 22 of `/proc/<pid>/stat`): tells a reused pid.
    pub start_time: u64,
    /// The VMM's control socket.
    pub control_socket: PathBuf,
}

/// Why a VM ended, as far as it can be known from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitCause {
    /// The driver killed it on request.
    Killed,
    /// The guest's kernel panicked.
    GuestPanic,
    /// The guest shut itself down or rebooted.
    GuestShutdown,
    /// The VMM was killed by a signal nobody of ours sent (the host's OOM killer included).
    VmmKilled,
    /// The VMM ended by itself with an error.
    VmmCrashed,
    /// The kernel killed the VMM because the memory limit of its control group was reached, or the host's.
    OutOfMemory,
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Coarse cause.
    pub cause: ExitCause,
    /// Evidence for people: exit status, last lines of the VMM's log or the guest's console.
    pub detail: String,
}

/// What can go wrong; the caller maps it, the text says on what and what to do.
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The VMM program could not be started.
    #[error("cannot start {program}: {reason}")]
    Start {
        /// Program path.
        program: String,
        /// What the system or the program said.
        reason: String,
    },
    /// The VMM refused or failed a command.
    #[error("VMM {name} failed {command}: {reason}")]
    Command {
        /// Name of the VM.
        name: String,
        /// What was asked.
        command: String,
        /// What it answered.
        reason: String,
    },
    /// The VMM did not answer in time.
    #[error("VMM {name} did not finish {command} within {limit:?}")]
    Timeout {
        /// Name of the VM.
        name: String,
        /// What was asked.
        command: String,
        /// The limit that passed.
        limit: Duration,
    },
    /// The VM has ended.
    #[error("VMM {name} is gone: {detail}")]
    Gone {
        /// Name of the VM.
        name: String,
        /// Why, as far as what is left of it tells.
        cause: ExitCause,
        /// How it ended.
        detail: String,
    },
    /// A file or system call failed.
    #[error("{context}: {source}")]
    Io {
        /// What was being done, on what.
        context: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// One kind of VMM on this host: makes machines.
#[async_trait]
pub trait Vmm: Send + Sync + 'static {
    /// What captures made by this driver are bound to.
    fn identity(&self) -> &Identity;

    /// Starts a VMM and boots a guest in it; returns as soon as the guest runs, not when it is ready.
    ///
    /// # Errors
    /// When the VMM cannot be started or refuses the machine; nothing is left behind.
    async fn boot(&self, spec: &MachineSpec, placement: Placement) -> Result<Box<dyn Machine>, VmmError>;

    /// Starts a VMM, in its jail, that is ready to load `capture`: what can be done before anybody waits. There is no
    /// guest in it until [`Machine::load`].
    ///
    /// # Errors
    /// As [`Vmm::boot`].
    async fn prepare(
        &self,
        spec: &MachineSpec,
        capture: &CaptureFiles,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError>;

    /// Starts a VMM from a capture; the vCPUs are stopped when this returns. The memory image is mapped privately, so
    /// any number of machines share it.
    ///
    /// # Errors
    /// As [`Vmm::boot`].
    async fn restore(
        &self,
        spec: &MachineSpec,
        capture: &CaptureFiles,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let machine = self.prepare(spec, capture, placement).await?;
        match machine.load().await {
            Ok(()) => Ok(machine),
            Err(error) => {
                machine.kill().await?;
                Err(error)
            }
        }
    }

    /// Takes over a VM started by an earlier process of ours. A command left half-done (stopped, not resumed) is
    /// visible through [`Machine::is_running`].
    ///
    /// # Errors
    /// [`VmmError::Gone`] when the process has ended or the pid now names another one.
    async fn adopt(
        &self,
        spec: &MachineSpec,
        record: &ProcessRecord,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError>;

    /// Kills every VMM process whose name starts with `prefix` and is not in `keep`; returns the names it ended.
    ///
    /// # Errors
    /// When the process list cannot be read.
    async fn reap_strays(&self, prefix: &str, keep: &[String]) -> Result<Vec<String>, VmmError>;
}

/// One live microVM. Dropping it does **not** end the VM: only [`Machine::kill`] does.
#[async_trait]
pub trait Machine: Send + Sync + 'static {
    /// What to journal for a later adoption.
    fn record(&self) -> &ProcessRecord;

    /// Loads the capture that the VMM was prepared for; the vCPUs are stopped when this returns.
    ///
    /// # Errors
    /// When it was not prepared or has loaded before, when the capture does not fit, or when the VMM is gone. The machine
    /// is of no use then, and is to be killed.
    async fn load(&self) -> Result<(), VmmError>;

    /// Asks the VMM whether the vCPUs run.
    ///
    /// # Errors
    /// When the VMM does not answer.
    async fn is_running(&self) -> Result<bool, VmmError>;

    /// Lets the vCPUs run.
    ///
    /// # Errors
    /// When the VMM refuses or is gone.
    async fn resume(&self) -> Result<(), VmmError>;

    /// Stops the vCPUs; memory and devices stay.
    ///
    /// # Errors
    /// When the VMM refuses or is gone.
    async fn stop(&self) -> Result<(), VmmError>;

    /// Writes device state and memory of a **stopped** machine to new files. The memory file is whole.
    ///
    /// # Errors
    /// When the machine runs, or a file cannot be written; partial files are removed.
    async fn capture(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError>;

    /// As [`Machine::capture`], but the memory file has data only where the guest wrote since the base that the report
    /// names; all else is holes, pages that became zero included among the data. A VMM that keeps a log of writes takes
    /// the previous capture as the base, if that was confirmed (see [`Machine::confirm_capture`]), one that does not what the
    /// machine was started from.
    ///
    /// # Errors
    /// As [`Machine::capture`].
    async fn capture_changes(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError>;

    /// Tells that the last capture, which wrote `files`, is recorded and will be there when the next one builds on it. After one
    /// that was not confirmed the next one is whole, since the caller may have dropped it. May be told again, also after an
    /// adoption; of another capture than the last one it changes nothing.
    ///
    /// # Errors
    /// When it cannot be noted: then the next capture is whole.
    async fn confirm_capture(&self, files: &CaptureFiles) -> Result<(), VmmError> {
        // Only a VMM whose captures build on one another needs to know.
        let _ = files;
        Ok(())
    }

    /// Ends the VM at once and returns when the process is gone. Ending an ended VM is no error.
    ///
    /// # Errors
    /// When the process cannot be signalled or does not go away.
    async fn kill(&self) -> Result<Exit, VmmError>;

    /// Waits for the VM to end, by whatever cause. May be awaited by several tasks and any number of times.
    async fn wait(&self) -> Exit;
}
