//! Who may use the control plane: requests that carry one of the node's keys. Keys are never logged or echoed.
//!
//! The sandbox proxy does not pass here: in the guest, the daemon checks the sandbox's own token.

use crate::error::Failure;
use crate::router::AppState;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Refuses requests without a valid key.
pub(crate) async fn require_key(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let Some(key) = presented_key(request.headers()) else {
        return refusal(
            "no API key: send one in the X-API-KEY header (clients of E2B read it from E2B_API_KEY)",
        );
    };
    if !state.settings.accepts(key) {
        return refusal("the API key is not valid on this node");
    }
    next.run(request).await
}

fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    let key = headers.get(X_API_KEY).map(HeaderValue::as_bytes);
    key.or_else(|| {
        let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
    })
}

fn refusal(message: &str) -> Response {
    Failure::new(StatusCode::UNAUTHORIZED, message).into_response()
}
