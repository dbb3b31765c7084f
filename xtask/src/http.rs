//! A small client for the node's API: one kept connection, JSON in and out. Owns the connection.

use anyhow::{Context, Result, bail};
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::time::Duration;

/// Longest wait for one answer: a create on a loaded host without virtualisation takes seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Talks to one node.
pub(crate) struct Client {
    address: String,
    key: String,
    connection: Option<SendRequest<Full<Bytes>>>,
}

/// An answer, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// The body as JSON; null when it is none.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// A header as text; empty when it is absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// The body as JSON if the status is a success.
    pub(crate) fn success(&self) -> Result<Value> {
        if !self.status.is_success() {
            bail!("{}: {}", self.status, String::from_utf8_lossy(&self.body));
        }
        Ok(self.json())
    }
}

impl Client {
    /// For a node at `address` (`host:port`). Connects when first used.
    pub(crate) fn new(address: &str, key: &str) -> Self {
        Self { address: address.to_owned(), key: key.to_owned(), connection: None }
    }

    /// One request with the API key and further headers.
    pub(crate) async fn send(
        &mut self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Answer> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", &self.address)
            .header("x-api-key", &self.key);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request =
            request.body(Full::new(body.into())).with_context(|| format!("cannot ask for {path}"))?;
        let exchange = async {
            let connection = self.connection().await?;
            let response = connection.send_request(request).await?;
            let (parts, body) = response.into_parts();
            Ok(Answer {
                status: parts.status,
                headers: parts.headers,
                body: body.collect().await?.to_bytes(),
            })
        };
        let result = match tokio::time::timeout(LIMIT, exchange).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("no answer within {LIMIT:?}")),
        };
        if result.is_err() {
            self.connection = None;
        }
        result.with_context(|| format!("{path} of the node at {}", self.address))
    }

    /// A request of the control plane.
    pub(crate) async fn api(&mut self, method: Method, path: &str, body: &Value) -> Result<Answer> {
        if body.is_null() {
            self.send(method, path, &[], Bytes::new()).await
        } else {
            self.send(method, path, &[("content-type", "application/json")], body.to_string()).await
        }
    }

    async fn connection(&mut self) -> Result<&mut SendRequest<Full<Bytes>>> {
        let usable = match &mut self.connection {
            Some(connection) => connection.ready().await.is_ok(),
            None => false,
        };
        if !usable {
            let stream = tokio::net::TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
            // Its end, an error included, is seen by the sender.
            tokio::spawn(connection);
            self.connection = Some(sender);
        }
        self.connection.as_mut().context("the connection was closed")
    }
}
