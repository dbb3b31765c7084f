//! Children of a sandbox: one snapshot of it, from which all of them are started at the same time.
//!
//! ```text
//! room for a child? ─ no ─▶ refused, nothing is stopped
//! parent ─ copied ─▶ snapshot of the fork ─┬─▶ child  ┐
//!    └ goes on       (nobody else sees it) ├─▶ child  ├ each runs, or failed for a reason of its own
//!                                          └─▶ child  ┘
//!                    deleted then: it goes with the last VMM that maps its memory
//! ```
//! Owns nothing but who of the children may ask for a turn now. Runs in a task of its own: a caller that goes away stops nothing.

use crate::create;
use crate::error::Error;
use crate::journal::{Purpose, Tenancy};
use crate::node::Node;
use crate::sandbox_task::{SnapshotWish, Taken};
use crate::snapshot::{self, Snapshot};
use crate::source::Source;
use crate::stage::Failure;
use crate::view::{CreateRequest, Created, ForkRequest, Forked, PauseMode, SandboxView, Stage};
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Waits until a first child could be started: a parent is not stopped for nothing.
pub(crate) async fn await_room(node: &Node, parent: &SandboxView) -> Result<(), Error> {
    let bytes = parent.memory_mib.saturating_mul(1 << 20);
    let told = |failure: Failure| failure.into_error("forking a sandbox");
    node.admission.check_room(&node.dir).map_err(told)?;
    // Given back at once: the copy takes its time, and a place is for who starts.
    node.admission.for_caller(bytes).await.map(drop).map_err(told)
}

/// What is taken of the parent for a fork.
pub(crate) fn wish() -> SnapshotWish {
    SnapshotWish { purpose: Purpose::Fork, name: None, mode: PauseMode::Full }
}

/// Starts the children of a parent, as it was when `taken`.
pub(crate) async fn children_of(
    node: &Arc<Node>,
    taken: Taken,
    request: &ForkRequest,
) -> Result<Forked, Error> {
    let Taken { snapshot, stopped, mut stages, parent } = taken;
    let started = Instant::now();
    let children = start_all(node, &parent, &snapshot, request).await;
    delete_soon(node, snapshot);
    stages.push(Stage { name: "children", duration: started.elapsed() });
    Ok(Forked { children: children?, stopped, stages })
}

async fn start_all(
    node: &Arc<Node>,
    parent: &Tenancy,
    snapshot: &Arc<Snapshot>,
    request: &ForkRequest,
) -> Result<Vec<Result<Created, Error>>, Error> {
    let start = Arc::new(snapshot::start_of(node, snapshot).await?);
    // No more of them wait for a turn at once than can have one: others who come meanwhile are not behind all of them, and each
    // waits for its own turn only.
    let turns = Arc::new(Semaphore::new(node.admission.figures().0.places.clamp(1, MOST_CHILDREN)));
    let making = request.children.iter().map(|child| {
        let mut env_vars = parent.env_vars.clone();
        env_vars.extend(child.env_vars.clone());
        let wish = CreateRequest {
            template: String::new(),
            timeout: child.timeout.unwrap_or(request.timeout),
            metadata: child.metadata.clone().unwrap_or_else(|| parent.metadata.clone()),
            env_vars,
            secure: parent.access_token.is_some(),
            internet_access: parent.internet_access,
            on_timeout: parent.on_timeout,
            auto_resume: parent.auto_resume,
        };
        let (turns, source) = (Arc::clone(&turns), Source::Snapshot(Arc::clone(&start)));
        async move {
            let _turn = turns.acquire().await.map_err(|_| Error::ShuttingDown)?;
            create::spawn(node, wish, source).await.unwrap_or(Err(Error::ShuttingDown))
        }
    });
    Ok(futures_util::future::join_all(making).await)
}

/// Nobody starts anything from it any more.
fn delete_soon(node: &Arc<Node>, snapshot: Arc<Snapshot>) {
    let (node, shared) = (Arc::clone(node), Arc::clone(node));
    let deleted = async move {
        if let Err(error) = snapshot::delete(&shared, &snapshot).await {
            // Those of forks go at the next start, too.
            tracing::warn!(%error, "the snapshot of a fork could not be deleted");
        }
    };
    node.tasks.spawn(deleted);
}

/// Most children of one call. Source: E2B's API.
pub(crate) const MOST_CHILDREN: usize = 100;
