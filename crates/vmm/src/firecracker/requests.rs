//! The requests to Firecracker's API: pure functions of what the machine is and of the version that is spoken to.
//!
//! Must not touch the host. Names and meanings are those of Firecracker's `swagger/firecracker.yaml`. Paths are those in
//! the jail, where every VM has its files under the same names: so a capture fits any number of VMs.

use super::{RateLimits, Version};
use crate::driver::{GUEST_MAC, MachineSpec};
use serde_json::{Value, json};

/// Names of the files of a VM in its jail.
pub(super) mod name {
    pub(in super::super) const DISK: &str = "disk";
    pub(in super::super) const KERNEL: &str = "kernel";
    pub(in super::super) const INITRAMFS: &str = "initramfs";
    pub(in super::super) const MEMORY: &str = "memory";
    pub(in super::super) const STATE: &str = "state";
    /// Directory of a capture that is being written; the two files in it are called as above.
    pub(in super::super) const CAPTURE: &str = "capture";
}

const DRIVE: &str = "root";
const NETWORK_INTERFACE: &str = "eth0";
/// From here on a balloon gives the pages back that the guest has freed.
const FREE_PAGE_REPORTING: Version = Version(1, 14, 0);
/// From here on `enable_diff_snapshots` is called `track_dirty_pages`.
const TRACK_DIRTY_PAGES: Version = Version(1, 13, 0);

/// `panic=-1`: a panic restarts at once, which ends the VM. `reboot=k`: by the keyboard controller, whose reset line is
/// the one way out that Firecracker offers its guests. `pci=off`: there is no bus to look for. The rest keeps the kernel
/// from waiting for a mouse, for a keyboard multiplexer and for serial ports that do not exist.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet panic=-1 reboot=k pci=off 8250.nr_uarts=1 i8042.noaux i8042.nomux \
                                i8042.nopnp i8042.dumbkbd";

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Request {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: Option<Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Put,
    Patch,
}

impl Request {
    fn put(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::Put, path: path.into(), body: Some(body) }
    }

    fn patch(path: impl Into<String>, body: Value) -> Self {
        Self { method: Method::Patch, path: path.into(), body: Some(body) }
    }
}

/// What the guest's CPU is to look like.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Template {
    /// Like the host's.
    None,
    /// Like one of Firecracker's own templates.
    Static(String),
    /// As this document of Firecracker's custom templates says.
    Custom(Value),
}

/// Everything of a machine that a boot configures.
#[derive(Debug)]
pub(super) struct Boot<'a> {
    pub(super) version: Version,
    pub(super) spec: &'a MachineSpec,
    pub(super) tap: &'a str,
    pub(super) guest_arguments: &'a [String],
    pub(super) template: &'a Template,
    pub(super) limits: &'a RateLimits,
    pub(super) balloon: bool,
}

impl Boot<'_> {
    /// The requests in order; the last one starts the guest. There is no entropy device: every CPU that Firecracker runs
    /// on has `rdrand`, and the guest daemon feeds the kernel's pool where clones must differ.
    pub(super) fn requests(&self) -> Vec<Request> {
        let Self { version, spec, tap, guest_arguments, template, limits, balloon } = self;
        // Firecracker tells which pages were written since the last capture only when it tracks from the start.
        let mut machine = json!({
            "vcpu_count": spec.vcpus, "mem_size_mib": spec.memory_mib, "smt": false, "track_dirty_pages": true,
        });
        if let Template::Static(name) = template {
            machine["cpu_template"] = json!(name);
        }
        let mut requests = vec![Request::put("/machine-config", machine)];
        if let Template::Custom(document) = template {
            requests.push(Request::put("/cpu-config", document.clone()));
        }
        let mut arguments = vec![KERNEL_ARGUMENTS];
        arguments.extend(guest_arguments.iter().map(String::as_str));
        requests.push(Request::put(
            "/boot-source",
            json!({
                "kernel_image_path": name::KERNEL, "initrd_path": name::INITRAMFS, "boot_args": arguments.join(" "),
            }),
        ));
        // The initramfs mounts the disk, so it is no root device for Firecracker. `Writeback`: the guest's flushes are
        // carried out. `Sync`: the asynchronous engine is a preview, and needs io_uring, which many hosts forbid.
        let mut drive = json!({
            "drive_id": DRIVE, "path_on_host": name::DISK, "is_root_device": false, "is_read_only": false,
            "cache_type": "Writeback", "io_engine": "Sync",
        });
        if limits.limit_disk() {
            drive["rate_limiter"] = disk_limiter(limits);
        }
        requests.push(Request::put(format!("/drives/{DRIVE}"), drive));
        let mut network =
            json!({"iface_id": NETWORK_INTERFACE, "host_dev_name": tap, "guest_mac": GUEST_MAC});
        if limits.limit_network() {
            network["rx_rate_limiter"] = network_limiter(limits);
            network["tx_rate_limiter"] = network_limiter(limits);
        }
        requests.push(Request::put(format!("/network-interfaces/{NETWORK_INTERFACE}"), network));
        if *balloon {
            let mut device = json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 0});
            if *version >= FREE_PAGE_REPORTING {
                device["free_page_reporting"] = json!(true);
            }
            requests.push(Request::put("/balloon", device));
        }
        requests.push(Request::put("/actions", json!({"action_type": "InstanceStart"})));
        requests
    }
}

/// Loads the capture in the jail; the vCPUs stay stopped. Tracks what the guest writes from then on.
pub(super) fn load(version: Version, tap: &str) -> Request {
    let tracking = if version >= TRACK_DIRTY_PAGES { "track_dirty_pages" } else { "enable_diff_snapshots" };
    Request::put(
        "/snapshot/load",
        json!({
            "snapshot_path": name::STATE,
            "mem_backend": {"backend_type": "File", "backend_path": name::MEMORY},
            tracking: true,
            "resume_vm": false,
            "network_overrides": [{"iface_id": NETWORK_INTERFACE, "host_dev_name": tap}],
        }),
    )
}

/// Gives a restored machine the limits of this node: a capture brings those of where it was made.
pub(super) fn limit(limits: &RateLimits) -> [Request; 2] {
    [
        Request::patch(
            format!("/drives/{DRIVE}"),
            json!({"drive_id": DRIVE, "rate_limiter": disk_limiter(limits)}),
        ),
        Request::patch(
            format!("/network-interfaces/{NETWORK_INTERFACE}"),
            json!({
                "iface_id": NETWORK_INTERFACE,
                "rx_rate_limiter": network_limiter(limits),
                "tx_rate_limiter": network_limiter(limits),
            }),
        ),
    ]
}

fn disk_limiter(limits: &RateLimits) -> Value {
    json!({"bandwidth": bucket(limits.disk_bytes), "ops": bucket(limits.disk_operations)})
}

fn network_limiter(limits: &RateLimits) -> Value {
    json!({"bandwidth": bucket(limits.network_bytes), "ops": bucket(None)})
}

/// What may be used in a second at once, refilled within a second. An empty bucket means no limit.
fn bucket(per_second: Option<u64>) -> Value {
    let refill_time = if per_second.is_some() { 1000 } else { 0 };
    json!({"size": per_second.unwrap_or(0), "refill_time": refill_time})
}

/// Whether the vCPUs are to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Running,
    Stopped,
}

/// Stops or resumes the vCPUs.
pub(super) fn run(wanted: Wanted) -> Request {
    let state = match wanted {
        Wanted::Running => "Resumed",
        Wanted::Stopped => "Paused",
    };
    Request::patch("/vm", json!({"state": state}))
}

/// What a snapshot's memory file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Snapshot {
    /// All of the memory.
    Full,
    /// Pages written since the previous snapshot, or since the start.
    Diff,
}

/// Writes device state and memory to the files of the capture directory in the jail.
pub(super) fn snapshot(kind: Snapshot) -> Request {
    let kind = match kind {
        Snapshot::Full => "Full",
        Snapshot::Diff => "Diff",
    };
    let path = |file| format!("{}/{file}", name::CAPTURE);
    Request::put(
        "/snapshot/create",
        json!({
            "snapshot_type": kind, "snapshot_path": path(name::STATE), "mem_file_path": path(name::MEMORY),
        }),
    )
}

/// Asks for the state of the machine.
pub(super) fn describe() -> Request {
    Request { method: Method::Get, path: "/".to_owned(), body: None }
}

#[cfg(test)]
mod tests;
