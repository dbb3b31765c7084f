//! One network slot per sandbox, and the pool of fresh ones.
//!
//! Owns network namespaces, veth pairs, tap devices and nftables tables of one node instance. Knows nothing of sandboxes
//! or VMMs: it hands out slots by name. A slot is never given out twice (connection tracking, neighbours).
//!
//! ```text
//!        host                                │  namespace aenv-<instance>-<slot>                    │  guest
//!                                            │                                                      │
//!  world ── any interface ──masquerade── ae<instance>v<n> ═══ veth ═══ uplink ──masquerade── tap0 ──┼── eth0
//!            │                            │  │                           policy `inet                │  169.254.0.21
//!            policy `inet aenv_<instance>`┘  │                           aenv_<instance>`           │
//! ```
//!
//! Both policies say the same from two sides, so that neither alone holds the guest: the one inside is bound to the
//! devices of the slot, the one on the host still stands if a VMM breaks out into its namespace.
//!
//! | module | what |
//! |---|---|
//! | [`slot`] | what a slot is; the contract with its users |
//! | [`settings`] | what an instance is told; names and addresses that follow from it |
//! | `policy` | who may talk to whom, as data |
//! | `nftables` | puts a policy into the kernel, atomically |
//! | `links` | interfaces, addresses, routes and neighbours of one namespace |
//! | `construct` | makes and removes one slot |
//! | `dialer` | connections from inside a slot |
//! | `registry` | which slots there are and who has them, as data |
//! | [`linux`] | [`LinuxSlots`]: the pool |
//! | [`host`] | what an instance changes on the host, and undoing it |

mod construct;
mod dialer;
pub mod host;
mod links;
pub mod linux;
mod nftables;
mod policy;
mod registry;
pub mod settings;
pub mod slot;

pub use host::{Purged, probe_firewall, purge};
pub use linux::{LinuxSlots, StartError};
pub use settings::{InstanceName, SettingsError, SlotSettings};
pub use slot::{DialNamespace, NetworkError, Slot, SlotName, Slots};
