//! FUSE exports as the kernel and other processes see them: real mounts, a holder process, daemons that are killed.
//!
//! Needs root and `/dev/fuse`. Everything is in a temporary directory; each test has a mount and a holder of its own.

mod memory;
mod roles;
mod stage;

mod disks;
mod images;
mod recovery;
mod removal;
mod room;
