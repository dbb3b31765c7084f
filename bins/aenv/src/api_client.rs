//! Speaks the public API of a node: one method per request that the commands need.
//!
//! Owns address and key. Pages are followed here; nothing is retried, nothing printed.

use crate::failure::{Exit, Failure};
use crate::settings::{ApiKey, BaseUrl, Settings};
use crate::transport::{
    RequestBody, Transport, TransportError, empty_body, error_code, error_text, full_body,
};
use aenv_protocol::ids::SandboxId;
use aenv_protocol::rest::{
    CollectedGarbage, ConnectRequest, Durability, ForkBody, ForkedChild, ListedSandbox, NewSandbox,
    NewSnapshot, NodeStatus, PauseBody, Sandbox, SandboxDetail, Snapshot, Template, TimeoutRequest,
};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Most requests are answered from the node's memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// A create without a standby, on a loaded machine without KVM, may restore for long.
const CREATE_PATIENCE: Duration = Duration::from_secs(300);
/// Saving waits for a disk where that is asked for; restoring, without KVM and on a loaded machine, may take long.
const PAUSE_PATIENCE: Duration = Duration::from_secs(300);
/// The node gives its block service a minute.
const COLLECT_PATIENCE: Duration = Duration::from_secs(90);
/// Most sandboxes that one page of a listing holds. Source: E2B's API.
const PAGE: usize = 100;
/// A listing longer than this many pages does not end.
const MAX_PAGES: usize = 10_000;
const NEXT_TOKEN: &str = "x-next-token";
const DURABILITY: &str = "x-aenv-durability";
const TIER: &str = "x-aenv-tier";
/// What stays as it is in a query: the unreserved characters of RFC 3986.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Why the API did not do what it was asked.
#[derive(Debug)]
pub(crate) enum ApiError {
    /// No usable answer.
    Transport(TransportError),
    /// The API answered with an error.
    Refused { status: StatusCode, message: String, code: Option<String> },
    /// The answer is not what the API promises.
    NotUnderstood { base: BaseUrl, reason: String },
    /// The request cannot be expressed.
    Unaskable { reason: String },
}

impl From<TransportError> for ApiError {
    fn from(error: TransportError) -> Self {
        Self::Transport(error)
    }
}

impl ApiError {
    /// Whether what was asked for does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused { status: StatusCode::NOT_FOUND, .. })
    }

    /// Whether what was asked for contradicts the state of the sandbox.
    pub(crate) fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused { status: StatusCode::CONFLICT, .. })
    }

    /// Whether the API gave this word as the reason.
    pub(crate) fn is(&self, word: &str) -> bool {
        matches!(self, Self::Refused { code: Some(code), .. } if code == word)
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Transport(error) => error.into(),
            ApiError::Refused { status, message, .. } => {
                let failure = Self::new(message);
                match status {
                    StatusCode::UNAUTHORIZED => failure.with_hint(
                        "the key is old or of another node: `. .aenv/env` again, or see E2B_API_KEY",
                    ),
                    StatusCode::NOT_FOUND => {
                        failure.with_hint("`aenv ls` and `aenv template ls` list what there is")
                    }
                    StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                        failure.with_hint("the node is busy or full: try again, or free room with `aenv rm`")
                    }
                    status if status.is_server_error() => {
                        failure.with_hint("the node's log says more; `aenv doctor` examines the machine")
                    }
                    _ => failure,
                }
            }
            ApiError::NotUnderstood { base, reason } => {
                Self::new(format!("what answers at {base} does not speak as the API of a node: {reason}"))
                    .with_hint("look at E2B_API_URL: something else may listen there")
            }
            ApiError::Unaskable { reason } => Self::new(reason).with_exit(Exit::USAGE),
        }
    }
}

/// How a resume was served.
#[derive(Debug)]
pub(crate) struct Resumed {
    /// Whether it ran already.
    pub(crate) was_running: bool,
    /// What served it: `hot`, `warm` or `cold`.
    pub(crate) tier: Option<String>,
}

/// The API of one node.
#[derive(Clone)]
pub(crate) struct ApiClient {
    transport: Transport,
    base: BaseUrl,
    key: ApiKey,
}

impl ApiClient {
    /// A client with the address and key of the settings.
    ///
    /// # Errors
    /// When there is no key.
    pub(crate) fn new(settings: &Settings, transport: &Transport) -> Result<Self, Failure> {
        Ok(Self {
            transport: transport.clone(),
            base: settings.api.clone(),
            key: settings.require_key()?.clone(),
        })
    }

    /// Starts a sandbox.
    pub(crate) async fn create(&self, wish: &NewSandbox) -> Result<Sandbox, ApiError> {
        let request = self.request(Method::POST, "/v2/sandboxes", Some(wish))?;
        self.ask(request, CREATE_PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// Everything about one sandbox, its token included.
    pub(crate) async fn sandbox(&self, id: &SandboxId) -> Result<SandboxDetail, ApiError> {
        let request = self.request(Method::GET, &format!("/sandboxes/{id}"), None::<&()>)?;
        self.ask(request, PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// Sandboxes in one of `states` (comma separated) that carry all `labels`, the newest first.
    pub(crate) async fn sandboxes(
        &self,
        states: &str,
        labels: &[(String, String)],
    ) -> Result<Vec<ListedSandbox>, ApiError> {
        let mut path = format!("/v2/sandboxes?state={}", encoded(states));
        if !labels.is_empty() {
            path.push_str(&format!("&metadata={}", label_filter(labels)));
        }
        self.pages(&path).await
    }

    /// Snapshots, the newest first: all, or those of a sandbox, or of a name.
    pub(crate) async fn snapshots(
        &self,
        sandbox: Option<&SandboxId>,
        name: Option<&str>,
    ) -> Result<Vec<Snapshot>, ApiError> {
        let mut path = "/snapshots?".to_owned();
        if let Some(id) = sandbox {
            path.push_str(&format!("&sandboxID={id}"));
        }
        if let Some(name) = name {
            path.push_str(&format!("&name={}", encoded(name)));
        }
        self.pages(&path).await
    }

    /// Keeps the state of a sandbox.
    pub(crate) async fn take_snapshot(
        &self,
        id: &SandboxId,
        wish: &NewSnapshot,
    ) -> Result<Snapshot, ApiError> {
        let request = self.request(Method::POST, &format!("/sandboxes/{id}/snapshots"), Some(wish))?;
        self.ask(request, PAUSE_PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// Deletes a snapshot by its id or name.
    pub(crate) async fn delete_snapshot(&self, asked: &str) -> Result<(), ApiError> {
        let path = format!("/templates/{}", encoded(asked));
        let request = self.request(Method::DELETE, &path, None::<&()>)?;
        self.ask(request, PATIENCE).await.map(|_nothing| ())
    }

    /// Starts children of a sandbox.
    pub(crate) async fn fork(&self, id: &SandboxId, wish: &ForkBody) -> Result<Vec<ForkedChild>, ApiError> {
        let request = self.request(Method::POST, &format!("/sandboxes/{id}/fork"), Some(wish))?;
        self.ask(request, CREATE_PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// All pages of a listing, whose path has a query.
    async fn pages<T: DeserializeOwned>(&self, listing: &str) -> Result<Vec<T>, ApiError> {
        let mut all = Vec::new();
        let mut token: Option<String> = None;
        for _page in 0..MAX_PAGES {
            let mut path = format!("{listing}&limit={PAGE}");
            if let Some(token) = &token {
                path.push_str(&format!("&nextToken={}", encoded(token)));
            }
            let answer = self.ask(self.request(Method::GET, &path, None::<&()>)?, PATIENCE).await?;
            all.append(&mut self.read::<Vec<T>>(&answer)?);
            token = text(&answer, NEXT_TOKEN).map(str::to_owned);
            if token.as_deref().is_none_or(str::is_empty) {
                return Ok(all);
            }
        }
        Err(ApiError::NotUnderstood { base: self.base.clone(), reason: "a list of it has no end".to_owned() })
    }

    /// Ends a sandbox.
    pub(crate) async fn kill(&self, id: &SandboxId) -> Result<(), ApiError> {
        let request = self.request(Method::DELETE, &format!("/sandboxes/{id}"), None::<&()>)?;
        self.ask(request, PATIENCE).await.map(|_nothing| ())
    }

    /// Lets a sandbox live for so many seconds from now.
    pub(crate) async fn set_timeout(&self, id: &SandboxId, seconds: i64) -> Result<(), ApiError> {
        let body = TimeoutRequest { timeout: seconds };
        let request = self.request(Method::POST, &format!("/sandboxes/{id}/timeout"), Some(&body))?;
        self.ask(request, PATIENCE).await.map(|_nothing| ())
    }

    /// Pauses a sandbox; tells what its saved state survives, if the node says so.
    pub(crate) async fn pause(
        &self,
        id: &SandboxId,
        wish: &PauseBody,
    ) -> Result<Option<Durability>, ApiError> {
        let request = self.request(Method::POST, &format!("/sandboxes/{id}/pause"), Some(wish))?;
        let answer = self.ask(request, PAUSE_PATIENCE).await?;
        Ok(text(&answer, DURABILITY).and_then(|word| serde_json::from_value(word.into()).ok()))
    }

    /// Lets a paused sandbox go on; one that runs only gets its time.
    pub(crate) async fn resume(&self, id: &SandboxId, wish: &ConnectRequest) -> Result<Resumed, ApiError> {
        let request = self.request(Method::POST, &format!("/v2/sandboxes/{id}/connect"), Some(wish))?;
        let answer = self.ask(request, PAUSE_PATIENCE).await?;
        let was_running = answer.status() != StatusCode::CREATED;
        Ok(Resumed { was_running, tier: text(&answer, TIER).map(str::to_owned) })
    }

    /// All templates.
    pub(crate) async fn templates(&self) -> Result<Vec<Template>, ApiError> {
        let request = self.request(Method::GET, "/templates", None::<&()>)?;
        self.ask(request, PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// What the node has for sandboxes, and what of it is taken.
    pub(crate) async fn node(&self) -> Result<NodeStatus, ApiError> {
        let request = self.request(Method::GET, "/node", None::<&()>)?;
        self.ask(request, PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    /// Removes stored layers that nothing is made of.
    pub(crate) async fn collect_garbage(&self) -> Result<CollectedGarbage, ApiError> {
        let request = self.request(Method::POST, "/storage/gc", None::<&()>)?;
        self.ask(request, COLLECT_PATIENCE).await.and_then(|answer| self.read(&answer))
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Request<RequestBody>, ApiError> {
        let unaskable = |error: &dyn std::fmt::Display| ApiError::Unaskable {
            reason: format!("the request cannot be sent: {error}"),
        };
        let uri = self.base.join(path).map_err(|error| unaskable(&error))?;
        let mut request = Request::builder().method(method).uri(uri).header("x-api-key", self.key.header());
        let body = match body {
            Some(body) => {
                request = request.header(header::CONTENT_TYPE, "application/json");
                full_body(serde_json::to_vec(body).map_err(|error| unaskable(&error))?)
            }
            None => empty_body(),
        };
        request.body(body).map_err(|error| unaskable(&error))
    }

    async fn ask(
        &self,
        request: Request<RequestBody>,
        patience: Duration,
    ) -> Result<Response<Bytes>, ApiError> {
        let answer = self.transport.ask(request, patience).await?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        Err(ApiError::Refused {
            status: answer.status(),
            message: error_text(answer.status(), answer.body()),
            code: error_code(answer.body()),
        })
    }

    fn read<T: DeserializeOwned>(&self, answer: &Response<Bytes>) -> Result<T, ApiError> {
        serde_json::from_slice(answer.body())
            .map_err(|error| ApiError::NotUnderstood { base: self.base.clone(), reason: error.to_string() })
    }
}

/// Whether a node answers at `base`, whatever the key.
///
/// # Errors
/// When nothing does, or something else.
pub(crate) async fn health(transport: &Transport, base: &BaseUrl) -> Result<(), ApiError> {
    let uri = base.join("/health").map_err(|error| ApiError::Unaskable { reason: error.to_string() })?;
    let request = Request::get(uri)
        .body(empty_body())
        .map_err(|error| ApiError::Unaskable { reason: error.to_string() })?;
    let answer = transport.ask(request, PATIENCE).await?;
    if answer.status().is_success() {
        return Ok(());
    }
    let reason = error_text(answer.status(), answer.body());
    Err(ApiError::NotUnderstood { base: base.clone(), reason })
}

fn text<'a>(answer: &'a Response<Bytes>, header: &str) -> Option<&'a str> {
    answer.headers().get(header).and_then(|value| value.to_str().ok())
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, QUERY).to_string()
}

/// The value of the query's `metadata`. The API decodes it three times: as part of the query, as a whole, and each
/// key and value alone (as E2B's clients encode it).
fn label_filter(labels: &[(String, String)]) -> String {
    let pairs: Vec<String> =
        labels.iter().map(|(key, value)| format!("{}={}", encoded(key), encoded(value))).collect();
    encoded(&encoded(&pairs.join("&")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use percent_encoding::percent_decode_str;
    use proptest::prelude::*;

    fn decoded(text: &str) -> String {
        percent_decode_str(text).decode_utf8().unwrap().into_owned()
    }

    proptest! {
        #[test]
        fn labels_survive_the_three_decodings(labels in prop::collection::vec((".{1,9}", ".{0,9}"), 1..4)) {
            let filter = label_filter(&labels);
            let query = format!("/x?metadata={filter}");
            prop_assert!(query.parse::<http::Uri>().is_ok());
            let back: Vec<(String, String)> = decoded(&decoded(&filter))
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .map(|(key, value)| (decoded(key), decoded(value)))
                .collect();
            prop_assert_eq!(back, labels);
        }
    }
}
