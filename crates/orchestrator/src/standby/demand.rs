//! The standbys of a snapshot: none until it is started from again and again, then more with each few starts, and none again when
//! nobody started from it for some minutes, or when it is deleted.
//!
//! ```text
//! starts of the last minutes   0 ── 1 ── 2 ── 3 ── 4 ── …            nothing for five minutes, deleted
//! hot standbys wanted          0    0    1    1    2  at most as many as a template has      0
//! ```
//! Templates have as many as the settings say, always: there are few of them. Snapshots may be many, and most are never started from.
//! Owns when the last starts were, and whether somebody fills the pool. Makes no standby.

use super::{Readiness, StandbyPool, Targets, keep_filled};
use crate::node::Node;
use crate::source::Source;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long a start counts.
const WINDOW: Duration = Duration::from_secs(300);
/// So many starts within that want one standby.
const STARTS_PER_STANDBY: usize = 2;

/// The standbys of one snapshot.
pub(crate) struct OnDemand {
    /// Those that can be taken.
    pub(crate) pool: StandbyPool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    starts: VecDeque<Instant>,
    /// Ends the task that fills the pool, if there is one.
    keeper: Option<CancellationToken>,
    closed: bool,
}

impl OnDemand {
    pub(crate) fn new() -> Self {
        Self { pool: StandbyPool::new(Targets { hot: 0, warm: 0 }), state: Mutex::default() }
    }

    /// Somebody starts from the snapshot that `source` is of, whose standbys these are.
    pub(crate) fn note_start(&self, node: &Arc<Node>, source: &Source) {
        let now = Instant::now();
        let mut state = self.locked();
        let most = node.settings.standbys;
        state.starts.push_back(now);
        // More make no difference.
        while state.starts.len() > most.saturating_mul(STARTS_PER_STANDBY).max(1) {
            state.starts.pop_front();
        }
        let hot = wanted(now, &state.starts, most);
        self.pool.aim(hot);
        if hot > 0 && state.keeper.is_none() && !state.closed {
            let until = node.stopping.child_token();
            state.keeper = Some(until.clone());
            node.tasks.spawn(keep(Arc::clone(node), source.clone(), until));
        }
    }

    /// The snapshot is to go: its standbys end, and no others are made.
    pub(crate) fn close(&self) {
        let mut state = self.locked();
        state.closed = true;
        if let Some(keeper) = &state.keeper {
            keeper.cancel();
        }
    }

    /// How many can be taken.
    pub(crate) fn ready(&self) -> usize {
        self.pool.len(Readiness::Hot)
    }

    /// Waits until nobody has started from it for as long as a start counts.
    async fn idle(&self) {
        loop {
            let last = self.locked().starts.back().copied();
            match last.map(|last| last + WINDOW) {
                Some(end) if end > Instant::now() => tokio::time::sleep_until(end).await,
                _ => return,
            }
        }
    }

    /// Nobody fills the pool any more. A start that came at this very moment is served without; the next one begins anew.
    fn ended(&self) {
        let mut state = self.locked();
        state.starts.clear();
        state.keeper = None;
        self.pool.aim(0);
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fills the pool as long as it is in demand.
async fn keep(node: Arc<Node>, source: Source, until: CancellationToken) {
    let Some(demand) = source.on_demand() else { return };
    tracing::info!(source = %source.name(), "a snapshot is in demand: standbys are made of it");
    let over = async {
        demand.idle().await;
        until.cancel();
    };
    tokio::join!(keep_filled(node, source.clone(), until.clone()), until.run_until_cancelled(over));
    demand.ended();
    tracing::info!(source = %source.name(), "a snapshot is in demand no more");
}

/// How many hot standbys starts at these moments want.
fn wanted(now: Instant, starts: &VecDeque<Instant>, most: usize) -> usize {
    let recent = starts.iter().filter(|start| **start + WINDOW > now).count();
    (recent / STARTS_PER_STANDBY).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_grows_with_the_starts_and_goes_with_time() {
        let begin = Instant::now();
        let at = |seconds: &[u64]| seconds.iter().map(|s| begin + Duration::from_secs(*s)).collect();
        for (starts, now, most, expected) in [
            (vec![], 0, 4, 0),
            (vec![0], 0, 4, 0),
            (vec![0, 1], 1, 4, 1),
            (vec![0, 1, 2, 3], 3, 4, 2),
            (vec![0, 1, 2, 3], 3, 1, 1),
            (vec![0, 1, 2, 3], 3, 0, 0),
            // The first two count no more.
            (vec![0, 1, 200, 201], 302, 4, 1),
            (vec![0, 1], 301, 4, 0),
        ] {
            let starts: VecDeque<Instant> = at(&starts);
            assert_eq!(wanted(begin + Duration::from_secs(now), &starts, most), expected, "{now}");
        }
    }
}
