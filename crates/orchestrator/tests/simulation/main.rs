//! Whole nodes on a fake host: their life, faults at every step, and crashes at every step.

mod crash;
mod faults;
mod life;
mod world;
