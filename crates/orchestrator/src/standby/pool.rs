//! The standbys of one template or snapshot that can be taken, and what is to be made next. Owns them; makes none.
//!
//! Each [`Readiness`] has a shelf with a target. What is made next is a pure function of the two shelves, [`choose`].

use super::Standby;
use crate::pause::GrowingPause;
use crate::view::Tier;
use aenv_protocol::ids::SandboxId;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Pauses after failures in a row.
const PAUSES: GrowingPause = GrowingPause::new(Duration::from_millis(250), Duration::from_secs(60));

/// How far a standby is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Its guest was restored, greeted and stopped.
    Hot,
    /// Its VMM process is ready to load the capture; there is no guest in it yet.
    Warm,
}

impl Readiness {
    /// What a create is told that gets such a standby.
    pub(crate) fn tier(self) -> Tier {
        match self {
            Self::Hot => Tier::Hot,
            Self::Warm => Tier::Warm,
        }
    }
}

/// How many standbys of each kind are wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Targets {
    pub(crate) hot: usize,
    pub(crate) warm: usize,
}

/// The standbys of one template or snapshot.
pub(crate) struct StandbyPool {
    shelves: Mutex<Shelves>,
    changed: Notify,
    /// One was put on a shelf.
    arrived: Notify,
}

struct Shelves {
    hot: Shelf,
    warm: Shelf,
}

struct Shelf {
    target: usize,
    ready: VecDeque<Standby>,
    pauses: GrowingPause,
    /// Nothing is to be made before this moment.
    not_before: Option<Instant>,
}

impl Shelves {
    fn of(&mut self, readiness: Readiness) -> &mut Shelf {
        match readiness {
            Readiness::Hot => &mut self.hot,
            Readiness::Warm => &mut self.warm,
        }
    }
}

impl Shelf {
    fn new(target: usize) -> Self {
        Self { target, ready: VecDeque::new(), pauses: PAUSES, not_before: None }
    }

    fn lack(&self) -> Lack {
        match self.not_before {
            _ if self.ready.len() >= self.target => Lack::None,
            None => Lack::Now,
            Some(moment) => Lack::From(moment),
        }
    }
}

impl StandbyPool {
    pub(crate) fn new(targets: Targets) -> Self {
        let shelves = Shelves { hot: Shelf::new(targets.hot), warm: Shelf::new(targets.warm) };
        Self { shelves: Mutex::new(shelves), changed: Notify::new(), arrived: Notify::new() }
    }

    /// So many hot ones are wanted from now on. Those that are there stay.
    pub(super) fn aim(&self, hot: usize) {
        self.locked().hot.target = hot;
        self.changed.notify_one();
    }

    /// Standbys that can be taken.
    pub(crate) fn len(&self, readiness: Readiness) -> usize {
        self.locked().of(readiness).ready.len()
    }

    /// Takes the oldest standby of a kind; no one else gets it.
    pub(crate) fn take(&self, readiness: Readiness) -> Option<Standby> {
        let standby = self.locked().of(readiness).ready.pop_front()?;
        standby.taken.cancel();
        self.changed.notify_one();
        Some(standby)
    }

    /// Takes the standby that is furthest.
    pub(crate) fn take_best(&self) -> Option<Standby> {
        self.take(Readiness::Hot).or_else(|| self.take(Readiness::Warm))
    }

    /// Takes a hot standby as soon as there is one.
    pub(crate) async fn next_hot(&self) -> Standby {
        loop {
            if let Some(standby) = self.take(Readiness::Hot) {
                return standby;
            }
            self.arrived.notified().await;
        }
    }

    /// A taken standby became a sandbox: the template is well.
    pub(crate) fn served(&self, readiness: Readiness) {
        let mut shelves = self.locked();
        let shelf = shelves.of(readiness);
        (shelf.pauses, shelf.not_before) = (PAUSES, None);
    }

    /// A standby could not be made, died or did not answer; returns how long no other is made.
    pub(crate) fn failed(&self, readiness: Readiness) -> Duration {
        let mut shelves = self.locked();
        let shelf = shelves.of(readiness);
        let pause = shelf.pauses.take();
        shelf.not_before = Some(Instant::now() + pause);
        drop(shelves);
        self.changed.notify_one();
        pause
    }

    /// Waits until a standby is wanted.
    pub(super) async fn wanted(&self) {
        loop {
            match self.next(Instant::now()) {
                Next::Make(_) => return,
                Next::Wait(None) => self.changed.notified().await,
                Next::Wait(Some(moment)) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = tokio::time::sleep_until(moment) => {}
                },
            }
        }
    }

    /// Waits until one was taken or failed.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// What is to be made now.
    pub(super) fn next(&self, now: Instant) -> Next {
        let shelves = self.locked();
        choose(now, shelves.hot.lack(), shelves.warm.lack())
    }

    pub(super) fn put(&self, standby: Standby) {
        self.locked().of(standby.readiness).ready.push_back(standby);
        self.arrived.notify_one();
    }

    pub(super) fn remove(&self, id: &SandboxId) -> Option<Standby> {
        let mut shelves = self.locked();
        [Readiness::Hot, Readiness::Warm].into_iter().find_map(|readiness| {
            let ready = &mut shelves.of(readiness).ready;
            let index = ready.iter().position(|standby| standby.vm.record.id == *id)?;
            ready.remove(index)
        })
    }

    fn locked(&self) -> MutexGuard<'_, Shelves> {
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a shelf wants something made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    /// It is full.
    None,
    /// Something is missing.
    Now,
    /// Something is missing and may be made from a moment on.
    From(Instant),
}

impl Lack {
    fn is_due(self, now: Instant) -> bool {
        match self {
            Self::None => false,
            Self::Now => true,
            Self::From(moment) => moment <= now,
        }
    }

    fn moment(self) -> Option<Instant> {
        match self {
            Self::From(moment) => Some(moment),
            Self::None | Self::Now => None,
        }
    }
}

/// What the one who fills the shelves is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Make one.
    Make(Readiness),
    /// Wait for a change, at most until that moment.
    Wait(Option<Instant>),
}

/// Hot ones first: one of them saves a caller nearly everything, a warm one only the start of a process. It is made from a
/// warm one where there is one, so warm ones also shorten the time until the next hot one is there.
fn choose(now: Instant, hot: Lack, warm: Lack) -> Next {
    match (hot, warm) {
        (hot, _) if hot.is_due(now) => Next::Make(Readiness::Hot),
        (_, warm) if warm.is_due(now) => Next::Make(Readiness::Warm),
        (hot, warm) => Next::Wait(hot.moment().into_iter().chain(warm.moment()).min()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kind_that_fails_does_not_hold_up_the_other() {
        let now = Instant::now();
        let soon = now + Duration::from_secs(1);
        let later = now + Duration::from_secs(2);
        for (hot, warm, next) in [
            (Lack::None, Lack::None, Next::Wait(None)),
            (Lack::Now, Lack::Now, Next::Make(Readiness::Hot)),
            (Lack::None, Lack::Now, Next::Make(Readiness::Warm)),
            (Lack::From(soon), Lack::Now, Next::Make(Readiness::Warm)),
            (Lack::From(soon), Lack::None, Next::Wait(Some(soon))),
            (Lack::From(later), Lack::From(soon), Next::Wait(Some(soon))),
            (Lack::From(now), Lack::From(now), Next::Make(Readiness::Hot)),
        ] {
            assert_eq!(choose(now, hot, warm), next, "{hot:?} {warm:?}");
        }
    }

    #[tokio::test]
    async fn pauses_grow_with_the_failures_in_a_row_and_success_ends_them() {
        let pool = StandbyPool::new(Targets { hot: 1, warm: 0 });
        assert_eq!(pool.next(Instant::now()), Next::Make(Readiness::Hot));
        let begin = Instant::now();
        let first = pool.failed(Readiness::Hot);
        assert!(matches!(pool.next(begin), Next::Wait(Some(moment)) if moment >= begin + first));
        pool.wanted().await;
        assert!(begin.elapsed() >= first);
        assert!(pool.failed(Readiness::Hot) > first);
        pool.served(Readiness::Hot);
        assert_eq!(pool.next(Instant::now()), Next::Make(Readiness::Hot));
        assert_eq!(pool.failed(Readiness::Hot), first);
    }
}
