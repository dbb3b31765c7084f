//! What most tests need: a directory, an exporter, and the end of every export, also when the test fails.

use crate::backing::Backing;
use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{Content, Export, ExportError, Exporter};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
/// Longer than anything takes here, so a test that hangs fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Stage {
    /// Dropped by some tests, to make another.
    pub(crate) exporter: Option<UblkExporter>,
    pub(crate) directory: TempDir,
    pub(crate) instance: String,
    exports: Vec<Export>,
}

impl Stage {
    /// Nothing where there is no driver.
    pub(crate) fn new(name: &str) -> Option<Self> {
        let instance = format!("test-{name}");
        let exporter = match UblkExporter::new(&Settings::new(&instance)) {
            Ok(exporter) => exporter,
            Err(error @ ExportError::Unavailable { .. }) => {
                // Written past the capture of the test runner, which hides what a passing test prints.
                let line = format!("SKIPPED, ublk is NOT tested: {error}\n");
                std::io::stderr().write_all(line.as_bytes()).unwrap();
                assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        // A filesystem that has direct I/O and holes, if the caller has one.
        let directory = match std::env::var_os("AENV_TEST_AREA") {
            Some(area) => tempfile::tempdir_in(area),
            None => tempfile::tempdir(),
        };
        Some(Self { exporter: Some(exporter), directory: directory.unwrap(), instance, exports: Vec::new() })
    }

    pub(crate) fn exporter(&self) -> &UblkExporter {
        self.exporter.as_ref().unwrap()
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn backing(&self, name: &str, size: u64) -> Arc<Backing> {
        Arc::new(Backing::open(&self.file(name), size))
    }

    /// An export that is removed at the end, whoever adds it.
    pub(crate) fn export(&mut self, number: u32, name: &str) -> Export {
        let export = Export { number, name: name.to_owned(), owner: 0 };
        self.exports.push(export.clone());
        export
    }

    /// A disk of that size behind a device.
    pub(crate) fn disk(&mut self, number: u32, name: &str, size: u64) -> (Export, Arc<Backing>, PathBuf) {
        let export = self.export(number, name);
        let backing = self.backing(name, size);
        let path = self.exporter().add(&export, Content::Disk(Arc::clone(&backing) as _)).unwrap();
        (export, backing, path)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let exporter = self.exporter.take().or_else(|| {
            UblkExporter::new(&Settings::new(&self.instance)).map_err(|error| eprintln!("{error}")).ok()
        });
        let Some(exporter) = exporter else { return };
        for export in &self.exports {
            if let Err(error) = exporter.remove(export) {
                eprintln!("not cleaned up: {error}");
            }
        }
    }
}

/// Opened for direct I/O.
pub(crate) fn open_direct(path: &Path, write: bool) -> File {
    let flags = OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).write(write).custom_flags(flags).open(path).unwrap()
}

/// Memory that direct I/O takes.
pub(crate) struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    pub(crate) fn new(length: usize) -> Self {
        let memory = vec![0; length + 4096];
        let start = memory.as_ptr().align_offset(4096);
        Self { memory, start, length }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

/// Runs a program and gives what it printed.
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}: {text}{complaint}", output.status);
    text
}

/// Waits for something that happens elsewhere.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < PATIENCE, "it never came: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Bytes that tell where they belong.
pub(crate) fn pattern(bytes: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}
