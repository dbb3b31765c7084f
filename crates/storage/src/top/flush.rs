//! Flushes of many callers at once share the work: who comes while one runs waits for the next, which serves them all.
//!
//! Owns the turn. Must not know what a flush does.

use super::lock;
use std::sync::{Condvar, Mutex};

#[derive(Debug, Default)]
pub(super) struct FlushQueue {
    rounds: Mutex<Rounds>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Rounds {
    started: u64,
    running: bool,
    /// The last round that succeeded.
    succeeded: u64,
}

impl FlushQueue {
    /// Returns when a round that began after this call has succeeded, or fails as the round that this caller ran. Whatever
    /// else `flush` does, it may succeed only when it has flushed: others take its success for theirs.
    pub(super) fn join<E>(&self, flush: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let mut rounds = lock(&self.rounds);
        // A round that runs already may have missed what this caller wrote.
        let needed = rounds.started + 1;
        while rounds.running {
            rounds = self.ended.wait(rounds).unwrap_or_else(std::sync::PoisonError::into_inner);
            if rounds.succeeded >= needed {
                return Ok(());
            }
        }
        rounds.running = true;
        rounds.started += 1;
        let round = rounds.started;
        drop(rounds);
        let mut turn = Turn { queue: self, round, succeeded: false };
        let outcome = flush();
        turn.succeeded = outcome.is_ok();
        outcome
    }
}

/// Ends the round, whatever happens in it.
struct Turn<'a> {
    queue: &'a FlushQueue,
    round: u64,
    succeeded: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut rounds = lock(&self.queue.rounds);
        rounds.running = false;
        if self.succeeded {
            rounds.succeeded = self.round;
        }
        self.queue.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn every_caller_gets_a_round_that_began_after_its_call() {
        let (queue, written, durable) = (FlushQueue::default(), AtomicU64::new(0), AtomicU64::new(0));
        let rounds = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mine = written.fetch_add(1, Ordering::SeqCst) + 1;
                        let flush = || {
                            rounds.fetch_add(1, Ordering::SeqCst);
                            let covered = written.load(Ordering::SeqCst);
                            std::thread::yield_now();
                            durable.fetch_max(covered, Ordering::SeqCst);
                            Ok::<(), ()>(())
                        };
                        queue.join(flush).unwrap();
                        assert!(durable.load(Ordering::SeqCst) >= mine);
                    }
                });
            }
        });
        assert!(rounds.load(Ordering::SeqCst) <= 1600);
    }

    #[test]
    fn a_round_that_failed_serves_nobody() {
        let queue = FlushQueue::default();
        assert_eq!(queue.join(|| Err("full")), Err("full"));
        assert_eq!(queue.join(|| Ok::<(), &str>(())), Ok(()));
    }
}
