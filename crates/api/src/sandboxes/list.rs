//! `GET /sandboxes` and `GET /v2/sandboxes`.

use crate::error::Failure;
use crate::extract::QueryPairs;
use crate::page::{Key, PageRequest, next_token_header};
use crate::router::AppState;
use crate::sandboxes::metadata::MetadataFilter;
use crate::sandboxes::view;
use aenv_orchestrator::{SandboxState, SandboxView};
use aenv_protocol::rest::ListedSandbox;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue};

/// Says how many running sandboxes match, on all pages together.
const X_TOTAL_RUNNING: HeaderName = HeaderName::from_static("x-total-running");

/// `GET /sandboxes`: the running ones, newest first.
pub(crate) async fn list_v1(State(state): State<AppState>, query: QueryPairs) -> Result<Response, Failure> {
    let metadata = MetadataFilter::of(&query)?;
    let mut views = state.orchestrator.list();
    views.retain(|view| view.state == SandboxState::Running && metadata.matches(&view.metadata));
    views.sort_by_key(|view| std::cmp::Reverse(key(view)));
    Ok(Json(views.into_iter().filter_map(view::listed).collect::<Vec<_>>()).into_response())
}

/// `GET /v2/sandboxes`: filtered, in pages.
pub(crate) async fn list_v2(State(state): State<AppState>, query: QueryPairs) -> Result<Response, Failure> {
    let filter = Filter::of(&query)?;
    let page = PageRequest::of(&query)?;
    let mut views = state.orchestrator.list();
    views.retain(|view| filter.matches(view));
    let running = views.iter().filter(|view| view.state == SandboxState::Running).count();
    let (views, token) = page.cut(views, key);
    let items: Vec<ListedSandbox> = views.into_iter().filter_map(view::listed).collect();
    let mut headers = next_token_header(token.as_deref());
    if filter.states.running {
        headers.insert(X_TOTAL_RUNNING, HeaderValue::from(running));
    }
    Ok((headers, Json(items)).into_response())
}

fn key(view: &SandboxView) -> Key {
    Key { nanoseconds: view.started_at.as_nanosecond(), id: view.id.to_string() }
}

/// Which sandboxes are asked for.
struct Filter {
    metadata: MetadataFilter,
    states: States,
    started_after: Option<jiff::Timestamp>,
    template: Option<String>,
}

/// States asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct States {
    running: bool,
    paused: bool,
    lost: bool,
}

impl Filter {
    fn of(query: &QueryPairs) -> Result<Self, Failure> {
        Ok(Self {
            metadata: MetadataFilter::of(query)?,
            states: states(query)?,
            started_after: query.parsed("startedAfter")?,
            template: query.get("template").map(str::to_owned),
        })
    }

    fn matches(&self, view: &SandboxView) -> bool {
        let state = match view.state {
            SandboxState::Running => self.states.running,
            SandboxState::Paused => self.states.paused,
            SandboxState::Lost { .. } => self.states.lost,
            SandboxState::Starting | SandboxState::Killing => false,
        };
        let template = self.template.as_deref();
        state
            && self.metadata.matches(&view.metadata)
            && self.started_after.is_none_or(|earliest| view.started_at >= earliest)
            && template
                .is_none_or(|wanted| view.template_id.as_str() == wanted || view.template_name == wanted)
    }
}

fn states(query: &QueryPairs) -> Result<States, Failure> {
    let mut asked = false;
    let mut states = States { running: false, paused: false, lost: false };
    for word in query.all("state").flat_map(|list| list.split(',')) {
        asked = true;
        match word.trim() {
            "running" => states.running = true,
            "paused" => states.paused = true,
            "lost" => states.lost = true,
            other => {
                return Err(Failure::field("state", format!("{other:?} is none of running, paused, lost")));
            }
        }
    }
    Ok(if asked { states } else { States { running: true, paused: true, lost: false } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_sandboxes_are_shown_only_to_those_who_ask() {
        let of = |query: &str| states(&QueryPairs::of(query)).unwrap();
        assert_eq!(of(""), States { running: true, paused: true, lost: false });
        assert_eq!(of("state=running%2Cpaused"), States { running: true, paused: true, lost: false });
        assert_eq!(of("state=running&state=lost"), States { running: true, paused: false, lost: true });
        assert_eq!(of("state=paused"), States { running: false, paused: true, lost: false });
        assert!(states(&QueryPairs::of("state=dead")).is_err());
    }
}
