//! What a VMM process prints, its guest's serial console included: bounded, and never in the VMM's way.
//!
//! Owns a named pipe and the log files in a VM's run directory. A guest decides how much is printed, so nothing here grows
//! with it, and nobody has to listen:
//!
//! ```text
//! VMM: stdout, stderr ──▶ pipe (64 KiB; full: what is written is lost, the writer goes on) ──▶ Console ──▶ vmm.log
//!                          │                                                                    │  full ─▶ vmm.log.old
//!                          └ open for reading in the VMM too: no reader, no broken pipe         └▶ last 16 KiB in memory
//! ```
//!
//! The pipe has a name so that the next process of ours can go on reading where this one ended.

use rustix::fs::{CWD, FileType, Mode};
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

const PIPE: &str = "console.pipe";
const LOG: &str = "vmm.log";
const OLD_LOG: &str = "vmm.log.old";
/// Size of one log file; there are two at most.
const LOG_BYTES: u64 = 128 << 10;
/// Kept in memory as evidence.
const TAIL_BYTES: usize = 16 << 10;
/// Read at a time: what the pipe holds.
const CHUNK_BYTES: usize = 64 << 10;

/// The log of the VM in `run_dir`, for evidence.
pub(crate) fn log_path(run_dir: &Path) -> PathBuf {
    run_dir.join(LOG)
}

/// What the VM in `run_dir` printed last, when nobody reads its console any more; empty when it has no log.
pub(crate) fn last_words(run_dir: &Path) -> String {
    // What cannot be read is no evidence.
    read_tail(&run_dir.join(LOG))
        .map_or_else(|_| String::new(), |tail| String::from_utf8_lossy(&tail).into_owned())
}

/// The file in `run_dir` that is of no use when the VM has ended. The log stays.
pub(crate) fn scratch_file(run_dir: &Path) -> PathBuf {
    run_dir.join(PIPE)
}

/// The reading end of a VMM's output.
#[derive(Debug)]
pub(crate) struct Console {
    pipe: pipe::Receiver,
    /// Absent after it could not be written.
    log: Option<Log>,
    tail: Vec<u8>,
    chunk: Vec<u8>,
}

impl Console {
    /// Makes the pipe and an empty log; returns what the VMM is to write to, too.
    ///
    /// # Errors
    /// When a file cannot be made. Panics outside of a tokio runtime.
    pub(crate) fn create(run_dir: &Path) -> io::Result<(File, Self)> {
        let path = run_dir.join(PIPE);
        for stale in [&path, &run_dir.join(OLD_LOG)] {
            match std::fs::remove_file(stale) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        File::create(run_dir.join(LOG))?;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let writer = OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(&path)?;
        Ok((writer, Self::open(run_dir)?))
    }

    /// Goes on where an earlier reader ended.
    ///
    /// # Errors
    /// When there is no pipe or the log cannot be opened. Panics outside of a tokio runtime.
    pub(crate) fn open(run_dir: &Path) -> io::Result<Self> {
        let pipe = pipe::OpenOptions::new().open_receiver(run_dir.join(PIPE))?;
        let log = Log::open(run_dir)?;
        let tail = read_tail(&log.path)?;
        Ok(Self { pipe, log: Some(log), tail, chunk: vec![0; CHUNK_BYTES] })
    }

    /// Waits for output and keeps it. `None` when no process has the pipe open for writing any more. May be cancelled.
    ///
    /// # Errors
    /// When the pipe cannot be read. A log that cannot be written is given up, since reading must go on.
    pub(crate) async fn read(&mut self) -> io::Result<Option<&[u8]>> {
        let length = self.pipe.read(&mut self.chunk).await?;
        let chunk = &self.chunk[..length];
        if chunk.is_empty() {
            return Ok(None);
        }
        // A short write to the page cache: not worth a thread of its own.
        if let Some(log) = &mut self.log
            && let Err(error) = log.append(chunk)
        {
            tracing::error!(path = %log.path.display(), %error, "cannot write a VMM's log any more");
            self.log = None;
        }
        self.tail.extend_from_slice(chunk);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL_BYTES));
        Ok(Some(chunk))
    }

    /// The last that was printed.
    pub(crate) fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }
}

/// A file that makes room by putting what it holds aside, once.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    file: File,
    length: u64,
}

impl Log {
    fn open(run_dir: &Path) -> io::Result<Self> {
        let path = run_dir.join(LOG);
        let file = OpenOptions::new().append(true).create(true).open(&path)?;
        let length = file.metadata()?.len();
        Ok(Self { path, file, length })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let added = bytes.len() as u64;
        if self.length + added > LOG_BYTES {
            std::fs::rename(&self.path, self.path.with_file_name(OLD_LOG))?;
            self.file = OpenOptions::new().append(true).create_new(true).open(&self.path)?;
            self.length = 0;
        }
        self.file.write_all(bytes)?;
        self.length += added;
        Ok(())
    }
}

fn read_tail(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES as u64)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES as u64).read_to_end(&mut tail)?;
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_printed_is_kept_and_the_end_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let (mut writer, mut console) = Console::create(directory.path()).unwrap();
        writer.write_all(b"one\n").unwrap();
        assert_eq!(console.read().await.unwrap(), Some(&b"one\n"[..]));
        drop(console);
        // Nobody reads: the writer is not disturbed, and the next reader gets it.
        writer.write_all(b"two\n").unwrap();
        let mut console = Console::open(directory.path()).unwrap();
        assert_eq!(console.tail(), "one\n");
        assert_eq!(console.read().await.unwrap(), Some(&b"two\n"[..]));
        drop(writer);
        assert_eq!(console.read().await.unwrap(), None);
        assert_eq!(console.tail(), "one\ntwo\n");
        assert_eq!(std::fs::read_to_string(directory.path().join(LOG)).unwrap(), "one\ntwo\n");
    }

    #[tokio::test]
    async fn a_flood_that_nobody_reads_neither_blocks_nor_grows() {
        let directory = tempfile::tempdir().unwrap();
        let (mut writer, mut console) = Console::create(directory.path()).unwrap();
        let mut accepted = 0;
        let error = loop {
            match writer.write(&[b'x'; 4096]) {
                Ok(length) => accepted += length,
                Err(error) => break error,
            }
            assert!(accepted <= 1 << 20, "the pipe has no bound");
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let read = console.read().await.unwrap().unwrap().len();
        assert!(read > 0 && writer.write(b"again").is_ok());
    }

    #[tokio::test]
    async fn the_log_has_a_bound_and_keeps_the_newest() {
        let directory = tempfile::tempdir().unwrap();
        let (mut writer, mut console) = Console::create(directory.path()).unwrap();
        for number in 0..20_u8 {
            writer.write_all(&[b'a' + number; 30 << 10]).unwrap();
            while console.tail.last() != Some(&(b'a' + number)) {
                console.read().await.unwrap();
            }
        }
        let size = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().len();
        assert!(size(LOG) <= LOG_BYTES && size(OLD_LOG) <= LOG_BYTES);
        assert!(size(LOG) + size(OLD_LOG) > LOG_BYTES);
        let newest = std::fs::read(directory.path().join(LOG)).unwrap();
        assert_eq!(newest.last(), Some(&(b'a' + 19)));
        assert_eq!(console.tail().len(), TAIL_BYTES);
        // A new VM in the same directory starts afresh.
        drop((writer, console));
        Console::create(directory.path()).unwrap();
        assert_eq!(size(LOG), 0);
        assert!(!directory.path().join(OLD_LOG).exists());
    }
}
