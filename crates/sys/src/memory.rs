//! The memory of another process: where a file is mapped, which of its pages were written, and what they hold.
//!
//! Owns nothing. A page of a **private** file mapping that was written since the mapping was made is anonymous: it is
//! present but not of the file any more, or it was swapped out. That is what [`changed_ranges`] finds; it asks
//! `PAGEMAP_SCAN` (Linux 6.7) and reads `/proc/<pid>/pagemap` where the kernel does not know it. What was written since a
//! later moment only some kernels know: see [`writes`].

pub mod writes;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bytes of a page.
pub const PAGE_SIZE: u64 = 4096;
/// Most parts one `process_vm_readv` takes (the kernel's `UIO_MAXIOV`).
const MAX_PARTS: usize = 1024;

/// One file mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileMapping {
    /// Addresses in that process.
    pub addresses: Range<u64>,
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Whether writes stay in the process (`MAP_PRIVATE`).
    pub private: bool,
    /// Whether it may be written.
    pub writable: bool,
    /// Path of the file; ends in ` (deleted)` when it has none any more.
    pub path: PathBuf,
}

/// All mappings of files in a process, by address.
///
/// # Errors
/// When there is no such process or it may not be looked into.
pub fn file_mappings(pid: u32) -> io::Result<Vec<FileMapping>> {
    let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
    Ok(maps.split(|byte| *byte == b'\n').filter_map(parse_mapping).collect())
}

/// Where a process has memory of no file that is private, writable and has no name of the kernel's (as heap and stacks have).
/// Neighbours of the same kind are one.
///
/// # Errors
/// As [`file_mappings`].
pub fn anonymous_mappings(pid: u32) -> io::Result<Vec<Range<u64>>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(maps.lines().filter_map(parse_anonymous).collect())
}

fn parse_anonymous(line: &str) -> Option<Range<u64>> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let is_unnamed = fields.nth(2)? == "0" && fields.next().is_none();
    let wanted = is_unnamed && permissions.starts_with("rw") && permissions.ends_with('p');
    wanted.then_some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

fn parse_mapping(line: &[u8]) -> Option<FileMapping> {
    let line = String::from_utf8_lossy(line);
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
    let path = fields.nth(2)?.trim_start();
    if !path.starts_with('/') {
        return None;
    }
    let addresses = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let (private, writable) = (permissions.ends_with('p'), permissions.contains('w'));
    Some(FileMapping { addresses, offset, private, writable, path: PathBuf::from(path) })
}

/// Opens the file behind a mapping, even when it was renamed or removed since.
///
/// # Errors
/// When the mapping is gone or may not be opened (needs `CAP_CHECKPOINT_RESTORE` or root).
pub fn open_mapped_file(pid: u32, mapping: &FileMapping) -> io::Result<File> {
    let Range { start, end } = mapping.addresses;
    File::open(format!("/proc/{pid}/map_files/{start:x}-{end:x}"))
}

/// Of `addresses` in a private mapping of a process, the runs of pages that were written since it was mapped.
///
/// # Errors
/// When there is no such process or it may not be looked into.
pub fn changed_ranges(pid: u32, addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    find(pid, addresses, &CHANGED)
}

/// What is looked for, in the words of both interfaces of the kernel.
struct Wanted {
    inverted: u64,
    mask: u64,
    any_of: u64,
    /// One category that all pages that are found share: those that are returned split runs.
    returned: u64,
    /// The same of an entry of `pagemap`.
    is_wanted: fn(u64) -> bool,
}

const CHANGED: Wanted = Wanted {
    inverted: PAGE_IS_FILE,
    mask: PAGE_IS_FILE,
    any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    returned: PAGE_IS_FILE,
    is_wanted: is_changed,
};

fn find(pid: u32, addresses: Range<u64>, wanted: &Wanted) -> io::Result<Vec<Range<u64>>> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    match scan(&pagemap, addresses.clone(), wanted) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
            read_entries(&pagemap, addresses, wanted)
        }
        scanned => scanned,
    }
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;

fn scan(pagemap: &File, addresses: Range<u64>, wanted: &Wanted) -> io::Result<Vec<Range<u64>>> {
    let mut regions = vec![PageRegion::default(); 4096];
    let mut found = Vec::new();
    let mut start = addresses.start;
    while start < addresses.end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end: addresses.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: wanted.inverted,
            category_mask: wanted.mask,
            category_anyof_mask: wanted.any_of,
            return_mask: wanted.returned,
            ..ScanArgument::default()
        };
        // SAFETY: the argument has the kernel's layout and says its own size; `vec` points to `vec_len` regions that live
        // and are not otherwise used until the call returns.
        let filled = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error())?;
        for region in &regions[..filled] {
            push_run(&mut found, region.start..region.end);
        }
        if argument.walk_end <= start {
            return Err(io::Error::other("the page scan of the kernel makes no progress"));
        }
        start = argument.walk_end;
    }
    Ok(found)
}

/// Entries of `/proc/<pid>/pagemap`: present, swapped, and "of a file or shared".
const ENTRY_PRESENT: u64 = 1 << 63;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_FILE: u64 = 1 << 61;

fn read_entries(pagemap: &File, addresses: Range<u64>, wanted: &Wanted) -> io::Result<Vec<Range<u64>>> {
    let mut found = Vec::new();
    let mut raw = vec![0; 256 << 10];
    let mut address = addresses.start;
    while address < addresses.end {
        let pages = ((addresses.end - address) / PAGE_SIZE).min(raw.len() as u64 / 8);
        let part = &mut raw[..usize::try_from(pages * 8).map_err(io::Error::other)?];
        pagemap.read_exact_at(part, address / PAGE_SIZE * 8)?;
        for (entry, page) in part.chunks_exact(8).zip(address / PAGE_SIZE..) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(entry);
            if (wanted.is_wanted)(u64::from_le_bytes(bytes)) {
                push_run(&mut found, page * PAGE_SIZE..(page + 1) * PAGE_SIZE);
            }
        }
        address += pages * PAGE_SIZE;
    }
    Ok(found)
}

fn is_changed(entry: u64) -> bool {
    entry & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 && entry & ENTRY_FILE == 0
}

/// Appends a run, joined with the last one when they touch.
fn push_run(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

/// Reads parts of the memory of a process, one behind the other, into `buffer`, whose length is that of all parts.
///
/// # Errors
/// When a part is not mapped there, or the process may not be read.
pub fn read(pid: u32, parts: &[Range<u64>], buffer: &mut [u8]) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(io::Error::other)?;
    let mut rest = buffer;
    for parts in parts.chunks(MAX_PARTS) {
        let remote = parts.iter().map(to_remote).collect::<io::Result<Vec<_>>>()?;
        let length = remote.iter().map(|part| part.iov_len).sum::<usize>();
        let (target, behind) = rest.split_at_mut_checked(length).ok_or(io::ErrorKind::InvalidInput)?;
        let local = libc::iovec { iov_base: target.as_mut_ptr().cast(), iov_len: length };
        // SAFETY: `local` is one exclusively borrowed buffer of that length; `remote` are addresses of the other process,
        // which the kernel checks; both arrays live until the call returns.
        let got = unsafe {
            libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as u64, 0)
        };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        if got != length {
            return Err(io::Error::other(format!(
                "only {got} of {length} bytes of process {pid} could be read"
            )));
        }
        rest = behind;
    }
    if rest.is_empty() { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn to_remote(part: &Range<u64>) -> io::Result<libc::iovec> {
    let iov_base = usize::try_from(part.start).map_err(io::Error::other)? as *mut libc::c_void;
    let iov_len = usize::try_from(part.end - part.start).map_err(io::Error::other)?;
    Ok(libc::iovec { iov_base, iov_len })
}

/// Whether all bytes are zero. Fast on pages.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    // Blocks without a branch inside, which the compiler turns into vector instructions.
    let (blocks, rest) = bytes.as_chunks::<256>();
    blocks.iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
        && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests;
