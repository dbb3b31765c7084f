//! What every test needs: a holder as a process, an exporter, and an end that leaves nothing.
//!
//! Processes are this test program again, with the one test `roles::role`, which is what the variable says.

use crate::memory::FileDisk;
use aenv_export::fuse::{FuseExporter, holder};
use aenv_export::{Content, Export, Exporter as _};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which role a process has.
pub(crate) const ROLE: &str = "AENV_TEST_ROLE";
/// In which directory.
pub(crate) const DIRECTORY: &str = "AENV_TEST_DIRECTORY";
/// Long enough for a crowded machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A process of ours, which ends with the test.
pub(crate) struct Process(pub(crate) Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn start(role: &str, directory: &Path) -> Process {
    let log = File::options().create(true).append(true).open(directory.join(format!("{role}.log"))).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "roles::role", "--nocapture"])
        .env(ROLE, role)
        .env(DIRECTORY, directory)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    Process(child)
}

/// A directory with a running holder.
pub(crate) struct Stage {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) holder: Process,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("mount")).unwrap();
        // Files of the mount are opened by other users, too.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(directory.path(), open).unwrap();
        let holder = start("holder", directory.path());
        Self { directory, holder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn mount(&self, name: &str) -> PathBuf {
        self.path("mount").join(name)
    }

    pub(crate) fn connect(&self) -> FuseExporter {
        FuseExporter::connect(&self.path("socket"), PATIENCE).unwrap()
    }

    /// An exporter that serves, without exports.
    pub(crate) fn serve(&self) -> FuseExporter {
        let exporter = self.connect();
        exporter.start().unwrap();
        exporter
    }

    pub(crate) fn disk(&self, name: &str, size: u64) -> Arc<FileDisk> {
        Arc::new(FileDisk::new(&self.path(name), size))
    }

    pub(crate) fn mounted(&self) -> bool {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.contains(self.path("mount").to_str().unwrap())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let stopped = holder::stop(&self.path("socket"), true);
        if std::thread::panicking() {
            for log in ["holder.log", "daemon.log", "writer.log"] {
                println!("{log}: {}", std::fs::read_to_string(self.path(log)).unwrap_or_default());
            }
        } else {
            stopped.unwrap();
            wait_until("the holder ends", || self.holder.0.try_wait().unwrap().is_some());
            assert!(!self.mounted());
        }
    }
}

pub(crate) fn export(number: u32, name: &str) -> Export {
    Export { number, name: name.to_owned(), owner: 0 }
}

pub(crate) fn add_disk(exporter: &FuseExporter, number: u32, disk: &Arc<FileDisk>) -> PathBuf {
    let content = Content::Disk(Arc::<FileDisk>::clone(disk));
    exporter.add(&export(number, &format!("disk-{number}")), content).unwrap()
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
