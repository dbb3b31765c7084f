//! Routes that stop a sandbox and let it go on: `pause`, `connect`, `resume`.
//!
//! | route | body | running | paused |
//! |---|---|---|---|
//! | `POST /sandboxes/{id}/pause` | optional | 204 | 409 |
//! | `POST /sandboxes/{id}/connect` | `timeout` demanded | 200, never shortened | 201 |
//! | `POST /v2/sandboxes/{id}/connect` | optional, 300 s | 200, never shortened | 201 |
//! | `POST /sandboxes/{id}/resume` | optional, 15 s | 409 | 201 |

use crate::error::Failure;
use crate::extract::{JsonBody, OptionalJsonBody, SandboxPath};
use crate::router::AppState;
use crate::sandboxes::{served, timeout, view};
use aenv_orchestrator::{self as orchestrator, PauseRequest, Resumed, SandboxState};
use aenv_protocol::ids::SandboxId;
use aenv_protocol::rest::{ConnectRequest, Durability, OnResume, PauseBody};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use std::time::Instant;

/// Life time that a connect of `/v2` leaves at least, in seconds.
const DEFAULT_CONNECT_TIMEOUT: i64 = 300;
/// Life time of a resume that names none, in seconds.
const DEFAULT_RESUME_TIMEOUT: i64 = 15;

/// `POST /sandboxes/{id}/pause`. A client that hangs up does not stop it.
pub(crate) async fn pause(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(body): OptionalJsonBody<PauseBody>,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let request = pause_request(body)?;
    let paused = state.orchestrator.pause(&id, request).await?;
    let mut response = StatusCode::NO_CONTENT.into_response();
    served::put_timing(&mut response, &paused.stages, started);
    // What it is by now, which may be more than was asked for.
    let reached = paused.sandbox.saved.map_or(request.durability, |saved| saved.durability);
    served::put_durability(&mut response, view::durability(reached));
    Ok(response)
}

/// `POST /sandboxes/{id}/connect`: the timeout must be there.
pub(crate) async fn connect_v1(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    JsonBody(request): JsonBody<ConnectRequest>,
) -> Result<Response, Failure> {
    let Some(seconds) = request.timeout else {
        return Err(Failure::field("timeout", "must be given"));
    };
    connect(&state, &id, request, seconds).await
}

/// `POST /v2/sandboxes/{id}/connect`.
pub(crate) async fn connect_v2(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(request): OptionalJsonBody<ConnectRequest>,
) -> Result<Response, Failure> {
    connect(&state, &id, request, request.timeout.unwrap_or(DEFAULT_CONNECT_TIMEOUT)).await
}

/// Never shortens a life time. 200 when it ran already, 201 when it was resumed.
async fn connect(
    state: &AppState,
    id: &SandboxId,
    request: ConnectRequest,
    seconds: i64,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let request = resume_request(state, request, seconds)?;
    let resumed = state.orchestrator.resume(id, request).await?;
    Ok(answer(state, resumed, started))
}

/// `POST /sandboxes/{id}/resume`, which old clients send to a sandbox they paused. One that runs is not touched.
pub(crate) async fn resume(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(request): OptionalJsonBody<ConnectRequest>,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let runs = || Failure::new(StatusCode::CONFLICT, format!("Sandbox {} is already running", id.as_str()));
    let wish = resume_request(&state, request, request.timeout.unwrap_or(DEFAULT_RESUME_TIMEOUT))?;
    if state.orchestrator.get(&id)?.state == SandboxState::Running {
        return Err(runs());
    }
    let resumed = state.orchestrator.resume(&id, wish).await?;
    // Somebody else was faster.
    if resumed.was_running { Err(runs()) } else { Ok(answer(&state, resumed, started)) }
}

fn answer(state: &AppState, resumed: Resumed, started: Instant) -> Response {
    let status = if resumed.was_running { StatusCode::OK } else { StatusCode::CREATED };
    let mut response = (status, Json(view::reach(resumed.sandbox, &state.settings))).into_response();
    if !resumed.was_running {
        served::put_timing(&mut response, &resumed.stages, started);
        served::put_tier(&mut response, resumed.tier);
    }
    response
}

fn pause_request(body: PauseBody) -> Result<PauseRequest, Failure> {
    let durability = match body.durability.unwrap_or(Durability::Process) {
        Durability::Process => orchestrator::Durability::Process,
        Durability::Local => orchestrator::Durability::Local,
        Durability::Published => {
            let why = "`published` needs a repository, which this node has not; docs/not-yet.md says what is planned";
            return Err(Failure::field("durability", why));
        }
    };
    let mode = match body.memory {
        Some(false) => orchestrator::PauseMode::Filesystem,
        Some(true) | None => orchestrator::PauseMode::Full,
    };
    let require_healthy_guest = body.require_healthy_guest.unwrap_or(false);
    Ok(PauseRequest { mode, durability, require_healthy_guest })
}

fn resume_request(
    state: &AppState,
    request: ConnectRequest,
    seconds: i64,
) -> Result<orchestrator::ResumeRequest, Failure> {
    let timeout = timeout::positive(seconds, state.settings.max_timeout)?;
    Ok(orchestrator::ResumeRequest { timeout, reboot: wants_reboot(request)? })
}

/// Either word for it will do; both at once must not contradict each other.
fn wants_reboot(request: ConnectRequest) -> Result<bool, Failure> {
    match (request.memory, request.on_resume) {
        (Some(true), Some(OnResume::Reboot)) => {
            Err(Failure::field("onResume", "`reboot` contradicts `memory: true`"))
        }
        (Some(false), _) | (_, Some(OnResume::Reboot)) => Ok(true),
        (Some(true) | None, None) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_means_what_its_body_says() {
        let of = |text: &str| pause_request(serde_json::from_str(text).unwrap());
        assert_eq!(of("{}").unwrap(), PauseRequest::default());
        let all = of(r#"{"memory":false,"requireHealthyGuest":true,"durability":"local"}"#).unwrap();
        assert_eq!(all.mode, orchestrator::PauseMode::Filesystem);
        assert_eq!(all.durability, orchestrator::Durability::Local);
        assert!(all.require_healthy_guest);
        let refused = of(r#"{"durability":"published"}"#).unwrap_err().into_response();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    }

    #[test]
    fn a_reboot_is_wished_in_either_word() {
        let of = |text: &str| wants_reboot(serde_json::from_str(text).unwrap());
        for no in ["{}", r#"{"memory":true}"#] {
            assert!(!of(no).unwrap(), "{no}");
        }
        for yes in
            [r#"{"memory":false}"#, r#"{"onResume":"reboot"}"#, r#"{"memory":false,"onResume":"reboot"}"#]
        {
            assert!(of(yes).unwrap(), "{yes}");
        }
        assert!(of(r#"{"memory":true,"onResume":"reboot"}"#).is_err());
    }
}
