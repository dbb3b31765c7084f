//! Answers one request: storage on one side, the char device on the other. Owns nothing.

use super::device::Device;
use crate::Content;
use aenv_storage::StorageError;
use aenv_sys::ublk::{Operation, Queue, RequestDescriptor};
use rustix::io::Errno;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes that one call copies. When the kernel takes the requests of a killed process back, it fails those that are being
/// copied instead of giving them out again, so a call has to be over sooner than that begins. It begins with a wait for every
/// processor, some milliseconds; a call of a killed process that ends is its last one.
const PIECE_BYTES: usize = 64 << 10;

/// What became of a request.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Number of bytes, or a negated error number.
    Answer(i32),
    /// There is no room; the same request may be tried again.
    NoRoom(String),
}

/// Why a request cannot be answered well.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("data cannot be copied: {0}")]
    Copy(io::Error),
    #[error("{0}")]
    Refused(&'static str, Errno),
}

/// Does it; `buffer` is as long as the largest request. Nothing it meets ends the calling thread.
pub(super) fn serve(device: &Device, queue: &Queue, tag: u16, buffer: &mut [u8]) -> Outcome {
    let request = queue.descriptor(tag);
    let done = catch_unwind(AssertUnwindSafe(|| perform(device, queue, tag, &request, buffer)));
    let failure = match done {
        Ok(Ok(bytes)) => return Outcome::Answer(bytes),
        Ok(Err(Failure::Storage(error @ StorageError::NoSpace { .. }))) if !device.is_ending() => {
            return Outcome::NoRoom(error.to_string());
        }
        Ok(Err(failure)) => failure,
        Err(_) => Failure::Refused("storage panicked", Errno::IO),
    };
    let number = device.number();
    if device.complains_first() {
        tracing::error!(number, name = device.name(), ?request, "a request fails: {failure}");
    } else {
        tracing::debug!(number, name = device.name(), ?request, "a request fails: {failure}");
    }
    let errno = match failure {
        Failure::Storage(StorageError::QuotaExceeded { .. }) => Errno::NOSPC,
        Failure::Refused(_, errno) => errno,
        Failure::Storage(_) | Failure::Copy(_) => Errno::IO,
    };
    Outcome::Answer(-errno.raw_os_error())
}

fn perform(
    device: &Device,
    queue: &Queue,
    tag: u16,
    request: &RequestDescriptor,
    buffer: &mut [u8],
) -> Result<i32, Failure> {
    let offset = request.offset;
    let bytes = usize::try_from(request.length).ok();
    let data = bytes.and_then(|bytes| buffer.get_mut(..bytes));
    let too_long = || Failure::Refused("the request is larger than agreed", Errno::INVAL);
    match (request.operation, device.content()) {
        (Operation::Read, content) => {
            let data = data.ok_or_else(too_long)?;
            match content {
                Content::Disk(disk) => disk.read_at(data, offset)?,
                Content::Image(image) => image.read_at(data, offset)?,
            }
            give(queue, tag, data).map_err(Failure::Copy)?;
        }
        (Operation::Write, Content::Disk(disk)) => {
            let data = data.ok_or_else(too_long)?;
            take(queue, tag, data).map_err(Failure::Copy)?;
            disk.write_at(data, offset)?;
            if request.forced_unit_access {
                disk.flush()?;
            }
        }
        (Operation::Flush, Content::Disk(disk)) => disk.flush()?,
        (Operation::Discard, Content::Disk(disk)) => disk.discard(offset, request.length)?,
        (Operation::WriteZeroes, Content::Disk(disk)) => {
            disk.write_zeroes(offset, request.length)?;
            if request.forced_unit_access {
                disk.flush()?;
            }
        }
        (Operation::Flush, Content::Image(_)) => {}
        (Operation::Other(_), _) => return Err(Failure::Refused("unknown operation", Errno::OPNOTSUPP)),
        (_, Content::Image(_)) => return Err(Failure::Refused("an image is never written", Errno::ROFS)),
    }
    // Of requests without data the kernel takes every number that is not negative.
    Ok(i32::try_from(request.length).unwrap_or(i32::MAX))
}

/// Gives the data of a read.
fn give(queue: &Queue, tag: u16, data: &[u8]) -> io::Result<()> {
    let mut pieces = data.chunks(PIECE_BYTES).zip((0..).step_by(PIECE_BYTES));
    pieces.try_for_each(|(piece, offset)| queue.device().give_data(queue.index(), tag, offset, piece))
}

/// Takes the data of a write.
fn take(queue: &Queue, tag: u16, data: &mut [u8]) -> io::Result<()> {
    let mut pieces = data.chunks_mut(PIECE_BYTES).zip((0..).step_by(PIECE_BYTES));
    pieces.try_for_each(|(piece, offset)| queue.device().take_data(queue.index(), tag, offset, piece))
}
