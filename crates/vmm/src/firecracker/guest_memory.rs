//! Where a guest's memory lies in its VMM's process, and what was written to it there.
//!
//! Owns nothing but what it has found. Never writes to the process; offsets are those in the memory file of a capture.

use aenv_sys::memory::{self, FileMapping, PAGE_SIZE, writes};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// Memory copied at a time.
const BATCH_BYTES: u64 = 1 << 20;
/// Pages that are compared to be sure of the place.
const PROBES: usize = 8;

/// A part of the guest's memory that lies in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    addresses: Range<u64>,
    offset: u64,
}

/// The guest's memory in a process.
#[derive(Debug)]
pub(super) struct GuestMemory {
    pid: u32,
    parts: Vec<Part>,
    /// Of the image that the guest was restored from.
    image: Option<FileMapping>,
}

impl GuestMemory {
    /// Looks for it; `None` when it cannot be told from other memory, as where a booted guest's lies in several pieces.
    pub(super) fn find(pid: u32, memory_bytes: u64) -> io::Result<Option<Self>> {
        let mut mappings = memory::file_mappings(pid)?;
        mappings.retain(|mapping| mapping.private && mapping.writable);
        mappings.sort_by_key(|mapping| mapping.offset);
        for mapping in &mappings {
            let parts = pieces(mappings.iter().filter(|other| other.path == mapping.path));
            if are_all_of(&parts, memory_bytes) {
                return Ok(Some(Self { pid, parts, image: Some(mapping.clone()) }));
            }
        }
        // A booted guest's memory is anonymous.
        let mut anonymous = memory::anonymous_mappings(pid)?;
        anonymous.retain(|addresses| addresses.end - addresses.start == memory_bytes);
        Ok(match anonymous.as_slice() {
            [addresses] => {
                let parts = vec![Part { addresses: addresses.clone(), offset: 0 }];
                Some(Self { pid, parts, image: None })
            }
            _ => None,
        })
    }

    /// The image that the guest was restored from.
    pub(super) fn open_image(&self) -> io::Result<Option<File>> {
        self.image.as_ref().map(|mapping| memory::open_mapped_file(self.pid, mapping)).transpose()
    }

    /// From now on, [`GuestMemory::writes`] finds what is written from now on.
    pub(super) fn forget_writes(&self) -> io::Result<()> {
        writes::forget(self.pid)
    }

    /// What was written since the writes before were forgotten, by the guest or the VMM.
    pub(super) fn writes(&self) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        for Part { addresses, offset } in &self.parts {
            let runs = writes::since_forgotten(self.pid, addresses.clone())?;
            let to_offset = |address| address - addresses.start + offset;
            found.extend(runs.into_iter().map(|run| to_offset(run.start)..to_offset(run.end)));
        }
        Ok(found)
    }

    /// Writes what the memory holds in these ranges to the same places of `image`.
    pub(super) fn copy(&self, ranges: &[Range<u64>], image: &File) -> io::Result<()> {
        let mut buffer = vec![0; usize::try_from(BATCH_BYTES).map_err(io::Error::other)?];
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let end = range.end.min(start + BATCH_BYTES);
                let bytes = &mut buffer[..usize::try_from(end - start).map_err(io::Error::other)?];
                self.read(start..end, bytes)?;
                image.write_all_at(bytes, start)?;
                start = end;
            }
        }
        Ok(())
    }

    /// Makes sure that this is the memory of which the VMM has just written these ranges to `image`: a wrong place would give
    /// wrong pages.
    pub(super) fn verify(&self, ranges: &[Range<u64>], image: &File) -> io::Result<()> {
        let page = usize::try_from(PAGE_SIZE).map_err(io::Error::other)?;
        let (mut here, mut there) = (vec![0; page], vec![0; page]);
        for range in ranges.iter().step_by(ranges.len().div_ceil(PROBES).max(1)) {
            self.read(range.start..range.start + PAGE_SIZE, &mut here)?;
            image.read_exact_at(&mut there, range.start)?;
            if here != there {
                let what = format!(
                    "the page at {:#x} of the guest's memory is not what Firecracker wrote of it: it lies elsewhere, or \
                     changes while the guest is stopped",
                    range.start
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
        }
        Ok(())
    }

    fn read(&self, range: Range<u64>, bytes: &mut [u8]) -> io::Result<()> {
        let mut addresses = Vec::new();
        for part in &self.parts {
            let end = part.offset + (part.addresses.end - part.addresses.start);
            let (from, to) = (range.start.max(part.offset), range.end.min(end));
            if from < to {
                let to_address = |offset| part.addresses.start + (offset - part.offset);
                addresses.push(to_address(from)..to_address(to));
            }
        }
        memory::read(self.pid, &addresses, bytes)
    }
}

/// Mappings of one file, by their offset, as pieces without what a balloon has cut out of them: there is anonymous memory there,
/// at the address where the file's would be.
fn pieces<'a>(mappings: impl Iterator<Item = &'a FileMapping>) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for FileMapping { addresses, offset, .. } in mappings {
        match parts.last_mut() {
            Some(last) if last.addresses.start.checked_add(offset - last.offset) == Some(addresses.start) => {
                last.addresses.end = addresses.end;
            }
            _ => parts.push(Part { addresses: addresses.clone(), offset: *offset }),
        }
    }
    parts
}

fn are_all_of(parts: &[Part], memory_bytes: u64) -> bool {
    let mut end = 0;
    for part in parts {
        if part.offset != end {
            return false;
        }
        end += part.addresses.end - part.addresses.start;
    }
    end == memory_bytes
}

/// What of `all` is not in `others`; both in order, without overlaps.
pub(super) fn without(all: &[Range<u64>], others: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut others = others.iter().peekable();
    for range in all {
        let mut start = range.start;
        while others.next_if(|other| other.end <= start).is_some() {}
        while let Some(other) = others.peek()
            && other.start < range.end
        {
            if start < other.start {
                rest.push(start..other.start);
            }
            start = start.max(other.end);
            if other.end > range.end {
                break;
            }
            others.next();
        }
        if start < range.end {
            rest.push(start..range.end);
        }
    }
    rest
}

#[cfg(test)]
impl GuestMemory {
    /// As if this memory of our own were a guest's.
    pub(super) fn ours(bytes: &[u8]) -> Self {
        let start = bytes.as_ptr() as u64;
        let part = Part { addresses: start..start + bytes.len() as u64, offset: 0 };
        Self { pid: std::process::id(), parts: vec![part], image: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn mapping(path: &str, addresses: Range<u64>, offset: u64) -> FileMapping {
        FileMapping { addresses, offset, private: true, writable: true, path: PathBuf::from(path) }
    }

    #[test]
    fn what_is_left_of_ranges_is_what_the_others_do_not_have() {
        let left = |all: &[Range<u64>], others: &[Range<u64>]| without(all, others);
        assert_eq!(left(&[0..10, 20..30], &[]), [0..10, 20..30]);
        assert_eq!(left(&[], &[0..10, 20..30]), [0..0; 0]);
        assert_eq!(left(&[0..10, 20..30], &[0..10, 15..40]), [0..0; 0]);
        assert_eq!(left(&[0..10, 20..30], &[2..4, 6..8, 9..21, 29..50]), [0..2, 4..6, 8..9, 21..29]);
        assert_eq!(left(&[0..5, 5..9, 20..30], &[4..6, 9..9]), [0..4, 6..9, 20..30]);
    }

    #[test]
    fn each_page_of_any_two_sets_is_told_right() {
        let ranges = |bits: u32| -> Vec<Range<u64>> {
            let mut runs: Vec<Range<u64>> = Vec::new();
            for bit in (0..8_u64).filter(|bit| bits & 1 << bit != 0) {
                match runs.last_mut() {
                    Some(last) if last.end == bit => last.end += 1,
                    _ => runs.push(bit..bit + 1),
                }
            }
            runs
        };
        for all in 0..256 {
            for others in 0..256 {
                assert_eq!(without(&ranges(all), &ranges(others)), ranges(all & !others));
            }
        }
    }

    #[test]
    fn memory_in_pieces_and_with_holes_of_a_balloon_is_found() {
        let whole = [mapping("/m", 0x10_000..0x20_000, 0)];
        let holed = [mapping("/m", 0x10_000..0x12_000, 0), mapping("/m", 0x15_000..0x20_000, 0x5_000)];
        let expected = [Part { addresses: 0x10_000..0x20_000, offset: 0 }];
        assert_eq!(pieces(whole.iter()), expected);
        assert_eq!(pieces(holed.iter()), expected);
        assert!(are_all_of(&expected, 0x10_000) && !are_all_of(&expected, 0x20_000));
        let apart = [mapping("/m", 0x90_000..0x95_000, 0), mapping("/m", 0x10_000..0x1b_000, 0x5_000)];
        let parts = pieces(apart.iter());
        assert_eq!(parts.len(), 2);
        assert!(are_all_of(&parts, 0x10_000));
        // Its end was cut off, so it cannot be told how far it reaches.
        assert!(!are_all_of(&pieces(apart[1..].iter()), 0x10_000) && !are_all_of(&[], 0x10_000));
    }

    #[test]
    fn memory_is_copied_and_compared_across_its_parts() {
        let page = usize::try_from(PAGE_SIZE).unwrap();
        let contents = [vec![1_u8; 3 * page], vec![2_u8; 2 * page]];
        let part = |content: &Vec<u8>, offset: u64| {
            let start = content.as_ptr() as u64;
            Part { addresses: start..start + content.len() as u64, offset }
        };
        let parts = vec![part(&contents[0], 0), part(&contents[1], 3 * PAGE_SIZE)];
        let memory = GuestMemory { pid: std::process::id(), parts, image: None };
        let image = tempfile::tempfile().unwrap();
        image.set_len(5 * PAGE_SIZE).unwrap();
        let copied = 2 * PAGE_SIZE..4 * PAGE_SIZE;
        memory.copy(std::slice::from_ref(&copied), &image).unwrap();
        let mut found = vec![9; 5 * page];
        image.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found.iter().step_by(page).copied().collect::<Vec<_>>(), [0, 0, 1, 2, 0]);
        memory.verify(std::slice::from_ref(&copied), &image).unwrap();
        memory.verify(&[], &image).unwrap();
        let wrong = memory.verify(&[copied, 4 * PAGE_SIZE..5 * PAGE_SIZE], &image).unwrap_err();
        assert_eq!(wrong.kind(), io::ErrorKind::InvalidData, "{wrong}");
    }
}
