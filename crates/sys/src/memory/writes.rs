//! Which pages of another process were written since it was last asked: its *soft-dirty* bits.
//!
//! Owns nothing; the bits are the kernel's and outlive whoever asks. [`forget`] takes the right to write away from every page
//! that the process has, so that the next write of each is noticed: also what a virtual machine of its writes through KVM,
//! whose own page tables lose these pages. Pages that were swapped out or moved keep their bits, memory that is mapped anew
//! counts as written, and a huge page as one. Not every kernel keeps such bits (`CONFIG_MEM_SOFT_DIRTY`), and one that does
//! not takes the command all the same: see [`are_known`].

use super::{PAGE_SIZE, Wanted, find};
use std::io;
use std::ops::Range;

/// The bit of an entry of `pagemap`, and the category of a page scan.
const ENTRY_SOFT_DIRTY: u64 = 1 << 55;
const PAGE_IS_SOFT_DIRTY: u64 = 1 << 7;

pub(super) const WRITTEN: Wanted = Wanted {
    inverted: 0,
    mask: PAGE_IS_SOFT_DIRTY,
    any_of: 0,
    returned: PAGE_IS_SOFT_DIRTY,
    is_wanted: is_written,
};

fn is_written(entry: u64) -> bool {
    entry & ENTRY_SOFT_DIRTY != 0
}

/// From now on, [`since_forgotten`] finds what a process writes from now on. What is written meanwhile is lost or found.
///
/// # Errors
/// When there is no such process or it is not ours to ask (needs root).
pub fn forget(pid: u32) -> io::Result<()> {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "4")
}

/// Of `addresses` in a process, the runs of pages that were written since it was last told to [`forget`], or mapped.
///
/// # Errors
/// When there is no such process or it may not be looked into.
pub fn since_forgotten(pid: u32, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    find(pid, addresses, &WRITTEN)
}

/// Whether this kernel keeps such bits, found out on a page of our own. Makes our own process forget, too.
///
/// # Errors
/// When our own process cannot be looked into.
pub fn are_known() -> io::Result<bool> {
    let page = GuardedPage::map()?;
    let own = std::process::id();
    let addresses = page.address..page.address + PAGE_SIZE;
    let found = || Ok::<bool, io::Error>(!since_forgotten(own, addresses.clone())?.is_empty());
    page.write();
    forget(own)?;
    let before = found()?;
    page.write();
    Ok(!before && found()?)
}

/// A page between two that may not be touched: the kernel makes no other mapping one with it, whose bits would count here.
struct GuardedPage {
    whole: *mut libc::c_void,
    address: u64,
}

impl GuardedPage {
    const LENGTH: usize = 3 * super::PAGE_SIZE as usize;

    fn map() -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let whole = unsafe { libc::mmap(std::ptr::null_mut(), Self::LENGTH, libc::PROT_NONE, flags, -1, 0) };
        if whole == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = whole as u64 + PAGE_SIZE;
        let mapped = Self { whole, address };
        let length = usize::try_from(PAGE_SIZE).map_err(io::Error::other)?;
        // SAFETY: the second of the three pages mapped above, to which nothing refers yet.
        let opened = unsafe {
            libc::mprotect(address as *mut libc::c_void, length, libc::PROT_READ | libc::PROT_WRITE)
        };
        if opened == 0 { Ok(mapped) } else { Err(io::Error::last_os_error()) }
    }

    fn write(&self) {
        // SAFETY: the page is mapped for reading and writing until this is dropped, and nothing else refers to it.
        unsafe { (self.address as *mut u8).write_volatile(1) };
    }
}

impl Drop for GuardedPage {
    fn drop(&mut self) {
        // SAFETY: unmaps what `map` made; nothing refers to it any more.
        unsafe { libc::munmap(self.whole, Self::LENGTH) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bit_is_told_from_others() {
        assert!(is_written(1 << 55) && is_written(1 << 55 | 1 << 63 | 7));
        assert!(!is_written(!(1 << 55)) && !is_written(0));
    }

    #[test]
    fn asking_whether_bits_are_known_gives_the_same_answer_again() {
        assert_eq!(are_known().unwrap(), are_known().unwrap());
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let absent = i32::MAX.unsigned_abs();
        assert!(forget(absent).is_err() && since_forgotten(absent, 0..PAGE_SIZE).is_err());
    }
}
