//! Shared memory that requests are read into. Another process keeps its descriptor, so it outlives this process, and
//! whoever comes next finds every request that was not answered.
//!
//! ```text
//! slot   0 state (4) | 4 three words (12) | ... | 4016 request header and arguments (80) | 4096 data (1 MiB)
//! ```
//! The request area begins such that the data of a write, behind 80 bytes of header and arguments, is page-aligned. State
//! and words are for the caller to give a meaning; new memory is all zeros.
//!
//! Owns the mapping. **One process at a time may map it**, which a record lock makes sure of.

use crate::pages::{PAGE_BYTES, mapped};
use rustix::fs::{FlockOperation, MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Most bytes of data in one request.
pub const DATA_BYTES: usize = 1 << 20;
/// Header and arguments of a write.
const PREFIX_BYTES: usize = 80;
/// Where the request area begins in a slot.
const REQUEST_OFFSET: usize = PAGE_BYTES - PREFIX_BYTES;
/// Bytes of a slot. Only pages that were touched take memory.
pub const SLOT_BYTES: usize = PAGE_BYTES + DATA_BYTES;
/// Words of a slot behind its state.
pub const WORDS: usize = 3;
/// Most slots.
pub const MAX_SLOTS: u32 = 65536;

/// Makes memory for `count` slots.
///
/// # Errors
/// The system's error; `InvalidInput` when there are none or more than [`MAX_SLOTS`].
pub fn create(count: u32) -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("aenv-requests", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, total_bytes(count)? as u64)?;
    // With its size fixed, no access to the mapping can fail.
    rustix::fs::fcntl_add_seals(&memory, SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(memory)
}

fn total_bytes(count: u32) -> io::Result<usize> {
    if count == 0 || count > MAX_SLOTS {
        let text = format!("{count} slots: there are 1 to {MAX_SLOTS}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(count as usize * SLOT_BYTES)
}

/// Takes what [`create`] made for this process. To do so again is no error.
///
/// # Errors
/// `WouldBlock` when another process has it.
pub fn lock(memory: BorrowedFd<'_>) -> io::Result<()> {
    // A record lock belongs to this process, whoever else has the descriptor, and ends with it.
    match rustix::fs::fcntl_lock(memory, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::AGAIN | Errno::ACCESS) => Err(io::ErrorKind::WouldBlock.into()),
        locked => Ok(locked?),
    }
}

/// Maps what [`create`] made; returns all slots. The caller must not close another descriptor of the same memory while it
/// has slots: this would end the lock.
///
/// # Errors
/// `WouldBlock` when another process has it mapped, `InvalidInput` when it is not such memory, or the system's error.
pub fn map(memory: OwnedFd, count: u32) -> io::Result<Vec<Slot>> {
    let length = total_bytes(count)?;
    let seals = rustix::fs::fcntl_get_seals(&memory)?;
    if !seals.contains(SealFlags::GROW | SealFlags::SHRINK) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the memory's size is not fixed"));
    }
    let size = rustix::fs::fstat(&memory)?.st_size;
    if usize::try_from(size) != Ok(length) {
        let text = format!("the memory has {size} bytes: {count} slots have {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    lock(memory.as_fd())?;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            memory.as_raw_fd(),
            0,
        )
    };
    let mapping = Arc::new(Mapping { address: mapped(address)?, length, _lock: memory });
    Ok((0..count as usize).map(|index| Slot { mapping: Arc::clone(&mapping), index }).collect())
}

/// The mapped memory of all slots.
struct Mapping {
    address: NonNull<u8>,
    length: usize,
    _lock: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread; slots hand out disjoint parts of it.
unsafe impl Send for Mapping {}

// SAFETY: as above; what two threads may reach at once are atomics.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no slot is left. It cannot fail with these arguments.
        let _ = unsafe { libc::munmap(self.address.as_ptr().cast(), self.length) };
    }
}

/// The only handle of one slot.
pub struct Slot {
    mapping: Arc<Mapping>,
    index: usize,
}

impl Slot {
    /// Its place among the slots.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// The state that was set last, by whichever process.
    #[must_use]
    pub fn state(&self) -> u32 {
        self.atomic(0).load(Ordering::Acquire)
    }

    /// Sets the state. Everything that was written to the slot before is seen by whoever reads this state.
    pub fn set_state(&self, state: u32) {
        self.atomic(0).store(state, Ordering::Release);
    }

    /// A word.
    ///
    /// # Panics
    /// When there are not so many [`WORDS`].
    #[must_use]
    pub fn word(&self, number: usize) -> u32 {
        assert!(number < WORDS, "a slot has {WORDS} words");
        self.atomic(number + 1).load(Ordering::Acquire)
    }

    /// Sets a word.
    ///
    /// # Panics
    /// When there are not so many [`WORDS`].
    pub fn set_word(&self, number: usize, value: u32) {
        assert!(number < WORDS, "a slot has {WORDS} words");
        self.atomic(number + 1).store(value, Ordering::Release);
    }

    /// The request area.
    #[must_use]
    pub fn request(&self) -> &[u8] {
        // SAFETY: the range lies in this slot's part of the mapping, behind the atomics; it is initialised, and changed
        // only through `&mut` of this handle, which is the only one, in the only process that has it mapped.
        unsafe { std::slice::from_raw_parts(self.at(REQUEST_OFFSET), SLOT_BYTES - REQUEST_OFFSET) }
    }

    /// The request area, to be read into.
    #[must_use]
    pub fn request_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `request`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at(REQUEST_OFFSET), SLOT_BYTES - REQUEST_OFFSET) }
    }

    /// Makes all its memory present and keeps it so, where this is allowed.
    ///
    /// # Errors
    /// The system's error, for example when a limit forbids it.
    pub fn lock(&mut self) -> io::Result<()> {
        // SAFETY: locks pages of this slot; changes no content.
        let done = unsafe { libc::mlock(self.at(0).cast(), SLOT_BYTES) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives the memory behind the first `length` bytes of the request area back, whole pages of it. It reads as zeros
    /// then, and what is kept may be swapped out.
    ///
    /// # Errors
    /// The system's error.
    pub fn keep_only(&mut self, length: usize) -> io::Result<()> {
        // SAFETY: unlocks pages of this slot; changes no content.
        let unlocked = unsafe { libc::munlock(self.at(0).cast(), SLOT_BYTES) };
        if unlocked != 0 {
            return Err(io::Error::last_os_error());
        }
        let kept = length.saturating_add(REQUEST_OFFSET).min(SLOT_BYTES).next_multiple_of(PAGE_BYTES);
        if kept == SLOT_BYTES {
            return Ok(());
        }
        // SAFETY: the pages belong to this slot's request area, which is exclusively ours by `&mut self`; they read as
        // zeros afterwards, which are valid bytes.
        let freed = unsafe { libc::madvise(self.at(kept).cast(), SLOT_BYTES - kept, libc::MADV_REMOVE) };
        if freed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn atomic(&self, number: usize) -> &AtomicU32 {
        let pointer = self.at(number * size_of::<AtomicU32>()).cast::<AtomicU32>();
        // SAFETY: the pointer is aligned (slots begin at page borders), lies in the mapping, which lives as long as
        // `self`, and this word is never accessed but through atomics.
        unsafe { &*pointer }
    }

    fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < SLOT_BYTES);
        // SAFETY: `index` is below the number of slots and `offset` inside of a slot, so the result is in the mapping.
        unsafe { self.mapping.address.as_ptr().add(self.index * SLOT_BYTES + offset) }
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Slot")
            .field("index", &self.index)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
