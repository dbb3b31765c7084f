//! Who may start a VM now, and how much memory guests may have. Owns the places, the committed memory and the queue.
//!
//! ```text
//! ask ─▶ queue full, or more than the node has ─▶ refused at once
//!    └─▶ waits ─▶ place and memory ─▶ Permit { place: until the VM runs, memory: for as long as the VM is kept }
//!             ├─ time over ─▶ refused, with what is lacking
//!             └─ went away ─▶ forgotten; whoever comes next is looked at
//! ```
//! Committed is the memory of every guest whose VM is kept: starting, running, standing by for its next client, or stopped
//! behind a saved state. Who gives way when it does not suffice is for [`giving_way`](crate::giving_way) to say, which is woken
//! from here. [`queue`] decides; here it is waited.

mod queue;

pub(crate) use queue::{Limits, Purpose, Taken};

use crate::data_dir::DataDir;
use crate::error::Shortage;
use crate::stage::{Cause, Failure};
use queue::{Demand, Lack, Queue, Ticket};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

/// Limits of one node, and what is taken.
pub(crate) struct Admission {
    shared: Arc<Shared>,
    queue_limit: Duration,
    min_free_bytes: u64,
}

struct Shared {
    state: Mutex<State>,
    lacking: Notify,
}

struct State {
    queue: Queue,
    waiters: HashMap<Ticket, oneshot::Sender<Permit>>,
}

/// The right to start one VM (or, to one who wants that nobody does, all such rights).
pub(crate) struct Permit {
    /// Until the VM runs.
    pub(crate) place: Place,
    /// For as long as there is a VM; none when its memory is counted elsewhere.
    pub(crate) memory: Option<Arc<Commitment>>,
}

/// A place among those that start, until dropped.
pub(crate) struct Place {
    shared: Arc<Shared>,
    purpose: Purpose,
}

/// Memory that is counted as a guest's, until dropped.
pub(crate) struct Commitment {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Admission {
    pub(crate) fn new(limits: Limits, queue_limit: Duration, min_free_bytes: u64) -> Self {
        let state = State { queue: Queue::new(limits), waiters: HashMap::new() };
        let shared = Arc::new(Shared { state: Mutex::new(state), lacking: Notify::new() });
        Self { shared, queue_limit, min_free_bytes }
    }

    /// Refuses when the data directory is nearly full.
    pub(crate) fn check_room(&self, dir: &DataDir) -> Result<(), Failure> {
        let root = dir.root().display();
        let free = dir.free_bytes().map_err(|source| {
            Failure::new(
                "admission",
                Cause::File { context: format!("cannot ask for free space of {root}"), source },
            )
        })?;
        if free < self.min_free_bytes {
            let reason = format!(
                "{root} has {} MiB free, {} MiB are required: remove sandboxes or templates, or enlarge its disk",
                free >> 20,
                self.min_free_bytes >> 20
            );
            return Err(Failure::new("admission", Shortage::Room(reason)));
        }
        Ok(())
    }

    /// Waits for a caller's turn to start a VM whose guest has `bytes` of memory; zero when that is counted already.
    pub(crate) async fn for_caller(&self, bytes: u64) -> Result<Permit, Failure> {
        self.wait(Demand { purpose: Purpose::Caller, bytes }, Some(self.queue_limit)).await
    }

    /// Waits until background work may start a VM.
    pub(crate) async fn for_background(&self, purpose: Purpose, bytes: u64) -> Result<Permit, Failure> {
        self.wait(Demand { purpose, bytes }, None).await
    }

    /// Waits until no VM is being started and no caller waits to; then nobody may until this is dropped.
    pub(crate) async fn for_nobody_else(&self) -> Result<Permit, Failure> {
        self.wait(Demand { purpose: Purpose::Alone, bytes: 0 }, None).await
    }

    async fn wait(&self, demand: Demand, limit: Option<Duration>) -> Result<Permit, Failure> {
        let (sender, receiver) = oneshot::channel();
        let ticket = {
            let mut state = self.shared.locked();
            let entered = state.queue.enter(demand);
            let ticket = entered.map_err(|lack| shortage(&state.queue, demand, lack, None))?;
            state.waiters.insert(ticket, sender);
            ticket
        };
        let _waiting = Waiting { shared: &self.shared, ticket };
        self.shared.settle();
        let granted = match limit {
            None => Some(receiver.await),
            Some(limit) => tokio::time::timeout(limit, receiver).await.ok(),
        };
        match granted {
            Some(granted) => {
                granted.map_err(|gone| Failure::new("admission", Cause::Unexpected(gone.to_string())))
            }
            None => {
                let state = self.shared.locked();
                Err(shortage(&state.queue, demand, state.queue.lack(ticket), limit))
            }
        }
    }

    /// Counts the memory of a guest that an earlier process started.
    pub(crate) fn adopt(&self, bytes: u64) -> Arc<Commitment> {
        self.shared.locked().queue.adopt(bytes);
        Arc::new(Commitment { shared: Arc::clone(&self.shared), bytes })
    }

    /// Waits until there is too little memory for the next one.
    pub(crate) async fn until_lacking(&self) {
        self.shared.lacking.notified().await;
    }

    /// How many bytes would have to be given back for the next one to be let in.
    pub(crate) fn lacking(&self) -> u64 {
        self.shared.locked().queue.lacking()
    }

    /// Whether the host has little memory left: no standbys are made meanwhile.
    pub(crate) fn set_low(&self, low: bool) {
        self.shared.locked().queue.set_low(low);
        self.shared.settle();
    }

    /// What there is, and what is taken.
    pub(crate) fn figures(&self) -> (Limits, Taken) {
        let state = self.shared.locked();
        (state.queue.limits(), state.queue.taken())
    }
}

/// What one is told who is not let in, after having waited for so long.
fn shortage(queue: &Queue, demand: Demand, lack: Lack, waited: Option<Duration>) -> Failure {
    let (limits, taken) = (queue.limits(), queue.taken());
    let waited = waited.unwrap_or(Duration::ZERO);
    let shortage = match lack {
        Lack::Memory => Shortage::Memory {
            needed_bytes: demand.bytes,
            committed_bytes: taken.bytes,
            limit_bytes: limits.bytes,
            waited,
        },
        Lack::Place => {
            Shortage::Places { starting: taken.starting, most: limits.places, waiting: taken.waiting, waited }
        }
    };
    Failure::new("admission", shortage)
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets in whoever can be.
    fn settle(self: &Arc<Self>) {
        let mut granted = Vec::new();
        let lacking = {
            let mut state = self.locked();
            while let Some((ticket, demand)) = state.queue.grant() {
                granted.push((state.waiters.remove(&ticket), demand));
            }
            state.queue.lacking() > 0
        };
        // Not under the lock: what goes to one who just went away comes back by its drop, which settles again.
        for (waiter, demand) in granted {
            let permit = self.permit(demand);
            if let Some(waiter) = waiter {
                drop(waiter.send(permit));
            }
        }
        if lacking {
            self.lacking.notify_one();
        }
    }

    fn permit(self: &Arc<Self>, demand: Demand) -> Permit {
        let Demand { purpose, bytes } = demand;
        let memory = (bytes > 0).then(|| Arc::new(Commitment { shared: Arc::clone(self), bytes }));
        Permit { place: Place { shared: Arc::clone(self), purpose }, memory }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.locked().queue.end_start(self.purpose);
        self.shared.settle();
    }
}

impl Drop for Commitment {
    fn drop(&mut self) {
        self.shared.locked().queue.free(self.bytes);
        self.shared.settle();
    }
}

/// One who waits, until it is let in or goes away.
struct Waiting<'a> {
    shared: &'a Arc<Shared>,
    ticket: Ticket,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let left = {
            let mut state = self.shared.locked();
            let waited = state.waiters.remove(&self.ticket).is_some();
            if waited {
                state.queue.leave(self.ticket);
            }
            waited
        };
        // Whoever stood behind it may be able to go now.
        if left {
            self.shared.settle();
        }
    }
}

#[cfg(test)]
mod tests;
