//! The route about the node itself. Ours alone: E2B's API has nothing like it.

use crate::router::AppState;
use aenv_protocol::rest::NodeStatus;
use axum::Json;
use axum::extract::State;

/// `GET /node`: what there is for sandboxes, and what of it is taken.
pub(crate) async fn show(State(state): State<AppState>) -> Json<NodeStatus> {
    let capacity = state.orchestrator.capacity();
    Json(NodeStatus {
        memory_limit_bytes: capacity.memory_limit_bytes,
        memory_committed_bytes: capacity.committed_bytes,
        memory_available_bytes: capacity.available_bytes,
        memory_low_bytes: capacity.low_memory_bytes,
        starting: capacity.starting,
        max_starting: capacity.max_starting,
        waiting: capacity.waiting,
        running: capacity.running,
        paused: capacity.paused,
        hot: capacity.hot,
        standbys: capacity.standbys,
    })
}
