//! Whole nodes on a fake host: their life, faults at every step, and crashes at every step.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod admission;
mod adoption;
mod crash;
mod draining;
mod faults;
mod life;
mod pause;
mod pause_crash;
mod pause_faults;
mod snapshot_races;
mod snapshots;
mod walk;
mod warm;
mod world;
