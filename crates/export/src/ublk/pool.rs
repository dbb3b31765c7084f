//! The threads that call storage.
//!
//! Owns the threads. What they do next comes from [`Lines`].

use super::MAX_IO_BYTES;
use super::device::Device;
use super::io_thread::{IoThread, prepare_thread};
use super::lines::{Lines, Waiting};
use super::serve::{Outcome, serve};
use crate::{Stall, vital};
use aenv_sys::pages::Pages;
use aenv_sys::ublk::Queue;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// A request that was fetched.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) queue: Arc<Queue>,
    pub(super) slot: usize,
    pub(super) tag: u16,
    /// Which I/O thread commits it.
    pub(super) thread: usize,
}

#[derive(Debug)]
pub(super) struct Pool {
    lines: Lines<Job>,
    threads: Vec<Arc<IoThread>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl Pool {
    pub(super) fn start(workers: usize, threads: Vec<Arc<IoThread>>) -> io::Result<Arc<Self>> {
        let lines = Lines::new(workers.saturating_sub(2));
        let pool = Arc::new(Self { lines, threads, workers: Mutex::default() });
        for thread in &pool.threads {
            thread.connect(Arc::downgrade(&pool));
        }
        for index in 0..workers {
            match pool.start_worker(index) {
                Ok(handle) => pool.workers().push(handle),
                Err(error) => {
                    pool.stop();
                    return Err(error);
                }
            }
        }
        Ok(pool)
    }

    fn start_worker(self: &Arc<Self>, index: usize) -> io::Result<JoinHandle<()>> {
        // The kernel copies from and to it, and fails the request of a process that is killed while it has to wait for memory.
        let mut buffer = Pages::new(MAX_IO_BYTES as usize)?;
        if !buffer.is_locked() && index == 0 {
            tracing::warn!(
                "memory of block requests may be swapped out: a limit or a missing right forbids to lock it"
            );
        }
        let its = Arc::clone(self);
        vital::spawn(&format!("ublk-work-{index}"), move || {
            its.run(&mut buffer);
            Ok(())
        })
    }

    /// Puts a request at the end of its device's line.
    pub(super) fn push(&self, device: Arc<Device>, job: Job) {
        self.lines.push(device, job);
    }

    /// Tries everything that one device has held at once.
    pub(super) fn release(&self, number: u32) {
        self.lines.release(number);
    }

    pub(super) fn stalled(&self) -> Vec<Stall> {
        self.lines.stalled()
    }

    /// Ends the workers when they have done what they are doing; what was not begun is dropped, and the kernel keeps it.
    pub(super) fn stop(&self) {
        self.lines.stop();
        let workers = std::mem::take(&mut *self.workers());
        for worker in workers {
            if worker.join().is_err() {
                tracing::error!("a thread that calls storage panicked");
            }
        }
        self.lines.clear();
    }

    fn workers(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, buffer: &mut [u8]) {
        prepare_thread();
        while let Some(request) = self.lines.next() {
            let Waiting { device, job, .. } = &request;
            match serve(device, &job.queue, job.tag, buffer) {
                Outcome::Answer(result) => {
                    self.threads[job.thread].commit(job.slot, job.tag, result);
                    self.lines.answered(&request);
                }
                Outcome::NoRoom(reason) => self.lines.hold(request, reason),
            }
        }
    }
}
