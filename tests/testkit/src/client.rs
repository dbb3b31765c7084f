//! A plain HTTP client for the node's API and for guests behind its proxy: what a user with curl could do, no SDK.
//!
//! Owns no state: every request is a connection of its own, unless it is sent over a [`Kept`] one. Answers are read whole;
//! [`Client::open`] gives the bare connection to tests that look at streams.

use anyhow::{Context, Result, bail};
use base64::Engine as _;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpStream;

/// Longest wait for an answer.
const LIMIT: Duration = Duration::from_secs(120);
/// The guest daemon's port.
const ENVD_PORT: u16 = 49983;

/// Talks to one node.
#[derive(Debug, Clone)]
pub struct Client {
    address: String,
    key: String,
}

/// A sandbox as its creator knows it.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// Its id.
    pub id: String,
    /// The token its guest daemon demands; empty when it demands none.
    pub token: String,
}

/// An answer, read whole.
#[derive(Debug, Clone)]
pub struct Answer {
    /// HTTP status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

/// How a command in a guest ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ended {
    /// What it wrote to standard output.
    pub stdout: String,
    /// What it wrote to standard error.
    pub stderr: String,
    /// Exit code; -1 when a signal ended it.
    pub exit_code: i64,
}

impl Answer {
    /// The body as JSON; null when it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

impl Ended {
    /// What the stream of a process says.
    ///
    /// # Errors
    /// When it ends without saying how the process ended.
    pub fn of(answer: &Answer) -> Result<Self> {
        let mut ended = Self::default();
        let mut has_end = false;
        let decode = |text: &str| base64::engine::general_purpose::STANDARD.decode(text);
        for message in messages(&answer.body)? {
            if !message["error"].is_null() {
                bail!("{}", message["error"]);
            }
            let data = &message["event"]["data"];
            if let Some(text) = data["stdout"].as_str() {
                ended.stdout.push_str(&String::from_utf8_lossy(&decode(text)?));
            }
            if let Some(text) = data["stderr"].as_str() {
                ended.stderr.push_str(&String::from_utf8_lossy(&decode(text)?));
            }
            let end = &message["event"]["end"];
            if !end.is_null() {
                has_end = true;
                ended.exit_code = end["exitCode"].as_i64().unwrap_or(0);
            }
        }
        if !has_end {
            bail!("the stream ended without an end event");
        }
        Ok(ended)
    }
}

/// A connection to the node that stays open between requests, as those of every HTTP library do.
#[derive(Debug)]
pub struct Kept(SendRequest<Full<Bytes>>);

impl Kept {
    /// One request without a body over it.
    ///
    /// # Errors
    /// As [`Kept::send`].
    pub async fn get(&mut self, request: http::request::Builder) -> Result<Answer> {
        self.send(request.body(Full::default())?).await
    }

    /// One request over it.
    ///
    /// # Errors
    /// Also when the node has closed it meanwhile.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Answer> {
        let exchange = async {
            self.0.ready().await?;
            let (parts, body) = self.0.send_request(request).await?.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok(Answer { status: parts.status, headers: parts.headers, body })
        };
        tokio::time::timeout(LIMIT, exchange).await.with_context(|| format!("no answer within {LIMIT:?}"))?
    }
}

impl Client {
    /// For the node at `address` (`host:port`).
    #[must_use]
    pub fn new(address: &str, key: &str) -> Self {
        Self { address: address.to_owned(), key: key.to_owned() }
    }

    /// The same node with another key.
    #[must_use]
    pub fn with_key(&self, key: &str) -> Self {
        Self::new(&self.address, key)
    }

    /// `host:port` of the node.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A bare connection to the node.
    ///
    /// # Errors
    /// When it does not accept one.
    pub async fn open(&self) -> Result<TcpStream> {
        TcpStream::connect(&self.address).await.with_context(|| format!("cannot connect to {}", self.address))
    }

    /// One request, as it is given.
    ///
    /// # Errors
    /// When the exchange breaks or takes too long.
    pub async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answer> {
        self.keep().await?.send(request).await
    }

    /// A connection for several requests.
    ///
    /// # Errors
    /// When the node does not accept one.
    pub async fn keep(&self) -> Result<Kept> {
        let stream = self.open().await?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // It ends when the sender is dropped; an error is seen by the sender.
        tokio::spawn(connection);
        Ok(Kept(sender))
    }

    fn request(&self, method: Method, path: &str) -> http::request::Builder {
        Request::builder().method(method).uri(path).header("host", &self.address)
    }

    /// A request of the control plane with any text as body.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn call(&self, method: Method, path: &str, body: &str) -> Result<Answer> {
        let request = self
            .request(method, path)
            .header("x-api-key", &self.key)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.to_owned())))?;
        self.send(request).await
    }

    /// `GET` of the control plane.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn get(&self, path: &str) -> Result<Answer> {
        self.call(Method::GET, path, "").await
    }

    /// `POST` of the control plane.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer> {
        self.call(Method::POST, path, &body.to_string()).await
    }

    /// Creates a sandbox of `base` that lives `timeout` seconds; `more` is laid over the body.
    ///
    /// # Errors
    /// When the answer is not 201.
    pub async fn create(&self, timeout: u64, more: &Value) -> Result<Sandbox> {
        let mut body = json!({ "templateID": "base", "timeout": timeout });
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        let answer = self.post("/v2/sandboxes", &body).await?;
        if answer.status != StatusCode::CREATED {
            bail!("create: {} {}", answer.status, answer.text());
        }
        let created = answer.json();
        let text = |field: &str| created[field].as_str().unwrap_or_default().to_owned();
        Ok(Sandbox { id: text("sandboxID"), token: text("envdAccessToken") })
    }

    /// Ends a sandbox; true when it was there.
    ///
    /// # Errors
    /// On any status but 204 and 404.
    pub async fn kill(&self, sandbox: &Sandbox) -> Result<bool> {
        let answer = self.call(Method::DELETE, &format!("/sandboxes/{}", sandbox.id), "").await?;
        match answer.status {
            StatusCode::NO_CONTENT => Ok(true),
            StatusCode::NOT_FOUND => Ok(false),
            status => bail!("kill: {status} {}", answer.text()),
        }
    }

    /// A request into a guest, routed by headers.
    #[must_use]
    pub fn guest_request(
        &self,
        sandbox: &Sandbox,
        port: u16,
        method: Method,
        path: &str,
    ) -> http::request::Builder {
        let builder = self
            .request(method, path)
            .header("e2b-sandbox-id", &sandbox.id)
            .header("e2b-sandbox-port", port.to_string());
        if port == ENVD_PORT { builder.header("x-access-token", &sandbox.token) } else { builder }
    }

    /// `GET` of a port in the guest.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn guest_get(&self, sandbox: &Sandbox, port: u16, path: &str) -> Result<Answer> {
        self.send(self.guest_request(sandbox, port, Method::GET, path).body(Full::default())?).await
    }

    /// `GET /health` of the guest daemon.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn health(&self, sandbox: &Sandbox) -> Result<Answer> {
        self.guest_get(sandbox, ENVD_PORT, "/health").await
    }

    /// Runs `script` with bash as `user` and waits for its end.
    ///
    /// # Errors
    /// When the command cannot be started, or the stream ends without saying how it ended.
    pub async fn run_as(&self, user: &str, sandbox: &Sandbox, script: &str) -> Result<Ended> {
        Ended::of(&self.start(user, sandbox, script).await?)
    }

    /// As [`Client::run_as`], as root, and its output without the last line's end; a failed command is an error.
    ///
    /// # Errors
    /// Also when the exit code is not zero.
    pub async fn run(&self, sandbox: &Sandbox, script: &str) -> Result<String> {
        let ended = self.run_as("root", sandbox, script).await?;
        if ended.exit_code != 0 {
            bail!("`{script}` ended with {ended:?}");
        }
        Ok(ended.stdout.trim_end().to_owned())
    }

    /// The raw answer to `Start`.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn start(&self, user: &str, sandbox: &Sandbox, script: &str) -> Result<Answer> {
        let process = json!({ "cmd": "/bin/bash", "args": ["-l", "-c", script] });
        self.stream(user, sandbox, "Start", &json!({ "process": process, "stdin": false })).await
    }

    /// The raw answer to `Connect`, by which a process is watched that runs already.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn attach(&self, user: &str, sandbox: &Sandbox, pid: u64) -> Result<Answer> {
        self.stream(user, sandbox, "Connect", &json!({ "process": { "pid": pid } })).await
    }

    async fn stream(&self, user: &str, sandbox: &Sandbox, call: &str, message: &Value) -> Result<Answer> {
        let credentials = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
        let request = self
            .guest_request(sandbox, ENVD_PORT, Method::POST, &format!("/process.Process/{call}"))
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("authorization", format!("Basic {credentials}"))
            .body(Full::new(envelope(message)))?;
        self.send(request).await
    }

    /// Writes a file as `user`.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn upload(&self, user: &str, sandbox: &Sandbox, path: &str, content: Bytes) -> Result<Answer> {
        let request = self
            .guest_request(sandbox, ENVD_PORT, Method::POST, &files_path(user, path))
            .header("content-type", "application/octet-stream")
            .body(Full::new(content))?;
        self.send(request).await
    }

    /// Reads a file as `user`.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn download(&self, user: &str, sandbox: &Sandbox, path: &str) -> Result<Answer> {
        self.guest_get(sandbox, ENVD_PORT, &files_path(user, path)).await
    }
}

fn files_path(user: &str, path: &str) -> String {
    let escaped: String = path
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                char::from(byte).to_string()
            }
            _ => format!("%{byte:02X}"),
        })
        .collect();
    format!("/files?path={escaped}&username={user}")
}

/// One message of a Connect stream: flags, length, content.
#[must_use]
pub fn envelope(message: &Value) -> Bytes {
    let content = message.to_string();
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), content.as_bytes()].concat().into()
}

/// All messages of a Connect stream, the closing one included.
///
/// # Errors
/// When a message is cut off or no JSON.
pub fn messages(mut stream: &[u8]) -> Result<Vec<Value>> {
    let mut messages = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<5>() {
        let length = usize::try_from(u32::from_be_bytes([header[1], header[2], header[3], header[4]]))?;
        let content = rest.get(..length).context("a message is cut off")?;
        messages.push(serde_json::from_slice(content).context("a message is no JSON")?);
        stream = &rest[length..];
    }
    Ok(messages)
}
