//! What is stored for the saves of VMs. The steps are drawn in the module above.
//!
//! Owns nothing but the rule how a save's images and files are called.

use super::{ServiceDisks, disk_name, name};
use crate::disks::{Base, Disks as _, MemoryChain, MemoryLayer, MemoryParts, SaveName, SealedDisk};
use crate::stage::Cause;
use aenv_protocol::ids::SandboxId;
use aenv_storage::StorageError;
use aenv_storage::block_service::{
    CreateImage, ImageView, LayerRef, Name, ReleaseLayer, ServiceError, write_back,
};
use aenv_storage::cache::BlockCache;
use aenv_storage::memory_chain::{self, MemoryFiles, NewLayer, Over};
use aenv_vmm::CaptureBase;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// First letters of the names of our images: the disk of a save, the files of its memory, the same to be mapped.
const DISK: &str = "s-";
const MEMORY: &str = "k-";
const MAPPED: &str = "m-";
/// First letters of the names of our layer files.
const LAYER: &str = "memory-";
/// Those of a layer that is being written, see [`aenv_storage::commit::write_layer_file`].
const HALF_WRITTEN: &str = ".layer-";
/// Our layers are not compressed, so nothing of them is cached.
const CACHE_BYTES: u64 = 1 << 20;

/// The VM that an image belongs to, when it is one of a save.
pub(super) fn vm_of(image: &Name) -> Option<&str> {
    let rest = [DISK, MEMORY, MAPPED].iter().find_map(|kind| image.as_str().strip_prefix(kind))?;
    let (vm, number) = rest.rsplit_once('-')?;
    number.parse::<u64>().is_ok().then_some(vm)
}

fn image_name(kind: &str, save: &SaveName) -> Result<Name, Cause> {
    name(&format!("{kind}{}-{}", save.vm, save.number))
}

impl ServiceDisks {
    fn layer_path(&self, save: &SaveName) -> PathBuf {
        self.layers.join(format!("{LAYER}{}-{}", save.vm, save.number))
    }

    pub(super) async fn seal_disk(&self, save: &SaveName) -> Result<SealedDisk, Cause> {
        let name = disk_name(&save.vm)?;
        let disk = self.client.disk(&name).await?;
        if let Some(path) = disk.path {
            // The VMM writes to a block device by way of the kernel's cache.
            blocking(move || write_back(&path)).await?;
        }
        let sealed = self.client.seal_disk(&name, disk.writable_top).await?;
        Ok(SealedDisk { base: Base::Layers(sealed.layers), stored_bytes: sealed.stored_bytes })
    }

    pub(super) async fn hold_disk(&self, save: &SaveName, base: &Base) -> Result<(), Cause> {
        let name = disk_name(&save.vm)?;
        let top = match base {
            Base::Layers(layers) => layers.last(),
            Base::File(_) => None,
        };
        let Some(top @ LayerRef::Top { disk, .. }) = top else {
            return Err(Cause::Unexpected(format!("what was sealed of {} is no top of its disk", save.vm)));
        };
        if *disk != name {
            return Err(Cause::Unexpected(format!("{disk} was sealed, not {name}")));
        }
        // An image keeps tops, but the disk's own record has to survive a power cut as well.
        self.client.flush_disk(&name).await?;
        // That top alone: what is below of it is the disk's, which may merge it.
        self.keep_layers(image_name(DISK, save)?, vec![top.clone()]).await.map(drop)
    }

    pub(super) async fn keep_layers(&self, name: Name, layers: Vec<LayerRef>) -> Result<ImageView, Cause> {
        let image = CreateImage { name, layers, owner: 0, exported: false };
        Ok(self.client.create_image(&image).await?)
    }

    pub(super) async fn rewind_or_make(
        &self,
        vm: &SandboxId,
        base: &Base,
        bytes: u64,
    ) -> Result<PathBuf, Cause> {
        let name = disk_name(vm)?;
        if let Base::Layers(layers) = base
            && let Some(LayerRef::Top { disk, top }) = layers.last()
            && *disk == name
        {
            let disk = self.client.rewind_disk(&name, top).await?;
            return disk
                .path
                .ok_or_else(|| Cause::Unexpected(format!("the block service does not export disk {vm}")));
        }
        self.remove(vm).await?;
        self.make(vm, base, bytes).await
    }

    pub(super) async fn store_layer(
        &self,
        save: &SaveName,
        parts: &MemoryParts,
    ) -> Result<MemoryLayer, Cause> {
        let (path, keeper) = (self.layer_path(save), image_name(MEMORY, save)?);
        // Both go with the thread that writes, which goes on when this is given up.
        let held = (self.turn(&save.vm).await, Arc::clone(&self.writing).read_owned().await);
        match self.client.image(&keeper).await {
            // It was stored, and the answer got lost.
            Ok(image) => {
                let stored_bytes = blocking(move || length(&path)).await?;
                return Ok(MemoryLayer { chain: chain_of(&image.layers), stored_bytes });
            }
            Err(ServiceError::NotFound(_)) => {}
            Err(error) => return Err(error.into()),
        }
        let parts = parts.clone();
        let made = blocking(move || {
            let (below, start) = (files_of(&parts.below), files_of(&parts.start));
            let over = match parts.base {
                CaptureBase::Nothing => Over::Nothing,
                CaptureBase::Start => Over::Start,
                CaptureBase::PreviousCapture => Over::Below,
            };
            let (changes, bytes) = (parts.changes.as_path(), parts.bytes);
            let new = NewLayer { below: &below, start: &start, changes, over, bytes };
            Ok((memory_chain::write(&new, &path, &Arc::new(BlockCache::new(CACHE_BYTES)))?, held))
        });
        let (made, _held) = made.await?;
        let chain = MemoryChain { image: made.files.image, layers: made.files.layers };
        self.keep_layers(keeper, layers_of(&chain)).await?;
        Ok(MemoryLayer { chain, stored_bytes: made.summary.layer_bytes })
    }

    pub(super) async fn export_memory(
        &self,
        save: &SaveName,
        chain: &MemoryChain,
        bytes: u64,
    ) -> Result<PathBuf, Cause> {
        self.export_chain(image_name(MAPPED, save)?, save.vm.as_str(), chain, bytes).await
    }

    /// A file that shows a memory, which is that of `owner`.
    pub(super) async fn export_chain(
        &self,
        name: Name,
        owner: &str,
        chain: &MemoryChain,
        bytes: u64,
    ) -> Result<PathBuf, Cause> {
        if let (Some(flat), true) = (&chain.image, chain.layers.is_empty()) {
            return Ok(flat.clone());
        }
        let image = CreateImage { name, layers: layers_of(chain), owner: 0, exported: true };
        let image = self.client.create_image(&image).await?;
        if let Some(failure) = image.failure {
            return Err(Cause::Unexpected(format!("the memory of {owner} cannot be read: {failure}")));
        }
        if image.size != bytes {
            let size = image.size;
            return Err(Cause::Unexpected(format!("the memory of {owner} has {size} bytes, not {bytes}")));
        }
        image.path.ok_or_else(|| Cause::Unexpected(format!("the memory of {owner} is not exported")))
    }

    pub(super) async fn remove_save(&self, save: &SaveName) -> Result<(), Cause> {
        let _turn = self.turn(&save.vm).await;
        for kind in [MAPPED, MEMORY, DISK] {
            self.client.delete_image(&image_name(kind, save)?).await?;
        }
        Ok(())
    }

    pub(super) async fn remove_layer(
        &self,
        save: &SaveName,
        used: &BTreeSet<PathBuf>,
    ) -> Result<bool, Cause> {
        let path = self.layer_path(save);
        // By their names: the directory may have been spelled in another way when they were written.
        if used.iter().any(|layer| layer.file_name() == path.file_name()) {
            return Ok(false);
        }
        let _turn = self.turn(&save.vm).await;
        self.release_file(&path).await?;
        Ok(true)
    }

    /// Removes a layer file unless something in the service is made of it.
    pub(super) async fn release_file(&self, file: &Path) -> Result<(), Cause> {
        // What was put there by others is theirs.
        let is_ours =
            file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(LAYER.as_bytes()));
        if is_ours {
            self.client.release_layer(&ReleaseLayer { file: file.to_owned() }).await?;
        }
        Ok(())
    }

    /// Removes what a node that was killed was writing. Nothing is being written yet.
    pub(super) async fn remove_half_written(&self) -> Result<(), Cause> {
        let directory = self.layers.clone();
        blocking(move || {
            let entries = match std::fs::read_dir(&directory) {
                Ok(entries) => entries,
                // Nothing was ever stored.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(failed("list", &directory, error)),
            };
            for entry in entries {
                let entry = entry.map_err(|error| failed("list", &directory, error))?;
                if entry.file_name().as_encoded_bytes().starts_with(HALF_WRITTEN.as_bytes()) {
                    remove_if_there(&entry.path())?;
                }
            }
            Ok(())
        })
        .await
    }
}

fn files_of(chain: &MemoryChain) -> MemoryFiles {
    MemoryFiles { image: chain.image.clone(), layers: chain.layers.clone() }
}

/// As the service calls them.
pub(super) fn layers_of(chain: &MemoryChain) -> Vec<LayerRef> {
    let flat = chain.image.iter().map(|raw| LayerRef::Raw { raw: raw.clone() });
    flat.chain(chain.layers.iter().map(|file| LayerRef::File { file: file.clone() })).collect()
}

fn chain_of(layers: &[LayerRef]) -> MemoryChain {
    let mut chain = MemoryChain::default();
    for layer in layers {
        match layer {
            LayerRef::Raw { raw } => chain.image = Some(raw.clone()),
            LayerRef::File { file } => chain.layers.push(file.clone()),
            LayerRef::Top { .. } => {}
        }
    }
    chain
}

fn remove_if_there(path: &std::path::Path) -> Result<(), StorageError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed("remove", path, error)),
        _ => Ok(()),
    }
}

fn length(path: &std::path::Path) -> Result<u64, StorageError> {
    std::fs::metadata(path).map(|metadata| metadata.len()).map_err(|error| failed("look at", path, error))
}

fn failed(action: &'static str, path: &std::path::Path, source: std::io::Error) -> StorageError {
    StorageError::Io { action, path: path.to_owned(), source }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StorageError> + Send + 'static,
) -> Result<T, Cause> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(|error| Cause::Unexpected(error.to_string()))??)
}

#[cfg(test)]
mod tests;
