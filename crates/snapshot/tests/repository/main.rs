//! The repository of snapshots, in a directory and in a bucket of a real S3 server, through one suite.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod faults;
mod hooked;
mod interleavings;
mod place;
mod sample;
mod suite;
