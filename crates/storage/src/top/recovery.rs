//! Reads the log of a top back: which state each block has, and where the log goes on.
//!
//! ```text
//! records are taken while length, sequence and CRC are right; the first that is not ends the log (a torn write)
//!
//!   ranges ──▶ waiting ──commit that covers them──▶ count
//!                 │
//!                 ├── session of another boot ──▶ void: the host lost its power, their data may not be there
//!                 └── end of the log ──▶ count if the running kernel wrote them, else void
//! ```
//! A void range leaves its blocks as they were, never as garbage: what the data file has of them is not looked at, and is
//! written anew as whole blocks before one becomes data again. A session makes the verdict lasting, since later commits
//! cover the sequence numbers of void records as well.
//!
//! Owns nothing that lasts.

use super::boot::BootId;
use super::files::StoredFile;
use super::log::{
    HEADER_BYTES, HeaderError, Identity, LogEnd, MAXIMUM_RECORD_BYTES, RECORD_HEADER_BYTES, Record,
    record_crc, u32_at, u64_at,
};
use super::map::{BlockMap, BlockRange};
use crate::{BLOCK_BYTES, StorageError};
use std::collections::VecDeque;
use std::io;

/// What a log says.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) identity: Identity,
    pub(super) map: BlockMap,
    pub(super) end: LogEnd,
    /// A `sealed` record counts.
    pub(super) sealed: bool,
    /// That of the last session.
    pub(super) boot: Option<BootId>,
    /// The last session was of another boot: the data file may hold blocks that the map does not know of.
    pub(super) power_was_lost: bool,
}

/// Reads the log of the top `name`, with the eyes of a process that runs in `boot`.
pub(super) fn recover(log: &dyn StoredFile, name: &str, boot: &BootId) -> Result<Recovered, Failure> {
    let length = log.length()?;
    if length < HEADER_BYTES {
        return Err(damaged(name, "its header is cut off"));
    }
    let mut header = [0; HEADER_BYTES as usize];
    log.read_exact_at(&mut header, 0)?;
    let (identity, crc) = Identity::decode(&header).map_err(|error| match error {
        HeaderError::Damaged(reason) => damaged(name, reason),
        HeaderError::Unsupported(reason) => {
            Failure::Storage(StorageError::Unsupported { name: name.to_owned(), reason: reason.to_owned() })
        }
    })?;
    let mut replay = Replay::new(BlockMap::new(identity.size / BLOCK_BYTES));
    let mut reader = Reader { log, length, window: Vec::new(), window_start: HEADER_BYTES };
    let mut end = LogEnd { crc, ..LogEnd::of_new_log(&identity) };
    while let Some(raw) = reader.next(&end)? {
        let record = Record::decode(raw.kind, raw.payload, end.sequence + 1, replay.map.blocks());
        let record = record
            .map_err(|reason| damaged(name, &format!("{reason}, at byte {} of its log", end.position)))?;
        end.position += raw.length;
        end.sequence += 1;
        end.crc = raw.crc;
        match &record {
            Record::Commit { covers } => end.committed = *covers,
            _ => end.last_change = end.sequence,
        }
        replay.take(record, end.sequence).map_err(|reason| damaged(name, reason))?;
    }
    let last = replay.boot;
    let power_was_lost = last.is_some_and(|last| last != *boot);
    replay.finish(boot);
    Ok(Recovered { identity, map: replay.map, end, sealed: replay.sealed, boot: last, power_was_lost })
}

/// Records in order, and what they have come to.
struct Replay {
    map: BlockMap,
    waiting: VecDeque<(u64, Change)>,
    boot: Option<BootId>,
    sealed: bool,
}

enum Change {
    Range(BlockRange),
    Sealed,
}

impl Replay {
    fn new(map: BlockMap) -> Self {
        Self { map, waiting: VecDeque::new(), boot: None, sealed: false }
    }

    fn take(&mut self, record: Record, sequence: u64) -> Result<(), &'static str> {
        match record {
            Record::Session { boot, .. } => {
                if self.boot.is_some_and(|before| before != boot) {
                    self.waiting.clear();
                }
                self.boot = Some(boot);
            }
            Record::Ranges(_) | Record::Sealed if self.boot.is_none() => {
                return Err("its log begins without a session");
            }
            Record::Ranges(ranges) => {
                self.waiting.extend(ranges.into_iter().map(|range| (sequence, Change::Range(range))));
            }
            Record::Sealed => self.waiting.push_back((sequence, Change::Sealed)),
            Record::Commit { covers } => self.count_until(covers),
        }
        Ok(())
    }

    fn finish(&mut self, boot: &BootId) {
        if self.boot == Some(*boot) {
            self.count_until(u64::MAX);
        }
    }

    fn count_until(&mut self, covers: u64) {
        while self.waiting.front().is_some_and(|(sequence, _)| *sequence <= covers) {
            match self.waiting.pop_front() {
                Some((_, Change::Range(range))) => self.map.set(range.blocks(), range.state),
                Some((_, Change::Sealed)) => self.sealed = true,
                None => break,
            }
        }
    }
}

/// A record as it is stored, its CRC checked.
struct RawRecord<'a> {
    kind: u32,
    payload: &'a [u8],
    length: u64,
    crc: u32,
}

/// Reads the log in pieces.
struct Reader<'a> {
    log: &'a dyn StoredFile,
    length: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl Reader<'_> {
    const WINDOW_BYTES: u64 = 1 << 20;

    /// The record behind `end`, or `None` where no whole one follows.
    fn next(&mut self, end: &LogEnd) -> io::Result<Option<RawRecord<'_>>> {
        let header = self.bytes(end.position, RECORD_HEADER_BYTES)?;
        let Some(header) = header else { return Ok(None) };
        let (crc, length, sequence, kind) =
            (u32_at(header, 0), u32_at(header, 4) as usize, u64_at(header, 8), u32_at(header, 16));
        let plausible =
            (RECORD_HEADER_BYTES..=MAXIMUM_RECORD_BYTES).contains(&length) && length.is_multiple_of(8);
        if !plausible || end.sequence.checked_add(1) != Some(sequence) {
            return Ok(None);
        }
        let Some(record) = self.bytes(end.position, length)? else { return Ok(None) };
        if record_crc(end.crc, &record[4..]) != crc {
            return Ok(None);
        }
        let payload = &record[RECORD_HEADER_BYTES..];
        Ok(Some(RawRecord { kind, payload, length: length as u64, crc }))
    }

    fn bytes(&mut self, position: u64, count: usize) -> io::Result<Option<&[u8]>> {
        if self.length - position < count as u64 {
            return Ok(None);
        }
        let window_end = self.window_start + self.window.len() as u64;
        if position + count as u64 > window_end {
            let size = Self::WINDOW_BYTES.min(self.length - position);
            self.window.resize(size as usize, 0);
            self.window_start = position;
            self.log.read_exact_at(&mut self.window, position)?;
        }
        let start = (position - self.window_start) as usize;
        Ok(Some(&self.window[start..start + count]))
    }
}

/// Damage, or an error of the system that lacks its path yet.
#[derive(Debug)]
pub(super) enum Failure {
    Storage(StorageError),
    System(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::System(error)
    }
}

fn damaged(name: &str, reason: &str) -> Failure {
    Failure::Storage(StorageError::Damaged { name: name.to_owned(), reason: reason.to_owned() })
}
