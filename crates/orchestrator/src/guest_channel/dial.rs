//! Connections from the node into a guest's ports, for the proxy.
//!
//! Tried in this order, over and over for a short time, because a caller often connects right after it started a server:
//! 1. the guest's address: servers that listen on all addresses;
//! 2. the guest daemon's relay: servers that listen on the guest's loopback only.
//!
//! Only a refused connection is tried again; everything else is final.

use crate::view::Dial;
use aenv_network::{DialNamespace, Slot};
use aenv_protocol::envd::{ENVD_PORT, RELAY_PORT};
use std::io::{Error, ErrorKind, Result};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Pauses between the attempts: five attempts within half a second.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(20),
    Duration::from_millis(60),
    Duration::from_millis(140),
    Duration::from_millis(240),
];
/// Longest the whole may take: a guest that does not even refuse is stuck or gone.
const LIMIT: Duration = Duration::from_secs(10);

/// Opens connections into one guest.
pub(crate) struct GuestDialer {
    dialer: Arc<dyn DialNamespace>,
    guest: Ipv4Addr,
}

impl GuestDialer {
    /// For the guest in `slot`.
    pub(crate) fn new(slot: &Slot) -> Self {
        Self { dialer: Arc::clone(&slot.dialer), guest: slot.guest_address }
    }

    async fn once(&self, port: u16) -> Result<TcpStream> {
        match self.direct(port).await {
            Err(error)
                if error.kind() == ErrorKind::ConnectionRefused
                    && port != RELAY_PORT
                    && port != ENVD_PORT =>
            {
                self.relayed(port).await
            }
            other => other,
        }
    }

    async fn direct(&self, port: u16) -> Result<TcpStream> {
        self.dialer.connect(SocketAddr::from((self.guest, port))).await
    }

    async fn relayed(&self, port: u16) -> Result<TcpStream> {
        let mut stream = self.direct(RELAY_PORT).await?;
        stream.set_nodelay(true)?;
        stream.write_all(format!("{port}\n").as_bytes()).await?;
        // Exactly the length of the good answer: the server's first bytes may follow at once.
        let mut answer = [0_u8; 3];
        stream.read_exact(&mut answer).await?;
        match &answer {
            b"ok\n" => Ok(stream),
            b"ref" => Err(ErrorKind::ConnectionRefused.into()),
            other => Err(Error::new(ErrorKind::InvalidData, format!("the guest's relay answered {other:?}"))),
        }
    }

    async fn patiently(&self, port: u16) -> Result<TcpStream> {
        for pause in PAUSES {
            match self.once(port).await {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => tokio::time::sleep(pause).await,
                other => return other,
            }
        }
        self.once(port).await
    }
}

#[async_trait::async_trait]
impl Dial for GuestDialer {
    async fn dial(&self, port: u16) -> Result<TcpStream> {
        tokio::time::timeout(LIMIT, self.patiently(port)).await.map_err(|_| {
            Error::new(ErrorKind::TimedOut, format!("the guest did not answer within {LIMIT:?}"))
        })?
    }
}
