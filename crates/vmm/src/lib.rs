//! Drives ONE microVM: boot, capture, restore, stop, adopt.
//!
//! Owns the VMM process and the files in its run directory. Does not know sandboxes, templates, networks or the API: the
//! caller passes paths, a network namespace and a tap device name, and decides when and why.
//!
//! ```text
//!             boot ──▶ Running ◀──resume── Stopped ◀── restore(capture)
//!                        │  └───stop──────▶  │
//!                        │                   └─ capture ─▶ device state + memory image
//!                        └── exits by itself or by kill ─▶ Exit { cause }
//! ```

pub mod cgroups;
mod confinement;
mod console;
pub mod driver;
mod ending;
pub mod firecracker;
mod host_disk;
mod partial;
pub mod probe;
mod process;
mod program;
pub mod qemu;
mod rate_limits;
mod strays;

pub use confinement::Confinement;
pub use driver::{
    BootSource, CaptureBase, CaptureFiles, CaptureReport, Exit, ExitCause, Identity, Machine, MachineSpec,
    Placement, ProcessRecord, Vmm, VmmError,
};
pub use process::PROBE_NAME;
pub use rate_limits::RateLimits;
pub use strays::end_strays;
