//! Soft-dirty bits, on a kernel that has them, as that of the nested machine: elsewhere the test prints a line and does nothing.

#![expect(unsafe_code, reason = "memory is mapped, as only this crate may")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

use aenv_sys::memory::{PAGE_SIZE, anonymous_mappings, file_mappings, read, writes};
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::Path;

const PAGES: usize = 16384;
const PAGE: usize = PAGE_SIZE as usize;

/// Private memory, of a file as that of a restored guest or of none as that of a booted one. Stays mapped.
struct Area(*mut u8);

impl Area {
    fn map(file: Option<&std::fs::File>) -> Self {
        let (protection, length) = (libc::PROT_READ | libc::PROT_WRITE, PAGES * PAGE);
        let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let descriptor = file.map_or(-1, |file| file.as_raw_fd());
        let flags = libc::MAP_PRIVATE | anonymous;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, descriptor, 0) };
        assert_ne!(address, libc::MAP_FAILED);
        // SAFETY: inside the mapping made above. Of huge pages all would count as written.
        assert_eq!(unsafe { libc::madvise(address, length, libc::MADV_NOHUGEPAGE) }, 0);
        Self(address.cast())
    }

    fn addresses(&self) -> Range<u64> {
        let start = self.0 as u64;
        start..start + PAGES as u64 * PAGE_SIZE
    }

    fn write(&self, page: usize, value: u8) {
        assert!(page < PAGES);
        // SAFETY: inside the mapping, which is never unmapped.
        unsafe { self.0.wrapping_add(page * PAGE).write_volatile(value) };
    }
}

fn only_what_was_written_since_is_found(area: &Area) {
    let pid = std::process::id();
    let addresses = area.addresses();
    (0..PAGES).step_by(2).for_each(|page| area.write(page, 1));
    for pages in [[3, 4, 700], [4, 5, 9001]] {
        writes::forget(pid).unwrap();
        assert_eq!(writes::since_forgotten(pid, addresses.clone()).unwrap(), [0..0; 0]);
        for page in pages {
            area.write(page, 2);
        }
        let [one, two, far] = pages.map(|page| addresses.start + page as u64 * PAGE_SIZE);
        let found = writes::since_forgotten(pid, addresses.clone()).unwrap();
        assert_eq!(found, [one..two + PAGE_SIZE, far..far + PAGE_SIZE]);
        // A part of it alone.
        let part = two..far;
        assert_eq!(
            writes::since_forgotten(pid, part).unwrap(),
            std::slice::from_ref(&(two..two + PAGE_SIZE))
        );
        let mut content = vec![0; 3 * PAGE];
        read(pid, &found, &mut content).unwrap();
        assert!(content.chunks(PAGE).all(|page| page[0] == 2));
    }
}

fn is_mapped(path: &Path, addresses: &Range<u64>) -> bool {
    let mappings = file_mappings(std::process::id()).unwrap();
    mappings.iter().any(|mapping| mapping.path == path && mapping.addresses == *addresses)
}

#[test]
fn only_what_was_written_since_is_found_each_time() {
    if !writes::are_known().unwrap() {
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        println!("SKIPPED: this kernel keeps no soft-dirty bits");
        return;
    }
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![7; PAGES * PAGE]).unwrap();
    let of_file = Area::map(Some(file.as_file()));
    assert!(is_mapped(file.path(), &of_file.addresses()));
    only_what_was_written_since_is_found(&of_file);
    let of_none = Area::map(None);
    let mappings = anonymous_mappings(std::process::id()).unwrap();
    let wanted = of_none.addresses();
    assert!(mappings.iter().any(|range| range.start <= wanted.start && wanted.end <= range.end));
    only_what_was_written_since_is_found(&of_none);
}
