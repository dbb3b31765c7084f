//! Where things lie in the data directory, and who may use it.
//!
//! ```text
//! <data>/lock                                     held by the one node process
//! <data>/journal.sqlite
//! <data>/templates/<id>/template.json             written last: a template without it does not exist
//! <data>/templates/<id>/captures/<key>/           {memory, state, disk.ext4}; capture.json written last
//! <data>/storage/layers/<sha256>.layer            root filesystems of templates, never changed once they are there
//! <data>/storage/layers/<sha256>.raw              the same as a flat file, where disks are not made of layers
//! <data>/storage/{disks,images}/                  of the block service, where that is used
//! <data>/sandboxes/<id>/disk.ext4                 where the block service is not used
//! <data>/sandboxes/<id>/captures/<number>/        {state, changes} of a save; {disk.ext4, memory} where the block service is
//!                                                 not used
//! <data>/sandboxes/<id>/run/                      sockets, logs and jail of the VMM
//! <data>/snapshots/<id>/                         {state} of a snapshot; {disk.ext4, memory} where the block service is not used
//! <data>/vmm/                                     roots of jails, made by the QEMU driver and not touched here
//! ```
//!
//! Owns the lock. Knows nothing of what the files contain.

use crate::settings::StartError;
use aenv_protocol::ids::{SandboxId, TemplateId};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Paths inside one data directory.
#[derive(Debug, Clone)]
pub(crate) struct DataDir {
    root: PathBuf,
}

impl DataDir {
    /// Makes the directories that are missing and resolves the path.
    pub(crate) fn open(root: &Path) -> Result<Self, StartError> {
        let fail = |action| {
            move |error: std::io::Error| StartError::DataDir {
                action,
                path: root.to_owned(),
                reason: error.to_string(),
            }
        };
        std::fs::create_dir_all(root).map_err(fail("make"))?;
        let root = root.canonicalize().map_err(fail("resolve"))?;
        // The journal holds tokens and environments, the disks whatever users wrote.
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o700)).map_err(fail("close"))?;
        let dir = Self { root };
        for child in [dir.templates(), dir.sandboxes(), dir.snapshots(), dir.layers()] {
            std::fs::create_dir_all(&child).map_err(fail("make a directory in"))?;
        }
        Ok(dir)
    }

    /// Takes the directory for this process; another holder is an error. Freed when the result is dropped.
    pub(crate) fn lock(&self) -> Result<DataDirLock, StartError> {
        let path = self.root.join("lock");
        let fail = |action, reason: String| StartError::DataDir { action, path: path.clone(), reason };
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|error| fail("open", error.to_string()))?;
        match file.try_lock() {
            Ok(()) => Ok(DataDirLock { _file: file }),
            Err(std::fs::TryLockError::WouldBlock) => Err(StartError::InUse(self.root.clone())),
            Err(std::fs::TryLockError::Error(error)) => Err(fail("lock", error.to_string())),
        }
    }

    /// The directory itself.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The journal's file.
    pub(crate) fn journal(&self) -> PathBuf {
        self.root.join("journal.sqlite")
    }

    /// The journal's file and those that SQLite keeps beside it.
    pub(crate) fn journal_files(&self) -> [PathBuf; 3] {
        ["", "-wal", "-shm"].map(|suffix| self.root.join(format!("journal.sqlite{suffix}")))
    }

    /// Where templates lie.
    pub(crate) fn templates(&self) -> PathBuf {
        self.root.join("templates")
    }

    /// Where one template lies.
    pub(crate) fn template(&self, id: &TemplateId) -> PathBuf {
        self.templates().join(id.as_str())
    }

    /// Where the images of templates lie.
    pub(crate) fn layers(&self) -> PathBuf {
        self.root.join("storage/layers")
    }

    /// The image whose flat form has this SHA-256, in hex, as a layer.
    pub(crate) fn image_layer(&self, sha256: &str) -> PathBuf {
        self.layers().join(format!("{sha256}.layer"))
    }

    /// The image with this SHA-256, in hex, as a flat file.
    pub(crate) fn image(&self, sha256: &str) -> PathBuf {
        self.layers().join(format!("{sha256}.raw"))
    }

    /// Where snapshots lie.
    pub(crate) fn snapshots(&self) -> PathBuf {
        self.root.join("snapshots")
    }

    /// Where one snapshot lies.
    pub(crate) fn snapshot(&self, id: &TemplateId) -> PathBuf {
        self.snapshots().join(id.as_str())
    }

    /// Where sandboxes lie.
    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.root.join("sandboxes")
    }

    /// Where one sandbox lies.
    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.as_str())
    }

    /// A sandbox's disk.
    pub(crate) fn sandbox_disk(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("disk.ext4")
    }

    /// Where the saves of a sandbox lie.
    pub(crate) fn sandbox_saves(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("captures")
    }

    /// Where one save of a sandbox lies.
    pub(crate) fn sandbox_save(&self, id: &SandboxId, number: u64) -> PathBuf {
        self.sandbox_saves(id).join(number.to_string())
    }

    /// A sandbox's directory for its VMM.
    pub(crate) fn sandbox_run(&self, id: &SandboxId) -> PathBuf {
        self.sandbox(id).join("run")
    }

    /// Refuses a filesystem that does not tell the data of a sparse file from its holes page by page: changed pages of a
    /// guest's memory are told like that, and a hole that looked like data would be taken for zeros that the guest wrote.
    pub(crate) fn check_holes(&self) -> Result<(), StartError> {
        let path = self.root.join("holes-probe");
        let fail = |reason: String| StartError::DataDir { action: "use", path: self.root.clone(), reason };
        let told = tells_holes(&path);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(fail(error.to_string())),
            _ => {}
        }
        match told {
            Ok(true) => Ok(()),
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                // What runs is to be adopted all the same; nothing is paused without room.
                tracing::warn!(data_dir = %self.root.display(), "no room to find out whether the filesystem tells data from holes");
                Ok(())
            }
            Ok(false) => Err(fail(
                "its filesystem does not tell data from holes in units of 4096 bytes: use ext4, XFS or btrfs with their usual block size"
                    .to_owned(),
            )),
            Err(error) => Err(fail(format!("its filesystem cannot be asked for holes: {error}"))),
        }
    }

    /// Bytes an unprivileged writer could still use here.
    pub(crate) fn free_bytes(&self) -> std::io::Result<u64> {
        let stat = rustix::fs::statvfs(&self.root)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }
}

/// Whether the one page of data of a new file is told from the holes around it.
fn tells_holes(path: &Path) -> std::io::Result<bool> {
    use rustix::fs::{SeekFrom, seek};
    const PAGE: u64 = 4096;
    let file = File::create(path)?;
    file.set_len(3 * PAGE)?;
    file.write_all_at(&[1; PAGE as usize], PAGE)?;
    let (data, hole) = (seek(&file, SeekFrom::Data(0))?, seek(&file, SeekFrom::Hole(PAGE))?);
    let behind = seek(&file, SeekFrom::Data(2 * PAGE));
    Ok((data, hole, behind) == (PAGE, 2 * PAGE, Err(rustix::io::Errno::NXIO)))
}

/// Proof that this process alone uses the data directory.
#[derive(Debug)]
pub(crate) struct DataDirLock {
    _file: File,
}

/// Writes a small file so that after a crash it is there in full or not at all.
pub(crate) fn write_durably(path: &Path, content: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    let directory = path.parent().ok_or(std::io::ErrorKind::InvalidInput)?;
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_user_is_refused_until_the_first_is_gone() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let lock = dir.lock().unwrap();
        assert!(matches!(dir.lock(), Err(StartError::InUse(_))));
        drop(lock);
        assert!(dir.lock().is_ok());
    }

    /// A filesystem in memory that knows no holes. Unmounted when dropped.
    struct Ramfs(tempfile::TempDir);

    impl Ramfs {
        fn mount() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut mount = std::process::Command::new("mount");
            assert!(mount.args(["-t", "ramfs", "ramfs"]).arg(directory.path()).status().unwrap().success());
            Self(directory)
        }
    }

    impl Drop for Ramfs {
        fn drop(&mut self) {
            let unmounted = std::process::Command::new("umount").arg(self.0.path()).status();
            assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
        }
    }

    #[test]
    fn a_filesystem_that_tells_no_holes_is_refused() {
        let temporary = tempfile::tempdir().unwrap();
        DataDir::open(temporary.path()).unwrap().check_holes().unwrap();
        assert!(!temporary.path().join("holes-probe").exists());
        // Only root may mount.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let ramfs = Ramfs::mount();
        let refused = DataDir::open(ramfs.0.path()).unwrap().check_holes().unwrap_err().to_string();
        assert!(refused.contains("holes") && refused.contains("ext4"), "{refused}");
    }
}
