//! Requests for a file's data: read, write, flush, discard, find data.
//!
//! Owns nothing. A file ends where its content ends and never changes its size: reads and writes are cut there, as on a
//! block device.

use super::files::File;
use super::requests::{Answer, Request};
use crate::Content;
use aenv_storage::{BLOCK_BYTES, BlockDevice, Image, StorageError};
use aenv_sys::fuse::abi::{FallocateIn, LseekIn, LseekOut, ReadIn, WriteIn, WriteOut};
use rustix::io::Errno;

/// Modes of `fallocate(2)`.
const KEEP_SIZE: u32 = 1;
const PUNCH_HOLE: u32 = 2;
const ZERO_RANGE: u32 = 0x10;
/// `whence` of `lseek(2)`.
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

type Result<T> = std::result::Result<T, Answer>;

/// Bytes of a range that lie in the file, which has at least `offset` bytes.
fn inside(file: &File, offset: u64, length: usize) -> usize {
    usize::try_from(file.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(length)
}

pub(super) fn read(file: &File, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    let (arguments, _) = request.arguments::<ReadIn>()?;
    let offset = arguments.offset;
    let length = inside(file, offset, arguments.size as usize);
    let Some(buffer) = reply.get_mut(..length) else {
        return Ok(Answer::Error(Errno::INVAL));
    };
    if length == 0 {
        return Ok(Answer::Body(0));
    }
    let done = file.with_content(|content| match content {
        Content::Disk(disk) => disk.read_at(buffer, offset),
        Content::Image(image) => image.read_at(buffer, offset),
    });
    Ok(finish(file, "read", done, || Answer::Body(length)))
}

pub(super) fn write(file: &File, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    let (arguments, data) = request.arguments::<WriteIn>()?;
    let offset = arguments.offset;
    let Some(data) = data.get(..arguments.size as usize) else {
        return Ok(Answer::Error(Errno::INVAL));
    };
    let data = &data[..inside(file, offset, data.len())];
    if data.is_empty() && arguments.size > 0 {
        return Ok(Answer::Error(Errno::NOSPC));
    }
    let done = file.with_content(|content| match content {
        Content::Disk(_) if data.is_empty() => Ok(()),
        Content::Disk(disk) => disk.write_at(data, offset),
        Content::Image(_) => Err(unsupported(file, "an image is not written")),
    });
    Ok(finish(file, "write", done, || Answer::of(reply, &WriteOut { size: data.len() as u32, padding: 0 })))
}

pub(super) fn flush(file: &std::sync::Arc<File>) -> Result<Answer> {
    let done = file.with_content(|content| match content {
        Content::Disk(disk) => disk.flush(),
        Content::Image(_) => Ok(()),
    });
    Ok(finish(file, "flush", done, || Answer::Body(0)))
}

pub(super) fn allocate(file: &File, request: &Request<'_>) -> Result<Answer> {
    let (arguments, _) = request.arguments::<FallocateIn>()?;
    let FallocateIn { offset, length, mode, .. } = arguments;
    let discards = mode == PUNCH_HOLE | KEEP_SIZE;
    if !discards && mode != ZERO_RANGE && mode != ZERO_RANGE | KEEP_SIZE {
        return Ok(Answer::Error(Errno::OPNOTSUPP));
    }
    let Some(end) = offset.checked_add(length) else {
        return Ok(Answer::Error(Errno::FBIG));
    };
    if end > file.size && mode & KEEP_SIZE == 0 {
        return Ok(Answer::Error(Errno::NOSPC));
    }
    let end = end.min(file.size);
    if offset >= end {
        return Ok(Answer::Body(0));
    }
    let done = file.with_content(|content| match content {
        Content::Disk(disk) if discards => punch(disk.as_ref(), offset, end),
        Content::Disk(disk) => disk.write_zeroes(offset, end - offset),
        Content::Image(_) => Err(unsupported(file, "an image is not written")),
    });
    Ok(finish(file, "discard in", done, || Answer::Body(0)))
}

/// A hole reads as zeros from its first byte to its last, while discarding concerns whole blocks only.
fn punch(disk: &dyn BlockDevice, offset: u64, end: u64) -> std::result::Result<(), StorageError> {
    let inner_end = end - end % BLOCK_BYTES;
    let Some(inner) = offset.checked_next_multiple_of(BLOCK_BYTES).filter(|inner| *inner < inner_end) else {
        return disk.write_zeroes(offset, end - offset);
    };
    if offset < inner {
        disk.write_zeroes(offset, inner - offset)?;
    }
    disk.discard(inner, inner_end - inner)?;
    if inner_end < end {
        disk.write_zeroes(inner_end, end - inner_end)?;
    }
    Ok(())
}

pub(super) fn seek(file: &File, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    let (LseekIn { offset, whence, .. }, _) = request.arguments()?;
    if whence != SEEK_DATA && whence != SEEK_HOLE {
        return Ok(Answer::Error(Errno::INVAL));
    }
    if offset >= file.size {
        return Ok(Answer::Error(Errno::NXIO));
    }
    let found = file.with_content(|content| match content {
        // All of a disk may be data.
        Content::Disk(_) => Ok(Some(if whence == SEEK_DATA { offset } else { file.size })),
        Content::Image(image) if whence == SEEK_DATA => Ok(data_at(image.next_data(offset)?, offset)),
        Content::Image(image) => hole_at(image.as_ref(), offset).map(Some),
    });
    match found {
        Some(Ok(Some(offset))) if whence == SEEK_HOLE || offset < file.size => {
            Ok(Answer::of(reply, &LseekOut { offset: offset.min(file.size) }))
        }
        Some(Ok(_)) => Ok(Answer::Error(Errno::NXIO)),
        Some(Err(error)) => Ok(Answer::failure(file, "find data in", &error)),
        None => Ok(Answer::Error(Errno::STALE)),
    }
}

fn data_at(run: Option<std::ops::Range<u64>>, offset: u64) -> Option<u64> {
    run.map(|run| run.start.max(offset))
}

/// The first byte at or after `offset` that no run of data covers. Runs may touch.
fn hole_at(image: &dyn Image, offset: u64) -> std::result::Result<u64, StorageError> {
    let mut hole = offset;
    while let Some(run) = image.next_data(hole)? {
        if run.start > hole || run.end <= hole {
            break;
        }
        hole = run.end;
        if hole >= image.size() {
            break;
        }
    }
    Ok(hole)
}

fn unsupported(file: &File, reason: &str) -> StorageError {
    StorageError::Unsupported { name: file.name.clone(), reason: reason.to_owned() }
}

/// Turns what the content did into the answer.
fn finish(
    file: &File,
    action: &'static str,
    done: Option<std::result::Result<(), StorageError>>,
    answer: impl FnOnce() -> Answer,
) -> Answer {
    match done {
        Some(Ok(())) => answer(),
        Some(Err(error)) => Answer::failure(file, action, &error),
        None => Answer::Error(Errno::STALE),
    }
}
