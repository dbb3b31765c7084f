//! Routes about what the node stores. Ours alone: E2B's API has nothing like them.

use crate::error::Failure;
use crate::router::AppState;
use aenv_protocol::rest::CollectedGarbage;
use axum::Json;
use axum::extract::State;

/// `POST /storage/gc`: removes stored layers that nothing is made of.
pub(crate) async fn collect_garbage(
    State(state): State<AppState>,
) -> Result<Json<CollectedGarbage>, Failure> {
    let collected = state.orchestrator.collect_garbage().await?;
    Ok(Json(CollectedGarbage {
        captures: collected.captures,
        layers: collected.layers,
        directories: collected.directories,
        bytes: collected.bytes,
    }))
}
