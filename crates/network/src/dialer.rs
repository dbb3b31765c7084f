//! Connections from inside a slot.
//!
//! Owns only the place of the slot's pin: a held descriptor would keep the namespace alive after its release. Names of
//! slots are not used again, so a pin that opens is the right one.

use crate::slot::DialNamespace;
use aenv_sys::netns::SocketOpener;
use async_trait::async_trait;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::{TcpSocket, TcpStream};

/// Dials from inside one pinned namespace.
pub(crate) struct PinDialer {
    pub(crate) pin: PathBuf,
    pub(crate) opener: Arc<SocketOpener>,
}

#[async_trait]
impl DialNamespace for PinDialer {
    async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.opener.open_tcp(&self.pin, &to).await?;
        let stream = TcpSocket::from_std_stream(socket).connect(to).await?;
        // Small requests and answers go both ways; waiting to fill a segment would only delay them.
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}
