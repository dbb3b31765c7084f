//! Disks as files that share blocks with what they were made of.
//!
//! Owns the files `disk.ext4` in the directories of sandboxes, captures, saves and snapshots, the files `memory` of saves and
//! snapshots, and the images of templates. The memory of a save is one flat file, a copy of what it is laid over that shares its blocks: there
//! are no layers.

use super::copy::{clone_blocking, copy_extents, failed};
use super::{
    Base, CaptureName, Disks, ListSnapshots, MemoryChain, MemoryLayer, MemoryParts, Needed, SaveName,
    SealedDisk, SnapshotParts,
};
use crate::data_dir::DataDir;
use crate::settings::{DiskCopies, StartError};
use crate::stage::Cause;
use crate::template::ImageForm;
use crate::view::{Collected, Waiting};
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_storage::StorageError;
use aenv_vmm::CaptureBase;
use async_trait::async_trait;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Name of the file in the directory of a capture.
const CAPTURED: &str = "disk.ext4";

/// Name of the file in the directory of a save.
const MEMORY: &str = "memory";

/// Makes disks in a data directory.
pub(crate) struct ReflinkDisks {
    dir: DataDir,
    copies: DiskCopies,
}

impl ReflinkDisks {
    pub(crate) fn new(dir: DataDir, copies: DiskCopies) -> Self {
        Self { dir, copies }
    }

    fn saved(&self, save: &SaveName, file: &str) -> PathBuf {
        self.dir.sandbox_save(&save.vm, save.number).join(file)
    }
}

#[async_trait]
impl Disks for ReflinkDisks {
    fn kind(&self) -> &'static str {
        "reflink"
    }

    fn image_form(&self) -> ImageForm {
        ImageForm::Flat
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
        let base = file_of(base)?;
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

    /// Which blocks of a file are shared with another one is not known without looking at all of them.
    async fn seal(&self, save: &SaveName) -> Result<SealedDisk, Cause> {
        let (from, to, copies) = (self.dir.sandbox_disk(&save.vm), self.saved(save, CAPTURED), self.copies);
        blocking(move || {
            remove(&to)?;
            clone_blocking(&from, &to, copies)?;
            Ok(SealedDisk { base: Base::File(to), stored_bytes: None })
        })
        .await
    }

    async fn hold(&self, _: &SaveName, base: &Base) -> Result<(), Cause> {
        let path = file_of(base)?;
        blocking(move || sync(&path)).await
    }

    async fn make_anew(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause> {
        self.make(vm, base, bytes).await
    }

    async fn store_memory(&self, save: &SaveName, parts: &MemoryParts) -> Result<MemoryLayer, Cause> {
        let base = match parts.base {
            CaptureBase::Nothing => None,
            CaptureBase::Start => flat(&parts.start)?,
            CaptureBase::PreviousCapture => flat(&parts.below)?,
        };
        let (changes, bytes) = (parts.changes.clone(), parts.bytes);
        let (to, copies) = (self.saved(save, MEMORY), self.copies);
        blocking(move || {
            remove(&to)?;
            let stored_bytes = lay_over(base.as_deref(), &changes, &to, bytes, copies)?;
            sync(&to)?;
            Ok(MemoryLayer { chain: MemoryChain { image: Some(to), layers: Vec::new() }, stored_bytes })
        })
        .await
    }

    async fn memory_image(&self, save: &SaveName, chain: &MemoryChain, _: u64) -> Result<PathBuf, Cause> {
        flat(chain)?.ok_or_else(|| Cause::Unexpected(format!("save {} has no memory", save.number)))
    }

    async fn forget_save(&self, save: &SaveName) -> Result<(), Cause> {
        let paths = [self.saved(save, CAPTURED), self.saved(save, MEMORY)];
        blocking(move || paths.iter().try_for_each(|path| remove(path))).await
    }

    /// There are no layers.
    async fn forget_layer(&self, _: &SaveName, _: &BTreeSet<PathBuf>) -> Result<bool, Cause> {
        Ok(true)
    }

    async fn release_layer(&self, _: &Path) -> Result<(), Cause> {
        Ok(())
    }

    /// Copies that share blocks.
    async fn hand_over(&self, snapshot: &TemplateId, parts: &SnapshotParts) -> Result<SnapshotParts, Cause> {
        let directory = self.dir.snapshot(snapshot);
        let disk = file_of(&parts.disk)?;
        let memory = parts.memory.as_ref().map(flat).transpose()?;
        let copies = self.copies;
        blocking(move || {
            std::fs::create_dir_all(&directory).map_err(|error| failed("make", &directory, error))?;
            let copy = |from: &Path, name: &str| {
                let (to, new) = (directory.join(name), directory.join(format!(".{name}.new")));
                remove(&new)?;
                clone_blocking(from, &new, copies)?;
                sync(&new)?;
                // Whole, or as it was: what is copied again may be what was copied before.
                std::fs::rename(&new, &to).map_err(|error| failed("rename", &new, error))?;
                sync(&to)?;
                Ok(to)
            };
            let disk = Base::File(copy(&disk, CAPTURED)?);
            let copied = |image: Option<PathBuf>| {
                let image = image.map(|image| copy(&image, MEMORY)).transpose()?;
                Ok(MemoryChain { image, layers: Vec::new() })
            };
            Ok(SnapshotParts { disk, memory: memory.map(copied).transpose()? })
        })
        .await
    }

    async fn snapshot_memory(
        &self,
        snapshot: &TemplateId,
        chain: &MemoryChain,
        _: u64,
    ) -> Result<PathBuf, Cause> {
        flat(chain)?.ok_or_else(|| Cause::Unexpected(format!("snapshot {snapshot} has no memory")))
    }

    async fn forget_snapshot(&self, snapshot: &TemplateId, _: Option<&SnapshotParts>) -> Result<(), Cause> {
        let directory = self.dir.snapshot(snapshot);
        blocking(move || [CAPTURED, MEMORY].iter().try_for_each(|name| remove(&directory.join(name)))).await
    }

    /// Files do not wait: the VMM is told that there is no room.
    async fn waiting(&self, _: &SandboxId) -> Result<Option<Waiting>, Cause> {
        Ok(None)
    }

    /// They go with the directories of their VMs.
    async fn sweep(&self, _: &BTreeSet<SandboxId>) -> Result<Vec<String>, Cause> {
        Ok(Vec::new())
    }

    /// Snapshots go with their directories.
    async fn collect(&self, needed: &Needed, _: &ListSnapshots<'_>) -> Result<Collected, Cause> {
        let (directory, images) = (self.dir.layers(), needed.images.clone());
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

fn file_of(base: &Base) -> Result<PathBuf, Cause> {
    match base {
        Base::File(path) => Ok(path.clone()),
        Base::Layers(_) => Err(of_the_service("its base is")),
    }
}

/// The only file of a memory; none when it is all zeros.
fn flat(chain: &MemoryChain) -> Result<Option<PathBuf>, Cause> {
    if chain.layers.is_empty() {
        Ok(chain.image.clone())
    } else {
        Err(of_the_service("layers of its memory are"))
    }
}

fn of_the_service(what: &str) -> Cause {
    Cause::Unexpected(format!("{what} kept by the block service, which this node does not use"))
}

/// Makes `to` a copy of `base` with the data of `changes` over it; tells how much that was.
fn lay_over(
    base: Option<&Path>,
    changes: &Path,
    to: &Path,
    bytes: u64,
    copies: DiskCopies,
) -> Result<u64, StorageError> {
    if let Some(base) = base {
        clone_blocking(base, to, copies)?;
    }
    let open = || File::options().write(true).create(true).truncate(false).open(to);
    let file = open().map_err(|error| failed("make", to, error))?;
    file.set_len(bytes).map_err(|error| failed("size", to, error))?;
    let from = File::open(changes).map_err(|error| failed("open", changes, error))?;
    copy_extents(&from, &file).map_err(|error| failed("copy the changes to", to, error))
}

/// Makes a file and its name durable.
fn sync(path: &Path) -> Result<(), StorageError> {
    let fail = |error| failed("sync", path, error);
    File::open(path).and_then(|file| file.sync_all()).map_err(fail)?;
    let directory = path.parent().ok_or_else(|| fail(ErrorKind::InvalidInput.into()))?;
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(fail)
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
    use std::os::unix::fs::FileExt as _;

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
    async fn a_save_is_kept_whatever_is_written_and_the_disk_can_be_made_of_it_again() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let disks = ReflinkDisks::new(dir.clone(), DiskCopies::FullCopyAllowed);
        let save = SaveName { vm: id("ia"), number: 1 };
        std::fs::create_dir_all(dir.sandbox_save(&save.vm, 1)).unwrap();
        let disk = dir.sandbox_disk(&save.vm);
        std::fs::write(&disk, "as saved").unwrap();
        let sealed = disks.seal(&save).await.unwrap();
        assert_eq!(disks.seal(&save).await.unwrap(), sealed, "it may be asked again");
        let sealed = sealed.base;
        disks.hold(&save, &sealed).await.unwrap();
        std::fs::write(&disk, "and written since").unwrap();
        for _ in 0..2 {
            let path = disks.make_anew(&save.vm, &sealed, 1).await.unwrap();
            assert_eq!(std::fs::read(path).unwrap(), b"as saved");
        }
        disks.forget_save(&save).await.unwrap();
        disks.forget_save(&save).await.unwrap();
        assert_eq!(std::fs::read_dir(dir.sandbox_save(&save.vm, 1)).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn memory_is_laid_over_what_its_changes_belong_to() {
        const PAGE: u64 = 4096;
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let disks = ReflinkDisks::new(dir.clone(), DiskCopies::FullCopyAllowed);
        let save = SaveName { vm: id("ia"), number: 3 };
        std::fs::create_dir_all(dir.sandbox_save(&save.vm, 3)).unwrap();
        let file = |name: &str, pages: &[(u64, u8)]| {
            let path = temporary.path().join(name);
            let file = File::create(&path).unwrap();
            file.set_len(4 * PAGE).unwrap();
            for (page, value) in pages {
                file.write_all_at(&[*value; PAGE as usize], page * PAGE).unwrap();
            }
            path
        };
        let chain = |path: PathBuf| MemoryChain { image: Some(path), layers: Vec::new() };
        let parts = |base| MemoryParts {
            below: chain(file("below", &[(0, 1), (1, 1), (2, 1)])),
            start: chain(file("start", &[(0, 2), (1, 2), (2, 2)])),
            // The zeros of page 1 are data.
            changes: file("changes", &[(1, 0), (3, 9)]),
            base,
            bytes: 4 * PAGE,
        };
        let wanted = [
            (CaptureBase::Nothing, [0, 0, 0, 9]),
            (CaptureBase::Start, [2, 0, 2, 9]),
            (CaptureBase::PreviousCapture, [1, 0, 1, 9]),
        ];
        for (base, pages) in wanted {
            let layer = disks.store_memory(&save, &parts(base)).await.unwrap();
            assert_eq!(layer.stored_bytes, 2 * PAGE);
            let image = disks.memory_image(&save, &layer.chain, 4 * PAGE).await.unwrap();
            let content = std::fs::read(image).unwrap();
            let seen: Vec<_> = content.chunks(PAGE as usize).map(|page| page[0]).collect();
            assert_eq!(seen, pages, "{base:?}");
        }
        let layered = MemoryChain { image: None, layers: vec![PathBuf::from("layer")] };
        assert!(disks.memory_image(&save, &layered, PAGE).await.is_err());
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
        let removed = disks
            .collect(&Needed { images: BTreeSet::from([used.clone()]), ..Needed::default() }, &BTreeSet::new)
            .await
            .unwrap();
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
