//! Changes stored bytes as accidents and enemies do, and makes checksums right again.
//!
//! Owns nothing. Knows where fields lie, so that changes hit what matters, and does not rely on any field being true.

use rand::Rng;
use rand::rngs::StdRng;
use std::ops::Range;

const ZFILE_HEADER: usize = 512;
const TAR_BLOCK: usize = 512;
const TAR_PREFIX: usize = 1536;
const RECORD_SEED: u32 = 100_007;

/// Values at which arithmetic goes wrong.
const BOUNDARIES: [u64; 22] = [
    0,
    1,
    2,
    4,
    5,
    7,
    255,
    511,
    512,
    513,
    4095,
    4096,
    65535,
    65536,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    (1 << 50) - 1,
    1 << 55,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX,
];

/// Where fields lie in headers, trailers and archives, from their start.
const FIELDS: [usize; 22] =
    [0, 8, 24, 28, 32, 40, 48, 56, 64, 72, 76, 78, 84, 88, 93, 124, 132, 148, 156, 257, 512, 1148];

/// What is around the bytes of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrapping {
    None,
    ZFile,
    Tar,
    ZFileInTar,
}

impl Wrapping {
    /// Whether all content has checksums.
    pub(crate) fn is_compressed(self) -> bool {
        matches!(self, Self::ZFile | Self::ZFileInTar)
    }

    /// Whether anything has.
    pub(crate) fn has_checksums(self) -> bool {
        self != Self::None
    }
}

/// Changes a few things.
pub(crate) fn mutate(random: &mut StdRng, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..random.random_range(1..=3) {
        if bytes.is_empty() {
            return;
        }
        mutate_once(random, bytes, other);
    }
}

fn mutate_once(random: &mut StdRng, bytes: &mut Vec<u8>, other: &[u8]) {
    let length = bytes.len();
    match random.random_range(0..12) {
        0 | 1 => {
            let at = place(random, length);
            bytes[at] ^= 1 << random.random_range(0..8);
        }
        2..=5 => {
            let at = place(random, length);
            let value = BOUNDARIES[random.random_range(0..BOUNDARIES.len())];
            let value = if random.random_range(0..4) == 0 { length as u64 } else { value };
            let width = 1 << random.random_range(0..4);
            let end = (at + width).min(length);
            bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
        }
        6 => {
            let cut = random.random_range(0..length);
            let cut = if random.random() { cut } else { cut - cut % 512 };
            bytes.truncate(cut);
        }
        7 => bytes.extend(std::iter::repeat_n(0, random.random_range(1..5000))),
        8 => {
            let range = range(random, length);
            bytes[range].fill(0);
        }
        9 => {
            let from = range(random, length);
            let copied = bytes[from].to_vec();
            splice(random, bytes, &copied);
        }
        10 => {
            let from = range(random, other.len());
            let copied = other[from].to_vec();
            splice(random, bytes, &copied);
        }
        _ => {
            // Digits of an archive's numbers.
            let at = place(random, length);
            let end = (at + random.random_range(1..12)).min(length);
            bytes[at..end].fill(b'0' + random.random_range(0..10));
        }
    }
}

/// Puts bytes over others, or between them.
fn splice(random: &mut StdRng, bytes: &mut Vec<u8>, copied: &[u8]) {
    let at = place(random, bytes.len());
    let replaced = if random.random() { (at + copied.len()).min(bytes.len()) } else { at };
    bytes.splice(at..replaced, copied.iter().copied());
}

/// Somewhere, often in a field.
fn place(random: &mut StdRng, length: usize) -> usize {
    let field = FIELDS[random.random_range(0..FIELDS.len())];
    let found = match random.random_range(0..8) {
        0 | 1 => field,
        2 => TAR_PREFIX + field,
        3 => length.saturating_sub(ZFILE_HEADER) + field,
        4 => length.saturating_sub(4096) + field,
        5 => length.saturating_sub(random.random_range(1..10_000)),
        _ => random.random_range(0..length),
    };
    found.min(length - 1)
}

fn range(random: &mut StdRng, length: usize) -> Range<usize> {
    let start = place(random, length);
    start..(start + random.random_range(1..2000)).min(length)
}

/// Makes all checksums right that can be found.
pub(crate) fn fix_checksums(bytes: &mut [u8], wrapping: Wrapping) {
    let mut payload = 0..bytes.len();
    if matches!(wrapping, Wrapping::Tar | Wrapping::ZFileInTar) {
        for start in [0, 2 * TAR_BLOCK] {
            fix_tar_header(bytes, start);
        }
        payload = TAR_PREFIX.min(bytes.len())..bytes.len().saturating_sub(1024);
        // The zeros that fill the last block of the archive do not belong to it.
        let said = bytes.get(TAR_BLOCK..TAR_BLOCK + 32).map(String::from_utf8_lossy).unwrap_or_default();
        let size = said.split('=').nth(1).and_then(|rest| rest.split('\n').next()?.parse::<usize>().ok());
        if let Some(end) = size.and_then(|size| size.checked_add(TAR_PREFIX)) {
            payload.end = payload.end.min(end);
        }
    }
    if wrapping.is_compressed()
        && let Some(zfile) = bytes.get_mut(payload)
    {
        fix_zfile(zfile);
    }
}

fn fix_tar_header(bytes: &mut [u8], start: usize) {
    let Some(header) = bytes.get_mut(start..start + TAR_BLOCK) else { return };
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn fix_zfile(bytes: &mut [u8]) {
    let Some(trailer) = bytes.len().checked_sub(ZFILE_HEADER).filter(|at| *at >= ZFILE_HEADER) else {
        return;
    };
    let (offset, blocks) = (u64_at(bytes, trailer + 40), u64_at(bytes, trailer + 48));
    let index_end = blocks.checked_mul(4).and_then(|length| offset.checked_add(length));
    if let (Ok(offset), Some(Ok(end))) = (usize::try_from(offset), index_end.map(usize::try_from))
        && end <= trailer
    {
        fix_records(bytes, offset, (offset..end).step_by(4));
        let crc = raw_crc(&bytes[offset..end], 0).to_le_bytes();
        bytes[trailer + 64..trailer + 68].copy_from_slice(&crc);
    }
    if bytes[32] & 8 != 0 {
        bytes.copy_within(trailer + 40..trailer + 96, 40);
    }
    for start in [0, trailer] {
        bytes[start + 28..start + 32].fill(0);
        let digest = raw_crc(&bytes[start..start + ZFILE_HEADER], 0).to_le_bytes();
        bytes[start + 28..start + 32].copy_from_slice(&digest);
    }
}

fn fix_records(bytes: &mut [u8], index_offset: usize, entries: impl Iterator<Item = usize>) {
    let mut place = ZFILE_HEADER;
    for entry in entries {
        let mut length = [0; 4];
        length.copy_from_slice(&bytes[entry..entry + 4]);
        let end = place.saturating_add(u32::from_le_bytes(length) as usize);
        if end > index_offset || end < place + 4 {
            return;
        }
        let crc = raw_crc(&bytes[place..end - 4], RECORD_SEED).to_le_bytes();
        bytes[end - 4..end].copy_from_slice(&crc);
        place = end;
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut field = [0; 8];
    field.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(field)
}

/// CRC-32C, not inverted.
fn raw_crc(bytes: &[u8], seed: u32) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}
