//! One HTTP/1.1 client for the API and for files: sends requests, reads bounded answers.
//!
//! Owns the pool of connections. Knows nothing of what is asked; must not retry (not every request may be repeated).

use crate::failure::{Failure, chain};
use aenv_protocol::rest::ApiError;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::TokioExecutor;
use std::time::Duration;

/// A host that does not answer a connection attempt within this time is taken as unreachable.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer that is read into memory, in bytes.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// What requests carry.
pub(crate) type RequestBody = BoxBody<Bytes, std::io::Error>;

/// A request with nothing in it.
pub(crate) fn empty_body() -> RequestBody {
    Empty::new().map_err(|never| match never {}).boxed()
}

/// A request with everything at hand.
pub(crate) fn full_body(bytes: impl Into<Bytes>) -> RequestBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// Why there is no usable answer.
#[derive(Debug)]
pub(crate) enum TransportError {
    /// No connection came about.
    Unreachable { authority: String, reason: String },
    /// The connection broke or the answer is not HTTP.
    Broken { authority: String, reason: String },
    /// Nothing came in time.
    Silent { authority: String, waited: Duration },
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Unreachable { authority, reason } => Self::new(format!(
                "nothing can be reached at http://{authority}: {reason}"
            ))
            .with_hint("is the node running? `make up` starts it; E2B_API_URL says where aenv looks for it"),
            TransportError::Broken { authority, reason } => {
                Self::new(format!("the connection to http://{authority} broke: {reason}"))
                    .with_hint("`aenv ls` shows what is still there; the node's log says more")
            }
            TransportError::Silent { authority, waited } => {
                Self::new(format!("http://{authority} did not answer within {} s", waited.as_secs()))
                    .with_hint("the node may be overloaded or stopped: see its log, and `aenv doctor`")
            }
        }
    }
}

/// Sends requests. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Transport {
    client: Client<HttpConnector, RequestBody>,
}

impl Transport {
    /// Opens nothing yet.
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        Self { client: Client::builder(TokioExecutor::new()).build(connector) }
    }

    /// Sends a request and waits for the head of its answer.
    ///
    /// # Errors
    /// When there is none within `patience`.
    pub(crate) async fn send(
        &self,
        request: Request<RequestBody>,
        patience: Duration,
    ) -> Result<Response<Incoming>, TransportError> {
        let authority = authority_of(&request);
        match tokio::time::timeout(patience, self.client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(classify(authority, &error)),
            Err(_elapsed) => Err(TransportError::Silent { authority, waited: patience }),
        }
    }

    /// Sends a request and reads its whole answer.
    ///
    /// # Errors
    /// When it is not complete within `patience` or larger than 32 MiB.
    pub(crate) async fn ask(
        &self,
        request: Request<RequestBody>,
        patience: Duration,
    ) -> Result<Response<Bytes>, TransportError> {
        let authority = authority_of(&request);
        let whole = async {
            let (head, body) = self.send(request, patience).await?.into_parts();
            Ok(Response::from_parts(head, read_all(body, &authority).await?))
        };
        tokio::time::timeout(patience, whole).await.unwrap_or_else(|_elapsed| {
            Err(TransportError::Silent { authority: authority.clone(), waited: patience })
        })
    }
}

/// Reads a bounded body.
///
/// # Errors
/// When it breaks off or is larger than 32 MiB.
pub(crate) async fn read_all(body: Incoming, authority: &str) -> Result<Bytes, TransportError> {
    match Limited::new(body, MAX_ANSWER_BYTES).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) => {
            Err(TransportError::Broken { authority: authority.to_owned(), reason: error.to_string() })
        }
    }
}

/// Host and port that a request goes to.
pub(crate) fn authority_of<B>(request: &Request<B>) -> String {
    request.uri().authority().map(ToString::to_string).unwrap_or_default()
}

fn classify(authority: String, error: &ClientError) -> TransportError {
    let reason = chain(error);
    let reason = reason.strip_prefix("client error (Connect): ").unwrap_or(&reason).to_owned();
    if error.is_connect() {
        TransportError::Unreachable { authority, reason }
    } else {
        TransportError::Broken { authority, reason }
    }
}

/// The text of an error's body, whatever it is: the API, the proxy and the daemon have one shape, but anything may
/// stand between us and them.
pub(crate) fn error_text(status: http::StatusCode, body: &[u8]) -> String {
    match serde_json::from_slice::<ApiError>(body) {
        Ok(error) => error.message,
        Err(_not_ours) => {
            let text = String::from_utf8_lossy(&body[..body.len().min(200)]);
            let text = text.trim();
            if text.is_empty() { format!("status {status}") } else { format!("status {status}: {text}") }
        }
    }
}

/// The word for programs in an error's body, if there is one.
pub(crate) fn error_code(body: &[u8]) -> Option<String> {
    serde_json::from_slice::<ApiError>(body).ok()?.error_code
}
