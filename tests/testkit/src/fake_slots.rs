//! Network slots in memory. A connection to a guest's port arrives at the fake guest that lives in the slot.

use crate::fake_host::{FakeHost, Operation};
use aenv_network::{DialNamespace, NetworkError, Slot, SlotName, Slots};
use async_trait::async_trait;
use std::io::{Error, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;

/// Address of every guest.
const GUEST: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);

/// User of every VMM; no process runs, so nobody minds that it is the same.
const FAKE_USER: u32 = 1 << 30;

/// The fake slots of a host.
pub struct FakeSlots {
    host: Arc<FakeHost>,
}

impl FakeSlots {
    /// Slots on `host`.
    #[must_use]
    pub fn new(host: Arc<FakeHost>) -> Self {
        Self { host }
    }

    fn slot(&self, name: SlotName) -> Slot {
        let netns = Path::new("/fake/netns").join(&name.0);
        let dialer =
            Arc::new(FakeDialer { host: Arc::clone(&self.host), name: name.clone(), netns: netns.clone() });
        Slot { name, netns, tap: "tap0".to_owned(), user: FAKE_USER, guest_address: GUEST, dialer }
    }

    fn failed(action: &'static str, slot: &str) -> impl FnOnce(String) -> NetworkError {
        let slot = slot.to_owned();
        move |reason| NetworkError::Kernel { action, slot, reason }
    }
}

#[async_trait]
impl Slots for FakeSlots {
    async fn acquire(&self) -> Result<Slot, NetworkError> {
        let call =
            self.host.begin(Operation::Acquire).await.map_err(Self::failed("make a namespace", "new"))?;
        let slot = self.slot(self.host.add_slot());
        call.reply().await;
        Ok(slot)
    }

    async fn adopt(&self, name: &SlotName) -> Result<Slot, NetworkError> {
        let call = self.host.begin(Operation::AdoptSlot).await.map_err(Self::failed("adopt", &name.0))?;
        if !self.host.has_slot(name) {
            return Err(NetworkError::NotFound(name.0.clone()));
        }
        call.reply().await;
        Ok(self.slot(name.clone()))
    }

    async fn deny_egress(&self, name: &SlotName) -> Result<(), NetworkError> {
        let call =
            self.host.begin(Operation::DenyEgress).await.map_err(Self::failed("deny egress", &name.0))?;
        if !self.host.deny_egress(name) {
            return Err(NetworkError::NotFound(name.0.clone()));
        }
        call.reply().await;
        Ok(())
    }

    async fn release(&self, name: &SlotName) -> Result<(), NetworkError> {
        let call = self.host.begin(Operation::Release).await.map_err(Self::failed("release", &name.0))?;
        self.host.remove_slot(name);
        call.reply().await;
        Ok(())
    }

    async fn sweep(&self, keep: &[SlotName]) -> Result<Vec<SlotName>, NetworkError> {
        let call =
            self.host.begin(Operation::Sweep).await.map_err(Self::failed("list namespaces", "host"))?;
        let strays: Vec<_> = self.host.slot_names().into_iter().filter(|name| !keep.contains(name)).collect();
        for name in &strays {
            self.host.remove_slot(name);
        }
        call.reply().await;
        Ok(strays)
    }
}

struct FakeDialer {
    host: Arc<FakeHost>,
    name: SlotName,
    netns: PathBuf,
}

#[async_trait]
impl DialNamespace for FakeDialer {
    async fn connect(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        if !self.host.has_slot(&self.name) {
            return Err(ErrorKind::NotFound.into());
        }
        let guest = self
            .host
            .process_in(&self.netns)
            .ok_or_else(|| Error::new(ErrorKind::HostUnreachable, "no guest in the slot"))?;
        let address = guest.port(to.port()).ok_or(ErrorKind::ConnectionRefused)?;
        self.host.note_connection();
        TcpStream::connect(address).await
    }
}
