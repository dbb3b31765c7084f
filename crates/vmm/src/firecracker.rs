//! The Firecracker driver: stock Firecracker 1.12 or newer under its own jailer, on KVM.
//!
//! Owns no state but its settings; every VM is owned by its [`Machine`]. Each VMM process runs in a jail, a session, a
//! process and a network namespace of its own, and outlives us; it is found by `--id <name>` among its arguments.
//!
//! ```text
//! boot     jail ─▶ API ─▶ machine, kernel, disk, network ─▶ start
//! prepare  jail ─▶ API        load ─▶ memory = private mapping of the image, page cache shared by all children
//! capture  Firecracker writes the pages dirtied since the previous capture, we add those that its log lacks
//! ```
//!
//! | module | what |
//! |---|---|
//! | `requests` | the API's requests, pure functions of machine and version |
//! | `api` | the connection |
//! | `jail` | the VM's directory and the jailer's command line |
//! | `launch` | start a process and connect, or leave nothing |
//! | `machine` | one live VM: commands, and the task that sees it end |
//! | `capture` | what is known of a stopped VM's memory, and writing it |
//! | `guest_memory` | where a guest's memory lies in its VMM's process, and what was written there |
//! | `ending` | why a VM ended, a pure function of the evidence |

mod api;
mod capture;
mod cpu;
mod ending;
mod guest_memory;
mod jail;
mod launch;
mod machine;
mod requests;

use crate::confinement::Confinement;
use crate::driver::{CaptureFiles, Identity, Machine, MachineSpec, Placement, ProcessRecord, Vmm, VmmError};
use crate::probe::{Accelerator, Kvm};
use crate::process::blocking;
use crate::program::{Version, ask_version, unusable};
use crate::rate_limits::RateLimits;
use crate::strays::end_strays;
use async_trait::async_trait;
use machine::FirecrackerMachine;
use requests::Template;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use cpu::CpuTemplate;

/// What to do where a program is missing.
const ADVICE: &str = "install Firecracker's release archive, or name the file in the settings";
/// The oldest version the driver is made for.
const OLDEST_VERSION: Version = Version(1, 12, 0);

/// What an operator may choose.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The VMM; a name without a slash is searched for in [`aenv_sys::process::SEARCH_PATH`].
    pub firecracker: PathBuf,
    /// Its jailer, of the same version; found in the same way.
    pub jailer: PathBuf,
    /// What the guest's CPU looks like. Captures are bound to it.
    pub cpu_template: CpuTemplate,
    /// Use `/dev/kvm` although the probe finds no virtualisation hardware: right on a PVM host whose guests run a PVM
    /// kernel, which no probe can know.
    pub trust_kvm: bool,
    /// Limits of every VM's disk and network.
    pub limits: RateLimits,
    /// Give guests a memory balloon, which returns freed pages to the host where Firecracker knows how (1.14).
    pub balloon: bool,
    /// How much of the host each VMM may use.
    pub confinement: Confinement,
    /// MiB of memory that a VMM may use beside its guest's: heap, page tables, and the page cache of what it writes.
    pub overhead_mib: u64,
    /// Preference of the host's OOM killer for VMM processes.
    pub oom_score_adj: i16,
    /// Longest time from the start of the process to its first answer.
    pub start_limit: Duration,
    /// Longest time for one command, except that a capture gets more with the size of the memory.
    pub command_limit: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            firecracker: PathBuf::from("firecracker"),
            jailer: PathBuf::from("jailer"),
            cpu_template: CpuTemplate::Host,
            trust_kvm: false,
            limits: RateLimits::default(),
            balloon: true,
            confinement: Confinement::unlimited(),
            // An idle one uses 5 MiB; the rest is for the page cache, without which captures are written slowly.
            overhead_mib: 128,
            // A VMM is what should go when the host runs out of memory, before the node that can tell why.
            oom_score_adj: 300,
            start_limit: Duration::from_secs(30),
            command_limit: Duration::from_secs(20),
        }
    }
}

/// Starts Firecracker machines. Cheap to clone, no state of its own.
#[derive(Debug, Clone)]
pub struct FirecrackerDriver {
    settings: Settings,
    /// With all links resolved, as the jailer names the process.
    firecracker: PathBuf,
    jailer: PathBuf,
    version: Version,
    template: Template,
    identity: Identity,
    /// Whether the kernel tells which pages a process wrote since it was last asked.
    writes_are_known: bool,
}

impl FirecrackerDriver {
    /// Finds out what this host can run: versions of the programs, KVM, the CPU that guests will see.
    ///
    /// # Errors
    /// When a program is missing, too old or of another version than the other one, when KVM is of no use, or when the
    /// CPU template cannot be read.
    pub async fn detect(settings: Settings) -> Result<Self, VmmError> {
        let firecracker = find_program(&settings.firecracker)?;
        let jailer = find_program(&settings.jailer)?;
        // The jailer takes only such a file; and strays are known by the names of their programs.
        for (program, name) in [(&firecracker, "firecracker"), (&jailer, "jailer")] {
            if !program.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)) {
                return Err(unusable(
                    program,
                    format!("the name of the file must begin with `{name}`: rename it"),
                ));
            }
        }
        let version = ask_version(&firecracker, " v", ADVICE).await?;
        if version < OLDEST_VERSION {
            let reason = format!("it is version {version}, at least {OLDEST_VERSION} is needed");
            return Err(unusable(&firecracker, reason));
        }
        let jailer_version = ask_version(&jailer, " v", ADVICE).await?;
        if jailer_version != version {
            let reason = format!(
                "it is version {jailer_version}, Firecracker is {version}: install both of one release"
            );
            return Err(unusable(&jailer, reason));
        }
        let kvm =
            Kvm::detect().map_err(|source| VmmError::Io { context: "cannot look at KVM".into(), source })?;
        let choice = kvm.choose(settings.trust_kvm.then_some(Accelerator::Kvm));
        if choice.accelerator != Accelerator::Kvm {
            let advice = choice.advice.map(|advice| format!("; {advice}")).unwrap_or_default();
            return Err(unusable(&firecracker, format!("{}{advice}", choice.reason)));
        }
        let wanted = settings.cpu_template.clone();
        let context = format!("cannot find out the guest's CPU ({wanted})");
        let (template, cpu_model) = blocking(move || cpu::resolve(&wanted), || context).await?;
        let identity = Identity {
            driver: "firecracker".to_owned(),
            version: version.to_string(),
            accelerator: Accelerator::Kvm.name().to_owned(),
            cpu_model,
        };
        let context = || "cannot find out whether this kernel tells what a process wrote".to_owned();
        let writes_are_known = blocking(aenv_sys::memory::writes::are_known, context).await?;
        if !writes_are_known {
            tracing::warn!(reason = capture::NOT_KEPT, "every capture of a VM but its first one is whole");
        }
        Ok(Self { settings, firecracker, jailer, version, template, identity, writes_are_known })
    }

    /// The program in use, with all links resolved.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.firecracker
    }
}

#[async_trait]
impl Vmm for FirecrackerDriver {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    async fn boot(&self, spec: &MachineSpec, placement: Placement) -> Result<Box<dyn Machine>, VmmError> {
        let launched = launch::boot(self, spec, &placement).await?;
        Ok(Box::new(FirecrackerMachine::start(self, launched, spec, placement)))
    }

    async fn prepare(
        &self,
        spec: &MachineSpec,
        capture: &CaptureFiles,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let launched = launch::prepare(self, spec, capture, &placement).await?;
        Ok(Box::new(FirecrackerMachine::start(self, launched, spec, placement)))
    }

    async fn adopt(
        &self,
        spec: &MachineSpec,
        record: &ProcessRecord,
        placement: Placement,
    ) -> Result<Box<dyn Machine>, VmmError> {
        let launched = launch::adopt(self, spec, record, &placement).await?;
        Ok(Box::new(FirecrackerMachine::start(self, launched, spec, placement)))
    }

    async fn reap_strays(&self, prefix: &str, keep: &[String]) -> Result<Vec<String>, VmmError> {
        // Both, whatever becomes of the first; the groups also catch what cannot be told by its name yet.
        let ended = end_strays(prefix, keep).await;
        self.settings.confinement.sweep(prefix, keep).await.and(ended)
    }
}

/// The file of a program, with all links resolved: the jailer names the process in the jail after it.
fn find_program(program: &Path) -> Result<PathBuf, VmmError> {
    let found = aenv_sys::process::find_program(program).and_then(|found| found.canonicalize());
    found.map_err(|error| unusable(program, format!("{error}; {ADVICE}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn programs_are_looked_for_and_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let [mute, jailer] = ["firecracker-1.12", "jailer"].map(|name| directory.path().join(name));
        std::fs::copy("/bin/true", &mute).unwrap();
        std::fs::copy("/bin/true", &jailer).unwrap();
        let refusal = async |firecracker: &Path| {
            let settings = Settings {
                firecracker: firecracker.to_owned(),
                jailer: jailer.clone(),
                ..Settings::default()
            };
            FirecrackerDriver::detect(settings).await.unwrap_err().to_string()
        };
        let absent = refusal(Path::new("/does/not/exist")).await;
        assert!(absent.starts_with("cannot start /does/not/exist"), "{absent}");
        let misnamed = refusal(Path::new("true")).await;
        assert!(misnamed.contains("must begin with `firecracker`"), "{misnamed}");
        let mute = refusal(&mute).await;
        assert!(mute.contains("does not say its version"), "{mute}");
    }
}
