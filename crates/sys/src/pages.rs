//! Memory that is page-aligned and, where this is allowed, never swapped out.
//!
//! Owns what it maps. Buffers of a server of files or disks have to be present at all times: when the kernel has to fault one in
//! while the server is being killed, it answers the request with an error instead.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Zeroed memory of this process, present from the start.
#[derive(Debug)]
pub struct Pages {
    address: NonNull<u8>,
    length: usize,
    locked: bool,
}

// SAFETY: it owns its memory as a `Box<[u8]>` does; nothing else points to it.
unsafe impl Send for Pages {}

// SAFETY: shared access only reads, as with `Box<[u8]>`.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `length` bytes, which must not be 0.
    ///
    /// # Errors
    /// The system's error. That the memory cannot be locked is none: see [`Pages::is_locked`].
    pub fn new(length: usize) -> io::Result<Self> {
        let length = length.checked_next_multiple_of(PAGE_BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        let address = mapped(address)?;
        // SAFETY: locks pages of the mapping just made; changes no content.
        let locked = unsafe { libc::mlock(address.as_ptr().cast(), length) } == 0;
        Ok(Self { address, length, locked })
    }

    /// Whether it stays in memory; without, it may be swapped out when memory is short.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locked
    }
}

/// What `mmap` returned.
pub(crate) fn mapped(address: *mut libc::c_void) -> io::Result<NonNull<u8>> {
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::other("the kernel mapped memory at address 0"))
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `length` bytes at `address` are mapped, initialised by the kernel, and ours alone.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.length) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.length) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrows from it any more. It cannot fail with these arguments.
        let _ = unsafe { libc::munmap(self.address.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_aligned_zeroed_and_of_whole_pages() {
        let mut pages = Pages::new(5000).unwrap();
        assert_eq!(pages.len(), 8192);
        assert_eq!(pages.as_ptr() as usize % PAGE_BYTES, 0);
        assert!(pages.iter().all(|byte| *byte == 0));
        pages[8191] = 7;
        assert_eq!(pages.last(), Some(&7));
    }

    #[test]
    fn a_length_that_overflows_is_refused() {
        assert_eq!(Pages::new(usize::MAX).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert!(Pages::new(0).is_err());
    }
}
