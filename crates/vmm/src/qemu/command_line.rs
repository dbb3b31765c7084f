//! The arguments of a QEMU process: a pure function of what the machine is.
//!
//! Must not touch the host, and names no path of it: all paths are those of the jail. Boot and restore give the same machine type, CPU, memory and devices **in the same order**:
//! device state is matched by that order. What only a boot needs (kernel, initramfs, kernel arguments) is left out of a
//! restore: the guest has it in memory already, and QEMU would keep a copy of the blobs in every process.

use super::{jail, program_tree};
use crate::driver::{GUEST_MAC, MachineSpec, Placement};
use crate::host_disk::DiskKind;
use crate::probe::{Accelerator, Choice, CpuVendor};
use crate::program::Version;
use crate::rate_limits::RateLimits;

/// Bytes of console output kept in the VMM's memory. A guest that prints for ever costs the host nothing else.
pub(super) const CONSOLE_BYTES: u32 = 64 << 10;
/// The console's ring buffer in QMP commands.
pub(super) const CONSOLE: &str = "console";
/// From here on a memory backend can be opened read-only and still be mapped privately writable.
pub(super) const READ_ONLY_BACKEND: Version = Version(8, 2, 0);

/// Everything TCG of QEMU 7.2 and newer emulates without a warning that makes up x86-64-v3, plus `rdrand`, by name:
/// `max` would change with the version. And `arat`, a timer that goes on whatever the processor sleeps like: without it
/// Linux keeps the periodic tick, which costs 6 % of a host's processor per idle guest, and times nothing finer than 4 ms.
const TCG_CPU: &str = "Nehalem-v1,enforce,+rdrand,+aes,+pclmulqdq,+avx,+avx2,+bmi1,+bmi2,+fma,+f16c,+movbe,+abm,+xsave,\
                       +fsgsbase,+smep,+smap,+erms,+rdtscp,+arat";
/// Oldest models with x86-64-v3 of each vendor: the guest sees the same on every newer host.
const INTEL_CPU: &str = "Haswell-noTSX,enforce";
const AMD_CPU: &str = "EPYC-v1,enforce";

/// The built-in CPU model of an accelerator on this host.
pub(super) fn cpu_model(choice: &Choice) -> &'static str {
    match (choice.accelerator, choice.vendor) {
        (Accelerator::Tcg, _) => TCG_CPU,
        (Accelerator::Kvm, CpuVendor::Amd) => AMD_CPU,
        (Accelerator::Kvm, CpuVendor::Intel | CpuVendor::Other) => INTEL_CPU,
    }
}

/// How the guest comes to life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// By booting its kernel, at once.
    Boot,
    /// From device state sent later; the vCPUs stay stopped.
    Restore,
}

/// What one process is started with.
#[derive(Debug)]
pub(super) struct CommandLine<'a> {
    pub(super) version: Version,
    pub(super) accelerator: Accelerator,
    pub(super) cpu_model: &'a str,
    pub(super) tsc_khz: Option<u64>,
    pub(super) spec: &'a MachineSpec,
    pub(super) placement: &'a Placement,
    pub(super) disk: DiskKind,
    pub(super) limits: &'a RateLimits,
    /// Process name, as in the process list.
    pub(super) process_name: &'a str,
    /// Number of the inherited listening socket for QMP.
    pub(super) monitor_fd: i32,
    pub(super) start: Start,
}

impl CommandLine<'_> {
    /// The arguments behind the program's name.
    pub(super) fn build(&self) -> Vec<String> {
        let mut line = Line(Vec::new());
        self.process(&mut line);
        self.machine(&mut line);
        devices(self.placement, self.disk, self.limits, &mut line);
        match self.start {
            Start::Boot => {
                line.add("-kernel", jail::KERNEL);
                line.add("-initrd", jail::INITRAMFS);
                line.add("-append", self.kernel_arguments());
            }
            Start::Restore => {
                line.add("-incoming", "defer");
                line.flag("-S");
            }
        }
        line.0
    }

    fn process(&self, line: &mut Line) {
        let name = self.process_name;
        line.add("-name", format_args!("guest={name},process={name}"));
        line.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
        line.flag("-nodefaults");
        line.flag("-no-user-config");
        line.add("-L", program_tree::FIRMWARE_DIRECTORY);
        line.add("-display", "none");
        // A guest that goes down is kept stopped until its console was read: the only evidence of a panic.
        line.add("-action", "reboot=shutdown,shutdown=pause");
        let fd = self.monitor_fd;
        line.add("-chardev", format_args!("socket,id=monitor,fd={fd},server=on,wait=off"));
        line.add("-mon", "chardev=monitor,mode=control");
    }

    fn machine(&self, line: &mut Line) {
        // Translated code takes at most these MiB; by default it may grow to a GiB, beyond every sensible memory limit.
        line.add(
            "-accel",
            match self.accelerator {
                Accelerator::Kvm => "kvm",
                Accelerator::Tcg => "tcg,thread=multi,tb-size=128",
            },
        );
        // Option ROMs stay on: without them QEMU 10 hangs at boot. Devices are announced by ACPI alone.
        line.add(
            "-machine",
            "microvm,rtc=on,memory-backend=memory,auto-kernel-cmdline=off,suppress-vmdesc=on,mem-merge=off,\
             dump-guest-core=off",
        );
        line.add("-cpu", self.cpu_model);
        line.add("-smp", self.spec.vcpus);
        let size = self.spec.memory_mib;
        line.add("-m", format_args!("{size}M"));
        let read_only = match self.start {
            Start::Restore if self.version >= READ_ONLY_BACKEND => ",readonly=on,rom=off",
            _ => "",
        };
        let path = jail::MEMORY;
        let backend =
            format_args!("memory-backend-file,id=memory,size={size}M,mem-path={path},share=off{read_only}");
        line.add("-object", backend);
        line.add("-global", "migration.send-configuration=off");
    }

    /// `panic=-1`: a panic restarts at once, which ends the VM. `reboot=t`: by a triple fault, since the kernel's other
    /// ways go through devices that this machine lacks, and a running guest then spins instead of restarting.
    /// `pci=off`: there is no bus to look for.
    fn kernel_arguments(&self) -> String {
        let mut arguments = "console=ttyS0 quiet panic=-1 reboot=t pci=off".to_owned();
        for argument in &self.placement.boot.guest_arguments {
            arguments.push(' ');
            arguments.push_str(argument);
        }
        if self.accelerator == Accelerator::Tcg {
            // Emulated, the machine has no clock that the kernel could calibrate the time-stamp counter against, and
            // its attempt with the interval timer fails at random on a busy host.
            arguments.push_str(" no_timer_check tsc=reliable");
            if let Some(khz) = self.tsc_khz {
                arguments.push_str(&format!(" tsc_early_khz={khz}"));
            }
        }
        arguments
    }
}

/// The guest's devices. Their order is part of what a capture is bound to. virtio-mmio stays at QEMU's default layout
/// (legacy): the state of the modern one has 90 KB of unused queues, which cost 2 ms per capture and 1 ms per restore.
fn devices(placement: &Placement, disk: DiskKind, limits: &RateLimits, line: &mut Line) {
    line.add("-chardev", format_args!("ringbuf,id={CONSOLE},size={CONSOLE_BYTES}"));
    line.add("-serial", format_args!("chardev:{CONSOLE}"));
    // A write-back cache whose flushes are carried out: the guest's fsync is real. Trimmed blocks go back to the host.
    let path = jail::disk(disk);
    // Who exports a disk has a cache of its own, so the host's would hold everything twice.
    let (driver, cache) = match disk {
        DiskKind::File => ("file", ""),
        DiskKind::ExportedFile => ("file", ",aio=threads,cache.direct=on"),
        DiskKind::Device { .. } => ("host_device", ",aio=threads,cache.direct=on"),
    };
    line.add(
        "-blockdev",
        format_args!("driver={driver},node-name=disk-file,filename={path},discard=unmap{cache}"),
    );
    let limited = limits.limit_disk();
    let node = if limited { "disk-raw" } else { "disk" };
    line.add("-blockdev", format_args!("driver=raw,node-name={node},file=disk-file,discard=unmap"));
    if limited {
        let limit = |name: &str, value: Option<u64>| {
            value.map_or_else(String::new, |value| format!(",{name}={value}"))
        };
        let bytes = limit("x-bps-total", limits.disk_bytes);
        let operations = limit("x-iops-total", limits.disk_operations);
        line.add("-object", format_args!("throttle-group,id=disk-limits{bytes}{operations}"));
        line.add("-blockdev", "driver=throttle,node-name=disk,throttle-group=disk-limits,file=disk-raw");
    }
    // A regular file on a full host: the guest stands still, its write is not lost. Who exports a disk holds such writes itself,
    // so an error of an exported one is the guest's own: its quota, or a layer that is damaged.
    let errors = match disk {
        DiskKind::File => "",
        DiskKind::ExportedFile | DiskKind::Device { .. } => ",werror=report,rerror=report",
    };
    line.add("-device", format_args!("virtio-blk-device,drive=disk{errors}"));
    let tap = &placement.tap;
    line.add("-netdev", format_args!("tap,id=net0,ifname={tap},script=no,downscript=no,vhost=off"));
    line.add("-device", format_args!("virtio-net-device,netdev=net0,mac={GUEST_MAC}"));
}

struct Line(Vec<String>);

impl Line {
    fn add(&mut self, option: &str, value: impl std::fmt::Display) {
        self.0.extend([option.to_owned(), value.to_string()]);
    }

    fn flag(&mut self, option: &str) {
        self.0.push(option.to_owned());
    }
}

#[cfg(test)]
mod tests;
