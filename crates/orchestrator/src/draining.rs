//! The end of a node whose sandboxes are to be paused: all at once, within a limit. What did not make it runs on, for the next
//! process to adopt.
//!
//! Nothing new is begun meanwhile; callers can still ask, and kill. A pause counts when it survives the loss of power: whoever
//! ends a node so is perhaps about to switch the host off.

use crate::error::Error;
use crate::orchestrator::Orchestrator;
use crate::view::{Durability, PauseRequest, PausedAll, SandboxState};
use aenv_protocol::ids::SandboxId;
use std::collections::HashSet;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Between two looks at a sandbox that is just changing, or not durable yet.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Pauses every sandbox that runs, also those whose start or resume ends meanwhile.
pub(crate) async fn pause_all(orchestrator: &Orchestrator, limit: Duration) -> PausedAll {
    let until = Instant::now() + limit;
    let mut begun: HashSet<SandboxId> = HashSet::new();
    let mut settling = JoinSet::new();
    let mut ended = PausedAll::default();
    loop {
        for view in orchestrator.list() {
            let alive = matches!(view.state, SandboxState::Running | SandboxState::Paused);
            if alive && begun.insert(view.id.clone()) {
                let orchestrator = orchestrator.clone();
                settling.spawn(async move { settle(&orchestrator, &view.id).await });
            }
        }
        if settling.is_empty() {
            return ended;
        }
        tokio::select! {
            Some(settled) = settling.join_next() => match settled {
                Ok(true) => ended.paused += 1,
                Ok(false) => ended.left += 1,
                Err(error) => {
                    tracing::error!(%error, "the pause of a sandbox ended early");
                    ended.left += 1;
                }
            },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            () = tokio::time::sleep_until(until) => {
                ended.left += settling.len();
                return ended;
            }
        }
    }
}

/// Pauses one and waits until that is durable; false when it goes on. One that is gone needs nothing.
async fn settle(orchestrator: &Orchestrator, id: &SandboxId) -> bool {
    loop {
        let Ok(view) = orchestrator.get(id) else { return true };
        let durable = view.saved.is_some_and(|saved| saved.durability >= Durability::Local);
        match view.state {
            SandboxState::Paused if durable => return true,
            SandboxState::Running => match orchestrator.pause(id, PauseRequest::default()).await {
                Ok(_) | Err(Error::AlreadyPaused(_)) => continue,
                Err(Error::Transitioning(_)) => {}
                Err(error) => {
                    tracing::warn!(sandbox = %id, %error, "not paused; it runs on");
                    return false;
                }
            },
            _ => {}
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}
