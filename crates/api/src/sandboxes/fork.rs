//! Routes that make more of a sandbox: `snapshots`, `fork`.

use crate::error::Failure;
use crate::extract::{OptionalJsonBody, SandboxPath};
use crate::router::AppState;
use crate::sandboxes::create::check_environment;
use crate::sandboxes::{served, timeout, view};
use crate::snapshots;
use aenv_orchestrator::{self as orchestrator, ChildRequest, ForkRequest, SnapshotRequest};
use aenv_protocol::rest::{ForkBody, ForkedChild, NewSnapshot};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use std::time::{Duration, Instant};

/// Life time of a child where the caller names none, in seconds.
const DEFAULT_FORK_TIMEOUT: i64 = 15;
/// Most children of one call. Source: E2B's API.
const MOST_CHILDREN: i64 = 100;

/// `POST /sandboxes/{id}/snapshots`: answered when sandboxes can be started from it.
pub(crate) async fn snapshot(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(body): OptionalJsonBody<NewSnapshot>,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let mode = match body.memory {
        Some(false) => orchestrator::PauseMode::Filesystem,
        Some(true) | None => orchestrator::PauseMode::Full,
    };
    let name = body.name.as_deref().map(snapshots::name_and_tag).transpose()?;
    let taken = state.orchestrator.snapshot(&id, SnapshotRequest { name, mode }).await?;
    let mut response = (StatusCode::CREATED, Json(snapshots::snapshot(taken.snapshot))).into_response();
    served::put_timing(&mut response, &taken.stages, started);
    served::put_stopped(&mut response, taken.stopped);
    Ok(response)
}

/// `POST /sandboxes/{id}/fork`: answered when each child runs or has failed.
pub(crate) async fn fork(
    State(state): State<AppState>,
    SandboxPath(id): SandboxPath,
    OptionalJsonBody(body): OptionalJsonBody<ForkBody>,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let seconds = body.timeout.unwrap_or(DEFAULT_FORK_TIMEOUT);
    let timeout = timeout::positive(seconds, state.settings.max_timeout)?;
    let request = ForkRequest { timeout, children: children(body, state.settings.max_timeout)? };
    let forked = state.orchestrator.fork(&id, request).await?;
    let child = |result: Result<orchestrator::Created, orchestrator::Error>| match result {
        Ok(created) => ForkedChild::Sandbox(view::reach(created.sandbox, &state.settings)),
        Err(error) => ForkedChild::Error(Failure::from(error).body()),
    };
    let children: Vec<ForkedChild> = forked.children.into_iter().map(child).collect();
    let mut response = (StatusCode::CREATED, Json(children)).into_response();
    served::put_timing(&mut response, &forked.stages, started);
    served::put_stopped(&mut response, forked.stopped);
    Ok(response)
}

fn children(body: ForkBody, longest: Duration) -> Result<Vec<ChildRequest>, Failure> {
    let described = body.children.len() as i64;
    let count = body.count.unwrap_or(described.max(1));
    if !(1..=MOST_CHILDREN).contains(&count) {
        return Err(Failure::field("count", format!("{count} is not in 1 to {MOST_CHILDREN}")));
    }
    if described != 0 && described != count {
        return Err(Failure::field("children", format!("{described} are described, but count is {count}")));
    }
    if body.children.is_empty() {
        return Ok((0..count).map(|_| ChildRequest::default()).collect());
    }
    let child = |child: aenv_protocol::rest::ChildBody| {
        let env_vars = child.env_vars.unwrap_or_default();
        check_environment(&env_vars)?;
        let timeout = child.timeout.map(|seconds| timeout::positive(seconds, longest)).transpose()?;
        Ok(ChildRequest { metadata: child.metadata, timeout, env_vars })
    };
    body.children.into_iter().map(child).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_children_is_what_was_asked_for() {
        let of = |text: &str| {
            children(serde_json::from_str(text).unwrap(), Duration::from_secs(3600))
                .map(|children| children.len())
        };
        for (body, count) in [
            ("{}", 1),
            (r#"{"count":100}"#, 100),
            (r#"{"children":[{},{}]}"#, 2),
            (r#"{"count":1,"children":[{}]}"#, 1),
        ] {
            assert_eq!(of(body).unwrap(), count, "{body}");
        }
        for body in [
            r#"{"count":0}"#,
            r#"{"count":101}"#,
            r#"{"count":-1}"#,
            r#"{"count":3,"children":[{}]}"#,
            r#"{"children":[{"envVars":{"A=B":"x"}}]}"#,
            r#"{"children":[{"timeout":0}]}"#,
            r#"{"children":[{},{"timeout":3601}]}"#,
        ] {
            assert!(of(body).is_err(), "{body}");
        }
    }

    #[test]
    fn a_child_may_have_a_life_time_of_its_own() {
        let body = serde_json::from_str(r#"{"children":[{"timeout":60},{}]}"#).unwrap();
        let children = children(body, Duration::from_secs(3600)).unwrap();
        let times: Vec<_> = children.iter().map(|child| child.timeout).collect();
        assert_eq!(times, [Some(Duration::from_secs(60)), None]);
    }
}
