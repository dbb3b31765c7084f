//! How the node talks to one guest: the guest daemon's `/health`, `/init` and `/sync` over one kept connection.
//!
//! Owns that connection. A connection that broke is opened again once per request: all of them may be repeated.
//! Never retries beyond the deadline it is given, and decides nothing about the sandbox.

mod dial;
#[cfg(test)]
mod tests;

pub(crate) use dial::GuestDialer;

use aenv_network::{DialNamespace, Slot};
use aenv_protocol::envd::{ACCESS_TOKEN_HEADER, ENVD_PORT, InitRequest, SyncRequest};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Pause between two attempts to reach a daemon that is still starting.
const BOOT_RETRY: Duration = Duration::from_millis(50);
/// Longest the first attempt may take while a daemon is starting, as packets to a guest without a driver are dropped;
/// each further one may take twice as long.
const BOOT_ATTEMPT: Duration = Duration::from_secs(1);
/// Most of an error body that is read.
const MAX_ERROR_BODY: usize = 4096;

/// Why the guest daemon did not do what was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum GuestError {
    /// No answer in time.
    #[error("guest daemon did not answer {request} within {limit:?}")]
    Timeout {
        /// Method and path.
        request: &'static str,
        /// The limit that passed.
        limit: Duration,
    },
    /// No connection, or it broke.
    #[error("guest daemon not reachable for {request}: {reason}")]
    Unreachable {
        /// Method and path.
        request: &'static str,
        /// Why.
        reason: String,
    },
    /// It refused.
    #[error("guest daemon answered {status} to {request}: {body}")]
    Refused {
        /// Method and path.
        request: &'static str,
        /// HTTP status.
        status: StatusCode,
        /// Start of what it said.
        body: String,
    },
}

/// Client of one guest's daemon.
pub(crate) struct GuestChannel {
    dialer: Arc<dyn DialNamespace>,
    daemon: SocketAddr,
    kept: Mutex<Option<SendRequest<Full<Bytes>>>>,
}

impl GuestChannel {
    /// A channel to the guest in `slot`; connects at the first request.
    pub(crate) fn new(slot: &Slot) -> Self {
        Self::to(Arc::clone(&slot.dialer), slot.guest_address)
    }

    fn to(dialer: Arc<dyn DialNamespace>, guest: Ipv4Addr) -> Self {
        Self { dialer, daemon: SocketAddr::from((guest, ENVD_PORT)), kept: Mutex::new(None) }
    }

    /// Asks whether the daemon answers.
    pub(crate) async fn health(&self, limit: Duration) -> Result<(), GuestError> {
        self.call("GET /health", Method::GET, "/health", None, Bytes::new(), limit).await
    }

    /// Waits for a daemon that is still starting.
    pub(crate) async fn wait_until_healthy(&self, limit: Duration) -> Result<(), GuestError> {
        let deadline = Instant::now() + limit;
        let mut attempt = BOOT_ATTEMPT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let outcome = self.health(attempt.min(left)).await;
            // A guest that is only slow gets the time it needs.
            attempt *= 2;
            match outcome {
                Ok(()) => return Ok(()),
                // What the last attempt saw is worth more than the bare fact that time is over.
                Err(error) if Instant::now() + BOOT_RETRY >= deadline => {
                    return Err(match error {
                        GuestError::Timeout { request, .. } => GuestError::Timeout { request, limit },
                        other => other,
                    });
                }
                Err(_) => tokio::time::sleep(BOOT_RETRY).await,
            }
        }
    }

    /// Gives the guest its identity, environment, token and clock.
    pub(crate) async fn init(&self, init: &InitRequest, limit: Duration) -> Result<(), GuestError> {
        self.init_as(init, init.access_token.as_deref(), limit).await
    }

    /// The same of a daemon that demands the token of the sandbox that its guest was until now.
    pub(crate) async fn init_as(
        &self,
        init: &InitRequest,
        token: Option<&str>,
        limit: Duration,
    ) -> Result<(), GuestError> {
        const REQUEST: &str = "POST /init";
        let body = serde_json::to_vec(init)
            .map_err(|error| GuestError::Unreachable { request: REQUEST, reason: error.to_string() })?;
        let token = token.or(init.access_token.as_deref());
        self.call(REQUEST, Method::POST, "/init", token, body.into(), limit).await
    }

    /// Has the daemon flush everything that was written to the guest's disk, and hold all programs still until it is greeted again.
    /// An older daemon refuses: it does not know how to flush; or it flushes and holds nothing.
    pub(crate) async fn sync(&self, token: Option<&str>, limit: Duration) -> Result<(), GuestError> {
        const REQUEST: &str = "POST /sync";
        let body = serde_json::to_vec(&SyncRequest { freeze: true })
            .map_err(|error| GuestError::Unreachable { request: REQUEST, reason: error.to_string() })?;
        self.call(REQUEST, Method::POST, "/sync", token, body.into(), limit).await
    }

    /// Has the daemon start a shell that ends at once, and waits for its end. What comes of the shell does not matter:
    /// an image need not have one.
    pub(crate) async fn rehearse_command(&self, limit: Duration) -> Result<(), GuestError> {
        const MESSAGE: &[u8] = br#"{"process":{"cmd":"/bin/bash","args":["-l","-c","true"]},"stdin":false}"#;
        // Envelope of a Connect stream: no flags, then the length of the message.
        let mut body = vec![0, 0, 0, 0, MESSAGE.len() as u8];
        body.extend_from_slice(MESSAGE);
        let path = "/process.Process/Start";
        let request = self.request(Method::POST, path, "application/connect+json", None, body.into());
        self.exchange("POST /process.Process/Start", request, limit).await
    }

    async fn call(
        &self,
        name: &'static str,
        method: Method,
        path: &'static str,
        token: Option<&str>,
        body: Bytes,
        limit: Duration,
    ) -> Result<(), GuestError> {
        self.exchange(name, self.request(method, path, "application/json", token, body), limit).await
    }

    fn request(
        &self,
        method: Method,
        path: &'static str,
        content_type: &'static str,
        token: Option<&str>,
        body: Bytes,
    ) -> http::Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, self.daemon.to_string())
            .header(http::header::CONTENT_TYPE, content_type);
        if let Some(token) = token {
            request = request.header(ACCESS_TOKEN_HEADER, token);
        }
        request.body(Full::new(body))
    }

    async fn exchange(
        &self,
        name: &'static str,
        request: http::Result<Request<Full<Bytes>>>,
        limit: Duration,
    ) -> Result<(), GuestError> {
        let request =
            request.map_err(|error| GuestError::Unreachable { request: name, reason: error.to_string() })?;
        tokio::time::timeout(limit, self.attempt(name, request))
            .await
            .map_err(|_| GuestError::Timeout { request: name, limit })?
    }

    async fn attempt(&self, name: &'static str, request: Request<Full<Bytes>>) -> Result<(), GuestError> {
        let unreachable = |reason: String| GuestError::Unreachable { request: name, reason };
        // Taken, not borrowed: a request that is given up half-way must not leave its connection to the next one.
        let kept = self.kept.lock().await.take().filter(|sender| !sender.is_closed());
        let was_kept = kept.is_some();
        let mut sender = match kept {
            Some(sender) => sender,
            None => self.connect().await.map_err(|error| unreachable(error.to_string()))?,
        };
        let mut response = sender.send_request(request.clone()).await;
        if response.is_err() && was_kept {
            sender = self.connect().await.map_err(|error| unreachable(error.to_string()))?;
            response = sender.send_request(request).await;
        }
        let response = response.map_err(|error| unreachable(error.to_string()))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ERROR_BODY).collect().await;
        if !status.is_success() {
            let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            return Err(GuestError::Refused {
                request: name,
                status,
                body: String::from_utf8_lossy(&body).into_owned(),
            });
        }
        body.map_err(|error| unreachable(error.to_string()))?;
        *self.kept.lock().await = Some(sender);
        Ok(())
    }

    async fn connect(&self) -> std::io::Result<SendRequest<Full<Bytes>>> {
        let stream = self.dialer.connect(self.daemon).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(std::io::Error::other)?;
        // Ends with the sender, or with the guest; either is seen by the next request.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "kept connection to a guest broke");
            }
        });
        Ok(sender)
    }
}
