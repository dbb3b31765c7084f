//! What the workers do next.
//!
//! Owns every request that was fetched and not begun, and those that wait for room on the host. Does none.
//!
//! ```text
//!  push ─▶ the device's line ─▶ running ─▶ answered
//!               ▲                  └─ no room ─▶ held ─┐
//!               └── after RETRY, or at `release` ──────┘
//! ```
//! Devices take turns, and one device never has all workers, so slow storage of one does not stop the others. While requests
//! are held, a worker that has nothing to do knows when they are to be tried again, if there is one.

use super::device::Device;
use super::turns::Turns;
use crate::Stall;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Until requests for which there was no room are tried again.
const RETRY: Duration = Duration::from_millis(250);

/// See above; `T` is what goes with a request.
#[derive(Debug)]
pub(super) struct Lines<T> {
    work: Mutex<Work<T>>,
    changed: Condvar,
}

/// A request that is to be done.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    pub(super) device: Arc<Device>,
    pub(super) job: T,
    /// Set when there was no room for it once.
    since: Option<SystemTime>,
}

#[derive(Debug)]
struct Work<T> {
    turns: Turns<Waiting<T>>,
    held: Vec<Waiting<T>>,
    retry_at: Option<Instant>,
    stalls: BTreeMap<u32, Stall>,
    stopping: bool,
}

impl<T> Lines<T> {
    /// Of one device, `share` requests may be done at once.
    pub(super) fn new(share: usize) -> Self {
        Self { work: Mutex::new(Work::new(share)), changed: Condvar::new() }
    }

    /// Puts a request at the end of its device's line.
    pub(super) fn push(&self, device: Arc<Device>, job: T) {
        self.work().push(Waiting { device, job, since: None });
        self.changed.notify_one();
    }

    /// The next request whose turn it is; waits for one. `None` when it is time to end. [`Lines::answered`] or
    /// [`Lines::hold`] is to be called for it.
    pub(super) fn next(&self) -> Option<Waiting<T>> {
        let mut work = self.work();
        loop {
            if work.stopping {
                return None;
            }
            let now = Instant::now();
            if work.retry_at.is_some_and(|at| at <= now) {
                work.retry();
                self.changed.notify_all();
            }
            if let Some(request) = work.turns.take() {
                // Another may be ready, and whoever was told of it may have been busy. And whoever takes a request no
                // longer looks at the time.
                if work.turns.is_ready() || work.retry_at.is_some() {
                    self.changed.notify_one();
                }
                return Some(request);
            }
            work = match work.retry_at {
                Some(at) => {
                    let limit = at.saturating_duration_since(now);
                    let waited = self.changed.wait_timeout(work, limit);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(work).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// A request was done.
    pub(super) fn answered(&self, request: &Waiting<T>) {
        let mut work = self.work();
        work.answered(request);
        work.turns.finished(request.device.number());
    }

    /// There was no room for a request.
    pub(super) fn hold(&self, request: Waiting<T>, reason: String) {
        let number = request.device.number();
        let mut work = self.work();
        work.hold(request, reason);
        work.turns.finished(number);
    }

    /// Tries everything that one device has held at once.
    pub(super) fn release(&self, number: u32) {
        let mut work = self.work();
        let (released, kept) =
            std::mem::take(&mut work.held).into_iter().partition(|held| held.device.number() == number);
        work.held = kept;
        let released: Vec<Waiting<T>> = released;
        for request in released {
            work.push(request);
        }
        drop(work);
        self.changed.notify_all();
    }

    pub(super) fn stalled(&self) -> Vec<Stall> {
        self.work().stalls.values().cloned().collect()
    }

    /// From now on there is nothing to do.
    pub(super) fn stop(&self) {
        self.work().stopping = true;
        self.changed.notify_all();
    }

    /// Drops everything, after [`Lines::stop`].
    pub(super) fn clear(&self) {
        *self.work() = Work { stopping: true, ..Work::new(0) };
    }

    fn work(&self) -> MutexGuard<'_, Work<T>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Work<T> {
    fn new(share: usize) -> Self {
        let turns = Turns::new(share);
        Self { turns, held: Vec::new(), retry_at: None, stalls: BTreeMap::new(), stopping: false }
    }

    fn push(&mut self, request: Waiting<T>) {
        if !self.stopping {
            self.turns.push(request.device.number(), request);
        }
    }

    fn hold(&mut self, mut request: Waiting<T>, reason: String) {
        if self.stopping {
            return;
        }
        if request.device.is_ending() {
            // Its removal began after the request had failed, and may have emptied the list before.
            return self.push(request);
        }
        let number = request.device.number();
        if request.since.is_none() {
            let since = SystemTime::now();
            request.since = Some(since);
            tracing::warn!(number, name = request.device.name(), "a request waits for room: {reason}");
            let stall = Stall { number, reason, since, requests: 0 };
            self.stalls.entry(number).or_insert(stall).requests += 1;
        }
        self.held.push(request);
        self.retry_at.get_or_insert_with(|| Instant::now() + RETRY);
    }

    /// Forgets that a request had to wait.
    fn answered(&mut self, request: &Waiting<T>) {
        let number = request.device.number();
        if request.since.is_some()
            && let Some(stall) = self.stalls.get_mut(&number)
        {
            stall.requests = stall.requests.saturating_sub(1);
            if stall.requests == 0 {
                self.stalls.remove(&number);
                tracing::info!(number, name = request.device.name(), "no request waits for room any more");
            }
        }
    }

    fn retry(&mut self) {
        self.retry_at = None;
        for request in std::mem::take(&mut self.held) {
            self.push(request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Content, Export};
    use aenv_storage::{Image, StorageError};
    use std::ops::Range;
    use std::sync::mpsc::channel;

    /// An image of zeros.
    #[derive(Debug)]
    struct Zeros;

    impl Image for Zeros {
        fn size(&self) -> u64 {
            4096
        }

        fn read_at(&self, buffer: &mut [u8], _: u64) -> Result<(), StorageError> {
            buffer.fill(0);
            Ok(())
        }

        fn next_data(&self, _: u64) -> Result<Option<Range<u64>>, StorageError> {
            Ok(None)
        }
    }

    fn device(number: u32) -> Arc<Device> {
        let export = Export { number, name: format!("export-{number}"), owner: 0 };
        Arc::new(Device::new(&export, Content::Image(Arc::new(Zeros))).unwrap())
    }

    #[test]
    fn a_held_request_is_tried_again_while_the_one_who_held_it_is_busy() {
        let lines = Arc::new(Lines::new(1));
        lines.push(device(1), "held");
        lines.push(device(2), "first");
        lines.push(device(2), "second");
        let (held, first) = (lines.next().unwrap(), lines.next().unwrap());
        assert_eq!((held.job, first.job), ("held", "first"));
        // Its share is used up, so the other worker finds nothing to do, and waits without a limit.
        let (sender, receiver) = channel();
        let its = Arc::clone(&lines);
        let other = std::thread::spawn(move || sender.send(its.next().map(|request| request.job)));
        std::thread::sleep(Duration::from_millis(200));
        lines.hold(held, "no room".to_owned());
        assert_eq!(lines.stalled().len(), 1);
        lines.answered(&first);
        assert_eq!(lines.next().unwrap().job, "second");
        // Busy with this one from here on.
        assert_eq!(receiver.recv_timeout(Duration::from_secs(20)).unwrap(), Some("held"));
        other.join().unwrap().unwrap();
    }

    #[test]
    fn a_request_that_waited_and_is_done_is_no_stall_any_more() {
        let lines = Lines::new(1);
        lines.push(device(1), ());
        for _ in 0..2 {
            let request = lines.next().unwrap();
            lines.hold(request, "no room".to_owned());
            assert!(lines.stalled().iter().all(|stall| stall.requests == 1));
        }
        lines.release(1);
        let request = lines.next().unwrap();
        lines.answered(&request);
        assert_eq!(lines.stalled(), []);
        lines.stop();
        assert!(lines.next().is_none());
    }
}
