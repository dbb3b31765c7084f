//! Disks as files that share blocks with what they were made of.
//!
//! Owns the files `disk.ext4` in the directories of sandboxes and captures, and the images of templates.

use super::copy::{clone_blocking, failed};
use super::{Base, CaptureName, Disks};
use crate::data_dir::DataDir;
use crate::settings::{DiskCopies, StartError};
use crate::stage::Cause;
use crate::view::{Collected, Waiting};
use aenv_protocol::ids::SandboxId;
use aenv_storage::StorageError;
use async_trait::async_trait;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Name of the file in the directory of a capture.
const CAPTURED: &str = "disk.ext4";

/// Makes disks in a data directory.
pub(crate) struct ReflinkDisks {
    dir: DataDir,
    copies: DiskCopies,
}

impl ReflinkDisks {
    pub(crate) fn new(dir: DataDir, copies: DiskCopies) -> Self {
        Self { dir, copies }
    }
}

#[async_trait]
impl Disks for ReflinkDisks {
    fn kind(&self) -> &'static str {
        "reflink"
    }

    async fn check(&self) -> Result<(), StartError> {
        let (dir, copies) = (self.dir.clone(), self.copies);
        let checked = tokio::task::spawn_blocking(move || check_reflink(&dir, copies)).await;
        checked.unwrap_or_else(|error| {
            let reason = error.to_string();
            Err(StartError::DataDir { action: "use", path: self.dir.root().to_owned(), reason })
        })
    }

    async fn make(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause> {
        let base = match base {
            Base::File(path) => path.clone(),
            Base::Layers(_) => {
                let reason = "its base is kept by the block service, which this node does not use";
                return Err(Cause::Unexpected(reason.to_owned()));
            }
        };
        let (path, copies) = (self.dir.sandbox_disk(vm), self.copies);
        blocking(move || {
            remove(&path)?;
            clone_blocking(&base, &path, copies)?;
            let file = File::options().write(true).open(&path).and_then(|file| {
                let larger = file.metadata()?.len() < bytes;
                if larger { file.set_len(bytes) } else { Ok(()) }
            });
            file.map_err(|error| failed("enlarge", &path, error))?;
            Ok(path)
        })
        .await
    }

    async fn keep(&self, vm: &SandboxId, _: &CaptureName, directory: &Path) -> Result<Base, Cause> {
        let (from, to) = (self.dir.sandbox_disk(vm), directory.join(CAPTURED));
        blocking(move || {
            let synced = File::open(&from).and_then(|file| file.sync_all());
            synced.map_err(|error| failed("sync", &from, error))?;
            std::fs::rename(&from, &to).map_err(|error| failed("rename to", &to, error))?;
            Ok(Base::File(to))
        })
        .await
    }

    /// It is in the capture's directory.
    async fn knows(&self, _: &CaptureName) -> Result<bool, Cause> {
        Ok(true)
    }

    async fn remove(&self, vm: &SandboxId) -> Result<(), Cause> {
        let path = self.dir.sandbox_disk(vm);
        blocking(move || remove(&path)).await
    }

    /// It goes with the directory.
    async fn forget_capture(&self, _: &CaptureName) -> Result<(), Cause> {
        Ok(())
    }

    /// Files do not wait: the VMM is told that there is no room.
    async fn waiting(&self, _: &SandboxId) -> Result<Option<Waiting>, Cause> {
        Ok(None)
    }

    /// They go with the directories of their VMs.
    async fn sweep(&self, _: &BTreeSet<SandboxId>) -> Result<Vec<String>, Cause> {
        Ok(Vec::new())
    }

    async fn collect(
        &self,
        _: &BTreeSet<CaptureName>,
        images: &BTreeSet<PathBuf>,
    ) -> Result<Collected, Cause> {
        let (directory, images) = (self.dir.layers(), images.clone());
        blocking(move || {
            let mut collected = Collected::default();
            let list = |error| failed("list", &directory, error);
            for entry in std::fs::read_dir(&directory).map_err(list)? {
                let path = entry.map_err(list)?.path();
                if !images.contains(&path) {
                    // POSIX counts in units of 512 bytes, whatever the filesystem's block size.
                    let blocks = std::fs::symlink_metadata(&path).map_err(list)?.blocks();
                    remove(&path)?;
                    tracing::info!(path = %path.display(), "removed the image of a template that is gone");
                    collected.layers += 1;
                    collected.bytes = collected.bytes.saturating_add(blocks.saturating_mul(512));
                }
            }
            Ok(collected)
        })
        .await
    }
}

/// Finds out whether files can share their blocks.
fn check_reflink(dir: &DataDir, copies: DiskCopies) -> Result<(), StartError> {
    if copies == DiskCopies::FullCopyAllowed {
        return Ok(());
    }
    let (probe, copy) = (dir.root().join("reflink-probe"), dir.root().join("reflink-probe-copy"));
    let fail = |reason: String| StartError::DataDir { action: "use", path: dir.root().to_owned(), reason };
    std::fs::write(&probe, [0_u8; 4096]).map_err(|error| fail(error.to_string()))?;
    let result = match remove(&copy) {
        Err(error) => Err(fail(error.to_string())),
        Ok(()) => clone_blocking(&probe, &copy, copies).map(drop).map_err(|error| fail(error.to_string())),
    };
    for path in [&probe, &copy] {
        remove(path).map_err(|error| fail(error.to_string()))?;
    }
    result
}

fn remove(path: &Path) -> Result<(), StorageError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, Cause> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        Err(error) => Err(Cause::Unexpected(format!("work on a disk ended early: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SandboxId {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn a_disk_is_made_larger_kept_and_made_of_what_was_kept() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let disks = ReflinkDisks::new(dir.clone(), DiskCopies::FullCopyAllowed);
        let image = dir.layers().join("image");
        std::fs::write(&image, [7; 4096]).unwrap();
        let (first, second) = (id("ia"), id("ib"));
        for vm in [&first, &second] {
            std::fs::create_dir_all(dir.sandbox(vm)).unwrap();
        }
        let base = Base::File(image.clone());
        // A second time, as after a lost answer, is no error.
        disks.make(&first, &base, 1 << 20).await.unwrap();
        let path = disks.make(&first, &base, 1 << 20).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
        std::fs::write(&path, [8; 8192]).unwrap();
        let capture = CaptureName { template: "t1".parse().unwrap(), key: "k".to_owned() };
        let kept = disks.keep(&first, &capture, temporary.path()).await.unwrap();
        assert!(!path.exists());
        let child = disks.make(&second, &kept, 4096).await.unwrap();
        assert_eq!(std::fs::read(&child).unwrap(), [8; 8192]);
        assert_eq!(std::fs::read(&image).unwrap(), [7; 4096]);
        disks.remove(&second).await.unwrap();
        disks.remove(&second).await.unwrap();
        assert!(!child.exists());
    }

    #[tokio::test]
    async fn images_that_no_template_has_are_collected() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let disks = ReflinkDisks::new(dir.clone(), DiskCopies::FullCopyAllowed);
        let (used, unused) = (dir.layers().join("used"), dir.layers().join("unused"));
        for path in [&used, &unused] {
            std::fs::write(path, "x").unwrap();
        }
        let removed = disks.collect(&BTreeSet::new(), &BTreeSet::from([used.clone()])).await.unwrap();
        assert_eq!((removed.layers, removed.captures, removed.directories), (1, 0, 0));
        assert!(removed.bytes > 0);
        assert!(used.exists() && !unused.exists());
    }

    #[tokio::test]
    async fn layers_of_the_block_service_are_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let disks = ReflinkDisks::new(DataDir::open(temporary.path()).unwrap(), DiskCopies::FullCopyAllowed);
        let error = disks.make(&id("ia"), &Base::Layers(Vec::new()), 4096).await.unwrap_err();
        assert!(error.to_string().contains("block service"), "{error}");
    }
}
