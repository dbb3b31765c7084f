//! Arguments and environment variables of the node. Values only.

use aenv_daemon::LogOptions;
use aenv_network::InstanceName;
use aenv_vmm::firecracker::CpuTemplate;
use aenv_vmm::probe::Accelerator;
use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::Ipv4Net;
use std::path::PathBuf;

/// Runs sandboxes on this machine and serves them over HTTP.
#[derive(Debug, Parser)]
#[command(name = "aenv-node", version, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) task: Task,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Serve until SIGTERM or SIGINT; sandboxes run on and are adopted by the next start, or are paused (--on-stop)
    Serve(Box<ServeOptions>),
    /// End every VM, network and sandbox of this instance; the node must not be running
    Purge(Instance),
    /// Templates of the data directory
    #[command(subcommand)]
    Template(TemplateTask),
    /// What this machine offers, what was chosen and why, and what to do about it
    Doctor(DoctorOptions),
}

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateTask {
    /// Make a root filesystem the template NAME; the node must not be running
    Import(ImportOptions),
}

/// Which node on this host.
#[derive(Debug, Clone, Args)]
pub(crate) struct Instance {
    /// Directory with templates, disks and the journal
    #[arg(long, env = "AENV_DATA_DIR", default_value = "/var/lib/aenv")]
    pub(crate) data_dir: PathBuf,
    /// Name of this node on its host, part of the name of every process, namespace and device it makes
    #[arg(long, env = "AENV_INSTANCE", default_value = "a")]
    pub(crate) instance: InstanceName,
    #[command(flatten)]
    pub(crate) vmm: VmmOptions,
    #[command(flatten)]
    pub(crate) stored: StoredOptions,
}

/// How disks are stored.
#[derive(Debug, Clone, Args)]
pub(crate) struct StoredOptions {
    /// `service`: layers of the block service, which is started where it does not run; `reflink`: files that share blocks, for
    /// which the data directory must be on XFS or btrfs
    #[arg(long, env = "AENV_DISKS", value_enum, default_value = "service")]
    pub(crate) disks: DisksChoice,
    /// Program of the block service; by default the one beside this program
    #[arg(long, env = "AENV_STORED")]
    pub(crate) stored: Option<PathBuf>,
    /// The block service's directory for sockets and mounts; `/run/aenv/INSTANCE` by default
    #[arg(long, env = "AENV_RUN_DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Told to the block service when it is started: `auto`, `ublk` or `fuse`
    #[arg(long, env = "AENV_EXPORT")]
    pub(crate) export: Option<String>,
    /// Told to the block service when it is started: memory for decompressed blocks, in bytes
    #[arg(long, env = "AENV_CACHE_BYTES")]
    pub(crate) cache_bytes: Option<u64>,
    /// Told to the block service when it is started: time between two looks for disks whose tops are to be merged, in seconds
    #[arg(long, env = "AENV_COMPACTION_SECONDS")]
    pub(crate) compaction_seconds: Option<u64>,
}

/// Value of `--disks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DisksChoice {
    Service,
    Reflink,
}

/// How microVMs are run.
#[derive(Debug, Clone, Args)]
pub(crate) struct VmmOptions {
    /// Which VMM; `auto` takes Firecracker where KVM is usable and it is installed with its jailer, else QEMU
    #[arg(long, env = "AENV_DRIVER", value_enum, default_value = "auto")]
    pub(crate) driver: DriverChoice,
    /// Firecracker program, at least 1.12
    #[arg(long, env = "AENV_FIRECRACKER", default_value = "firecracker")]
    pub(crate) firecracker: PathBuf,
    /// Firecracker's jailer, of the same version
    #[arg(long, env = "AENV_JAILER", default_value = "jailer")]
    pub(crate) jailer: PathBuf,
    /// What guests of Firecracker see of the CPU: the name of one of its static templates, or a file with a custom one (a
    /// path has a slash or a dot); `none` is the host's CPU. Captures are bound to it
    #[arg(long, env = "AENV_CPU_TEMPLATE", default_value = "none")]
    pub(crate) cpu_template: CpuTemplate,
    /// Control group (version 2) for the groups of VMs, as a path below the hierarchy's mount point; by default the node's
    /// own group where systemd delegated it, or one named after the instance where there is no systemd
    #[arg(long, env = "AENV_CGROUP")]
    pub(crate) cgroup: Option<PathBuf>,
    /// Bytes a second that a VMM may read from the device of the data directory, kept by its control group, whatever its
    /// guest or the VMM does; unlimited by default
    #[arg(long, env = "AENV_IO_READ_BYTES_PER_SECOND", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) io_read_bytes_per_second: Option<u64>,
    /// The same for bytes written
    #[arg(long, env = "AENV_IO_WRITE_BYTES_PER_SECOND", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) io_write_bytes_per_second: Option<u64>,
    /// Bytes a second that a sandbox may read from and write to its disk; unlimited by default
    #[arg(long, env = "AENV_DISK_BYTES_PER_SECOND", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) disk_bytes_per_second: Option<u64>,
    /// Reads and writes a second that a sandbox may do on its disk; unlimited by default
    #[arg(long, env = "AENV_DISK_OPERATIONS_PER_SECOND", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) disk_operations_per_second: Option<u64>,
    /// Bytes a second through a sandbox's network card in each direction (Firecracker only); unlimited by default
    #[arg(long, env = "AENV_NETWORK_BYTES_PER_SECOND", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) network_bytes_per_second: Option<u64>,
    /// QEMU program, at least 7.2
    #[arg(long, env = "AENV_QEMU", default_value = "qemu-system-x86_64")]
    pub(crate) qemu: PathBuf,
    /// How guest code is executed; `auto` asks the machine. Set `kvm` on a PVM host whose guests have a PVM kernel
    #[arg(long, env = "AENV_ACCELERATOR", value_enum, default_value = "auto")]
    pub(crate) accelerator: AcceleratorChoice,
    /// CPU model and flags in QEMU's words instead of the built-in choice; captures are bound to it
    #[arg(long, env = "AENV_CPU_MODEL")]
    pub(crate) cpu_model: Option<String>,
}

/// Value of `--driver`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DriverChoice {
    Auto,
    Firecracker,
    Qemu,
}

/// Value of `--accelerator`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AcceleratorChoice {
    Auto,
    Kvm,
    Tcg,
}

impl AcceleratorChoice {
    /// What is forced, if anything.
    pub(crate) fn forced(self) -> Option<Accelerator> {
        match self {
            Self::Auto => None,
            Self::Kvm => Some(Accelerator::Kvm),
            Self::Tcg => Some(Accelerator::Tcg),
        }
    }
}

/// Value of `--on-stop`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnStop {
    /// They run on, and the next start adopts them.
    Leave,
    /// They are paused, all at once, so that they survive the host being switched off.
    Pause,
}

#[derive(Debug, Args)]
pub(crate) struct ServeOptions {
    #[command(flatten)]
    pub(crate) instance: Instance,
    /// Address of the API and of traffic into sandboxes
    #[arg(long, env = "AENV_LISTEN", default_value = "127.0.0.1:8000")]
    pub(crate) listen: String,
    /// Directory with the guest's `kernel/vmlinuz` (QEMU), `kernel/vmlinux` (Firecracker) and `initramfs.cpio`
    #[arg(long, env = "AENV_GUEST_DIR", default_value = "/usr/lib/aenv/guest")]
    pub(crate) guest_dir: PathBuf,
    /// API key that clients must send
    #[arg(long, env = "AENV_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// File with one API key a line, in addition; lines that begin with # are comments
    #[arg(long, env = "AENV_API_KEYS_FILE")]
    pub(crate) api_keys_file: Option<PathBuf>,
    /// Domain of sandbox host names, `{port}-{id}.DOMAIN`, told to clients; may carry a port
    #[arg(long, env = "AENV_DOMAIN")]
    pub(crate) domain: Option<String>,
    /// Network of the links between sandboxes and host, /16 to /30, which nothing else on the host may use
    #[arg(long, env = "AENV_SUBNET", default_value = "100.64.0.0/16")]
    pub(crate) subnet: Ipv4Net,
    /// Fresh network slots to keep ready
    #[arg(long, env = "AENV_SLOT_POOL", default_value_t = 4)]
    pub(crate) slot_pool: usize,
    /// Hot standbys to keep for every template: restored, greeted and stopped
    #[arg(long, env = "AENV_STANDBYS", default_value_t = 2)]
    pub(crate) standbys: usize,
    /// Warm standbys to keep for every template, besides: VMM processes that are ready to load its capture
    #[arg(long, env = "AENV_WARM", default_value_t = 2)]
    pub(crate) warm: usize,
    /// Seconds that the stopped VMM of a paused sandbox is kept, so that a resume only has to let it run; 0 keeps none
    #[arg(long, env = "AENV_HOT_SECONDS", default_value_t = 600)]
    pub(crate) hot_seconds: u32,
    /// MiB of memory changed since a VMM was started beyond which a pause does not keep it: where a pause has to look at all of
    /// that again, the next one is short again, and the resume between them is a cold one
    #[arg(long, env = "AENV_FRESH_AFTER_MIB", default_value_t = 256)]
    pub(crate) fresh_after_mib: u32,
    /// Sandboxes that may be starting cold at once; by default one more than there are processors
    #[arg(long, env = "AENV_MAX_STARTING")]
    pub(crate) max_starting: Option<usize>,
    /// Requests that may wait for a place or for memory; more are refused at once
    #[arg(long, env = "AENV_MAX_WAITING", default_value_t = 256)]
    pub(crate) max_waiting: usize,
    /// Memory, in MiB, that guests may have together: those that run, standbys, and paused ones whose VM is kept; by default
    /// twice what the host, or the control group of the VMs, has. Standbys and paused ones give way before a request is refused
    #[arg(long, env = "AENV_MEMORY_LIMIT_MIB", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) memory_limit_mib: Option<u64>,
    /// Standbys and paused ones give way, too, while the host has fewer MiB available; 0: never; by default a twentieth of its
    /// memory, at least 256
    #[arg(long, env = "AENV_LOW_MEMORY_MIB")]
    pub(crate) low_memory_mib: Option<u64>,
    /// What becomes of running sandboxes when the node is stopped by SIGTERM or SIGINT; a second signal ends it at once
    #[arg(long, env = "AENV_ON_STOP", value_enum, default_value = "leave")]
    pub(crate) on_stop: OnStop,
    /// Seconds that they may take to be paused; those that did not make it run on
    #[arg(long, env = "AENV_STOP_SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub(crate) stop_seconds: u32,
    /// Seconds that a create or a cold resume may wait for its turn, and for memory, before it is refused
    #[arg(long, env = "AENV_START_WAIT_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub(crate) start_wait_seconds: u32,
    /// Longest life time a client may ask for, in hours
    #[arg(long, env = "AENV_MAX_TIMEOUT_HOURS", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=8760))]
    pub(crate) max_timeout_hours: u32,
    /// Creates are refused while the data directory has fewer MiB free
    #[arg(long, env = "AENV_MIN_FREE_MIB", default_value_t = 512)]
    pub(crate) min_free_mib: u64,
    #[command(flatten)]
    pub(crate) log: LogOptions,
}

#[derive(Debug, Args)]
pub(crate) struct ImportOptions {
    /// Directory with templates, disks and the journal
    #[arg(long, env = "AENV_DATA_DIR", default_value = "/var/lib/aenv")]
    pub(crate) data_dir: PathBuf,
    /// Name of the template
    pub(crate) name: String,
    /// Raw ext4 image
    pub(crate) rootfs: PathBuf,
    /// Virtual CPUs of its sandboxes
    #[arg(long, env = "AENV_TEMPLATE_VCPUS", default_value_t = 2)]
    pub(crate) vcpus: u32,
    /// Memory of its sandboxes in MiB
    #[arg(long, env = "AENV_TEMPLATE_MEMORY_MIB", default_value_t = 512)]
    pub(crate) memory_mib: u64,
    /// Size of the root filesystem of its sandboxes in MiB, at least that of the image; it takes no room until it is used
    #[arg(long, env = "AENV_TEMPLATE_DISK_MIB", default_value_t = 10240)]
    pub(crate) disk_mib: u64,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorOptions {
    #[command(flatten)]
    pub(crate) instance: Instance,
    /// Print the report as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_bad_value_is_refused_by_its_name() {
        for (argument, value) in [
            ("--instance", "too-long"),
            ("--subnet", "100.64.0.0"),
            ("--max-timeout-hours", "0"),
            ("--start-wait-seconds", "0"),
            ("--memory-limit-mib", "0"),
            ("--on-stop", "kill"),
            ("--stop-seconds", "0"),
            ("--disk-bytes-per-second", "0"),
            ("--driver", "xen"),
            ("--disks", "nbd"),
        ] {
            let error =
                Arguments::try_parse_from(["aenv-node", "serve", argument, value]).unwrap_err().to_string();
            assert!(error.contains(argument), "{error}");
        }
    }
}
