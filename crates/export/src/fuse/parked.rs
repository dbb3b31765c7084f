//! Requests that wait for room on the host, and the slots that are free.
//!
//! ```text
//! free ──a worker takes it──▶ with a worker ──no room──▶ parked ──retried: done, export removed, asker killed──▶ free
//!                                   ▲                      │
//!                                   └──── answered ────    └── daemon killed ──▶ parked again by the next one
//! ```
//! Owns the slots that no worker has. A parked request stays in its slot: nothing is copied. When more than a limit of
//! bytes are parked, a worker waits before it reads on, except the last one, which goes on with reads as long as there are
//! slots. Executes nothing.

use crate::Stall;
use aenv_sys::fuse::slots::Slot;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// Time between two tries.
const PAUSE: Duration = Duration::from_millis(250);

/// See above.
#[derive(Debug)]
pub(super) struct Parked {
    limit: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Waiting>,
    free: Vec<Slot>,
    /// Of all that wait.
    bytes: usize,
    /// Workers that have a slot.
    working: usize,
    /// Names the next one that waits.
    next: u64,
    retry: bool,
    ended: bool,
}

#[derive(Debug)]
struct Waiting {
    id: u64,
    /// Absent while it is tried.
    slot: Option<Slot>,
    number: u32,
    reason: String,
    since: SystemTime,
    bytes: usize,
}

/// What a request waits with.
#[derive(Debug)]
pub(super) struct Reason {
    /// Number of the export.
    pub(super) number: u32,
    /// What its content said.
    pub(super) text: String,
    /// Bytes of the request.
    pub(super) bytes: usize,
}

impl Parked {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a worker that has none; waits for one. None when the end has come.
    pub(super) fn take_slot(&self) -> Option<Slot> {
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            if (state.bytes <= self.limit || state.working == 0)
                && let Some(slot) = state.free.pop()
            {
                state.working += 1;
                return Some(slot);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A slot that nobody uses any more.
    pub(super) fn release(&self, slot: Slot) {
        self.lock().free.push(slot);
        self.changed.notify_all();
    }

    /// A worker ends and gives its slot back.
    pub(super) fn leave(&self, slot: Slot) {
        let mut state = self.lock();
        state.free.push(slot);
        state.working = state.working.saturating_sub(1);
        drop(state);
        self.changed.notify_all();
    }

    /// A worker's request begins to wait; the worker has no slot then.
    pub(super) fn park(&self, slot: Slot, reason: Reason) {
        let mut state = self.lock();
        state.working = state.working.saturating_sub(1);
        state.add(slot, reason);
        drop(state);
        self.changed.notify_all();
    }

    /// A request that an earlier daemon left goes on waiting.
    pub(super) fn park_again(&self, slot: Slot, reason: Reason) {
        self.lock().add(slot, reason);
        self.changed.notify_all();
    }

    /// Waits until it is time to try, then returns everything that waits; each has to be given back by
    /// [`Parked::done`] or [`Parked::still`]. None when the end has come.
    pub(super) fn take_due(&self) -> Option<Vec<(u64, u32, Slot)>> {
        let mut state = self.lock();
        while state.waiting.is_empty() && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let pause = |state: &mut State| !state.retry && !state.ended;
        let waited = self.changed.wait_timeout_while(state, PAUSE, pause);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.ended {
            return None;
        }
        state.retry = false;
        let taken = state.waiting.iter_mut().filter_map(|waiting| {
            let slot = waiting.slot.take()?;
            Some((waiting.id, waiting.number, slot))
        });
        Some(taken.collect())
    }

    /// A request that waited was answered.
    pub(super) fn done(&self, id: u64, slot: Slot) {
        let mut state = self.lock();
        if let Some(at) = state.waiting.iter().position(|waiting| waiting.id == id) {
            let waiting = state.waiting.remove(at);
            state.bytes = state.bytes.saturating_sub(waiting.bytes);
        }
        state.free.push(slot);
        drop(state);
        self.changed.notify_all();
    }

    /// A request has to wait further; with the reason when it was tried.
    pub(super) fn still(&self, id: u64, slot: Slot, text: Option<String>) {
        if let Some(waiting) = self.lock().waiting.iter_mut().find(|waiting| waiting.id == id) {
            waiting.slot = Some(slot);
            if let Some(text) = text {
                waiting.reason = text;
            }
        }
    }

    /// See [`super::FuseExporter::retry_stalled`].
    pub(super) fn retry_now(&self) {
        self.lock().retry = true;
        self.changed.notify_all();
    }

    /// Nobody waits here any more, nor will.
    pub(super) fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Lets go of all slots, with what is in them.
    pub(super) fn clear(&self) {
        let mut state = self.lock();
        state.waiting.clear();
        state.free.clear();
    }

    /// See [`super::FuseExporter::stalled`].
    pub(super) fn stalled(&self) -> Vec<Stall> {
        let mut stalls: Vec<Stall> = Vec::new();
        // In the order in which they began to wait.
        for waiting in &self.lock().waiting {
            match stalls.iter_mut().find(|stall| stall.number == waiting.number) {
                Some(stall) => stall.requests = stall.requests.saturating_add(1),
                None => stalls.push(Stall {
                    number: waiting.number,
                    reason: waiting.reason.clone(),
                    since: waiting.since,
                    requests: 1,
                }),
            }
        }
        stalls
    }
}

impl State {
    fn add(&mut self, slot: Slot, reason: Reason) {
        let Reason { number, text, bytes } = reason;
        let (id, since) = (self.next, SystemTime::now());
        self.next += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.waiting.push(Waiting { id, slot: Some(slot), number, reason: text, since, bytes });
    }
}

#[cfg(test)]
mod tests;
