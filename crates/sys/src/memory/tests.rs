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
    assert_eq!(read_changed(&pagemap, mapping.addresses.clone()).unwrap(), expected);

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
