//! What tests need beside the product: fakes with seeded faults, and harnesses. Never part of a program.

pub mod client;
pub mod fake_host;
mod fake_memory;
pub mod fake_slots;
pub mod fake_store;
pub mod fake_vmm;
pub mod node;
pub mod pausing;
pub mod resources;

pub use aenv_vmm::ExitCause;
pub use fake_host::{Counts, FakeHost, Fault, Operation};
pub use fake_slots::FakeSlots;
pub use fake_store::FakeStore;
pub use fake_vmm::FakeVmm;
