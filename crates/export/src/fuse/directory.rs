//! Requests for the one directory: look-ups and listings.
//!
//! Owns nothing. A listing goes on behind a node number, so that files that come and go meanwhile do not disturb it:
//! `.` is entry 1, `..` entry 2, and a file its node number plus one.

use super::files::{File, Files, REGULAR_FILE};
use super::requests::{Answer, Request, VALID_SECONDS};
use aenv_sys::fuse::abi::{self, Attributes, DirectoryEntry, EntryOut, ReadIn};
use rustix::io::Errno;
use zerocopy::IntoBytes;

const DIRECTORY: u32 = 0o040_000;
/// Others than root reach files by name only.
const MODE: u32 = DIRECTORY | 0o711;
/// Unit that entries of a listing are filled up to.
const ENTRY_ALIGNMENT: usize = 8;

type Result<T> = std::result::Result<T, Answer>;

/// Of the directory.
pub(super) fn attributes() -> Attributes {
    Attributes { inode: abi::ROOT_NODE, mode: MODE, links: 2, block_size: 4096, ..Attributes::default() }
}

fn entry_of(file: &File) -> EntryOut {
    EntryOut {
        node: file.node(),
        entry_valid: VALID_SECONDS,
        attributes_valid: VALID_SECONDS,
        attributes: file.attributes(),
        ..EntryOut::default()
    }
}

pub(super) fn look_up(files: &Files, request: &Request<'_>, reply: &mut [u8]) -> Result<Answer> {
    if request.header.node != abi::ROOT_NODE {
        return Ok(Answer::Error(Errno::NOTDIR));
    }
    let name = request.body.strip_suffix(b"\0").and_then(|name| std::str::from_utf8(name).ok());
    let Some(file) = name.and_then(|name| files.look_up(name)) else {
        // Not to be remembered: the next export may have this name.
        return Ok(Answer::Error(Errno::NOENT));
    };
    Ok(Answer::of(reply, &entry_of(&file)))
}

pub(super) fn list(files: &Files, request: &Request<'_>, reply: &mut [u8], plus: bool) -> Result<Answer> {
    if request.header.node != abi::ROOT_NODE {
        return Ok(Answer::Error(Errno::NOTDIR));
    }
    let (arguments, _) = request.arguments::<ReadIn>()?;
    let Some(room) = reply.get_mut(..arguments.size as usize) else {
        return Ok(Answer::Error(Errno::INVAL));
    };
    let mut listing = Listing { room, used: 0, plus };
    for (offset, name) in [(1, "."), (2, "..")] {
        // The kernel takes no part in counting these two: their node is 0.
        let attributes = attributes();
        if arguments.offset < offset
            && !listing.push(offset, name, &EntryOut { attributes, ..EntryOut::default() })
        {
            return Ok(Answer::Body(listing.used));
        }
    }
    // A file's entry is its node plus one: go on with the first one behind `offset`.
    files.visit(arguments.offset, plus, |file| listing.push(file.node() + 1, &file.name, &entry_of(file)));
    Ok(Answer::Body(listing.used))
}

struct Listing<'a> {
    room: &'a mut [u8],
    used: usize,
    plus: bool,
}

impl Listing<'_> {
    /// Whether there was room.
    fn push(&mut self, offset: u64, name: &str, entry: &EntryOut) -> bool {
        let head = if self.plus { entry.as_bytes() } else { &[] };
        let kind = entry.attributes.mode / 4096;
        let described =
            DirectoryEntry { inode: entry.attributes.inode, offset, name_length: name.len() as u32, kind };
        let length =
            head.len() + (size_of::<DirectoryEntry>() + name.len()).next_multiple_of(ENTRY_ALIGNMENT);
        let Some(place) = self.room.get_mut(self.used..).and_then(|rest| rest.get_mut(..length)) else {
            return false;
        };
        place.fill(0);
        let mut at = 0;
        for part in [head, described.as_bytes(), name.as_bytes()] {
            place[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.used += length;
        true
    }
}

const _: () = assert!(REGULAR_FILE / 4096 == 8 && DIRECTORY / 4096 == 4);
