//! Which VMM this node uses, and how its processes are limited.
//!
//! ```text
//! AENV_DRIVER   firecracker ─▶ Firecracker, or an error that says what is missing
//!               qemu        ─▶ QEMU
//!               auto        ─▶ Firecracker where KVM is usable and its two programs are installed, else QEMU
//! ```
//!
//! Owns nothing. What was chosen and why is logged once by the node and shown by the doctor.

use crate::arguments::{DriverChoice, Instance, VmmOptions};
use aenv_vmm::cgroups::{Cgroups, IoLimit, Outcome};
use aenv_vmm::firecracker::{self, FirecrackerDriver};
use aenv_vmm::probe::{Accelerator, Choice, Kvm};
use aenv_vmm::qemu::{self, QemuDriver};
use aenv_vmm::{Confinement, RateLimits, Vmm};
use anyhow::{Context as _, Result, bail};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A driver that can be used here.
pub(crate) struct Chosen {
    pub(crate) vmm: Arc<dyn Vmm>,
    /// Name for people.
    pub(crate) product: &'static str,
    pub(crate) program: PathBuf,
    /// How guest code is executed.
    pub(crate) accelerator: Choice,
    /// Why this driver.
    pub(crate) reason: String,
    /// What is to be done for a better one.
    pub(crate) advice: Option<String>,
    /// The kernel's file among the guest's, in the form this driver boots.
    pub(crate) kernel: &'static str,
}

/// The driver of this machine, whose VMs are confined.
pub(crate) async fn choose(instance: &Instance, confinement: Confinement) -> Result<Chosen> {
    let options = &instance.vmm;
    let by_operator = "set by the operator".to_owned();
    match options.driver {
        DriverChoice::Firecracker => firecracker_driver(options, confinement, by_operator).await,
        DriverChoice::Qemu => qemu_driver(instance, confinement, by_operator, None).await,
        DriverChoice::Auto => match missing_for_firecracker(options)? {
            None => {
                let reason = "KVM is usable, Firecracker and its jailer are installed".to_owned();
                firecracker_driver(options, confinement, reason).await
            }
            Some(Missing { reason, advice }) => {
                let reason = format!("Firecracker cannot be used: {reason}");
                qemu_driver(instance, confinement, reason, advice).await
            }
        },
    }
}

/// Why Firecracker is not to be used by itself.
struct Missing {
    reason: String,
    /// Absent where nothing can be installed that would help.
    advice: Option<String>,
}

fn missing_for_firecracker(options: &VmmOptions) -> Result<Option<Missing>> {
    let kvm = Kvm::detect().context("cannot look at KVM")?;
    let choice = kvm.choose(options.accelerator.forced());
    if choice.accelerator != Accelerator::Kvm {
        return Ok(Some(Missing {
            reason: format!("it needs KVM, and {}", choice.reason),
            advice: choice.advice,
        }));
    }
    for (program, variable) in [(&options.firecracker, "AENV_FIRECRACKER"), (&options.jailer, "AENV_JAILER")]
    {
        if !aenv_sys::process::is_installed(program) {
            return Ok(Some(Missing {
                reason: format!("{} is not installed", program.display()),
                advice: Some(format!(
                    "install Firecracker and its jailer (`cargo xtask fetch` brings both), or say where they are in {variable}"
                )),
            }));
        }
    }
    Ok(None)
}

async fn firecracker_driver(
    options: &VmmOptions,
    confinement: Confinement,
    reason: String,
) -> Result<Chosen> {
    let settings = firecracker::Settings {
        firecracker: options.firecracker.clone(),
        jailer: options.jailer.clone(),
        cpu_template: options.cpu_template.clone(),
        trust_kvm: options.accelerator.forced() == Some(Accelerator::Kvm),
        limits: rate_limits(options),
        confinement,
        ..firecracker::Settings::default()
    };
    let driver = FirecrackerDriver::detect(settings)
        .await
        .context("cannot use Firecracker; `aenv doctor` says more")?;
    let kvm = Kvm::detect().context("cannot look at KVM")?;
    Ok(Chosen {
        program: driver.program().to_owned(),
        vmm: Arc::new(driver),
        product: "Firecracker",
        accelerator: kvm.choose(Some(Accelerator::Kvm)),
        reason,
        advice: None,
        kernel: "kernel/vmlinux",
    })
}

async fn qemu_driver(
    instance: &Instance,
    confinement: Confinement,
    reason: String,
    advice: Option<String>,
) -> Result<Chosen> {
    let options = &instance.vmm;
    let settings = qemu::Settings {
        program: options.qemu.clone(),
        accelerator: options.accelerator.forced(),
        cpu_model: options.cpu_model.clone(),
        limits: rate_limits(options),
        confinement,
        ..qemu::Settings::new(program_trees(&instance.data_dir))
    };
    let driver = QemuDriver::detect(settings).await.context("cannot use QEMU; `aenv doctor` says more")?;
    Ok(Chosen {
        program: driver.program().to_owned(),
        accelerator: driver.choice().clone(),
        vmm: Arc::new(driver),
        product: "QEMU",
        reason,
        advice,
        kernel: "kernel/vmlinuz",
    })
}

/// Where the roots of QEMU's jails are.
pub(crate) fn program_trees(data_dir: &Path) -> PathBuf {
    data_dir.join("vmm")
}

fn rate_limits(options: &VmmOptions) -> RateLimits {
    RateLimits {
        disk_bytes: options.disk_bytes_per_second,
        disk_operations: options.disk_operations_per_second,
        network_bytes: options.network_bytes_per_second,
    }
}

/// The limit of block I/O that was asked for, on the device of the data directory.
fn io_limit(instance: &Instance) -> Result<Option<IoLimit>> {
    let VmmOptions { io_read_bytes_per_second: rbps, io_write_bytes_per_second: wbps, .. } = instance.vmm;
    if rbps.is_none() && wbps.is_none() {
        return Ok(None);
    }
    let directory = &instance.data_dir;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let device = std::fs::metadata(directory)
        .with_context(|| format!("cannot look at {}", directory.display()))?
        .dev();
    let (major, minor) =
        whole_device(rustix::fs::major(device), rustix::fs::minor(device)).with_context(|| {
            format!("{} lies on no block device whose I/O could be limited", directory.display())
        })?;
    Ok(Some(IoLimit { major, minor, rbps, wbps, riops: None, wiops: None }))
}

/// The device itself, or the one that it is a partition of: only whole devices have limits.
fn whole_device(major: u32, minor: u32) -> Result<(u32, u32)> {
    let entry = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let entry = entry.canonicalize().with_context(|| format!("there is no {}", entry.display()))?;
    let whole = if entry.join("partition").exists() { entry.join("..") } else { entry };
    let text = std::fs::read_to_string(whole.join("dev")).context("it has no number")?;
    let (major, minor) = text.trim().split_once(':').context("its number is not understood")?;
    Ok((major.parse()?, minor.parse()?))
}

/// The limits of VMM processes on this host: none, said once, where it has no usable control groups.
pub(crate) fn confinement(instance: &Instance) -> Result<Confinement> {
    let name = instance.instance.to_string();
    let outcome = Cgroups::prepare(&name, instance.vmm.cgroup.as_deref())
        .context("cannot prepare the control groups of VMs")?;
    let io = io_limit(instance)?;
    Ok(match outcome {
        Outcome::Usable(cgroups) => Confinement::new(cgroups, Vec::from_iter(io)),
        Outcome::Unusable { reason, .. } if io.is_some() => {
            bail!("the limits of block I/O that were asked for cannot be kept: {reason}")
        }
        Outcome::Unusable { reason, advice } => {
            tracing::warn!(
                reason,
                advice,
                "sandboxes run without limits of memory, processor time and processes"
            );
            Confinement::unlimited()
        }
    })
}
