//! The workers: they read requests into slots, have them answered, and tell the kernel.
//!
//! A slot says how far its request is, so that the next daemon knows what to do with it:
//!
//! ```text
//! FREE ─▶ READING ──request read──▶ EXECUTING ──done──▶ ANSWERING ──kernel told──▶ FREE
//!                                      │  ▲
//!                                      ▼  │ tried again
//!                                     PARKED
//! next daemon:  FREE                          nothing was in flight
//!               READING                       a request may be in it, then as EXECUTING; the header's length is 0 if not
//!               EXECUTING                     not answered: do it (again)
//!               ANSWERING, data was changed   done and perhaps answered: never do it again, send the stored answer
//!               ANSWERING, else               do it again: it changes nothing
//!               PARKED                        goes on waiting
//! ```
//! An answer that the kernel has already is refused by it (`ENOENT`), so sending one too many does no harm. But a write
//! that was answered must not be done again: its range may have been written since.
//!
//! Owns the threads and the descriptors of the connection. Decides no answer.

use super::files::Files;
use super::holder::Attachment;
use super::parked::{Parked, Reason};
use super::requests::{Answer, Request, answer_to};
use crate::{ExportError, vital};
use aenv_sys::fuse::abi::{ReplyHeader, RequestHeader, WriteOut, opcode};
use aenv_sys::fuse::pressure;
use aenv_sys::fuse::slots::{DATA_BYTES, Slot};
use aenv_sys::pages::{PAGE_BYTES, Pages};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use zerocopy::{FromZeros, IntoBytes};

const FREE: u32 = 0;
const READING: u32 = 1;
const EXECUTING: u32 = 2;
const ANSWERING: u32 = 3;
const PARKED: u32 = 4;

/// Words of a slot: the descriptor its request was read from; the answer's errno and size while ANSWERING.
const DEVICE: usize = 0;
const OUTCOME_ERROR: usize = 1;
const OUTCOME_SIZE: usize = 2;

/// Bytes of an answer's header.
const REPLY_HEADER: usize = size_of::<ReplyHeader>();
/// Where an answer begins in its buffer, such that its body is page-aligned.
const REPLY_OFFSET: usize = PAGE_BYTES - REPLY_HEADER;
/// Name that is looked up to wake a worker.
const WAKE_UP: &str = ".end-of-worker";
/// How long the end waits for requests that are being executed.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// Workers that serve.
#[derive(Debug)]
pub(super) struct Session {
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    socket: OwnedFd,
}

#[derive(Debug)]
struct Shared {
    devices: Vec<OwnedFd>,
    files: Arc<Files>,
    parked: Arc<Parked>,
    /// Slots whose requests an earlier daemon did not answer.
    left: Mutex<Vec<Slot>>,
    stopping: AtomicBool,
    /// Whether it was said that memory cannot be locked.
    warned: AtomicBool,
}

/// Buffer of answers: one per thread.
struct Reply(Pages);

impl Reply {
    fn new() -> io::Result<Self> {
        Pages::new(PAGE_BYTES + DATA_BYTES).map(Self)
    }

    fn body(&mut self) -> &mut [u8] {
        &mut self.0[PAGE_BYTES..]
    }

    /// The whole answer, its body being `size` bytes.
    fn message(&mut self, unique: u64, error: Option<Errno>, size: usize) -> &[u8] {
        let length = REPLY_HEADER + size;
        let error = error.map_or(0, |error| -error.raw_os_error());
        let header = ReplyHeader { length: length as u32, error, unique };
        self.0[REPLY_OFFSET..PAGE_BYTES].copy_from_slice(header.as_bytes());
        &self.0[REPLY_OFFSET..REPLY_OFFSET + length]
    }
}

impl Session {
    /// Begins to serve: first what earlier daemons left, then what the kernel has.
    pub(super) fn start(
        attachment: Attachment,
        slots: Vec<Slot>,
        files: Arc<Files>,
        parked: Arc<Parked>,
    ) -> Result<Self, ExportError> {
        let (devices, socket) = attachment.into_parts();
        Self::serve(devices, socket, slots, files, parked)
    }

    fn serve(
        devices: Vec<OwnedFd>,
        socket: OwnedFd,
        slots: Vec<Slot>,
        files: Arc<Files>,
        parked: Arc<Parked>,
    ) -> Result<Self, ExportError> {
        let left = Mutex::new(sort_slots(slots, &parked, devices.len()));
        let workers = devices.len();
        let (stopping, warned) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { devices, files, parked, left, stopping, warned });
        let mut session = Self { threads: Vec::new(), shared, socket };
        for device in 0..workers {
            session.spawn(&format!("fuse-{device}"), move |shared, reply| work(shared, device, reply))?;
        }
        session.spawn("fuse-parked", |shared, reply| {
            retry_parked(shared, reply);
            Ok(())
        })?;
        Ok(session)
    }

    /// Closed by the other side when the holder is gone.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce(&Shared, &mut Reply) -> io::Result<()> + Send + 'static,
    ) -> Result<(), ExportError> {
        let failed = |source| ExportError::Io { action: format!("start the thread {name}"), source };
        let shared = Arc::clone(&self.shared);
        let mut reply = Reply::new().map_err(failed)?;
        if !reply.0.is_locked() {
            self.shared.warn_unlocked("a limit or a missing right forbids it");
        }
        let thread = vital::spawn(name, move || {
            if let Err(error) = pressure::become_io_flusher() {
                tracing::debug!("a thread that serves files may wait for memory: {error}");
            }
            run(&shared, &mut reply)
        });
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }

    /// Has each worker read one request more, which it ends with: a look-up of a name that no export can have. Nothing else
    /// wakes a thread that waits for requests. On a thread of its own, as a worker may be busy for long.
    fn wake_workers(&self, name: PathBuf) {
        let workers = self.shared.devices.len();
        let waker = std::thread::Builder::new().name("fuse-stop".to_owned()).spawn(move || {
            for _ in 0..workers {
                match rustix::fs::stat(&name) {
                    Err(Errno::NOENT) => {}
                    // The connection is gone, and the workers see it, too.
                    other => return tracing::debug!("workers are not woken: {other:?}"),
                }
            }
        });
        if let Err(error) = waker {
            tracing::warn!("cannot start a thread that wakes the workers: {error}");
        }
    }

    /// Ends all threads. Requests that wait go on waiting, for the next daemon.
    pub(super) fn stop(self, mount: &Path) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.parked.end();
        let deadline = Instant::now() + STOP_PATIENCE;
        self.wake_workers(mount.join(WAKE_UP));
        for thread in self.threads {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            if !thread.is_finished() {
                tracing::warn!("a request takes longer than {STOP_PATIENCE:?}: its thread is left behind");
            } else if thread.join().is_err() {
                tracing::error!("a thread that serves files has panicked");
            }
        }
        self.shared.parked.clear();
        self.shared.left.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Shared {
    fn warn_unlocked(&self, error: impl std::fmt::Display) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("memory of requests cannot be locked and may be swapped out: {error}");
        }
    }

    /// Executes a request and answers it. Returns why it was parked, if so.
    fn handle(&self, slot: &Slot, reply: &mut Reply) -> Handled {
        let Some(request) = Request::parse(slot.request()) else {
            tracing::error!("the kernel sent a request whose length is not its own");
            slot.set_state(FREE);
            return Handled::Done;
        };
        slot.set_state(EXECUTING);
        let executed =
            std::panic::catch_unwind(AssertUnwindSafe(|| answer_to(&self.files, &request, reply.body())));
        let answer = executed.unwrap_or_else(|_| {
            tracing::error!("request {} of node {} has panicked", request.header.opcode, request.header.node);
            Answer::Error(Errno::IO)
        });
        let (error, size) = match answer {
            Answer::Body(size) => (None, size),
            Answer::Error(error) => (Some(error), 0),
            Answer::Park(reason) => {
                slot.set_state(PARKED);
                return Handled::NoRoom(Reason {
                    number: number_of(&request.header),
                    text: reason,
                    bytes: request.header.length as usize,
                });
            }
            Answer::Silence => {
                slot.set_state(FREE);
                return Handled::Done;
            }
        };
        self.answer(slot, &request.header, error, size, reply);
        let woken = self.stopping.load(Ordering::Acquire) && is_wake_up(&request);
        if woken { Handled::WokenUp } else { Handled::Done }
    }

    /// Sends the answer, whose body is in `reply`, and frees the slot.
    fn answer(
        &self,
        slot: &Slot,
        header: &RequestHeader,
        error: Option<Errno>,
        size: usize,
        reply: &mut Reply,
    ) {
        if changes_data(header.opcode) {
            let done = if header.opcode == opcode::WRITE { written(reply.body()) } else { 0 };
            slot.set_word(OUTCOME_ERROR, error.map_or(0, |error| error.raw_os_error().unsigned_abs()));
            slot.set_word(OUTCOME_SIZE, done);
            slot.set_state(ANSWERING);
        }
        let Some(device) = self.devices.get(slot.word(DEVICE) as usize) else {
            tracing::error!("a request was read from descriptor {}, which is not there", slot.word(DEVICE));
            slot.set_state(FREE);
            return;
        };
        match rustix::io::write(device, reply.message(header.unique, error, size)) {
            // Gone meanwhile: interrupted, answered by an earlier daemon, or unmounted.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(refused) => {
                tracing::error!("the kernel refuses an answer to request {}: {refused}", header.opcode);
                if let Err(error) =
                    rustix::io::write(device, reply.message(header.unique, Some(Errno::IO), 0))
                {
                    tracing::error!("the kernel refuses an error for request {}: {error}", header.opcode);
                }
            }
        }
        slot.set_state(FREE);
    }

    /// Deals with a slot that an earlier daemon left.
    fn resume(&self, slot: &Slot, reply: &mut Reply) -> Handled {
        if slot.state() == ANSWERING
            && let Some(request) = Request::parse(slot.request())
            && changes_data(request.header.opcode)
        {
            let error = match slot.word(OUTCOME_ERROR) {
                0 => None,
                number => Some(Errno::from_raw_os_error(number.cast_signed())),
            };
            let size = match (error, request.header.opcode) {
                (None, opcode::WRITE) => {
                    let done = WriteOut { size: slot.word(OUTCOME_SIZE), padding: 0 };
                    reply.body()[..size_of::<WriteOut>()].copy_from_slice(done.as_bytes());
                    size_of::<WriteOut>()
                }
                _ => 0,
            };
            self.answer(slot, &request.header, error, size, reply);
            return Handled::Done;
        }
        self.handle(slot, reply)
    }
}

enum Handled {
    Done,
    NoRoom(Reason),
    /// By a request of our own, to end.
    WokenUp,
}

/// Whether it is the look-up that [`Session::stop`] makes.
fn is_wake_up(request: &Request<'_>) -> bool {
    let header = &request.header;
    header.opcode == opcode::LOOKUP
        && header.user == 0
        && request.body.strip_suffix(b"\0") == Some(WAKE_UP.as_bytes())
}

/// Whether doing it again could undo what was done since.
fn changes_data(code: u32) -> bool {
    matches!(code, opcode::WRITE | opcode::FALLOCATE)
}

/// Bytes that the answer to a write says were written.
fn written(body: &[u8]) -> u32 {
    body.first_chunk::<4>().map_or(0, |size| u32::from_ne_bytes(*size))
}

/// Number of the export that a request is about.
fn number_of(header: &RequestHeader) -> u32 {
    u32::try_from(header.node.saturating_sub(1)).unwrap_or(0)
}

/// Gives free slots and parked requests to `parked`; returns those with other requests.
fn sort_slots(slots: Vec<Slot>, parked: &Parked, devices: usize) -> Vec<Slot> {
    let mut left = Vec::new();
    for mut slot in slots {
        let whole = Request::parse(slot.request()).map(|request| request.header);
        match (slot.state(), whole) {
            (READING | EXECUTING | ANSWERING, Some(_)) if (slot.word(DEVICE) as usize) < devices => {
                left.push(slot);
            }
            (PARKED, Some(header)) => {
                let text = "there was no room, and it was not tried again yet".to_owned();
                let bytes = header.length as usize;
                parked.park_again(slot, Reason { number: number_of(&header), text, bytes });
            }
            _ => {
                slot.set_state(FREE);
                keep_only(&mut slot, 0);
                parked.release(slot);
            }
        }
    }
    if !left.is_empty() {
        tracing::info!(
            "{} requests were in flight when the earlier daemon ended: they are done again",
            left.len()
        );
    }
    left
}

/// A worker.
fn work(shared: &Shared, device: usize, reply: &mut Reply) -> io::Result<()> {
    loop {
        let slot = shared.left.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(mut slot) = slot else { break };
        match shared.resume(&slot, reply) {
            Handled::NoRoom(reason) => {
                keep_only(&mut slot, reason.bytes);
                shared.parked.park_again(slot, reason);
            }
            Handled::Done | Handled::WokenUp => {
                keep_only(&mut slot, 0);
                shared.parked.release(slot);
            }
        }
    }
    while let Some(mut slot) = shared.parked.take_slot() {
        if let Err(error) = slot.lock() {
            shared.warn_unlocked(&error);
        }
        match serve(shared, device, &mut slot, reply)? {
            Some(reason) => {
                keep_only(&mut slot, reason.bytes);
                shared.parked.park(slot, reason);
            }
            None => {
                shared.parked.leave(slot);
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Serves requests until one has to wait, and returns why; none when the end has come.
fn serve(shared: &Shared, device: usize, slot: &mut Slot, reply: &mut Reply) -> io::Result<Option<Reason>> {
    let no_device = || io::Error::other(format!("there is no descriptor {device}"));
    let descriptor = shared.devices.get(device).ok_or_else(no_device)?;
    slot.set_word(DEVICE, u32::try_from(device).map_err(io::Error::other)?);
    loop {
        // Nothing of the request before may be taken for a new one.
        slot.request_mut()[..size_of::<RequestHeader>()].zero();
        slot.set_state(READING);
        match rustix::io::read(descriptor, slot.request_mut()) {
            Ok(_) => {}
            // The request was taken back, or there was a signal.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => continue,
            Err(Errno::NODEV | Errno::CONNABORTED) => {
                slot.set_state(FREE);
                return Ok(None);
            }
            Err(error) => {
                slot.set_state(FREE);
                return Err(io::Error::other(format!("cannot read requests of the FUSE mount: {error}")));
            }
        }
        match shared.handle(slot, reply) {
            Handled::Done => {}
            Handled::NoRoom(reason) => return Ok(Some(reason)),
            Handled::WokenUp => return Ok(None),
        }
    }
}

/// The thread that tries parked requests again.
fn retry_parked(shared: &Shared, reply: &mut Reply) {
    while let Some(due) = shared.parked.take_due() {
        let mut full = Vec::new();
        for (id, number, mut slot) in due {
            if full.contains(&number) && !give_up_if_killed(shared, &slot, reply) {
                shared.parked.still(id, slot, None);
                continue;
            }
            let handled = if slot.state() == PARKED { shared.handle(&slot, reply) } else { Handled::Done };
            match handled {
                Handled::NoRoom(reason) => {
                    full.push(number);
                    if give_up_if_killed(shared, &slot, reply) {
                        keep_only(&mut slot, 0);
                        shared.parked.done(id, slot);
                    } else {
                        shared.parked.still(id, slot, Some(reason.text));
                    }
                }
                Handled::Done | Handled::WokenUp => {
                    keep_only(&mut slot, 0);
                    shared.parked.done(id, slot);
                }
            }
        }
    }
}

/// A slot that no worker has keeps no memory but that of its request.
fn keep_only(slot: &mut Slot, bytes: usize) {
    if let Err(error) = slot.keep_only(bytes) {
        tracing::warn!("slot {} keeps more memory than it needs: {error}", slot.index());
    }
}

/// Answers a parked request whose asker is being killed: it could not end before. Returns whether it is.
fn give_up_if_killed(shared: &Shared, slot: &Slot, reply: &mut Reply) -> bool {
    let Some(request) = Request::parse(slot.request()) else { return false };
    let killed = aenv_sys::process::is_being_killed(request.header.pid);
    if killed {
        shared.answer(slot, &request.header, Some(Errno::INTR), 0, reply);
    }
    killed
}

#[cfg(test)]
mod tests;
