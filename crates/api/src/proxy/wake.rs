//! Lets traffic wake paused sandboxes: one wake for all requests that wait for the same sandbox.
//!
//! ```text
//!  request ─▶ a route ────────────────────────────────────────────▶ forwarded
//!         └─▶ none, but it may be woken ─▶ wake, begun or joined ─▶ a route ─▶ forwarded
//!                                            ├ 15 s passed ────────────────▶ 503; the wake goes on
//!                                            └ refused ────────────────────▶ 409, 502 or 503
//!         └─▶ none, paused and not to be woken ─────────────────────────────▶ 409; the daemon's health: 502
//! ```
//! A caller that hangs up stops nothing. Owns the wakes under way, and nothing else.

use crate::proxy::refusal::Refusal;
use aenv_orchestrator::{Error, Orchestrator, Route, SandboxState};
use aenv_protocol::ids::SandboxId;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a request waits for its sandbox to be resumed. Source: E2B's edge.
const WAKE_LIMIT: Duration = Duration::from_secs(15);
/// Life time that a sandbox woken by traffic has at least. Source: E2B's edge.
const WOKEN_LIFE: Duration = Duration::from_secs(300);

/// A sandbox whose token can have signed a URL.
#[derive(Debug, Clone)]
pub struct Signer {
    /// Which sandbox.
    pub id: SandboxId,
    /// The token that its guest daemon demands.
    pub access_token: String,
}

/// Tells how to reach running sandboxes, and wakes paused ones.
pub trait RouteTable: Send + Sync + 'static {
    /// The route of a running sandbox.
    fn route(&self, id: &SandboxId) -> Option<Route>;
    /// Every sandbox with a token that runs or is paused.
    fn signers(&self) -> Vec<Signer>;
    /// Whether a sandbox is paused, or just being paused, and traffic may wake it then.
    fn may_wake(&self, id: &SandboxId) -> bool;
    /// Whether a sandbox is paused.
    fn is_paused(&self, id: &SandboxId) -> bool;
    /// Resumes one that traffic may wake. Dropping the future need not stop that.
    fn wake(&self, id: &SandboxId) -> BoxFuture<'static, Result<(), Error>>;
}

impl RouteTable for Orchestrator {
    fn route(&self, id: &SandboxId) -> Option<Route> {
        Self::route(self, id)
    }

    fn signers(&self) -> Vec<Signer> {
        let able = self
            .list()
            .into_iter()
            .filter(|view| matches!(view.state, SandboxState::Running | SandboxState::Paused));
        able.filter_map(|view| Some(Signer { id: view.id, access_token: view.access_token? })).collect()
    }

    fn may_wake(&self, id: &SandboxId) -> bool {
        self.get(id).is_ok_and(|view| view.woken_by_traffic)
    }

    fn is_paused(&self, id: &SandboxId) -> bool {
        self.get(id).is_ok_and(|view| view.state == SandboxState::Paused)
    }

    fn wake(&self, id: &SandboxId) -> BoxFuture<'static, Result<(), Error>> {
        let (orchestrator, id) = (self.clone(), id.clone());
        async move {
            let view = orchestrator.get(&id)?;
            if !view.woken_by_traffic {
                // Somebody was faster: it runs, or it is not to be woken any more.
                return Ok(());
            }
            let life = woken_life(view.life_time, orchestrator.max_timeout());
            orchestrator.wake(&id, life).await.map(|_resumed| ())
        }
        .boxed()
    }
}

/// As long as its creator wished, but no request shall find it gone a moment later.
fn woken_life(wished: Duration, longest: Duration) -> Duration {
    wished.max(WOKEN_LIFE).min(longest)
}

type Wake = Shared<BoxFuture<'static, Result<(), Error>>>;

/// Wakes under way.
#[derive(Default)]
pub(crate) struct Wakes(Arc<Mutex<HashMap<SandboxId, Wake>>>);

impl Wakes {
    /// The route of a sandbox, after it was woken if need be.
    ///
    /// # Errors
    /// When there is none to be had.
    pub(crate) async fn route(&self, routes: &dyn RouteTable, id: &SandboxId) -> Result<Route, Refusal> {
        if let Some(route) = routes.route(id) {
            return Ok(route);
        }
        if routes.may_wake(id) {
            match tokio::time::timeout(WAKE_LIMIT, self.join(routes, id)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(refusal(routes, id, &error)),
                Err(_) => return Err(Refusal::Waking(id.clone())),
            }
        }
        // Without a wake too: another request's may have ended a moment ago.
        routes.route(id).ok_or_else(|| without_route(routes, id.clone()))
    }

    fn join(&self, routes: &dyn RouteTable, id: &SandboxId) -> Wake {
        let mut wakes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(wake) = wakes.get(id) {
            return wake.clone();
        }
        let wake = routes.wake(id).shared();
        wakes.insert(id.clone(), wake.clone());
        let (under_way, id, all) = (wake.clone(), id.clone(), Arc::clone(&self.0));
        tokio::spawn(async move {
            let woken = under_way.await;
            all.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
            match woken {
                Ok(()) => tracing::info!(sandbox = %id, "woken by traffic"),
                Err(error) => tracing::warn!(sandbox = %id, %error, "traffic could not wake a sandbox"),
            }
        });
        wake
    }
}

/// What the caller is told of a sandbox that cannot be reached and is not woken.
pub(super) fn without_route(routes: &dyn RouteTable, id: SandboxId) -> Refusal {
    if routes.is_paused(&id) { Refusal::Paused(id) } else { Refusal::NotFound(id) }
}

/// What the caller is told when a sandbox could not be woken.
fn refusal(routes: &dyn RouteTable, id: &SandboxId, error: &Error) -> Refusal {
    let id = id.clone();
    match error {
        Error::SandboxNotFound(_) | Error::SandboxLost { .. } => Refusal::NotFound(id),
        // It was just being paused, and is not woken by traffic then.
        Error::IsPaused(_) => without_route(routes, id),
        Error::Transitioning(_) => Refusal::Transitioning(id),
        Error::NoCapacity(_)
        | Error::Unavailable { .. }
        | Error::ShuttingDown
        | Error::TemplateNotReady { .. } => Refusal::Busy { id, reason: error.to_string() },
        Error::TemplateNotFound(_)
        | Error::InvalidArgument { .. }
        | Error::Conflict(_)
        | Error::AlreadyPaused(_)
        | Error::GuestUnresponsive { .. }
        | Error::Incompatible { .. }
        | Error::SnapshotIncompatible { .. }
        | Error::Internal { .. } => Refusal::Asleep { id, reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_woken_lives_as_long_as_wished_and_five_minutes_at_least() {
        let [minute, hour, day] = [60, 3600, 86_400].map(Duration::from_secs);
        assert_eq!(woken_life(minute, day), WOKEN_LIFE);
        assert_eq!(woken_life(hour, day), hour);
        assert_eq!(woken_life(hour, minute), minute);
        assert_eq!(woken_life(Duration::ZERO, day), WOKEN_LIFE);
    }
}
