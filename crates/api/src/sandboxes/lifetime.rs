//! Routes of one sandbox: show, kill, and how long it lives. A paused one has no time to change: 409.

use crate::error::Failure;
use crate::extract::{JsonBody, OptionalJsonBody, SandboxPath};
use crate::router::AppState;
use crate::sandboxes::{timeout, view};
use aenv_protocol::rest::{RefreshRequest, SandboxDetail, TimeoutRequest};
use axum::Json;
use axum::extract::State;
use http::StatusCode;
use std::time::Duration;

/// A refresh leaves at least and at most so many seconds.
const REFRESH_FLOOR: i64 = 15;
const REFRESH_LIMIT: i64 = 3600;

/// `GET /sandboxes/{id}`. A lost sandbox is a 404 with its cause: clients know no state for it.
pub(crate) async fn show(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
) -> Result<Json<SandboxDetail>, Failure> {
    let found = state.orchestrator.get(&id)?;
    let waiting = state.orchestrator.waiting(&id).await;
    match view::detail(found, waiting, &state.settings) {
        Some(detail) => Ok(Json(detail)),
        None => Err(Failure::no_such_sandbox(id.as_str())),
    }
}

/// `DELETE /sandboxes/{id}`: a paused one goes with its saved state, without being resumed.
pub(crate) async fn kill(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, Failure> {
    state.orchestrator.kill(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/timeout`: from now, may shorten, zero and less end it.
pub(crate) async fn set_timeout(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    JsonBody(request): JsonBody<TimeoutRequest>,
) -> Result<StatusCode, Failure> {
    let timeout = timeout::maybe_now(request.timeout, state.settings.max_timeout)?;
    state.orchestrator.set_timeout(&id, timeout).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/refreshes`: extends only.
pub(crate) async fn refresh(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(request): OptionalJsonBody<RefreshRequest>,
) -> Result<StatusCode, Failure> {
    let asked = request.duration.unwrap_or(REFRESH_FLOOR);
    if !(0..=REFRESH_LIMIT).contains(&asked) {
        return Err(Failure::field("duration", format!("{asked} is not in 0 to {REFRESH_LIMIT} seconds")));
    }
    let at_least = Duration::from_secs(asked.max(REFRESH_FLOOR).unsigned_abs());
    state.orchestrator.extend(&id, at_least).await?;
    Ok(StatusCode::NO_CONTENT)
}
