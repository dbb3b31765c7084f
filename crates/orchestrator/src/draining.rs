//! The end of a node whose sandboxes are to be paused: all at once, within a limit. What did not make it runs on, for the next
//! process to adopt.
//!
//! Nothing new is begun meanwhile; callers can still ask, and kill. A pause counts when it survives the loss of power: whoever
//! ends a node so is perhaps about to switch the host off.

use crate::error::Error;
use crate::orchestrator::Orchestrator;
use crate::view::{Durability, PauseRequest, PausedAll, SandboxState, SandboxView};
use aenv_protocol::ids::SandboxId;
use std::collections::HashSet;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Between two looks at a sandbox that is just changing, or not durable yet.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Pauses every sandbox that runs, also those whose start, pause or resume ends meanwhile.
pub(crate) async fn pause_all(orchestrator: &Orchestrator, limit: Duration) -> PausedAll {
    let until = Instant::now() + limit;
    // Each is looked at as long as it is not where it should be: one that was paused when this began may run a moment later.
    let (mut under_way, mut given_up) = (HashSet::new(), HashSet::new());
    let mut settling: JoinSet<(SandboxId, bool)> = JoinSet::new();
    loop {
        for view in orchestrator.list().into_iter().filter(|view| is_alive(view) && !is_settled(view)) {
            if !given_up.contains(&view.id) && under_way.insert(view.id.clone()) {
                let orchestrator = orchestrator.clone();
                settling.spawn(async move {
                    let settled = settle(&orchestrator, &view.id).await;
                    (view.id, settled)
                });
            }
        }
        if settling.is_empty() {
            break;
        }
        tokio::select! {
            Some(settled) = settling.join_next() => match settled {
                Ok((id, settled)) => {
                    under_way.remove(&id);
                    if !settled {
                        given_up.insert(id);
                    }
                }
                // Which one it was is not known: it stays under way, and is counted as what it is in the end.
                Err(error) => tracing::error!(%error, "the pause of a sandbox ended early"),
            },
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            () = tokio::time::sleep_until(until) => break,
        }
    }
    let alive: Vec<SandboxView> = orchestrator.list().into_iter().filter(is_alive).collect();
    let paused = alive.iter().filter(|view| is_settled(view)).count();
    PausedAll { paused, left: alive.len() - paused }
}

fn is_alive(view: &SandboxView) -> bool {
    matches!(view.state, SandboxState::Running | SandboxState::Paused)
}

/// Whether it is paused, stays so, and survives the loss of power.
fn is_settled(view: &SandboxView) -> bool {
    let durable = view.saved.as_ref().is_some_and(|saved| saved.durability >= Durability::Local);
    view.state == SandboxState::Paused && durable && !view.is_changing
}

/// Pauses one and waits until that is durable; false when it goes on. One that is gone needs nothing.
async fn settle(orchestrator: &Orchestrator, id: &SandboxId) -> bool {
    loop {
        let Ok(view) = orchestrator.get(id) else { return true };
        match view.state {
            SandboxState::Paused if is_settled(&view) => return true,
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
