//! What both RPC services need: who calls, how errors are told, and how the services are mounted.

use crate::accounts::{AccountError, User};
use crate::daemon::Daemon;
use crate::filesystem::rpc::FilesystemRpc;
use crate::process::rpc::ProcessRpc;
use base64::Engine as _;
use connectrpc::{ConnectError, ConnectRpcService, DeadlinePolicy, Limits, RequestContext, Router};
use http::HeaderMap;
use std::sync::Arc;

/// Most bytes of one request message: standard input travels in messages.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Both services. A client's timeout ends the *stream* with `deadline_exceeded`, never the process behind it.
#[must_use]
pub(crate) fn services(daemon: &Daemon) -> ConnectRpcService {
    let router = Router::new()
        .add_service(Arc::new(ProcessRpc(daemon.clone())))
        .add_service(Arc::new(FilesystemRpc(daemon.clone())));
    let limits = Limits::default().with_max_message_size(MAX_MESSAGE_BYTES);
    ConnectRpcService::new(router)
        .with_limits(limits.with_max_request_body_size(MAX_MESSAGE_BYTES + 64))
        .with_deadline_policy(DeadlinePolicy::new().with_enforce_on_streams(true))
}

/// The user that the request wants to act as.
///
/// # Errors
/// `unauthenticated` when there is no such user.
pub(crate) fn caller(daemon: &Daemon, ctx: &RequestContext) -> Result<User, ConnectError> {
    let name = basic_user(ctx.headers()).map_err(ConnectError::unauthenticated)?;
    daemon.user(name.as_deref()).map_err(|error| match error {
        AccountError::Unknown(_) => ConnectError::unauthenticated(error.to_string()),
        AccountError::Read { .. } => internal(&error),
    })
}

/// The user name of `Authorization: Basic`, which is a choice, not a proof. Other schemes are none of ours.
///
/// # Errors
/// When the header cannot be read.
pub(crate) fn basic_user(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    const UNREADABLE: &str = "the authorization header is not base64 of 'user:'";
    let Some(value) = headers.get(http::header::AUTHORIZATION) else { return Ok(None) };
    let value = value.to_str().map_err(|_| UNREADABLE)?;
    let Some((scheme, encoded)) = value.split_once(' ') else { return Ok(None) };
    if !scheme.eq_ignore_ascii_case("basic") {
        return Ok(None);
    }
    let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim()).map_err(|_| UNREADABLE)?;
    let decoded = String::from_utf8(decoded).map_err(|_| UNREADABLE)?;
    let (user, _password) = decoded.split_once(':').ok_or(UNREADABLE)?;
    Ok(Some(user.to_owned()))
}

/// An `internal` error with all causes in its text.
#[must_use]
pub(crate) fn internal(error: &dyn std::error::Error) -> ConnectError {
    ConnectError::internal(with_causes(error))
}

/// The text of an error and of all its causes.
#[must_use]
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(": ");
        text.push_str(&next.to_string());
        cause = next.source();
    }
    text
}
