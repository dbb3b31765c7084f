//! Routes of one sandbox: show, kill, and everything that changes how long it lives.

use crate::error::Failure;
use crate::extract::{JsonBody, OptionalJsonBody, SandboxPath};
use crate::router::AppState;
use crate::sandboxes::{timeout, view};
use aenv_protocol::ids::SandboxId;
use aenv_protocol::rest::{
    ConnectRequest, RefreshRequest, ResumeRequest, Sandbox, SandboxDetail, TimeoutRequest,
};
use axum::Json;
use axum::extract::State;
use http::StatusCode;
use std::time::Duration;

/// Life time that a connect of `/v2` leaves at least, in seconds.
const DEFAULT_CONNECT_TIMEOUT: i64 = 300;
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

/// `DELETE /sandboxes/{id}`.
pub(crate) async fn kill(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
) -> Result<StatusCode, Failure> {
    state.orchestrator.kill(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST /sandboxes/{id}/connect`: the timeout must be there.
pub(crate) async fn connect_v1(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, Failure> {
    let Some(seconds) = request.timeout else {
        return Err(Failure::field("timeout", "must be given"));
    };
    connect(&state, &id, seconds).await
}

/// `POST /v2/sandboxes/{id}/connect`.
pub(crate) async fn connect_v2(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(request): OptionalJsonBody<ConnectRequest>,
) -> Result<Json<Sandbox>, Failure> {
    connect(&state, &id, request.timeout.unwrap_or(DEFAULT_CONNECT_TIMEOUT)).await
}

/// Never shortens a life time. Always 200: 201 would mean that it was resumed.
async fn connect(state: &AppState, id: &SandboxId, seconds: i64) -> Result<Json<Sandbox>, Failure> {
    let at_least = timeout::positive(seconds, state.settings.max_timeout)?;
    let view = state.orchestrator.extend(id, at_least).await?;
    Ok(Json(view::reach(view, &state.settings)))
}

/// `POST /sandboxes/{id}/resume`, which old clients send to a sandbox they paused: here each one is running.
pub(crate) async fn resume(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(_): OptionalJsonBody<ResumeRequest>,
) -> Result<StatusCode, Failure> {
    let view = state.orchestrator.get(&id)?;
    Err(Failure::new(StatusCode::CONFLICT, format!("Sandbox {} is already running", view.id)))
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
