//! FUSE exports as the kernel and other processes see them: real mounts, a holder process, daemons that are killed.
//!
//! Needs root and `/dev/fuse`. Everything is in a temporary directory; each test has a mount and a holder of its own.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, in its shared parts too, and says why"
)]

mod memory;
mod roles;
mod stage;

mod disks;
mod images;
mod recovery;
mod removal;
mod room;
