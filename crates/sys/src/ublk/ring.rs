//! Fetching requests and committing answers. Owns the char devices, the mapped descriptors, and one io_uring per thread.
//!
//! The life of one tag of one queue:
//!
//! ```text
//!  attach ─▶ in the kernel ──completion 0──▶ with the server ──commit──▶ in the kernel      (a request each round)
//!                └──completion other than 0──▶ ended      when all tags ended: the queue is forgotten
//! ```

use super::abi::{self, DESCRIPTOR_BYTES, RequestDescriptor};
use io_uring::types::Fd;
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Commands that are handed over at once.
const SUBMISSIONS: u32 = 512;
/// Completions the ring has room for; more are kept by the kernel.
const COMPLETIONS: u32 = 4096;
/// Marks the completion that stands for a [`Waker`]; no slot has this number.
const WAKE: u64 = u64::MAX;

/// /dev/ublkcN, which one process at a time may have open.
#[derive(Debug)]
pub struct CharDevice {
    file: File,
}

impl CharDevice {
    /// Opens it.
    ///
    /// # Errors
    /// EBUSY while another server has it open.
    pub fn open(number: u32) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(format!("/dev/ublkc{number}"))?;
        Ok(Self { file })
    }

    /// Open as long as this is.
    pub(super) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Takes the data of a write request, from the byte `offset` of it on.
    ///
    /// # Errors
    /// EINVAL when the server does not have such a request.
    pub fn take_data(&self, queue: u16, tag: u16, offset: u32, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, abi::data_position(queue, tag, offset))
    }

    /// Gives the data of a read request, for the byte `offset` of it on.
    ///
    /// # Errors
    /// EINVAL when the server does not have such a request.
    pub fn give_data(&self, queue: u16, tag: u16, offset: u32, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, abi::data_position(queue, tag, offset))
    }
}

/// The descriptors of one queue of a device, which the kernel writes and we read.
#[derive(Debug)]
pub struct Queue {
    device: Arc<CharDevice>,
    index: u16,
    depth: u16,
    descriptors: NonNull<u8>,
    mapped: usize,
}

// SAFETY: the mapping belongs to no thread, and is only read, byte for byte with volatile reads.
unsafe impl Send for Queue {}
// SAFETY: as above; reading from several threads at once is fine.
unsafe impl Sync for Queue {}

impl Queue {
    /// Maps its descriptors.
    ///
    /// # Errors
    /// EINVAL when the device has no such queue of that depth.
    pub fn map(device: Arc<CharDevice>, index: u16, depth: u16) -> io::Result<Self> {
        if depth == 0 || depth > abi::MAX_DEPTH {
            return Err(Errno::INVAL.into());
        }
        let page = rustix::param::page_size();
        let mapped = (usize::from(depth) * DESCRIPTOR_BYTES).next_multiple_of(page);
        let spacing = (usize::from(abi::MAX_DEPTH) * DESCRIPTOR_BYTES).next_multiple_of(page) as u64;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let position = spacing * u64::from(index);
        // SAFETY: a new mapping at an address of the kernel's choice, so no existing memory is touched.
        let address = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), mapped, ProtFlags::READ, flags, &device.file, position)
        }?;
        let descriptors = NonNull::new(address.cast()).ok_or(Errno::FAULT)?;
        Ok(Self { device, index, depth, descriptors, mapped })
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &CharDevice {
        &self.device
    }

    /// Its number within the device.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// The request that was delivered with `tag` and not answered yet. Nonsense, but nothing worse, at other times.
    ///
    /// # Panics
    /// When there is no such tag in this queue.
    #[must_use]
    pub fn descriptor(&self, tag: u16) -> RequestDescriptor {
        assert!(tag < self.depth, "tag {tag} of a queue of {}", self.depth);
        let mut bytes = [0; DESCRIPTOR_BYTES];
        for (index, byte) in bytes.iter_mut().enumerate() {
            let at = usize::from(tag) * DESCRIPTOR_BYTES + index;
            // SAFETY: `at` is less than `depth` times the size of a descriptor, so it lies in the mapping.
            let pointer = unsafe { self.descriptors.add(at) };
            // SAFETY: the mapping is readable as long as `self` lives. Another process's writing is no data race of this
            // program; the read is volatile, so it happens once.
            *byte = unsafe { pointer.read_volatile() };
        }
        RequestDescriptor::decode(&bytes)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped, and nothing refers to it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.descriptors.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// Makes [`Ring::wait`] return, from any thread.
#[derive(Debug)]
pub struct Waker {
    counter: OwnedFd,
}

impl Waker {
    /// Wakes, now or at the next wait.
    ///
    /// # Errors
    /// None that could be reached while the waker is there.
    pub fn wake(&self) -> io::Result<()> {
        match rustix::io::write(&self.counter, &1_u64.to_ne_bytes()) {
            // A full counter wakes as well.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// What happened.
#[derive(Debug)]
pub enum Event<C> {
    /// A request was delivered.
    Request {
        /// Its queue.
        queue: Arc<Queue>,
        /// What was attached with the queue.
        context: C,
        /// What [`Ring::commit`] wants to know.
        slot: usize,
        /// Its tag.
        tag: u16,
    },
    /// The tag delivers no more: ENODEV when the device was stopped.
    Ended {
        /// What was attached with the queue.
        context: C,
        /// The tag.
        tag: u16,
        /// Why.
        error: Errno,
    },
}

#[derive(Debug)]
struct Slot<C> {
    queue: Arc<Queue>,
    context: C,
    /// Tags in the kernel.
    pending: u32,
    /// Tags with the server.
    held: u32,
}

/// The queues of one thread. The kernel ties a queue to the thread that fetches from it, so a ring stays where it was made.
///
/// `C` goes with each queue and comes back with each of its requests.
pub struct Ring<C> {
    ring: IoUring,
    slots: Vec<Option<Slot<C>>>,
    waker: Arc<Waker>,
    listening: bool,
    /// Requests and ends that were seen and not told yet.
    completions: Vec<(u64, i32, bool)>,
}

impl<C: std::fmt::Debug> std::fmt::Debug for Ring<C> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ring").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl<C: Clone> Ring<C> {
    /// A ring without queues.
    ///
    /// # Errors
    /// Where io_uring may not be used.
    pub fn new() -> io::Result<Self> {
        let ring = IoUring::builder().setup_cqsize(COMPLETIONS).setup_coop_taskrun().build(SUBMISSIONS)?;
        let counter = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let waker = Arc::new(Waker { counter });
        Ok(Self { ring, slots: Vec::new(), waker, listening: false, completions: Vec::new() })
    }

    /// To wake it.
    #[must_use]
    pub fn waker(&self) -> Arc<Waker> {
        Arc::clone(&self.waker)
    }

    /// Fetches all requests of a queue from now on.
    ///
    /// # Errors
    /// The system's error.
    pub fn attach(&mut self, queue: Arc<Queue>, context: C) -> io::Result<()> {
        let depth = queue.depth;
        let slot = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[slot] = Some(Slot { queue, context, pending: 0, held: u32::from(depth) });
        for tag in 0..depth {
            self.command(slot, tag, abi::FETCH, 0)?;
        }
        self.submit()
    }

    /// Answers a request: a number of bytes, or a negated error number. It is handed over at the next wait.
    ///
    /// # Errors
    /// The system's error.
    pub fn commit(&mut self, slot: usize, tag: u16, result: i32) -> io::Result<()> {
        self.command(slot, tag, abi::COMMIT_AND_FETCH, result)
    }

    /// Hands over what was committed, waits until something happened or a [`Waker`] was used, and adds what happened to
    /// `events`.
    ///
    /// # Errors
    /// The system's error.
    pub fn wait(&mut self, events: &mut Vec<Event<C>>) -> io::Result<()> {
        if !self.listening {
            let poll = opcode::PollAdd::new(Fd(self.waker.counter.as_raw_fd()), POLL_IN).multi(true);
            self.push(&poll.build().user_data(WAKE))?;
            self.listening = true;
        }
        let wanted = usize::from(self.completions.is_empty());
        match self.ring.submit_and_wait(wanted).map_err(|error| Errno::from_io_error(&error).ok_or(error)) {
            // BUSY: completions must be taken first.
            Ok(_) | Err(Ok(Errno::INTR | Errno::BUSY | Errno::AGAIN)) => {}
            Err(Ok(errno)) => return Err(errno.into()),
            Err(Err(error)) => return Err(error),
        }
        let taken = self.ring.completion();
        self.completions
            .extend(taken.map(|entry| (entry.user_data(), entry.result(), cqueue::more(entry.flags()))));
        for (data, result, more) in std::mem::take(&mut self.completions) {
            if data == WAKE {
                self.listening &= more;
                self.take_wakes()?;
            } else {
                events.extend(self.completed(data, result));
            }
        }
        Ok(())
    }

    fn take_completions(&mut self) {
        let taken = self.ring.completion();
        let seen = taken.map(|entry| (entry.user_data(), entry.result(), cqueue::more(entry.flags())));
        self.completions.extend(seen);
    }

    fn take_wakes(&self) -> io::Result<()> {
        match rustix::io::read(self.waker.counter.as_fd(), &mut [0; 8]) {
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn completed(&mut self, data: u64, result: i32) -> Option<Event<C>> {
        let (index, tag) = (usize::try_from(data >> 16).ok()?, u16::try_from(data & 0xffff).ok()?);
        let slot = self.slots.get_mut(index)?.as_mut()?;
        let context = slot.context.clone();
        slot.pending -= 1;
        if result == 0 {
            slot.held += 1;
            let queue = Arc::clone(&slot.queue);
            return Some(Event::Request { queue, context, slot: index, tag });
        }
        if slot.pending == 0 && slot.held == 0 {
            self.slots[index] = None;
        }
        let error = Errno::from_raw_os_error(result.saturating_neg());
        Some(Event::Ended { context, tag, error })
    }

    /// Moves a tag from the server to the kernel.
    fn command(&mut self, index: usize, tag: u16, operation: u32, result: i32) -> io::Result<()> {
        let slot = self.slots.get_mut(index).and_then(Option::as_mut).ok_or(Errno::INVAL)?;
        if tag >= slot.queue.depth || slot.held == 0 {
            return Err(Errno::INVAL.into());
        }
        let descriptor = Fd(slot.queue.device.descriptor());
        let command = abi::io_command(slot.queue.index, tag, result);
        let data = (index as u64) << 16 | u64::from(tag);
        let entry = opcode::UringCmd16::new(descriptor, operation).cmd(command).build().user_data(data);
        self.push(&entry)?;
        if let Some(slot) = self.slots[index].as_mut() {
            slot.held -= 1;
            slot.pending += 1;
        }
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: entries are commands that point to no memory of ours (data is copied at the char device) and a poll of
        // the counter. Their descriptors are open until they are submitted: slots hold a queue until none of its commands
        // is left, and the waker lives as long as the ring.
        unsafe { self.ring.submission().push(entry) }.map_err(io::Error::other)
    }

    /// Hands over what was committed.
    ///
    /// # Errors
    /// The system's error.
    pub fn submit(&mut self) -> io::Result<()> {
        loop {
            match self.ring.submit().map_err(|error| Errno::from_io_error(&error).ok_or(error)) {
                Ok(_) => return Ok(()),
                Err(Ok(Errno::INTR | Errno::AGAIN)) => {}
                Err(Ok(Errno::BUSY)) => self.take_completions(),
                Err(Ok(errno)) => return Err(errno.into()),
                Err(Err(error)) => return Err(error),
            }
        }
    }
}

/// The event a poll of the counter waits for, as io_uring wants it.
const POLL_IN: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_ring_is_woken_from_another_thread_each_time() {
        let mut ring = match Ring::<()>::new() {
            Ok(ring) => ring,
            Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => return,
            Err(error) => panic!("{error}"),
        };
        for _ in 0..3 {
            let waker = ring.waker();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(5));
                waker.wake()
            });
            let mut events = Vec::new();
            ring.wait(&mut events).unwrap();
            assert!(events.is_empty());
            thread.join().unwrap().unwrap();
        }
        assert!(ring.commit(0, 0, 0).is_err(), "there is no queue");
    }
}
