//! A WebSocket into a guest, as far as short texts need one (RFC 6455), and the program there that answers them.
//!
//! Owns the client's connection; the program ends with its sandbox.

use aenv_testkit::client::{Client, Sandbox};
use anyhow::{Context as _, Result, ensure};
use http::StatusCode;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Where the program answers in the guest.
const PORT: u16 = 8124;
/// How long something that happens by itself may take on a loaded machine without virtualisation.
const PATIENCE: Duration = Duration::from_secs(60);
/// Key and answer of the example in RFC 6455, section 1.3.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// A client masks what it sends; any mask will do.
const MASK: [u8; 4] = [1, 2, 3, 4];

/// Answers each text with the number of texts that it was sent so far, over all connections, and the text.
const PROGRAM: &str = r#"
import base64, hashlib, socketserver
count = 0
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        global count
        key = b""
        while line := self.rfile.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-key":
                key = value.strip()
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                         b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
        while len(head := self.rfile.read(6)) == 6:
            data = self.rfile.read(head[1] & 127)
            count += 1
            answer = b"%d %s" % (count, bytes(byte ^ head[2 + i % 4] for i, byte in enumerate(data)))
            self.wfile.write(bytes([0x81, len(answer)]) + answer)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Server(("", 8124), Handler).serve_forever()
"#;

/// An open one.
#[derive(Debug)]
pub struct WebSocket(TcpStream);

impl WebSocket {
    /// Starts the program and opens a connection to it.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub async fn start(client: &Client, sandbox: &Sandbox) -> Result<Self> {
        let uploaded = client.upload("root", sandbox, "/root/websocket.py", PROGRAM.into()).await?;
        ensure!(uploaded.status.is_success(), "upload: {} {}", uploaded.status, uploaded.text());
        client.run(sandbox, "nohup python3 /root/websocket.py >/root/websocket.log 2>&1 &").await?;
        Self::until_open(client, sandbox, |_| true).await
    }

    /// Opens a connection, as a client does that lost one: again and again, for as long as the refusals may be `passing`.
    ///
    /// # Errors
    /// When another refusal comes, or none is open in time.
    pub async fn until_open(
        client: &Client,
        sandbox: &Sandbox,
        passing: impl Fn(StatusCode) -> bool,
    ) -> Result<Self> {
        let asked = Instant::now();
        loop {
            match Self::open(client, sandbox).await? {
                Ok(open) => return Ok(open),
                Err(status) => {
                    ensure!(passing(status) && asked.elapsed() < PATIENCE, "no WebSocket: {status}");
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Opens a connection, or tells with which status that was refused.
    ///
    /// # Errors
    /// When the exchange breaks, takes too long, or the answer is no answer to a WebSocket.
    pub async fn open(client: &Client, sandbox: &Sandbox) -> Result<std::result::Result<Self, StatusCode>> {
        let mut stream = client.open().await?;
        let head = format!(
            "GET / HTTP/1.1\r\nhost: {}\r\ne2b-sandbox-id: {}\r\ne2b-sandbox-port: {PORT}\r\nconnection: Upgrade\r\n\
             upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: {KEY}\r\n\r\n",
            client.address(),
            sandbox.id
        );
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::new();
        let read = async {
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(stream.read_u8().await?);
            }
            Ok::<_, std::io::Error>(())
        };
        tokio::time::timeout(PATIENCE, read).await.context("no answer to a WebSocket")??;
        let answer = String::from_utf8(answer)?;
        let status: StatusCode = answer.get(9..12).context("no status")?.parse()?;
        if status != StatusCode::SWITCHING_PROTOCOLS {
            return Ok(Err(status));
        }
        ensure!(answer.contains(ACCEPT), "not an answer to this WebSocket: {answer}");
        Ok(Ok(Self(stream)))
    }

    /// Sends a text; gives which one that was for the program, once it has answered with the same text.
    ///
    /// # Errors
    /// When the connection breaks, or the answer is another one.
    pub async fn say(&mut self, text: &str) -> Result<u64> {
        let length =
            u8::try_from(text.len()).ok().filter(|length| *length < 100).context("too long a text")?;
        let mut frame = vec![0x81, 0x80 | length];
        frame.extend(MASK);
        frame.extend(text.bytes().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        self.0.write_all(&frame).await?;
        let read = async {
            let mut head = [0; 2];
            self.0.read_exact(&mut head).await?;
            let mut answer = vec![0; usize::from(head[1])];
            self.0.read_exact(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = tokio::time::timeout(PATIENCE, read).await.context("no answer to a text")??;
        let answer = String::from_utf8(answer)?;
        let (count, said) = answer.split_once(' ').context("an answer of another form")?;
        ensure!(said == text, "{text:?} was answered with {answer:?}");
        Ok(count.parse()?)
    }

    /// Waits until the connection is broken, by an error or an end without a closing frame.
    ///
    /// # Errors
    /// When something is said over it instead, or it stays.
    pub async fn until_broken(mut self) -> Result<()> {
        let read = tokio::time::timeout(PATIENCE, self.0.read_u8()).await.context("it stays open")?;
        ensure!(read.is_err(), "something came over it: {read:?}");
        Ok(())
    }
}
