//! Routes of templates: listing them and finding one by name.

use crate::error::Failure;
use crate::extract::{NamePath, QueryPairs};
use crate::page::{Key, PageRequest, next_token_header};
use crate::router::AppState;
use aenv_orchestrator::{TemplateState, TemplateView};
use aenv_protocol::envd::ENVD_VERSION;
use aenv_protocol::rest::{Template, TemplateAlias, TemplateBuildStatus};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;

/// `GET /templates`: all of them, oldest first.
pub(crate) async fn list_v1(State(state): State<AppState>) -> Json<Vec<Template>> {
    let mut views = state.orchestrator.templates();
    views.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
    Json(views.into_iter().map(template).collect())
}

/// `GET /v2/templates`: in pages.
pub(crate) async fn list_v2(State(state): State<AppState>, query: QueryPairs) -> Result<Response, Failure> {
    let page = PageRequest::of(&query)?;
    let (views, token) = page.cut(state.orchestrator.templates(), |view| Key {
        nanoseconds: view.created_at.as_nanosecond(),
        id: view.id.to_string(),
    });
    let items: Vec<Template> = views.into_iter().map(template).collect();
    Ok((next_token_header(token.as_deref()), Json(items)).into_response())
}

/// `GET /templates/aliases/{alias}`.
pub(crate) async fn find_alias(
    State(state): State<AppState>,
    NamePath(alias): NamePath,
) -> Result<Json<TemplateAlias>, Failure> {
    let name = alias.strip_suffix(":default").unwrap_or(&alias);
    let views = state.orchestrator.templates();
    let found = views.iter().find(|view| view.name == name || view.id.as_str() == name);
    match found {
        Some(view) => Ok(Json(TemplateAlias { template_id: view.id.to_string(), public: true })),
        None => Err(Failure::new(
            StatusCode::NOT_FOUND,
            format!("template {alias:?} does not exist; `aenv template ls` lists those that do"),
        )),
    }
}

fn template(view: TemplateView) -> Template {
    let (build_status, failure) = match view.state {
        TemplateState::Preparing => (TemplateBuildStatus::Building, None),
        TemplateState::Ready => (TemplateBuildStatus::Ready, None),
        TemplateState::Failed(reason) => (TemplateBuildStatus::Error, Some(reason)),
    };
    Template {
        template_id: view.id.to_string(),
        // A template has one build for as long as it lives, so the build needs no id of its own.
        build_id: view.id.to_string(),
        cpu_count: view.vcpus,
        memory_mb: view.memory_mib,
        disk_size_mb: view.disk_mib,
        public: true,
        aliases: vec![view.name.clone()],
        names: vec![view.name],
        created_at: view.created_at,
        updated_at: view.created_at,
        created_by: None,
        last_spawned_at: None,
        spawn_count: view.spawn_count,
        build_count: 1,
        envd_version: ENVD_VERSION.to_owned(),
        build_status,
        standbys: view.standbys,
        warm: view.warm,
        stored_bytes: view.stored_bytes,
        failure,
    }
}
