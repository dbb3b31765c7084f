//! `POST /sandboxes` and `POST /v2/sandboxes`.

use crate::error::Failure;
use crate::extract::JsonBody;
use crate::router::AppState;
use crate::sandboxes::{lifecycle, served, timeout, unsupported, view};
use aenv_orchestrator::CreateRequest;
use aenv_protocol::rest::NewSandbox;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use std::collections::BTreeMap;
use std::time::Instant;

/// Life time in seconds where the caller names none.
const DEFAULT_TIMEOUT_V1: i64 = 15;
const DEFAULT_TIMEOUT_V2: i64 = 300;

/// `POST /sandboxes`: open unless `secure` is wished.
pub(crate) async fn create_v1(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, Failure> {
    let secure = request.secure.unwrap_or(false);
    create(state, request, DEFAULT_TIMEOUT_V1, secure).await
}

/// `POST /v2/sandboxes`: always secured.
pub(crate) async fn create_v2(
    State(state): State<AppState>,
    JsonBody(request): JsonBody<NewSandbox>,
) -> Result<Response, Failure> {
    create(state, request, DEFAULT_TIMEOUT_V2, true).await
}

async fn create(
    state: AppState,
    request: NewSandbox,
    default_timeout: i64,
    secure: bool,
) -> Result<Response, Failure> {
    let started = Instant::now();
    let timeout = timeout::positive(request.timeout.unwrap_or(default_timeout), state.settings.max_timeout)?;
    if request.template_id.is_empty() {
        return Err(Failure::field("templateID", "must not be empty"));
    }
    unsupported::refuse(&request)?;
    let (on_timeout, auto_resume) = lifecycle::wished(&request)?;
    let env_vars = request.env_vars.unwrap_or_default();
    check_environment(&env_vars)?;
    let wish = CreateRequest {
        template: request.template_id,
        timeout,
        metadata: request.metadata.unwrap_or_default(),
        env_vars,
        secure,
        internet_access: request.allow_internet_access.unwrap_or(true),
        on_timeout,
        auto_resume,
    };
    // A client that hangs up drops this future; the orchestrator finishes what it began all the same.
    let created = state.orchestrator.create(wish).await?;
    let body = Json(view::reach(created.sandbox, &state.settings));
    let mut response = (StatusCode::CREATED, body).into_response();
    served::put_timing(&mut response, &created.stages, started);
    served::put_tier(&mut response, created.tier);
    Ok(response)
}

/// A variable that no process can be started with would make every later command fail.
pub(crate) fn check_environment(variables: &BTreeMap<String, String>) -> Result<(), Failure> {
    for (name, value) in variables {
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(Failure::field("envVars", format!("{name:?} cannot be the name of a variable")));
        }
        if value.contains('\0') {
            return Err(Failure::field("envVars", format!("the value of {name:?} holds a NUL")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_variables_are_named() {
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "\0")] {
            assert!(check_environment(&BTreeMap::from([(name.into(), value.into())])).is_err(), "{name:?}");
        }
        assert!(check_environment(&BTreeMap::from([("A".into(), "=".into())])).is_ok());
    }
}
