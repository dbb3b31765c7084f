//! One network slot per sandbox, and the pool of fresh ones.
//!
//! Owns network namespaces, veth pairs, tap devices and nftables tables of one node instance. Knows nothing of sandboxes
//! or VMMs: it hands out slots by name. A slot is never given out twice (connection tracking, neighbours).

pub mod slot;

pub use slot::{DialNamespace, NetworkError, Slot, SlotName, Slots};
