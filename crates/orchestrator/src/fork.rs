//! Children of a sandbox: one snapshot of it, from which all of them are started at the same time.
//!
//! ```text
//! parent ─ copied ─▶ snapshot of the fork ─┬─▶ child  ┐
//!    └ goes on       (nobody else sees it) ├─▶ child  ├ each runs, or failed for a reason of its own
//!                                          └─▶ child  ┘
//!                    deleted then: it goes with the last VMM that maps its memory
//! ```
//! Owns nothing. Runs in a task of its own: a caller that goes away stops nothing.

use crate::create;
use crate::error::Error;
use crate::journal::{Purpose, Tenancy};
use crate::node::Node;
use crate::sandbox_task::{SnapshotWish, Taken};
use crate::snapshot::{self, Snapshot};
use crate::source::Source;
use crate::view::{CreateRequest, Created, ForkRequest, Forked, PauseMode, Stage};
use std::sync::Arc;
use tokio::time::Instant;

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
    let making = request.children.iter().map(|child| {
        let mut env_vars = parent.env_vars.clone();
        env_vars.extend(child.env_vars.clone());
        let wish = CreateRequest {
            template: String::new(),
            timeout: request.timeout,
            metadata: child.metadata.clone().unwrap_or_else(|| parent.metadata.clone()),
            env_vars,
            secure: parent.access_token.is_some(),
            internet_access: parent.internet_access,
            on_timeout: parent.on_timeout,
            auto_resume: parent.auto_resume,
        };
        let made = create::spawn(node, wish, Source::Snapshot(Arc::clone(&start)));
        async move { made.await.unwrap_or(Err(Error::ShuttingDown)) }
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
