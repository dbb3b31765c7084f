//! A directory in memory that records everything done to it, and can show what any crash would have left.
//!
//! ```text
//!   operations ──▶ page cache ──writeback, any sector at any time──▶ platter
//!                      └────────────── sync_data: all of it ────────────▲
//!   names      ──▶ journal ────── some first part of it, or sync ───────▶
//! ```
//! The death of the process leaves the page cache, with the operation in flight done in part. The loss of power leaves the
//! platter: of what was not synced, any choice of sectors of 512 bytes.

use super::{Directory, Lock, StoredFile, lock};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

const SECTOR: u64 = 512;

#[derive(Debug, Clone)]
enum Operation {
    Create { file: usize, name: String },
    Rename { from: String, to: String },
    Exchange { one: String, other: String },
    Remove { name: String },
    SyncNames,
    Write { file: usize, offset: u64, data: Vec<u8> },
    Punch { file: usize, range: Range<u64> },
    SetLength { file: usize, length: u64 },
    SyncFile { file: usize },
}

/// What an operation does, for tests that let some of them fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Create,
    Rename,
    Exchange,
    Remove,
    Write,
    Punch,
    SetLength,
    Sync,
}

impl Operation {
    /// What it does, and the name of the file it does it to; none for the sync of all names.
    fn act(&self, state: &State) -> (Act, String) {
        let name_of = |file: &usize| {
            let name = state.names.iter().find(|(_, other)| *other == file);
            name.map(|(name, _)| name.clone()).unwrap_or_default()
        };
        match self {
            Self::Create { name, .. } => (Act::Create, name.clone()),
            Self::Rename { from, .. } => (Act::Rename, from.clone()),
            Self::Exchange { one, .. } => (Act::Exchange, one.clone()),
            Self::Remove { name } => (Act::Remove, name.clone()),
            Self::SyncNames => (Act::Sync, String::new()),
            Self::Write { file, .. } => (Act::Write, name_of(file)),
            Self::Punch { file, .. } => (Act::Punch, name_of(file)),
            Self::SetLength { file, .. } => (Act::SetLength, name_of(file)),
            Self::SyncFile { file } => (Act::Sync, name_of(file)),
        }
    }
}

/// A part of a buffer that lies in one sector.
struct Piece {
    buffer: Range<usize>,
    sector: u64,
    within: usize,
}

fn pieces(offset: u64, length: usize) -> impl Iterator<Item = Piece> {
    let mut start = 0;
    std::iter::from_fn(move || {
        (start < length).then(|| {
            let position = offset + start as u64;
            let within = (position % SECTOR) as usize;
            let end = length.min(start + SECTOR as usize - within);
            let piece = Piece { buffer: start..end, sector: position / SECTOR, within };
            start = end;
            piece
        })
    })
}

/// Content of a file: sectors that were written, and the length.
#[derive(Debug, Clone, Default)]
struct Bytes {
    sectors: BTreeMap<u64, [u8; SECTOR as usize]>,
    length: u64,
}

impl Bytes {
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if offset + buffer.len() as u64 > self.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for part in pieces(offset, buffer.len()) {
            let piece = &mut buffer[part.buffer];
            match self.sectors.get(&part.sector) {
                Some(sector) => piece.copy_from_slice(&sector[part.within..part.within + piece.len()]),
                None => piece.fill(0),
            }
        }
        Ok(())
    }

    fn write(&mut self, data: &[u8], offset: u64) {
        for part in pieces(offset, data.len()) {
            let piece = &data[part.buffer];
            let sector = self.sectors.entry(part.sector).or_insert([0; SECTOR as usize]);
            sector[part.within..part.within + piece.len()].copy_from_slice(piece);
        }
        self.length = self.length.max(offset + data.len() as u64);
    }

    fn set_length(&mut self, length: u64) {
        if length < self.length {
            self.sectors.retain(|sector, _| sector * SECTOR < length);
            if let Some(last) = self.sectors.get_mut(&(length / SECTOR)) {
                last[(length % SECTOR) as usize..].fill(0);
            }
        }
        self.length = length;
    }
}

#[derive(Debug, Clone, Default)]
struct State {
    names: BTreeMap<String, usize>,
    files: Vec<Bytes>,
}

impl State {
    fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Create { file, name } => {
                self.names.insert(name.clone(), *file);
                self.files.resize(self.files.len().max(file + 1), Bytes::default());
            }
            Operation::Rename { from, to } => {
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Operation::Exchange { one, other } => {
                if let (Some(first), Some(second)) = (self.names.remove(one), self.names.remove(other)) {
                    self.names.extend([(one.clone(), second), (other.clone(), first)]);
                }
            }
            Operation::Remove { name } => {
                self.names.remove(name);
            }
            Operation::Write { file, offset, data } => self.files[*file].write(data, *offset),
            Operation::Punch { file, range } => {
                assert!(range.start % 4096 == 0 && range.end % 4096 == 0);
                self.files[*file].sectors.retain(|sector, _| !range.contains(&(sector * SECTOR)));
            }
            Operation::SetLength { file, length } => self.files[*file].set_length(*length),
            Operation::SyncFile { .. } | Operation::SyncNames => {}
        }
    }
}

#[derive(Debug, Default)]
struct Recorder {
    start: State,
    now: Mutex<(State, Vec<Operation>)>,
    after_sync: Mutex<Option<Hook>>,
    judge: Mutex<Option<Judge>>,
}

/// What another thread does in the middle of a flush.
struct Hook(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Hook")
    }
}

/// Says which operations fail, and how.
#[derive(Clone)]
struct Judge(Arc<Verdict>);

type Verdict = dyn Fn(Act, &str) -> Option<io::ErrorKind> + Send + Sync;

impl std::fmt::Debug for Judge {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Judge")
    }
}

/// The directory; clones are handles of the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Simulation(Arc<Recorder>);

#[derive(Debug)]
struct SimulatedFile {
    recorder: Arc<Recorder>,
    file: usize,
}

impl Recorder {
    fn record(&self, operation: Operation) -> io::Result<()> {
        let Some(kind) = self.verdict(&operation) else {
            self.apply(operation);
            return Ok(());
        };
        if let Operation::Write { file, offset, mut data } = operation {
            // A write that fails is done in part.
            data.truncate(data.len() / 2);
            self.apply(Operation::Write { file, offset, data });
        }
        Err(kind.into())
    }

    fn apply(&self, operation: Operation) {
        let mut now = lock(&self.now);
        now.0.apply(&operation);
        now.1.push(operation);
    }

    fn verdict(&self, operation: &Operation) -> Option<io::ErrorKind> {
        let Judge(judge) = lock(&self.judge).clone()?;
        let (act, name) = operation.act(&lock(&self.now).0);
        // No lock is held: it may look at the disk.
        judge(act, &name)
    }

    fn sync(&self, operation: Operation) -> io::Result<()> {
        self.record(operation)?;
        let hook = lock(&self.after_sync).take();
        if let Some(Hook(act)) = hook {
            act();
        }
        Ok(())
    }
}

impl Simulation {
    fn new(start: State) -> Self {
        let now = Mutex::new((start.clone(), Vec::new()));
        Self(Arc::new(Recorder { start, now, ..Recorder::default() }))
    }

    pub(crate) fn directory(&self) -> Arc<dyn Directory> {
        Arc::new(self.clone())
    }

    /// How many operations were recorded.
    pub(crate) fn recorded(&self) -> usize {
        lock(&self.0.now).1.len()
    }

    /// Asks `judge` before each operation from now on: what it gives is how the operation fails.
    pub(crate) fn let_fail(
        &self,
        judge: impl Fn(Act, &str) -> Option<io::ErrorKind> + Send + Sync + 'static,
    ) {
        *lock(&self.0.judge) = Some(Judge(Arc::new(judge)));
    }

    /// Drops what was recorded: no crash is asked for any more.
    pub(crate) fn forget(&self) {
        lock(&self.0.now).1.clear();
    }

    /// Runs something when the next sync has ended, before anybody hears of it.
    pub(crate) fn after_next_sync(&self, act: impl FnOnce() + Send + 'static) {
        *lock(&self.0.after_sync) = Some(Hook(Box::new(act)));
    }

    /// Bytes that are stored of a file.
    pub(crate) fn stored_bytes(&self, name: &str) -> u64 {
        let now = lock(&self.0.now);
        now.0.files[now.0.names[name]].sectors.len() as u64 * SECTOR
    }

    /// What is there when the process dies after the first `count` operations, with the next one done in part.
    pub(crate) fn after_death(&self, count: usize, random: &mut StdRng) -> Self {
        let all = lock(&self.0.now).1.clone();
        let mut operations = all[..count].to_vec();
        if let Some(Operation::Write { file, offset, data }) = all.get(count) {
            let part = data[..random.random_range(0..=data.len())].to_vec();
            operations.push(Operation::Write { file: *file, offset: *offset, data: part });
        }
        let died = Self::new(self.0.start.clone());
        // What was not synced is still to be lost with the power.
        operations.into_iter().for_each(|operation| died.0.apply(operation));
        died
    }

    /// What is there when the host loses its power after the first `count` operations.
    pub(crate) fn after_power_cut(&self, count: usize, seed: u64) -> Self {
        let operations = lock(&self.0.now).1[..count].to_vec();
        let mut platter = Platter::new(&self.0.start, seed);
        let last_sync =
            operations.iter().rposition(|it| matches!(it, Operation::SyncNames)).map_or(0, |at| at + 1);
        let names_until = platter.random.random_range(last_sync..=count);
        for (index, operation) in operations.iter().enumerate() {
            platter.apply(operation, index < names_until);
        }
        Self::new(platter.cut())
    }
}

/// Follows page cache and platter side by side.
struct Platter {
    cache: State,
    kept: State,
    dirty: BTreeSet<(usize, u64)>,
    lengths_dirty: BTreeSet<usize>,
    /// How eagerly each file is written back, so that any of them may be far ahead of the others.
    eagerness: BTreeMap<usize, f64>,
    random: StdRng,
}

impl Platter {
    fn new(start: &State, seed: u64) -> Self {
        Self {
            cache: start.clone(),
            kept: start.clone(),
            dirty: BTreeSet::new(),
            lengths_dirty: BTreeSet::new(),
            eagerness: BTreeMap::new(),
            random: StdRng::seed_from_u64(seed),
        }
    }

    fn apply(&mut self, operation: &Operation, name_is_kept: bool) {
        self.cache.apply(operation);
        match operation {
            Operation::Create { .. } => {
                // The inode is there as soon as anything speaks of it; its name may not be.
                self.kept.files.resize(self.cache.files.len(), Bytes::default());
                if name_is_kept {
                    self.kept.apply(operation);
                }
            }
            Operation::Rename { .. } | Operation::Exchange { .. } | Operation::Remove { .. } => {
                if name_is_kept {
                    self.kept.apply(operation);
                }
            }
            Operation::Write { file, offset, data } => {
                self.touch(*file, *offset / SECTOR..(offset + data.len() as u64).div_ceil(SECTOR));
            }
            Operation::Punch { file, range } => self.touch(*file, range.start / SECTOR..range.end / SECTOR),
            Operation::SetLength { file, length } => {
                let end = self.kept.files[*file].length.div_ceil(SECTOR);
                self.touch(*file, (length / SECTOR).min(end)..end);
            }
            Operation::SyncFile { file } => {
                let all: Vec<_> = self.dirty.range((*file, 0)..(*file + 1, 0)).copied().collect();
                all.into_iter().for_each(|sector| self.write_back(sector));
                self.dirty.retain(|(other, _)| other != file);
                self.lengths_dirty.remove(file);
                self.kept.files[*file].length = self.cache.files[*file].length;
            }
            Operation::SyncNames => {}
        }
    }

    fn touch(&mut self, file: usize, sectors: Range<u64>) {
        let random = &mut self.random;
        let eagerness = *self
            .eagerness
            .entry(file)
            .or_insert_with(|| [0.0, 0.1, 0.5, 0.9, 1.0][random.random_range(0..5)]);
        self.lengths_dirty.insert(file);
        for sector in sectors {
            self.dirty.insert((file, sector));
            if self.random.random_bool(eagerness) {
                self.write_back((file, sector));
            }
        }
        if self.random.random_bool(eagerness) {
            self.kept.files[file].length = self.cache.files[file].length;
        }
    }

    fn write_back(&mut self, (file, sector): (usize, u64)) {
        let cache = &self.cache.files[file];
        let kept = &mut self.kept.files[file];
        match cache.sectors.get(&sector) {
            Some(bytes) => {
                kept.sectors.insert(sector, *bytes);
                kept.length = kept.length.max(cache.length.min((sector + 1) * SECTOR));
            }
            None => {
                kept.sectors.remove(&sector);
            }
        }
    }

    fn cut(mut self) -> State {
        for (file, sector) in std::mem::take(&mut self.dirty) {
            let eagerness = self.eagerness.get(&file).copied().unwrap_or(0.0);
            if self.random.random_bool(eagerness / 2.0) {
                self.write_back((file, sector));
            }
        }
        for file in std::mem::take(&mut self.lengths_dirty) {
            if self.random.random_bool(0.5) {
                self.kept.files[file].length = self.cache.files[file].length;
            }
            let kept = &mut self.kept.files[file];
            let length = kept.length;
            kept.sectors.retain(|sector, _| sector * SECTOR < length);
        }
        self.kept
    }
}

impl Directory for Simulation {
    fn create(&self, name: &str) -> io::Result<Arc<dyn StoredFile>> {
        let file = {
            let now = lock(&self.0.now);
            if now.0.names.contains_key(name) {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            now.0.files.len()
        };
        self.0.record(Operation::Create { file, name: name.to_owned() })?;
        Ok(Arc::new(SimulatedFile { recorder: Arc::clone(&self.0), file }))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn StoredFile>> {
        let file = lock(&self.0.now).0.names.get(name).copied().ok_or(io::ErrorKind::NotFound)?;
        Ok(Arc::new(SimulatedFile { recorder: Arc::clone(&self.0), file }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.open(from)?;
        self.0.record(Operation::Rename { from: from.to_owned(), to: to.to_owned() })
    }

    fn exchange(&self, one: &str, other: &str) -> io::Result<()> {
        self.open(one).and_then(|_| self.open(other))?;
        self.0.record(Operation::Exchange { one: one.to_owned(), other: other.to_owned() })
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.open(name)?;
        self.0.record(Operation::Remove { name: name.to_owned() })
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(lock(&self.0.now).0.names.keys().cloned().collect())
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync(Operation::SyncNames)
    }

    fn path(&self) -> &Path {
        Path::new("simulation")
    }
}

impl StoredFile for SimulatedFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        lock(&self.recorder.now).0.files[self.file].read(buffer, offset)
    }

    fn write_all_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.recorder.record(Operation::Write { file: self.file, offset, data: data.to_vec() })
    }

    fn punch_hole(&self, range: Range<u64>) -> io::Result<()> {
        self.recorder.record(Operation::Punch { file: self.file, range })
    }

    fn sync_data(&self) -> io::Result<()> {
        self.recorder.sync(Operation::SyncFile { file: self.file })
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.recorder.record(Operation::SetLength { file: self.file, length })
    }

    fn length(&self) -> io::Result<u64> {
        Ok(lock(&self.recorder.now).0.files[self.file].length)
    }

    fn data_extents(&self) -> io::Result<Vec<Range<u64>>> {
        let now = lock(&self.recorder.now);
        let file = &now.0.files[self.file];
        Ok(file.sectors.keys().map(|sector| sector * SECTOR..(sector + 1) * SECTOR).collect())
    }

    fn lock(&self, _: Lock) -> io::Result<bool> {
        Ok(true)
    }
}
