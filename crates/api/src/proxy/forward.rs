//! One request into a guest, and its answer back. Both bodies stream; nothing is held in memory.

use crate::proxy::guard::{Activity, Guarded};
use crate::proxy::headers;
use crate::proxy::refusal::Refusal;
use crate::proxy::target::Target;
use crate::proxy::upgrade::{self, Carried};
use crate::proxy::upstream::{GuestBody, Permit, Upstream, guest_uri, is_refused};
use aenv_orchestrator::Route;
use axum::body::Body;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use http_body_util::Either;
use hyper::body::Incoming;
use hyper_util::client::legacy::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// Everything one exchange needs.
pub(crate) struct Exchange {
    pub(crate) route: Route,
    pub(crate) target: Target,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) permit: Permit,
    pub(crate) from: SocketAddr,
    pub(crate) stop: CancellationToken,
}

/// The head of a request as the guest gets it.
struct Head {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
}

impl Head {
    fn with(&self, body: GuestBody) -> Request<GuestBody> {
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        request
    }

    fn may_be_repeated(&self) -> bool {
        [Method::GET, Method::HEAD, Method::OPTIONS].contains(&self.method)
    }
}

impl Exchange {
    /// Runs the exchange up to the head of the answer; the bodies go on by themselves.
    pub(crate) async fn run(self, mut request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let wanted = headers::upgrade_of(request.headers());
        let client_side = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
        let (parts, body) = request.into_parts();
        let uri = guest_uri(self.target.port, parts.uri.path_and_query().cloned())
            .map_err(|error| self.failed(&error))?;
        let mut guest_headers = parts.headers;
        headers::for_guest(&mut guest_headers, wanted, self.from, &format!("localhost:{}", self.target.port));
        let head = Head { method: parts.method, uri, headers: guest_headers };

        let activity = Activity::start();
        let mut response = tokio::select! {
            biased;
            () = self.route.ended.cancelled() => return Err(Refusal::NotFound(self.target.id)),
            answer = self.send(&head, body, &activity) => answer?,
            () = activity.idle() => return Err(Refusal::Silent(self.target)),
        };

        let changed = headers::upgrade_of(response.headers());
        let carried = match (response.status(), client_side) {
            (StatusCode::SWITCHING_PROTOCOLS, Some(client)) => {
                Some(Carried { client, guest: hyper::upgrade::on(&mut response) })
            }
            (StatusCode::SWITCHING_PROTOCOLS, None) => {
                return Err(self.failed(&"it changed the protocol without being asked to"));
            }
            _ => None,
        };
        let (mut parts, body) = response.into_parts();
        headers::strip(&mut parts.headers, changed.filter(|_| carried.is_some()));
        parts.version = Version::HTTP_11;
        let body = match carried {
            Some(carried) => {
                upgrade::carry(carried, self.target.id, self.route.ended, self.stop, self.permit);
                Body::empty()
            }
            None => Body::new(Guarded::new(body, &self.route.ended, activity, Some(self.permit))),
        };
        Ok(Response::from_parts(parts, body))
    }

    /// Sends the request; once more when it has no body, changes nothing and met a connection that had just closed.
    async fn send(
        &self,
        head: &Head,
        body: Incoming,
        activity: &Activity,
    ) -> Result<Response<Incoming>, Refusal> {
        if !body.is_end_stream() {
            let guarded = Guarded::new(body, &self.route.ended, activity.clone(), None);
            let sent = self.upstream.send(&self.target, head.with(Either::Left(guarded))).await;
            return sent.map_err(|error| self.unanswered(&error));
        }
        let bodiless = || head.with(Either::Right(Body::empty()));
        let first = self.upstream.send(&self.target, bodiless()).await;
        let sent = match first {
            Err(error) if head.may_be_repeated() && !error.is_connect() => {
                self.upstream.send(&self.target, bodiless()).await
            }
            other => other,
        };
        sent.map_err(|error| self.unanswered(&error))
    }

    fn unanswered(&self, error: &Error) -> Refusal {
        if error.is_connect() && is_refused(error) {
            return Refusal::PortClosed(self.target.clone());
        }
        self.failed(&innermost(error))
    }

    fn failed(&self, reason: &dyn ToString) -> Refusal {
        Refusal::Failed { target: self.target.clone(), reason: reason.to_string() }
    }
}

fn innermost(error: &Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
