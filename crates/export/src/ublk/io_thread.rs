//! A thread that fetches requests of any number of devices, and commits their answers.
//!
//! Owns its ring. Other threads leave messages and wake it; it hands requests to the pool and never calls storage.

use super::device::Device;
use super::pool::{Job, Pool};
use crate::vital;
use aenv_sys::ublk::{Event, Queue, Ring, Waker};
use rustix::io::Errno;
use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

#[derive(Debug)]
pub(super) struct IoThread {
    index: usize,
    inbox: Mutex<Inbox>,
    waker: Arc<Waker>,
    /// Set once, when the pool has been started.
    pool: OnceLock<Weak<Pool>>,
    handle: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Inbox {
    messages: Vec<Message>,
    /// The thread has ended, so messages would never be read.
    closed: bool,
}

#[derive(Debug)]
enum Message {
    Attach { queue: Arc<Queue>, device: Arc<Device>, reply: SyncSender<io::Result<()>> },
    Commit { slot: usize, tag: u16, result: i32 },
    Stop,
}

impl IoThread {
    /// Starts it, with a ring and without devices.
    pub(super) fn start(index: usize) -> io::Result<Arc<Self>> {
        let (sender, receiver) = sync_channel(1);
        let (ready, made) = sync_channel::<io::Result<Arc<Waker>>>(1);
        let handle = vital::spawn(&format!("ublk-io-{index}"), move || {
            let mut ring = match prepare() {
                Ok(ring) => ring,
                Err(error) => {
                    // Nobody depends on it yet: whoever waits for it is told, if there is someone.
                    let _nobody_waits = ready.send(Err(error));
                    return Ok(());
                }
            };
            if ready.send(Ok(ring.waker())).is_err() {
                return Ok(());
            }
            let Ok(thread): Result<Arc<Self>, _> = receiver.recv() else { return Ok(()) };
            let ended = thread.run(&mut ring);
            let mut inbox = thread.inbox();
            inbox.closed = true;
            inbox.messages.clear();
            ended
        })?;
        let waker = made.recv().map_err(io::Error::other)??;
        let thread = Arc::new(Self {
            index,
            inbox: Mutex::default(),
            waker,
            pool: OnceLock::new(),
            handle: Mutex::new(Some(handle)),
        });
        sender.send(Arc::clone(&thread)).map_err(io::Error::other)?;
        Ok(thread)
    }

    /// Tells it where requests go.
    pub(super) fn connect(&self, pool: Weak<Pool>) {
        // Set before any device is attached, and only once.
        let _already = self.pool.set(pool);
    }

    /// Begins to fetch requests of a device; returns when the kernel has the commands.
    pub(super) fn attach(&self, queue: Arc<Queue>, device: Arc<Device>) -> io::Result<()> {
        let (reply, answer) = sync_channel(1);
        self.leave(Message::Attach { queue, device, reply })?;
        answer.recv().map_err(io::Error::other)?
    }

    /// Answers a request; no error when the thread has ended, for the kernel gives the request out again.
    pub(super) fn commit(&self, slot: usize, tag: u16, result: i32) {
        if let Err(error) = self.leave(Message::Commit { slot, tag, result }) {
            tracing::debug!(index = self.index, "an answer comes too late: {error}");
        }
    }

    /// Ends it; the kernel keeps all further requests of its devices.
    pub(super) fn stop(&self) {
        if let Err(error) = self.leave(Message::Stop) {
            tracing::debug!(index = self.index, "the thread has ended before: {error}");
        }
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).take();
        if handle.is_some_and(|handle| handle.join().is_err()) {
            tracing::error!(index = self.index, "the thread for block requests panicked");
        }
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, message: Message) -> io::Result<()> {
        let first = {
            let mut inbox = self.inbox();
            if inbox.closed {
                return Err(io::Error::other("the thread for block requests has ended"));
            }
            inbox.messages.push(message);
            inbox.messages.len() == 1
        };
        // It takes all messages at once, so only the first one has to wake it.
        if first { self.waker.wake() } else { Ok(()) }
    }

    fn run(&self, ring: &mut Ring<Arc<Device>>) -> io::Result<()> {
        let mut events = Vec::new();
        let mut messages = Vec::new();
        loop {
            std::mem::swap(&mut self.inbox().messages, &mut messages);
            for message in messages.drain(..) {
                match message {
                    Message::Attach { queue, device, reply } => {
                        // Whoever asked has gone: then nobody starts the device.
                        let _nobody_waits = reply.send(ring.attach(queue, device));
                    }
                    Message::Commit { slot, tag, result } => ring.commit(slot, tag, result)?,
                    Message::Stop => return ring.submit(),
                }
            }
            ring.wait(&mut events)?;
            for event in events.drain(..) {
                self.handle(event);
            }
        }
    }

    fn handle(&self, event: Event<Arc<Device>>) {
        match event {
            Event::Request { queue, context: device, slot, tag } => {
                let job = Job { queue, slot, tag, thread: self.index };
                if let Some(pool) = self.pool.get().and_then(Weak::upgrade) {
                    pool.push(device, job);
                }
            }
            Event::Ended { error: Errno::NODEV, .. } => {}
            Event::Ended { context: device, tag, error } => {
                tracing::error!(number = device.number(), tag, "the kernel refuses a command: {error}");
            }
        }
    }
}

fn prepare() -> io::Result<Ring<Arc<Device>>> {
    prepare_thread();
    let ring = Ring::new()?;
    aenv_sys::ublk::drop_admin_capability_of_thread()?;
    Ok(ring)
}

/// What all threads of the path of a request need.
pub(super) fn prepare_thread() {
    if let Err(error) = aenv_sys::ublk::mark_thread_as_io_flusher() {
        tracing::warn!("when memory is short, block requests may wait for themselves: {error}");
    }
}
