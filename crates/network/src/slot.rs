//! What a slot is, and the contract between those who make slots and those who use them.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpStream;

/// Name of a slot, unique on this host among the slots of one instance for as long as the host is up.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotName(pub String);

/// A network of its own for one guest.
#[derive(Clone)]
pub struct Slot {
    /// Its name; journalled by the user of the slot.
    pub name: SlotName,
    /// Network namespace to start the VMM in.
    pub netns: PathBuf,
    /// Persistent tap device inside the namespace.
    pub tap: String,
    /// User and group id that the tap belongs to and the VMM is to run under: no other slot of this host has it, and no
    /// account.
    pub user: u32,
    /// Address of the guest, the same in every slot.
    pub guest_address: Ipv4Addr,
    /// Opens connections from inside the namespace.
    pub dialer: Arc<dyn DialNamespace>,
}

/// Opens TCP connections whose socket lives in a slot's namespace.
#[async_trait]
pub trait DialNamespace: Send + Sync + 'static {
    /// Connects to `to` as seen from inside the namespace; gives up when the caller drops the future.
    ///
    /// # Errors
    /// Those of `connect(2)`, and `NotFound` when the namespace is gone.
    async fn connect(&self, to: SocketAddr) -> std::io::Result<TcpStream>;
}

/// What can go wrong with slots.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NetworkError {
    /// A kernel request failed.
    #[error("cannot {action} for slot {slot}: {reason}")]
    Kernel {
        /// What was being done.
        action: &'static str,
        /// For which slot, or `host`.
        slot: String,
        /// The kernel's answer.
        reason: String,
    },
    /// No such slot: it was never made or is gone.
    #[error("network slot {0} does not exist")]
    NotFound(String),
    /// All addresses of the instance's range are in use.
    #[error("no free network slot: all {0} of this instance are in use")]
    Exhausted(usize),
    /// The slots were shut down.
    #[error("no network slot: the node is shutting down")]
    ShuttingDown,
}

/// Makes, hands out and removes slots.
#[async_trait]
pub trait Slots: Send + Sync + 'static {
    /// Takes a fresh slot, from the pool when it has one.
    ///
    /// # Errors
    /// When a slot cannot be made; nothing of it stays.
    async fn acquire(&self) -> Result<Slot, NetworkError>;

    /// Takes over a slot made by an earlier process of the same instance.
    ///
    /// # Errors
    /// [`NetworkError::NotFound`] when it is gone.
    async fn adopt(&self, name: &SlotName) -> Result<Slot, NetworkError>;

    /// Cuts the guest of this slot off from everything outside; the host's own connections to the guest go on.
    ///
    /// # Errors
    /// When the rules cannot be changed.
    async fn deny_egress(&self, name: &SlotName) -> Result<(), NetworkError>;

    /// Removes a slot that is no longer used by any VMM. Removing one that is gone is no error.
    ///
    /// # Errors
    /// When something of it could not be removed.
    async fn release(&self, name: &SlotName) -> Result<(), NetworkError>;

    /// Removes every slot of this instance that is not in `keep` and not in the pool; returns what it removed.
    ///
    /// # Errors
    /// When the slots cannot be listed.
    async fn sweep(&self, keep: &[SlotName]) -> Result<Vec<SlotName>, NetworkError>;
}
