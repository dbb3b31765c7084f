//! The threads that call storage, and the order in which they do.
//!
//! Owns the threads, every request that was fetched and not begun, and those that wait for room on the host.
//!
//! ```text
//!  push ─▶ the device's line ─▶ running ─▶ answered
//!               ▲                  └─ no room ─▶ held ─┐
//!               └── after RETRY, or at `release` ──────┘
//! ```
//! Devices take turns, and one device never has all workers, so slow storage of one does not stop the others.

use super::MAX_IO_BYTES;
use super::device::Device;
use super::io_thread::{IoThread, prepare_thread};
use super::serve::{Outcome, serve};
use super::turns::Turns;
use crate::Stall;
use aenv_sys::ublk::Queue;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Until requests for which there was no room are tried again.
const RETRY: Duration = Duration::from_millis(250);

/// A request that was fetched.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) device: Arc<Device>,
    pub(super) queue: Arc<Queue>,
    pub(super) slot: usize,
    pub(super) tag: u16,
    /// Which I/O thread commits it.
    pub(super) thread: usize,
    /// Set when there was no room for it once.
    pub(super) waiting_since: Option<SystemTime>,
}

#[derive(Debug)]
pub(super) struct Pool {
    work: Mutex<Work>,
    changed: Condvar,
    threads: Vec<Arc<IoThread>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Work {
    turns: Turns<Job>,
    held: Vec<Job>,
    retry_at: Option<Instant>,
    stalls: BTreeMap<u32, Stall>,
    stopping: bool,
}

impl Pool {
    pub(super) fn start(workers: usize, threads: Vec<Arc<IoThread>>) -> io::Result<Arc<Self>> {
        let work = Work::new(workers.saturating_sub(2));
        let pool = Arc::new(Self {
            work: Mutex::new(work),
            changed: Condvar::new(),
            threads,
            workers: Mutex::default(),
        });
        for thread in &pool.threads {
            thread.connect(Arc::downgrade(&pool));
        }
        for index in 0..workers {
            let its = Arc::clone(&pool);
            let worker =
                std::thread::Builder::new().name(format!("ublk-work-{index}")).spawn(move || its.run());
            match worker {
                Ok(handle) => pool.workers().push(handle),
                Err(error) => {
                    pool.stop();
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    /// Puts a request at the end of its device's line.
    pub(super) fn push(&self, job: Job) {
        self.work().push(job);
        self.changed.notify_one();
    }

    /// Tries everything that one device has held at once.
    pub(super) fn release(&self, number: u32) {
        let mut work = self.work();
        let (released, kept) =
            std::mem::take(&mut work.held).into_iter().partition(|job| job.device.number() == number);
        work.held = kept;
        let released: Vec<Job> = released;
        for job in released {
            work.push(job);
        }
        drop(work);
        self.changed.notify_all();
    }

    pub(super) fn stalled(&self) -> Vec<Stall> {
        self.work().stalls.values().cloned().collect()
    }

    /// Ends the workers when they have done what they are doing; what was not begun is dropped, and the kernel keeps it.
    pub(super) fn stop(&self) {
        self.work().stopping = true;
        self.changed.notify_all();
        let workers = std::mem::take(&mut *self.workers());
        for worker in workers {
            if worker.join().is_err() {
                tracing::error!("a thread that calls storage panicked");
            }
        }
        *self.work() = Work { stopping: true, ..Work::new(0) };
    }

    fn work(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn workers(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        prepare_thread();
        let mut buffer = vec![0; MAX_IO_BYTES as usize];
        while let Some(job) = self.next() {
            let number = job.device.number();
            match serve(&job.device, &job.queue, job.tag, &mut buffer) {
                Outcome::Answer(result) => {
                    self.threads[job.thread].commit(job.slot, job.tag, result);
                    let mut work = self.work();
                    work.answered(&job);
                    work.turns.finished(number);
                }
                Outcome::NoRoom(reason) => {
                    let mut work = self.work();
                    work.hold(job, reason);
                    work.turns.finished(number);
                }
            }
        }
    }

    /// The next request whose turn it is; waits for one. `None` when it is time to end.
    fn next(&self) -> Option<Job> {
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
            if let Some(job) = work.turns.take() {
                // Another may be ready, and whoever was told of it may have been busy.
                if work.turns.is_ready() {
                    self.changed.notify_one();
                }
                return Some(job);
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
}

impl Work {
    fn new(share: usize) -> Self {
        let turns = Turns::new(share);
        Self { turns, held: Vec::new(), retry_at: None, stalls: BTreeMap::new(), stopping: false }
    }

    fn push(&mut self, job: Job) {
        if !self.stopping {
            self.turns.push(job.device.number(), job);
        }
    }

    fn hold(&mut self, mut job: Job, reason: String) {
        if self.stopping {
            return;
        }
        if job.device.is_ending() {
            // Its removal began after the request had failed, and may have emptied the list before.
            return self.push(job);
        }
        let number = job.device.number();
        if job.waiting_since.is_none() {
            let since = SystemTime::now();
            job.waiting_since = Some(since);
            tracing::warn!(number, name = job.device.name(), "a request waits for room: {reason}");
            let stall = Stall { number, reason, since, requests: 0 };
            self.stalls.entry(number).or_insert(stall).requests += 1;
        }
        self.held.push(job);
        self.retry_at.get_or_insert_with(|| Instant::now() + RETRY);
    }

    /// Forgets that a request had to wait.
    fn answered(&mut self, job: &Job) {
        let number = job.device.number();
        if job.waiting_since.is_some()
            && let Some(stall) = self.stalls.get_mut(&number)
        {
            stall.requests = stall.requests.saturating_sub(1);
            if stall.requests == 0 {
                self.stalls.remove(&number);
                tracing::info!(number, name = job.device.name(), "no request waits for room any more");
            }
        }
    }

    fn retry(&mut self) {
        self.retry_at = None;
        for job in std::mem::take(&mut self.held) {
            self.push(job);
        }
    }
}
