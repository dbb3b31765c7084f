//! The kernel's ublk driver: block devices whose requests a process answers.
//!
//! Owns descriptors, mappings and rings, each until it is dropped. Decides nothing: which device, which answer.
//!
//! ```text
//!  /dev/ublk-control ◀─ Control ── add, parameters, start, stop, delete, recover
//!  /dev/ublkcN       ◀─ CharDevice ── data of requests (pread, pwrite)     mapped: descriptors of requests
//!       ▲ fetch, commit                                                         │
//!       └──── Ring: one thread, any number of queues of any number of devices ◀─┘
//! ```
//!
//! States of a device with user recovery:
//!
//! ```text
//!  add ─▶ dead ─start─▶ live ──its server ends──▶ quiesced (requests wait) ─begin_recovery, fetch, end_recovery─▶ live
//!                        └── stop ─▶ dead ─delete─▶ (gone)   ◀── stop ──┘
//! ```
//! A recovery is begun only when the last one had fetched all: [`fetch_and_end`] does it for one that was interrupted.
//!
//! Written from the kernel's include/uapi/linux/ublk_cmd.h and drivers/block/ublk_drv.c (6.12).

mod abi;
mod control;
mod ring;
mod stand_in;

pub use abi::{
    DESCRIPTOR_BYTES, DeviceInfo, DeviceState, Features, MAX_NUMBER, Operation, Parameters, RequestDescriptor,
};
pub use control::Control;
pub use ring::{CharDevice, Event, Queue, Ring, Waker};
pub use stand_in::fetch_and_end;

/// From the kernel's include/uapi/linux/prctl.h; the C library's binding lacks it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Tells the kernel that the calling thread answers block requests: memory it allocates is never waited for by writing to
/// a block device, which could be its own.
///
/// # Errors
/// Without CAP_SYS_RESOURCE.
pub fn mark_thread_as_io_flusher() -> std::io::Result<()> {
    // SAFETY: this option takes numbers only and touches no memory of ours.
    let answer = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if answer < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Takes CAP_SYS_ADMIN from the calling thread. The kernel reads no partition table from a device one of whose queues is
/// served without it, and content that a guest wrote should not be parsed by the host's kernel.
///
/// # Errors
/// The system's error.
pub fn drop_admin_capability_of_thread() -> std::io::Result<()> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    sets.effective.remove(CapabilitySet::SYS_ADMIN);
    sets.permitted.remove(CapabilitySet::SYS_ADMIN);
    Ok(set_capabilities(None, sets)?)
}
