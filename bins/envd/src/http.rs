//! The HTTP surface: routes, and what is checked before a handler sees a request.
//!
//! ```text
//! request ─▶ CORS ─▶ access token ─▶ route ─▶ user ─▶ handler
//!             └ preflight is answered here   └ exempt: GET /health, /files (signatures), POST /init
//! ```
//! Owns no state; the [`Daemon`] is handed to the handlers.

use crate::daemon::Daemon;
use crate::{files, greeting, metrics, rpc, sync};
use aenv_protocol::envd::ACCESS_TOKEN_HEADER;
use aenv_protocol::envd::files::ErrorBody;
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};

const UNAUTHORIZED: &str =
    "unauthorized access, please provide a valid access token or method signing if supported";

/// A refused REST request.
#[derive(Debug)]
pub(crate) struct Refusal {
    /// Status of the answer.
    pub(crate) status: StatusCode,
    /// Text for a person.
    pub(crate) message: String,
}

impl Refusal {
    /// A refusal.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let body = ErrorBody { code: self.status.as_u16(), message: self.message };
        (self.status, axum::Json(body)).into_response()
    }
}

/// All routes of the daemon.
pub(crate) fn routes(daemon: &Daemon) -> Router {
    Router::new()
        .route("/health", get(|| async { (StatusCode::NO_CONTENT, [(header::CACHE_CONTROL, "no-store")]) }))
        .route("/init", post(greeting::greet))
        .route("/sync", post(sync::answer))
        .route("/envs", get(environment))
        .route("/metrics", get(metrics::answer))
        .route("/files", get(files::download::download).post(files::upload::upload))
        .with_state(daemon.clone())
        .fallback_service(rpc::services(daemon))
        .layer(from_fn_with_state(daemon.clone(), check_token))
        .layer(from_fn(allow_other_origins))
}

async fn environment(State(daemon): State<Daemon>) -> Response {
    ([(header::CACHE_CONTROL, "no-store")], axum::Json(daemon.global_environment())).into_response()
}

async fn check_token(State(daemon): State<Daemon>, request: Request, next: Next) -> Response {
    let exempt = matches!(
        (request.method().as_str(), request.uri().path()),
        ("GET" | "HEAD", "/health") | ("POST", "/init") | ("GET" | "HEAD" | "POST", "/files")
    );
    if !exempt {
        let token = daemon.settings().token.clone();
        let given = request.headers().get(ACCESS_TOKEN_HEADER).map_or(&b""[..], HeaderValue::as_bytes);
        if token.is_some_and(|token| !token.matches(given)) {
            return Refusal::new(StatusCode::UNAUTHORIZED, UNAUTHORIZED).into_response();
        }
    }
    next.run(request).await
}

/// Answers preflights and lets scripts of any origin read answers: the access token is the protection, not the origin.
async fn allow_other_origins(request: Request, next: Next) -> Response {
    const ANY: HeaderValue = HeaderValue::from_static("*");
    let is_foreign = request.headers().contains_key(header::ORIGIN);
    let wanted = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let is_preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let fixed = |name: HeaderName, value| (name, HeaderValue::from_static(value));
    let mut answer = if is_preflight {
        let allowed = [
            fixed(header::ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, POST, PUT, PATCH, DELETE"),
            fixed(header::ACCESS_CONTROL_MAX_AGE, "7200"),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.unwrap_or(ANY)),
        ];
        (StatusCode::NO_CONTENT, allowed).into_response()
    } else {
        next.run(request).await
    };
    if is_foreign {
        answer.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, ANY);
        answer.headers_mut().append(header::VARY, HeaderValue::from_static("Origin"));
        let (name, value) = fixed(header::ACCESS_CONTROL_EXPOSE_HEADERS, "*");
        answer.headers_mut().insert(name, value);
    }
    answer
}
