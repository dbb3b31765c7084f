//! `POST /init`: the node greets the guest after every boot and restore.
//!
//! Order of effects, all before the answer: clock, random pool, hostname and files (a guest's own machine only), then
//! the settings in one step, then programs that were held still go on. The clock comes first because programs of a guest that goes on run beside the daemon. A greeting with a token that is already held elsewhere, or an old one, changes nothing:
//!
//! | state | greeting | effect |
//! |---|---|---|
//! | no token | any | applied |
//! | token | header or body carries that token | applied |
//! | token | other | 401 |
//! | greeted | `timestamp` older than the last, same sandbox | 204, nothing changes |

use crate::daemon::{Daemon, Machine, Token};
use crate::http::Refusal;
use crate::identity::{self, Roots};
use crate::rpc::with_causes;
use aenv_protocol::envd::{ACCESS_TOKEN_HEADER, ENVD_VERSION, InitRequest};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use std::path::PathBuf;

/// Handler of `POST /init`.
///
/// # Errors
/// 400 for a body that cannot be read, 401 for a wrong token, 500 when the machine refuses an identity.
pub(crate) async fn greet(
    State(daemon): State<Daemon>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refusal> {
    let body = body.map_err(|rejection| Refusal::new(rejection.status(), rejection.body_text()))?;
    let greeting: InitRequest = if body.is_empty() {
        InitRequest::default()
    } else {
        serde_json::from_slice(&body)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, format!("invalid body: {error}")))?
    };
    let stamp = greeting.timestamp.as_deref().map(str::parse::<jiff::Timestamp>).transpose();
    let stamp = stamp
        .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, format!("invalid timestamp: {error}")))?;
    check(&daemon, &greeting, &headers)?;
    if !is_stale(&daemon, &greeting, stamp) {
        if daemon.machine == Machine::Guest {
            identity::apply(&Roots::default(), greeting.identity.as_ref(), stamp)
                .map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, with_causes(&error)))?;
        }
        apply(&daemon, greeting, stamp);
    }
    if daemon.machine == Machine::Guest {
        // Not before: no program is to run as somebody else, or in another time.
        daemon.freezer.thaw();
    }
    Ok((StatusCode::NO_CONTENT, [("x-envd-version", ENVD_VERSION), ("cache-control", "no-store")])
        .into_response())
}

fn check(daemon: &Daemon, greeting: &InitRequest, headers: &HeaderMap) -> Result<(), Refusal> {
    let settings = daemon.settings();
    let Some(token) = &settings.token else { return Ok(()) };
    let in_header = headers.get(ACCESS_TOKEN_HEADER).is_some_and(|given| token.matches(given.as_bytes()));
    let in_body = greeting.access_token.as_ref().is_some_and(|given| token.matches(given.as_bytes()));
    if in_header || in_body {
        return Ok(());
    }
    Err(Refusal::new(
        StatusCode::UNAUTHORIZED,
        "the guest was greeted already and the access token does not match",
    ))
}

fn is_stale(daemon: &Daemon, greeting: &InitRequest, stamp: Option<jiff::Timestamp>) -> bool {
    let settings = daemon.settings();
    let is_other_sandbox = greeting
        .identity
        .as_ref()
        .is_some_and(|new| settings.identity.as_ref().is_none_or(|(sandbox, _)| *sandbox != new.sandbox_id));
    match (stamp, settings.stamp) {
        (Some(stamp), Some(last)) => stamp < last && !is_other_sandbox,
        _ => false,
    }
}

fn apply(daemon: &Daemon, greeting: InitRequest, stamp: Option<jiff::Timestamp>) {
    let mut settings = daemon.settings_mut();
    settings.environment = greeting.env_vars;
    settings.token = greeting.access_token.filter(|token| !token.is_empty()).map(Token::new);
    if let Some(user) = greeting.default_user.filter(|user| !user.is_empty()) {
        settings.default_user = Some(user);
    }
    if let Some(directory) = greeting.default_workdir.filter(|directory| !directory.is_empty()) {
        settings.default_directory = Some(PathBuf::from(directory));
    }
    if let Some(identity) = greeting.identity {
        settings.identity = Some((identity.sandbox_id, identity.template_id));
    }
    if stamp.is_some() {
        settings.stamp = stamp;
    }
}
