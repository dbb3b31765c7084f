//! Carries connections of the node to programs that listen on the guest's loopback only.
//!
//! ```text
//! node ── "<port>\n" ──▶ relay ── connect 127.0.0.1, then [::1] ──▶ program
//!      ◀── "ok\n" | "refused\n" + end ──      then bytes both ways until both sides have ended
//! ```
//! Owns no state beyond the connections.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Longest first line: five digits and its end.
const MAX_LINE_BYTES: usize = 6;
/// Time for the first line to arrive.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves for as long as the daemon lives.
pub(crate) async fn serve(listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(async move {
                    if let Err(error) = carry(client).await {
                        tracing::debug!(%error, "a relayed connection broke");
                    }
                });
            }
            Err(error) => {
                // Out of descriptors, mostly: some will come back.
                tracing::warn!(%error, "cannot accept a connection to relay");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn carry(mut client: TcpStream) -> io::Result<()> {
    client.set_nodelay(true)?;
    let port = tokio::time::timeout(LINE_TIMEOUT, read_port(&mut client)).await??;
    let program = match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        Err(_) => TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await,
        connected => connected,
    };
    let Ok(mut program) = program else {
        client.write_all(b"refused\n").await?;
        return client.shutdown().await;
    };
    program.set_nodelay(true)?;
    client.write_all(b"ok\n").await?;
    tokio::io::copy_bidirectional(&mut client, &mut program).await?;
    Ok(())
}

/// Reads the first line and not a byte more.
async fn read_port(client: &mut TcpStream) -> io::Result<u16> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the first line is no port");
    let mut line = Vec::with_capacity(MAX_LINE_BYTES);
    loop {
        match client.read_u8().await? {
            b'\n' => break,
            byte if line.len() < MAX_LINE_BYTES => line.push(byte),
            _ => return Err(invalid()),
        }
    }
    let text = std::str::from_utf8(&line).map_err(|_| invalid())?;
    text.parse().ok().filter(|port| *port != 0).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn relayed(first_line: &str) -> (TcpStream, String) {
        let relay = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = relay.local_addr().expect("has one");
        tokio::spawn(serve(relay));
        let mut client = TcpStream::connect(address).await.expect("connects");
        client.write_all(first_line.as_bytes()).await.expect("writes");
        let mut answer = String::new();
        while !answer.ends_with('\n') {
            match client.read_u8().await {
                Ok(byte) => answer.push(char::from(byte)),
                Err(_) => break,
            }
        }
        (client, answer)
    }

    #[tokio::test]
    async fn bytes_pass_both_ways_and_ends_are_kept_apart() {
        let program = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let port = program.local_addr().expect("has one").port();
        let serving = tokio::spawn(async move {
            let (mut connection, _) = program.accept().await.expect("accepts");
            let mut heard = String::new();
            connection.read_to_string(&mut heard).await.expect("reads");
            connection.write_all(b"answer").await.expect("writes");
            heard
        });
        let (mut client, answer) = relayed(&format!("{port}\nhello")).await;
        assert_eq!(answer, "ok\n");
        client.shutdown().await.expect("ends");
        let mut rest = String::new();
        client.read_to_string(&mut rest).await.expect("reads");
        assert_eq!((rest.as_str(), serving.await.expect("serves").as_str()), ("answer", "hello"));
    }

    #[tokio::test]
    async fn closed_ports_are_refused_and_nonsense_ends_the_connection() {
        let unused =
            TcpListener::bind("127.0.0.1:0").await.expect("binds").local_addr().expect("has one").port();
        assert_eq!(relayed(&format!("{unused}\n")).await.1, "refused\n");
        for nonsense in ["0\n", "65536\n", "-1\n", "GET / HTTP/1.1\r\n", "\n"] {
            assert_eq!(relayed(nonsense).await.1, "", "{nonsense:?}");
        }
    }
}
