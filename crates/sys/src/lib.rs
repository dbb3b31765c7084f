//! Safe access to Linux. The only crate of the project in which `unsafe` is allowed; each block says why it is sound.
//!
//! Owns no state. Knows nothing of sandboxes: callers pass names, paths and numbers.
//!
//! | module | what |
//! |---|---|
//! | [`cgroup`] | control groups of version 2: find, make, read and write control files, kill, remove |
//! | [`netns`] | network namespaces: make, open, remove, enter for one call, open sockets inside |
//! | [`tap`] | persistent TAP devices |
//! | [`process`] | pidfds, start times, detached spawning, waiting |
//! | [`host_memory`] | how much memory the host has, has left, and waits for |
//! | [`memory`] | which pages of another process were written, and reading them |
//! | [`pages`] | memory that is page-aligned and never swapped out |
//! | [`file`] | reflinks, holes, data extents, free space |
//! | [`fuse`] | the FUSE device: protocol, mounting, memory for requests that outlives a process |
//! | [`tsc`] | the rate of the time-stamp counter |
//! | [`ublk`] | the kernel's ublk driver: block devices answered by this process |
//! | [`watch`] | being told of new files in a directory |
//! | [`guest`] | what PID 1 of a guest needs: random pool, growing a filesystem, spawning as a user |
#![expect(unsafe_code, reason = "this crate is the one home of unsafe code")]

pub mod cgroup;
pub mod file;
pub mod fuse;
pub mod guest;
pub mod host_memory;
pub mod memory;
pub mod netns;
pub mod pages;
pub mod process;
pub mod tap;
pub mod tsc;
pub mod ublk;
pub mod watch;
