//! What a request asks for, and the answer.
//!
//! ```text
//! bytes ─▶ Request ─▶ answer_to ─┬─▶ Body      this many bytes of the reply area
//!                                ├─▶ Error     an errno
//!                                ├─▶ Park      no room: try the same again later
//!                                └─▶ Silence   the kernel wants no answer
//! ```
//! Owns nothing; may run the same request twice, in one daemon or in two. What the kernel checks itself (rights, by
//! `default_permissions`) is not checked again.

use super::files::{File, Files, NAME_BYTES, Permissions};
use super::{data, directory};
use aenv_storage::StorageError;
use aenv_sys::fuse::abi::{
    self, AttributesOut, BatchForgetIn, ForgetIn, ForgetOne, OpenIn, OpenOut, RequestHeader, SetAttributesIn,
    StatfsOut, opcode, open_flags, set_attributes,
};
use rustix::io::Errno;
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Seconds for which the kernel may keep names and attributes: we tell it when they change.
pub(super) const VALID_SECONDS: u64 = 365 * 24 * 3600;
/// Part of an open file's flags that says whether it is read or written.
const ACCESS_MODE: u32 = 3;
/// Permission bits that can be changed: not those that lend the owner's rights.
const CHANGEABLE_MODE: u32 = 0o777;

/// A request in the memory it was read into.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) header: RequestHeader,
    /// Behind the header.
    pub(super) body: &'a [u8],
}

impl<'a> Request<'a> {
    /// None when there is no whole request.
    pub(super) fn parse(area: &'a [u8]) -> Option<Self> {
        let (header, _) = RequestHeader::read_from_prefix(area).ok()?;
        let body = area.get(size_of::<RequestHeader>()..header.length as usize)?;
        Some(Self { header, body })
    }

    /// The arguments, and what follows them.
    pub(super) fn arguments<T: FromBytes>(&self) -> Result<(T, &'a [u8])> {
        T::read_from_prefix(self.body).map_err(|_| Answer::Error(Errno::INVAL))
    }
}

/// See above.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Body(usize),
    Error(Errno),
    Park(String),
    Silence,
}

impl Answer {
    /// An answer that is only a structure.
    pub(super) fn of<T: IntoBytes + Immutable>(reply: &mut [u8], body: &T) -> Self {
        match body.write_to_prefix(reply) {
            Ok(()) => Self::Body(size_of::<T>()),
            Err(_) => Self::Error(Errno::IO),
        }
    }

    /// What a failure of the content means; the first one of each file is logged.
    pub(super) fn failure(file: &File, action: &'static str, error: &StorageError) -> Self {
        match error {
            StorageError::NoSpace { .. } => return Self::Park(error.to_string()),
            StorageError::QuotaExceeded { .. } => {
                if file.fails_first() {
                    tracing::info!("cannot {action} export {}: {error}", file.name);
                }
                return Self::Error(Errno::NOSPC);
            }
            _ => {}
        }
        if file.fails_first() {
            tracing::error!("cannot {action} export {}, and may not say so again: {error}", file.name);
        }
        Self::Error(Errno::IO)
    }
}

/// Does what a request asks for. The body of the answer goes to the beginning of `reply`.
pub(super) fn answer_to(files: &Files, request: &Request<'_>, reply: &mut [u8]) -> Answer {
    let result = match request.header.opcode {
        // Most frequent first.
        opcode::READ => with_file(files, request, |file| data::read(file, request, reply)),
        opcode::WRITE => with_file(files, request, |file| data::write(file, request, reply)),
        opcode::FSYNC => with_file(files, request, data::flush),
        opcode::FALLOCATE => with_file(files, request, |file| data::allocate(file, request)),
        opcode::LSEEK => with_file(files, request, |file| data::seek(file, request, reply)),
        opcode::LOOKUP => directory::look_up(files, request, reply),
        opcode::GETATTR => get_attributes(files, request, reply),
        opcode::SETATTR => with_file(files, request, |file| set_attributes_of(file, request, reply)),
        opcode::OPEN => with_file(files, request, |file| open(file, request, reply)),
        opcode::OPENDIR => Ok(Answer::of(reply, &OpenOut::default())),
        opcode::READDIR => directory::list(files, request, reply, false),
        opcode::READDIRPLUS => directory::list(files, request, reply, true),
        opcode::STATFS => Ok(statfs(files, reply)),
        // Nothing is cached or counted per open file, and the kernel checks rights.
        opcode::FLUSH
        | opcode::RELEASE
        | opcode::RELEASEDIR
        | opcode::FSYNCDIR
        | opcode::ACCESS
        | opcode::DESTROY => Ok(Answer::Body(0)),
        opcode::FORGET => forget(files, request),
        opcode::BATCH_FORGET => forget_many(files, request),
        // Who is killed while a request is parked is found by looking; other requests end soon.
        opcode::INTERRUPT => Ok(Answer::Silence),
        // The directory has what is exported.
        opcode::CREATE
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::SYMLINK
        | opcode::LINK
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2 => Ok(Answer::Error(Errno::PERM)),
        // The kernel does not ask again.
        _ => Ok(Answer::Error(Errno::NOSYS)),
    };
    result.unwrap_or_else(|answer| answer)
}

type Result<T> = std::result::Result<T, Answer>;

fn with_file(
    files: &Files,
    request: &Request<'_>,
    work: impl FnOnce(&Arc<File>) -> Result<Answer>,
) -> Result<Answer> {
    match files.get(request.header.node) {
        Some(file) => work(&file),
        None if request.header.node == abi::ROOT_NODE => Ok(Answer::Error(Errno::ISDIR)),
        // Its export was removed.
        None => Ok(Answer::Error(Errno::STALE)),
    }
}

fn get_attributes(files: &Files, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    if request.header.node == abi::ROOT_NODE {
        return Ok(attributes(reply, directory::attributes()));
    }
    with_file(files, request, |file| Ok(attributes(reply, file.attributes())))
}

fn attributes(reply: &mut [u8], attributes: abi::Attributes) -> Answer {
    Answer::of(reply, &AttributesOut { valid: VALID_SECONDS, attributes, ..AttributesOut::default() })
}

fn set_attributes_of(file: &File, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    let (change, _) = request.arguments::<SetAttributesIn>()?;
    let asks_for = |bits: u32| change.valid & bits != 0;
    if asks_for(set_attributes::SIZE) {
        // Times are changed along with it.
        if change.size != file.size {
            return Ok(Answer::Error(Errno::PERM));
        }
    } else if asks_for(set_attributes::TIMES) {
        return Ok(Answer::Error(Errno::PERM));
    }
    if asks_for(set_attributes::MODE | set_attributes::USER | set_attributes::GROUP) {
        let mode = change.mode & 0o7777;
        if request.header.user != 0 || asks_for(set_attributes::MODE) && mode & !CHANGEABLE_MODE != 0 {
            return Ok(Answer::Error(Errno::PERM));
        }
        file.change(|permissions: &mut Permissions| {
            if asks_for(set_attributes::MODE) {
                permissions.mode = mode;
            }
            if asks_for(set_attributes::USER) {
                permissions.user = change.user;
            }
            if asks_for(set_attributes::GROUP) {
                permissions.group = change.group;
            }
        });
    }
    Ok(attributes(reply, file.attributes()))
}

fn open(file: &File, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    let (arguments, _) = request.arguments::<OpenIn>()?;
    if !file.is_disk && arguments.flags & ACCESS_MODE != 0 {
        return Ok(Answer::Error(Errno::ROFS));
    }
    let caching = if file.is_disk {
        open_flags::DIRECT_IO | open_flags::PARALLEL_DIRECT_WRITES
    } else {
        open_flags::KEEP_CACHE
    };
    let open_flags = caching | open_flags::NO_FLUSH;
    Ok(Answer::of(reply, &OpenOut { handle: u64::from(file.number), open_flags, backing: 0 }))
}

fn statfs(files: &Files, reply: &mut [u8]) -> Answer {
    let (count, bytes) = files.totals();
    let block_size = 4096;
    let out = StatfsOut {
        blocks: bytes / u64::from(block_size),
        files: count,
        block_size,
        name_length: NAME_BYTES as u32,
        fragment_size: block_size,
        ..StatfsOut::default()
    };
    Answer::of(reply, &out)
}

fn forget(files: &Files, request: &Request<'_>) -> Result<Answer> {
    // There is no answer that could tell an error.
    if let Ok((forget, _)) = request.arguments::<ForgetIn>() {
        files.forget(request.header.node, forget.lookups);
    }
    Ok(Answer::Silence)
}

fn forget_many(files: &Files, request: &Request<'_>) -> Result<Answer> {
    if let Ok((batch, mut rest)) = request.arguments::<BatchForgetIn>() {
        for _ in 0..batch.count {
            let Ok((one, behind)) = ForgetOne::read_from_prefix(rest) else { break };
            files.forget(one.node, one.lookups);
            rest = behind;
        }
    }
    Ok(Answer::Silence)
}

#[cfg(test)]
mod tests;
