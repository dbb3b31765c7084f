//! The table of routes of the control plane, and what happens to requests that are in none of its rows.

use crate::error::Failure;
use crate::settings::Settings;
use crate::{auth, node, sandboxes, snapshots, storage, templates};
use aenv_orchestrator::Orchestrator;
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use axum::routing::{delete, get, post};
use http::{Method, StatusCode, Uri};
use std::sync::Arc;
use std::time::Instant;

/// What every handler has.
#[derive(Clone)]
pub(crate) struct AppState {
    pub(crate) orchestrator: Orchestrator,
    pub(crate) settings: Arc<Settings>,
}

/// The control plane as one service. Everything but `/health` demands an API key.
pub fn router(orchestrator: Orchestrator, settings: Settings) -> Router {
    let state = AppState { orchestrator, settings: Arc::new(settings) };
    Router::new()
        .route("/sandboxes", post(sandboxes::create_v1).get(sandboxes::list_v1))
        .route("/v2/sandboxes", post(sandboxes::create_v2).get(sandboxes::list_v2))
        .route("/sandboxes/{id}", get(sandboxes::show).delete(sandboxes::kill))
        .route("/sandboxes/{id}/connect", post(sandboxes::connect_v1))
        .route("/v2/sandboxes/{id}/connect", post(sandboxes::connect_v2))
        .route("/sandboxes/{id}/pause", post(sandboxes::pause))
        .route("/sandboxes/{id}/resume", post(sandboxes::resume))
        .route("/sandboxes/{id}/snapshots", post(sandboxes::snapshot))
        .route("/sandboxes/{id}/fork", post(sandboxes::fork))
        .route("/sandboxes/{id}/timeout", post(sandboxes::set_timeout))
        .route("/sandboxes/{id}/refreshes", post(sandboxes::refresh))
        .route("/templates", get(templates::list_v1))
        .route("/v2/templates", get(templates::list_v2))
        .route("/templates/{id}", delete(snapshots::delete))
        .route("/snapshots", get(snapshots::list))
        .route("/templates/aliases/{alias}", get(templates::find_alias))
        .route("/storage/gc", post(storage::collect_garbage))
        .route("/node", get(node::show))
        .route_layer(from_fn_with_state(state.clone(), auth::require_key))
        .route("/health", get(health))
        .route_layer(from_fn(log_request))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .with_state(state)
}

async fn health(State(_): State<AppState>) -> &'static str {
    "Health check successful"
}

async fn no_route(method: Method, uri: Uri) -> Failure {
    let message = format!("there is no route {method} {}; docs/not-yet.md lists what is planned", uri.path());
    Failure::new(StatusCode::NOT_FOUND, message)
}

async fn wrong_method(method: Method, uri: Uri) -> Failure {
    Failure::new(StatusCode::METHOD_NOT_ALLOWED, format!("{} does not support {method}", uri.path()))
}

/// One event for each request of the control plane, without headers and bodies: they carry secrets.
async fn log_request(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    tracing::debug!(
        %method,
        path,
        route = route.as_ref().map_or("", MatchedPath::as_str),
        status = response.status().as_u16(),
        milliseconds = started.elapsed().as_millis(),
        "request answered"
    );
    response
}
