//! What a VMM process may use, and how the kernel wants it said.
//!
//! Values only; touches no file.

/// Length of the window in which the CPU quota is counted: the kernel's default. Shorter costs switches, longer makes
/// pauses that a guest notices.
const CPU_PERIOD_MICROSECONDS: u64 = 100_000;
/// The kernel refuses a smaller quota.
const CPU_QUOTA_LEAST_MICROSECONDS: u64 = 1_000;
/// Threads of a VMM beside one per virtual CPU: QEMU's pool for block requests grows to 64; main loop, RCU, I/O threads and
/// migration add a handful; workers of io_uring count too.
const VMM_THREADS: u32 = 128;

/// Limits of one block device; an absent one is unlimited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoLimit {
    /// Major device number.
    pub major: u32,
    /// Minor device number.
    pub minor: u32,
    /// Bytes read per second.
    pub rbps: Option<u64>,
    /// Bytes written per second.
    pub wbps: Option<u64>,
    /// Reads per second.
    pub riops: Option<u64>,
    /// Writes per second.
    pub wiops: Option<u64>,
}

/// The limits of one VM's group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory: the guest's, the VMM's, and page cache that it was the first to touch.
    pub memory_max: u64,
    /// Bytes in swap beside that.
    pub memory_swap_max: u64,
    /// Processor time in thousandths of one CPU; absent: unlimited. Less than 10 counts as 10.
    pub cpu_max: Option<u32>,
    /// Threads and processes.
    pub pids_max: u32,
    /// Block devices with limits; those that are not listed are unlimited.
    pub io: Vec<IoLimit>,
    /// When memory runs out the whole group is killed and not one process of it.
    pub oom_group: bool,
}

impl Limits {
    /// The limits of a machine with `vcpus` virtual CPUs and `memory_mib` MiB of guest memory.
    ///
    /// `overhead_mib` is what the VMM may use beside the guest's memory. Too little of it kills healthy guests, so it is
    /// meant to be generous; it is a limit and reserves nothing. It has to hold
    /// * the VMM's heap, stacks, libraries and device buffers,
    /// * the translated code under TCG: QEMU's buffer, 64 MiB and more, fills up with time,
    /// * page tables of the guest's memory (2 MiB per GiB), which are charged as kernel memory,
    /// * nothing for the page cache of a shared memory image: the first child that touches a page is charged for it, but the
    ///   kernel reclaims clean cache before it kills. A limit measured on a second child is too low all the same.
    #[must_use]
    pub fn for_machine(vcpus: u32, memory_mib: u64, overhead_mib: u64) -> Self {
        Self {
            memory_max: memory_mib.saturating_add(overhead_mib).saturating_mul(1 << 20),
            memory_swap_max: 0,
            cpu_max: Some(vcpus.saturating_mul(1000)),
            pids_max: vcpus.saturating_add(VMM_THREADS),
            io: Vec::new(),
            oom_group: true,
        }
    }

    /// The control files and what is written to each, in order. The jailer takes the same as `--cgroup FILE=VALUE`.
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let mut settings = vec![
            ("memory.max", self.memory_max.to_string()),
            ("memory.swap.max", self.memory_swap_max.to_string()),
            ("memory.oom.group", u8::from(self.oom_group).to_string()),
            ("cpu.max", self.cpu_quota()),
            ("pids.max", self.pids_max.to_string()),
        ];
        settings.extend(self.io.iter().map(|limit| ("io.max", limit.line())));
        settings
    }

    fn cpu_quota(&self) -> String {
        let Some(thousandths) = self.cpu_max else { return format!("max {CPU_PERIOD_MICROSECONDS}") };
        let quota = u64::from(thousandths) * CPU_PERIOD_MICROSECONDS / 1000;
        format!("{} {CPU_PERIOD_MICROSECONDS}", quota.max(CPU_QUOTA_LEAST_MICROSECONDS))
    }
}

impl IoLimit {
    fn line(&self) -> String {
        let value = |limit: Option<u64>| limit.map_or_else(|| "max".to_owned(), |limit| limit.to_string());
        format!(
            "{}:{} rbps={} wbps={} riops={} wiops={}",
            self.major,
            self.minor,
            value(self.rbps),
            value(self.wbps),
            value(self.riops),
            value(self.wiops),
        )
    }
}
