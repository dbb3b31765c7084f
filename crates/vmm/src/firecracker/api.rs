//! The connection to Firecracker's API: HTTP over a Unix socket, one request at a time.
//!
//! Owns one connection, which is made again when it broke. Firecracker serves its API by one thread, which hands every
//! request to the VMM's thread and waits for it: several connections would gain nothing.

use super::requests::{Method, Request};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;

/// Bytes of the longest answer that is read: Firecracker's are some KiB.
const LONGEST_ANSWER: usize = 1 << 20;
/// Characters of a refusal that are passed on.
const LONGEST_FAULT: usize = 1000;

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// There is no connection to be had.
    #[error("cannot connect to {}: {source}", .socket.display())]
    Connect {
        /// Where.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Closed(#[from] hyper::Error),
    /// No answer in time.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// Firecracker says no.
    #[error("{fault} (status {status})")]
    Refused {
        /// HTTP status.
        status: u16,
        /// Its words.
        fault: String,
    },
    /// The answer is longer than any that Firecracker gives.
    #[error("an answer of more than {LONGEST_ANSWER} bytes: {0}")]
    TooLong(String),
    /// The answer makes no sense.
    #[error("an answer that is no JSON: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The request cannot be written as HTTP.
    #[error("no valid request: {0}")]
    Invalid(#[from] hyper::http::Error),
}

/// A client of one Firecracker.
#[derive(Debug)]
pub(super) struct Api {
    socket: PathBuf,
    pid: u32,
    connection: Mutex<Option<Connection>>,
}

#[derive(Debug)]
struct Connection {
    sender: SendRequest<Full<Bytes>>,
    _driver: AbortOnDropHandle<()>,
}

impl Api {
    /// Connects to the process `pid`.
    ///
    /// # Errors
    /// When nobody listens at `socket`, or somebody else: the jailed user owns the directory and may put the name of
    /// another socket there.
    pub(super) async fn connect(socket: &Path, pid: u32) -> Result<Self, ApiError> {
        let connection = Connection::open(socket, pid).await?;
        Ok(Self { socket: socket.to_owned(), pid, connection: Mutex::new(Some(connection)) })
    }

    /// Sends a request and waits for the answer's body, `null` when there is none.
    ///
    /// # Errors
    /// When Firecracker refuses, or does not answer in time. A request that was given up leaves no trace here, but
    /// Firecracker may still carry it out.
    pub(super) async fn send(&self, request: &Request, limit: Duration) -> Result<Value, ApiError> {
        let exchange = async {
            let mut slot = self.connection.lock().await;
            // Taken out, so that a request given up half-way takes its connection along.
            let mut connection = match slot.take() {
                Some(connection) if !connection.sender.is_closed() => connection,
                _ => Connection::open(&self.socket, self.pid).await?,
            };
            let answer = connection.exchange(request).await;
            if !matches!(answer, Err(ApiError::Closed(_) | ApiError::TooLong(_))) {
                *slot = Some(connection);
            }
            answer
        };
        tokio::time::timeout(limit, exchange).await.unwrap_or(Err(ApiError::Timeout(limit)))
    }
}

impl Connection {
    async fn open(socket: &Path, pid: u32) -> Result<Self, ApiError> {
        let failed = |source| ApiError::Connect { socket: socket.to_owned(), source };
        let stream = connect_through_descriptor(socket).await.map_err(failed)?;
        let listener = stream.peer_cred().map_err(failed)?.pid().map(i32::cast_unsigned);
        if listener != Some(pid) {
            let what = format!("process {listener:?} listens there instead of {pid}");
            return Err(failed(io::Error::new(io::ErrorKind::PermissionDenied, what)));
        }
        let (sender, driver) = handshake(TokioIo::new(stream)).await?;
        // How a connection ends, the pending request is told as well.
        let driver = tokio::spawn(async move { drop(driver.await) });
        Ok(Self { sender, _driver: AbortOnDropHandle::new(driver) })
    }

    async fn exchange(&mut self, request: &Request) -> Result<Value, ApiError> {
        let method = match request.method {
            Method::Get => hyper::Method::GET,
            Method::Put => hyper::Method::PUT,
            Method::Patch => hyper::Method::PATCH,
        };
        let body = match &request.body {
            Some(body) => serde_json::to_vec(body)?,
            None => Vec::new(),
        };
        let message = hyper::Request::builder()
            .method(method)
            .uri(&request.path)
            .header(HOST, "localhost")
            .header(ACCEPT, "application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))?;
        self.sender.ready().await?;
        let answer = self.sender.send_request(message).await?;
        let status = answer.status();
        // The process may have been taken over: it must not be able to fill our memory.
        let body = Limited::new(answer.into_body(), LONGEST_ANSWER).collect().await;
        let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
            Ok(broken) => ApiError::Closed(*broken),
            Err(error) => ApiError::TooLong(error.to_string()),
        });
        let body = body?.to_bytes();
        if !status.is_success() {
            return Err(ApiError::Refused { status: status.as_u16(), fault: fault(&body) });
        }
        if body.is_empty() { Ok(Value::Null) } else { Ok(serde_json::from_slice(&body)?) }
    }
}

/// What a refusal says.
fn fault(body: &[u8]) -> String {
    let message = serde_json::from_slice::<Value>(body).ok();
    let message = message.as_ref().and_then(|body| body["fault_message"].as_str());
    let text = message.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    text.chars().take(LONGEST_FAULT).collect()
}

/// A socket's address holds 108 bytes, a path may be longer: so it goes through the directory's descriptor.
async fn connect_through_descriptor(socket: &Path) -> io::Result<UnixStream> {
    let directory = File::open(socket.parent().unwrap_or(Path::new("/")))?;
    let name = socket.file_name().unwrap_or_default().display();
    UnixStream::connect(format!("/proc/self/fd/{}/{name}", directory.as_raw_fd())).await
}

#[cfg(test)]
mod tests;
