//! The QEMU driver: stock QEMU 7.2 or newer, machine type `microvm`, with KVM or emulated (TCG).
//!
//! Owns no state but its settings; every VM is owned by its [`Machine`]. Each VMM process runs in a session and a network
//! namespace of its own, under the name `aenv-<name>`, and outlives us.
//!
//! ```text
//! boot     memory = private mapping of an empty sparse file  ─┐
//! restore  memory = private mapping of a capture's image      ─┴▶ pages the guest writes are anonymous
//! capture  new image = reflink of what is mapped + the anonymous pages, so a second generation costs what it changed
//! ```
//!
//! | module | what |
//! |---|---|
//! | `command_line` | the arguments, a pure function: boot and restore must have the same devices in the same order |
//! | `monitor` | the QMP connection |
//! | `program_tree` | a root directory with QEMU and nothing else |
//! | `jail` | what one process sees, and may do |
//! | `launch` | start a process and connect, or leave nothing |
//! | `machine` | one live VM: commands, and the task that sees it end |
//! | `capture` | write memory and device state of a stopped VM |
//! | `ending` | why a VM ended, a pure function of the evidence |

mod capture;
mod command_line;
mod ending;
mod jail;
mod launch;
mod machine;
mod monitor;
mod program_tree;

use crate::confinement::Confinement;
use crate::driver::{CaptureFiles, Identity, Machine, MachineSpec, Placement, ProcessRecord, Vmm, VmmError};
use crate::probe::{Accelerator, Choice, Kvm};
use crate::process::blocking;
use crate::program::{Version, ask_version, unusable};
use crate::rate_limits::RateLimits;
use crate::strays::end_strays;
use async_trait::async_trait;
use machine::QemuMachine;
use program_tree::ProgramTree;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;

/// What to do where there is no QEMU.
const ADVICE: &str = "install QEMU (package qemu-system-x86)";
/// The oldest version the driver is made for.
const OLDEST_VERSION: Version = Version(7, 2, 0);
/// How long the time-stamp counter is measured when the driver starts.
const TSC_MEASUREMENT: Duration = Duration::from_millis(50);

/// What an operator may choose.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The program; a name without a slash is searched for in [`aenv_sys::process::SEARCH_PATH`].
    pub program: PathBuf,
    /// Use this accelerator instead of the one the probe chooses. [`Accelerator::Kvm`] is the right answer on a PVM host
    /// whose guests run a PVM kernel, which no probe can know.
    pub accelerator: Option<Accelerator>,
    /// CPU model and flags in QEMU's words instead of the built-in choice. Captures are bound to it.
    pub cpu_model: Option<String>,
    /// Directory for the root file systems of VMM processes: on a file system where devices are of no concern, readable
    /// by every user once reached. Filled at the first start.
    pub program_trees: PathBuf,
    /// Limits of every VM's disk. QEMU has none for a network card: to ask for one is an error.
    pub limits: RateLimits,
    /// How much of the host each VMM may use.
    pub confinement: Confinement,
    /// MiB of memory that a VMM may use beside its guest's: heap, page tables and, emulated, translated code.
    pub overhead_mib: u64,
    /// Preference of the host's OOM killer for VMM processes.
    pub oom_score_adj: i16,
    /// Longest time from the start of the process to its first answer.
    pub start_limit: Duration,
    /// Longest time for one command.
    pub command_limit: Duration,
}

impl Settings {
    /// Settings with the default of everything that has one.
    #[must_use]
    pub fn new(program_trees: PathBuf) -> Self {
        Self {
            program: PathBuf::from("qemu-system-x86_64"),
            program_trees,
            accelerator: None,
            cpu_model: None,
            limits: RateLimits::default(),
            confinement: Confinement::unlimited(),
            // 45 MiB are used by an idle one; translated code adds what `command_line` allows it.
            overhead_mib: 256,
            // A VMM is what should go when the host runs out of memory, before the node that can tell why.
            oom_score_adj: 300,
            start_limit: Duration::from_secs(30),
            command_limit: Duration::from_secs(20),
        }
    }
}

/// Starts QEMU machines. Cheap to clone, no state of its own.
#[derive(Debug, Clone)]
pub struct QemuDriver {
    settings: Settings,
    version: Version,
    choice: Choice,
    identity: Identity,
    tsc_khz: Option<u64>,
    /// Made at the first start of a VM.
    tree: Arc<OnceCell<Arc<ProgramTree>>>,
}

impl QemuDriver {
    /// Finds out what this host can run: version of the program, usable acceleration, CPU model. Takes some 100 ms.
    ///
    /// # Errors
    /// When the program is missing, too old or does not say its version.
    pub async fn detect(settings: Settings) -> Result<Self, VmmError> {
        settings.limits.refuse_network(&settings.program.display().to_string())?;
        let version = ask_version(&settings.program, "version ", ADVICE).await?;
        if version < OLDEST_VERSION {
            return Err(unusable(
                &settings.program,
                format!("it is version {version}, at least {OLDEST_VERSION} is needed"),
            ));
        }
        let kvm =
            Kvm::detect().map_err(|source| VmmError::Io { context: "cannot look at KVM".into(), source })?;
        let choice = kvm.choose(settings.accelerator);
        let cpu_model =
            settings.cpu_model.clone().unwrap_or_else(|| command_line::cpu_model(&choice).to_owned());
        // Only an emulated guest needs the rate: see `command_line::kernel_arguments`.
        let tsc_khz = match choice.accelerator {
            Accelerator::Kvm => None,
            Accelerator::Tcg => {
                blocking(
                    || Ok(aenv_sys::tsc::measure_khz(TSC_MEASUREMENT)),
                    || "cannot measure the time-stamp counter".to_owned(),
                )
                .await?
            }
        };
        let identity = Identity {
            driver: "qemu".to_owned(),
            version: version.to_string(),
            accelerator: choice.accelerator.name().to_owned(),
            cpu_model,
        };
        Ok(Self { settings, version, choice, identity, tsc_khz, tree: Arc::default() })
    }

    /// Which accelerator was chosen, and why.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The program in use.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.settings.program
    }

    /// The root of every process.
    async fn tree(&self) -> Result<Arc<ProgramTree>, VmmError> {
        let Settings { program, program_trees, .. } = &self.settings;
        let make = || async {
            let (program, accelerator, directory) =
                (program.clone(), self.choice.accelerator, program_trees.clone());
            let context = || format!("cannot make the root of QEMU's jail in {}", program_trees.display());
            blocking(move || ProgramTree::prepare(&program, accelerator, &directory), context)
                .await
                .map(Arc::new)
        };
        self.tree.get_or_try_init(make).await.map(Arc::clone)
    }
}

#[async_trait]
impl Vmm for QemuDriver {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    async fn boot(&self, spec: &MachineSpec, placement: Placement) -> Result<Box<dyn Machine>, VmmError> {
        let launched = launch::boot(self, spec, &placement).await?;
        Ok(Box::new(QemuMachine::start(launched, spec, placement, None)))
    }

    async fn prepare(
        &self,
        spec: &MachineSpec,
        capture: &CaptureFiles,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let (launched, pending) = launch::prepare(self, spec, capture, &placement).await?;
        Ok(Box::new(QemuMachine::start(launched, spec, placement, Some(pending))))
    }

    async fn adopt(
        &self,
        spec: &MachineSpec,
        record: &ProcessRecord,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let launched = launch::adopt(self, record, &placement).await?;
        Ok(Box::new(QemuMachine::start(launched, spec, placement, None)))
    }

    async fn reap_strays(&self, prefix: &str, keep: &[String]) -> Result<Vec<String>, VmmError> {
        // Both, whatever becomes of the first; the groups also catch what cannot be told by its name yet.
        let ended = end_strays(prefix, keep).await;
        self.settings.confinement.sweep(prefix, keep).await.and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_limit_that_cannot_be_kept_is_refused() {
        let limits = RateLimits { network_bytes: Some(1), ..RateLimits::default() };
        let settings = Settings { limits, ..Settings::new(PathBuf::new()) };
        let error = QemuDriver::detect(settings).await.unwrap_err();
        assert!(error.to_string().contains("network card"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_program_is_a_clear_error() {
        let settings =
            Settings { program: PathBuf::from("/does/not/exist"), ..Settings::new(PathBuf::new()) };
        let error = QemuDriver::detect(settings).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot start /does/not/exist"), "{error}");
        let settings = Settings { program: PathBuf::from("/bin/true"), ..Settings::new(PathBuf::new()) };
        let error = QemuDriver::detect(settings).await.unwrap_err();
        assert!(error.to_string().contains("does not say its version"), "{error}");
    }
}
