//! Routes of snapshots: listing and deleting them. They are taken by a route of the sandbox.

use crate::error::Failure;
use crate::extract::{NamePath, QueryPairs};
use crate::page::{Key, PageRequest, next_token_header};
use crate::router::AppState;
use aenv_orchestrator::{self as orchestrator, SnapshotView};
use aenv_protocol::rest::{PauseMode, Snapshot, SnapshotState};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;

/// The tag that is not written.
const DEFAULT_TAG: &str = "default";
/// Longest name and tag, in bytes.
const LONGEST: usize = 128;

/// `GET /snapshots`: in pages, newest first; all, or those of a sandbox, or of a name.
pub(crate) async fn list(State(state): State<AppState>, query: QueryPairs) -> Result<Response, Failure> {
    let page = PageRequest::of(&query)?;
    let sandbox = query.get("sandboxID").map(|id| id.split('-').next().unwrap_or_default());
    // As it was given when it was made.
    let name = query.get("name").map(str::to_ascii_lowercase);
    let name = name.as_deref().map(split);
    let mut views = state.orchestrator.snapshots();
    views.retain(|view| {
        sandbox.is_none_or(|id| view.source.as_str() == id)
            && name.as_ref().is_none_or(|(name, tag)| {
                let of_view = view.name.as_ref();
                of_view.is_some_and(|it| it.0 == *name && tag.is_none_or(|tag| it.1 == tag))
            })
    });
    let (views, token) =
        page.cut(views, |view| Key { nanoseconds: view.created_at.as_nanosecond(), id: view.id.to_string() });
    let items: Vec<Snapshot> = views.into_iter().map(snapshot).collect();
    Ok((next_token_header(token.as_deref()), Json(items)).into_response())
}

/// `DELETE /templates/{id}`, of a snapshot.
pub(crate) async fn delete(
    State(state): State<AppState>,
    NamePath(asked): NamePath,
) -> Result<StatusCode, Failure> {
    state.orchestrator.delete_snapshot(&asked).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A snapshot as it is shown.
pub(crate) fn snapshot(view: SnapshotView) -> Snapshot {
    let name =
        |(name, tag): (String, String)| if tag == DEFAULT_TAG { name } else { format!("{name}:{tag}") };
    Snapshot {
        snapshot_id: view.id.to_string(),
        names: view.name.map(name).into_iter().collect(),
        sandbox_id: view.source.to_string(),
        template_id: view.template_id.to_string(),
        alias: view.template_name,
        // Clients' time types have no more digits.
        created_at: jiff::Timestamp::from_microsecond(view.created_at.as_microsecond())
            .unwrap_or(view.created_at),
        mode: match view.mode {
            orchestrator::PauseMode::Full => PauseMode::Full,
            orchestrator::PauseMode::Filesystem => PauseMode::Filesystem,
        },
        state: match view.state {
            orchestrator::SnapshotState::Storing => SnapshotState::Storing,
            orchestrator::SnapshotState::Ready => SnapshotState::Ready,
        },
        cpu_count: view.vcpus,
        memory_mb: view.memory_mib,
        disk_size_mb: view.disk_mib,
        stored_bytes: view.stored_bytes,
        users: view.users,
        standbys: view.standbys,
    }
}

/// The name and tag that somebody wants for a snapshot.
///
/// # Errors
/// 400 that names the field.
pub(crate) fn name_and_tag(wished: &str) -> Result<(String, String), Failure> {
    let (name, tag) = split(wished);
    let tag = tag.unwrap_or(DEFAULT_TAG);
    let is_plain = |text: &str, others: &[u8]| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
        (1..=LONGEST).contains(&text.len()) && text.bytes().all(allowed)
    };
    if !is_plain(name, b"-_") {
        let why = format!("{name:?} must be 1 to {LONGEST} characters of a-z, 0-9, `-` and `_`");
        return Err(Failure::field("name", why));
    }
    if !is_plain(tag, b"-_.") {
        let why = format!("the tag {tag:?} must be 1 to {LONGEST} characters of a-z, 0-9, `-`, `_` and `.`");
        return Err(Failure::field("name", why));
    }
    Ok((name.to_ascii_lowercase(), tag.to_ascii_lowercase()))
}

fn split(text: &str) -> (&str, Option<&str>) {
    match text.split_once(':') {
        Some((name, tag)) => (name, Some(tag)),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_a_path_can_carry() {
        let pair = |name: &str, tag: &str| (name.to_owned(), tag.to_owned());
        assert_eq!(name_and_tag("After-Setup").unwrap(), pair("after-setup", "default"));
        assert_eq!(name_and_tag("a_1:v1.2").unwrap(), pair("a_1", "v1.2"));
        for wrong in ["", ":tag", "a:", "a/b", "a b", "a:b:c", "ä", "a.b", &"a".repeat(129)] {
            assert!(name_and_tag(wrong).is_err(), "{wrong:?}");
        }
    }
}
