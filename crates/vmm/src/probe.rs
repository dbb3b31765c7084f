//! What this host offers for running VMs, found by looking and not by hoping.
//!
//! Owns no state and changes nothing on the host (one probe makes and removes two small files). Chooses the accelerator;
//! everything else it only reports, for the caller to show.
//!
//! "`/dev/kvm` opens" proves little: a PVM host has it without any virtualisation hardware, and an ordinary guest kernel is
//! then interpreted instruction by instruction and never finishes booting. So KVM counts only together with the CPU's flag.

use std::io;
use std::path::Path;

/// How guest code is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// By the CPU, through `/dev/kvm`.
    Kvm,
    /// By translation in the VMM: slow, but everywhere.
    Tcg,
}

impl Accelerator {
    /// Its name in captures and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }
}

/// Who made the host's CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuVendor {
    /// `GenuineIntel`.
    Intel,
    /// `AuthenticAMD`, and Hygon, which is its kin.
    Amd,
    /// Any other.
    Other,
}

/// State of `/dev/kvm`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvmDevice {
    /// Opens for reading and writing.
    Usable,
    /// Does not exist.
    Absent,
    /// Exists, but cannot be opened; the system's words.
    Denied(String),
}

/// All there is to know about KVM without starting a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kvm {
    /// The device.
    pub device: KvmDevice,
    /// Whether the CPU has the flag `vmx` or `svm`.
    pub hardware: bool,
    /// Whether the kernel's KVM is the software-only PVM.
    pub pvm: bool,
    /// Who made the CPU.
    pub vendor: CpuVendor,
}

/// The accelerator in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What was chosen.
    pub accelerator: Accelerator,
    /// Who made the host's CPU.
    pub vendor: CpuVendor,
    /// Why, in one sentence.
    pub reason: String,
    /// What a person can do for something faster; absent when nothing is to be done.
    pub advice: Option<String>,
}

impl Kvm {
    /// Looks at `/proc/cpuinfo`, `/sys/module` and `/dev/kvm`.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn detect() -> io::Result<Self> {
        let (vendor, hardware) = parse_cpu(&std::fs::read_to_string("/proc/cpuinfo")?);
        let device = match std::fs::File::options().read(true).write(true).open("/dev/kvm") {
            Ok(_) => KvmDevice::Usable,
            Err(error) if error.kind() == io::ErrorKind::NotFound => KvmDevice::Absent,
            Err(error) => KvmDevice::Denied(error.to_string()),
        };
        Ok(Self { device, hardware, pvm: Path::new("/sys/module/kvm_pvm").exists(), vendor })
    }

    /// The accelerator to use, `wanted` by an operator or the best there is.
    #[must_use]
    pub fn choose(&self, wanted: Option<Accelerator>) -> Choice {
        let vendor = self.vendor;
        if let Some(accelerator) = wanted {
            return Choice { accelerator, vendor, reason: "set by the operator".to_owned(), advice: None };
        }
        let advice = |text: &str| Some(text.to_owned());
        let (accelerator, reason, advice) = match &self.device {
            KvmDevice::Usable if self.hardware => {
                (Accelerator::Kvm, "/dev/kvm opens and the CPU virtualises".to_owned(), None)
            }
            KvmDevice::Usable if self.pvm => (
                Accelerator::Tcg,
                "/dev/kvm is PVM, which runs only guest kernels made for it".to_owned(),
                advice(
                    "use a host with virtualisation, or set the accelerator to kvm together with a PVM guest kernel",
                ),
            ),
            KvmDevice::Usable => (
                Accelerator::Tcg,
                "/dev/kvm opens, but the CPU has neither vmx nor svm".to_owned(),
                advice("use a host with (nested) virtualisation"),
            ),
            KvmDevice::Denied(why) => (
                Accelerator::Tcg,
                format!("/dev/kvm cannot be opened: {why}"),
                advice("run the node as root or as a member of the group kvm"),
            ),
            KvmDevice::Absent if self.hardware => (
                Accelerator::Tcg,
                "there is no /dev/kvm, though the CPU virtualises".to_owned(),
                advice("load the kernel module kvm_intel or kvm_amd"),
            ),
            KvmDevice::Absent => (
                Accelerator::Tcg,
                "there is no /dev/kvm and the CPU has neither vmx nor svm".to_owned(),
                advice("use a host with (nested) virtualisation, or turn it on in the firmware"),
            ),
        };
        Choice { accelerator, vendor, reason, advice }
    }
}

/// Vendor, and whether the CPU has virtualisation hardware.
fn parse_cpu(cpuinfo: &str) -> (CpuVendor, bool) {
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split_once(':')).map_or("", |(_, value)| value.trim())
    };
    let vendor = match field("vendor_id") {
        "GenuineIntel" => CpuVendor::Intel,
        "AuthenticAMD" | "HygonGenuine" => CpuVendor::Amd,
        _ => CpuVendor::Other,
    };
    (vendor, field("flags").split_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

/// What the doctor's report says about the host beside the VMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// `uname -r`.
    pub kernel: String,
    /// KVM.
    pub kvm: Kvm,
    /// `/dev/fuse` exists.
    pub fuse: bool,
    /// `/dev/ublk-control` exists.
    pub ublk: bool,
    /// `/dev/net/tun` exists.
    pub tun: bool,
    /// Files in the data directory can share blocks.
    pub reflink: bool,
    /// Bytes free on the data directory's filesystem.
    pub free_bytes: u64,
}

impl HostFacts {
    /// Looks at the host. Blocks for some milliseconds.
    ///
    /// # Errors
    /// When `/proc` cannot be read or `data_dir` cannot be written.
    pub fn gather(data_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            kvm: Kvm::detect()?,
            fuse: Path::new("/dev/fuse").exists(),
            ublk: Path::new("/dev/ublk-control").exists(),
            tun: Path::new("/dev/net/tun").exists(),
            reflink: aenv_sys::file::supports_reflink(data_dir)?,
            free_bytes: aenv_sys::file::free_bytes(data_dir)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL: &str =
        "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme vmx sse\nvmx flags\t: vnmi\n";

    #[test]
    fn the_cpu_is_read() {
        assert_eq!(parse_cpu(INTEL), (CpuVendor::Intel, true));
        assert_eq!(parse_cpu("vendor_id : AuthenticAMD\nflags : fpu svm_lock\n"), (CpuVendor::Amd, false));
        assert_eq!(parse_cpu(""), (CpuVendor::Other, false));
    }

    #[test]
    fn kvm_counts_only_with_hardware() {
        let kvm = |device, hardware, pvm| Kvm { device, hardware, pvm, vendor: CpuVendor::Intel };
        let real = kvm(KvmDevice::Usable, true, false).choose(None);
        assert_eq!((real.accelerator, real.advice), (Accelerator::Kvm, None));
        let pvm = kvm(KvmDevice::Usable, false, true);
        let choice = pvm.choose(None);
        assert_eq!(choice.accelerator, Accelerator::Tcg);
        assert!(choice.reason.contains("PVM") && choice.advice.is_some());
        assert_eq!(pvm.choose(Some(Accelerator::Kvm)).accelerator, Accelerator::Kvm);
        for device in [KvmDevice::Absent, KvmDevice::Denied("no".to_owned())] {
            for hardware in [true, false] {
                let choice = kvm(device.clone(), hardware, false).choose(None);
                assert!(choice.accelerator == Accelerator::Tcg && choice.advice.is_some());
            }
        }
    }

    #[test]
    fn facts_of_this_host_are_gathered() {
        let directory = tempfile::tempdir().unwrap();
        let facts = HostFacts::gather(directory.path()).unwrap();
        assert!(!facts.kernel.is_empty() && facts.free_bytes > 0);
        assert!(HostFacts::gather(Path::new("/does/not/exist")).is_err());
    }
}
