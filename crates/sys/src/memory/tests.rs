use super::*;
use std::io::Write;

#[test]
fn pagemap_entries_are_decoded() {
    assert!(is_changed(ENTRY_PRESENT | 0x1234));
    assert!(is_changed(ENTRY_SWAPPED));
    assert!(!is_changed(ENTRY_PRESENT | ENTRY_FILE));
    assert!(!is_changed(ENTRY_SWAPPED | ENTRY_FILE));
    assert!(!is_changed(0));
    assert!(!is_changed(1 << 55));
}

#[test]
fn touching_runs_are_joined() {
    let mut runs = Vec::new();
    for run in [0..4096, 4096..8192, 12288..16384] {
        push_run(&mut runs, run);
    }
    assert_eq!(runs, [0..8192, 12288..16384]);
}

#[test]
fn mapping_lines_are_parsed() {
    let line = b"7f00-8f00 rw-p 00001000 fe:00 1234                       /a dir/memory (deleted)";
    let mapping = parse_mapping(line).unwrap();
    assert_eq!(mapping.addresses, 0x7f00..0x8f00);
    assert_eq!(mapping.offset, 0x1000);
    assert!(mapping.private && mapping.writable);
    assert_eq!(mapping.path, PathBuf::from("/a dir/memory (deleted)"));
    assert_eq!(parse_mapping(b"7f00-8f00 rw-p 00000000 00:00 0 "), None);
    assert_eq!(parse_mapping(b"7f00-8f00 rw-p 00000000 00:00 0      [heap]"), None);
    assert_eq!(parse_mapping(b""), None);
}

#[test]
fn anonymous_memory_is_told_from_other_memory() {
    assert_eq!(parse_anonymous("7f00-8f00 rw-p 00000000 00:00 0 "), Some(0x7f00..0x8f00));
    for line in [
        "7f00-8f00 rw-p 00000000 00:00 0                          [heap]",
        "7f00-8f00 r--p 00000000 00:00 0 ",
        "7f00-8f00 rw-s 00000000 00:00 0 ",
        "7f00-8f00 rw-p 00001000 fe:00 1234                       /a/memory",
        "",
    ] {
        assert_eq!(parse_anonymous(line), None, "{line}");
    }
}

#[test]
fn zero_pages_are_told_from_others() {
    let mut page = vec![0; 4096];
    assert!(is_zero(&page));
    for position in [0, 255, 256, 4095] {
        page[position] = 1;
        assert!(!is_zero(&page));
        page[position] = 0;
    }
    assert!(is_zero(&[0; 3]) && !is_zero(&[0, 0, 1]) && is_zero(&[]));
}

/// A private mapping of a file of `pages` pages filled with ones.
fn private_mapping(pages: usize) -> (tempfile::NamedTempFile, *mut u8) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&vec![1; pages * 4096]).unwrap();
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            pages * 4096,
            protection,
            libc::MAP_PRIVATE,
            file.as_file().as_raw_fd(),
            0,
        )
    };
    assert_ne!(address, libc::MAP_FAILED);
    (file, address.cast())
}

#[test]
fn written_pages_of_a_private_mapping_are_found_and_read() {
    let (file, address) = private_mapping(64);
    for page in [3, 4, 63] {
        // SAFETY: inside the mapping made above.
        unsafe { address.wrapping_add(page * 4096).write_volatile(9) };
    }
    // SAFETY: as above. A page that was only read is not changed.
    assert_eq!(unsafe { address.wrapping_add(10 * 4096).read_volatile() }, 1);
    let pid = std::process::id();
    let mappings = file_mappings(pid).unwrap();
    let mapping = mappings.iter().find(|mapping| mapping.path == file.path()).unwrap();
    assert!(mapping.private && mapping.writable && mapping.offset == 0);
    let base = mapping.addresses.start;
    assert_eq!(base, address as u64);
    let expected = [base + 3 * 4096..base + 5 * 4096, base + 63 * 4096..base + 64 * 4096];
    assert_eq!(changed_ranges(pid, mapping.addresses.clone()).unwrap(), expected);
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    assert_eq!(read_entries(&pagemap, mapping.addresses.clone(), &CHANGED).unwrap(), expected);

    let mut buffer = vec![0; 3 * 4096];
    read(pid, &expected, &mut buffer).unwrap();
    assert_eq!((buffer[0], buffer[1], buffer[4096], buffer[8192]), (9, 1, 9, 9));
    assert!(read(pid, &expected, &mut buffer[1..]).is_err());
    assert!(read(pid, std::slice::from_ref(&(0..4096)), &mut buffer[..4096]).is_err());

    let mut mapped = open_mapped_file(pid, mapping).unwrap();
    let mut content = Vec::new();
    std::io::Read::read_to_end(&mut mapped, &mut content).unwrap();
    assert!(content.len() == 64 * 4096 && content.iter().all(|byte| *byte == 1));
    // SAFETY: unmaps what was mapped above; nothing refers to it any more.
    unsafe { libc::munmap(address.cast(), 64 * 4096) };
}

/// Swap space in a file, until it is dropped.
struct Swap(std::ffi::CString);

impl Swap {
    fn new(file: &tempfile::NamedTempFile) -> Self {
        file.as_file().set_len(0).unwrap();
        std::fs::write(file.path(), vec![0; 16 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        assert!(std::process::Command::new("mkswap").arg(file.path()).output().unwrap().status.success());
        let path = std::ffi::CString::new(file.path().as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the path ends in a NUL and lives until the call returns.
        assert_eq!(unsafe { libc::swapon(path.as_ptr(), 0) }, 0, "{}", io::Error::last_os_error());
        Self(path)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: as for `swapon`.
        assert_eq!(unsafe { libc::swapoff(self.0.as_ptr()) }, 0, "{}", io::Error::last_os_error());
    }
}

/// Not run with the others, since all processes of the host may use the swap space.
#[test]
#[ignore = "adds swap space to the host for a moment, which needs root"]
fn pages_that_were_swapped_out_are_changed_ones() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let _swap = Swap::new(&file);
    let (mapped, address) = private_mapping(64);
    for page in [3, 4, 63] {
        // SAFETY: inside the mapping made above.
        unsafe { address.wrapping_add(page * 4096).write_volatile(9) };
    }
    // SAFETY: the kernel may move pages of our own mapping out at any time.
    let moved = unsafe { libc::madvise(address.cast(), 64 * 4096, libc::MADV_PAGEOUT) };
    assert_eq!(moved, 0, "{}", io::Error::last_os_error());
    let pid = std::process::id();
    let mappings = file_mappings(pid).unwrap();
    let mapping = mappings.iter().find(|mapping| mapping.path == mapped.path()).unwrap();
    let base = mapping.addresses.start;
    let pagemap = File::open("/proc/self/pagemap").unwrap();
    let mut entry = [0; 8];
    pagemap.read_exact_at(&mut entry, (base / 4096 + 3) * 8).unwrap();
    assert_ne!(u64::from_le_bytes(entry) & ENTRY_SWAPPED, 0, "nothing was swapped out: this tests nothing");
    let expected = [base + 3 * 4096..base + 5 * 4096, base + 63 * 4096..base + 64 * 4096];
    assert_eq!(scan(&pagemap, mapping.addresses.clone(), &CHANGED).unwrap(), expected);
    assert_eq!(read_entries(&pagemap, mapping.addresses.clone(), &CHANGED).unwrap(), expected);
    let mut buffer = vec![0; 3 * 4096];
    read(pid, &expected, &mut buffer).unwrap();
    assert_eq!((buffer[0], buffer[1], buffer[4096], buffer[8192]), (9, 1, 9, 9));
    // SAFETY: unmaps what was mapped above; nothing refers to it any more.
    unsafe { libc::munmap(address.cast(), 64 * 4096) };
}
