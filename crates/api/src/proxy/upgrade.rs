//! Connections that stopped being HTTP, WebSockets above all: bytes are carried in both directions until one side ends,
//! or the sandbox does.

use crate::proxy::upstream::Permit;
use aenv_protocol::ids::SandboxId;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;

/// Bytes in flight in each direction of one connection.
const BUFFER_BYTES: usize = 32 << 10;

/// Both sides of a connection that is about to change its protocol.
pub(crate) struct Carried {
    pub(crate) client: OnUpgrade,
    pub(crate) guest: OnUpgrade,
}

/// Carries in the background. A client that vanishes without a word is found by the keep-alive of its socket.
pub(crate) fn carry(
    carried: Carried,
    id: SandboxId,
    ended: CancellationToken,
    stop: CancellationToken,
    permit: Permit,
) {
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = ended.cancelled() => {}
            () = stop.cancelled() => {}
            result = copy(carried) => if let Err(error) = result {
                tracing::debug!(sandbox = %id, %error, "upgraded connection broke");
            },
        }
        drop(permit);
    });
}

async fn copy(carried: Carried) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let (client, guest) = tokio::try_join!(carried.client, carried.guest)?;
    let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
    tokio::io::copy_bidirectional_with_sizes(&mut client, &mut guest, BUFFER_BYTES, BUFFER_BYTES).await?;
    Ok(())
}
