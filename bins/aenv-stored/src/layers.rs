//! Layers and images of them: each layer file is open once, however many disks and images are made of it.
//!
//! ```text
//! {"raw"}               a flat file, or nothing
//! {"file"} … {"file"}   a chain of layer files over it, or none
//! {"disk", "top"} …     sealed tops above
//! ```
//! Owns the open layers, which close with their last user, and the block cache. Does not know which disks there are: sealed
//! tops are handed in.

use crate::failure::Failure;
use crate::locks::lock;
use aenv_storage::blob::FileBlob;
use aenv_storage::block_service::{CacheView, LayerRef};
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;
use aenv_storage::open::open_layer_blob;
use aenv_storage::top::{SealedTop, StackedImage};
use aenv_storage::{EmptyImage, Image, OverlaidImage, RawImage};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

/// One of the layers of a disk, as far as it is known by others already.
#[derive(Debug)]
pub(crate) enum Resolved {
    File(PathBuf),
    Raw(PathBuf),
    Top(Arc<SealedTop>),
}

/// All layer files that are in use.
#[derive(Debug)]
pub(crate) struct Layers {
    cache: Arc<BlockCache>,
    files: Open<Layer>,
    raw_images: Open<RawImage>,
}

/// What is open, by the path of its file.
#[derive(Debug)]
struct Open<T>(Mutex<HashMap<PathBuf, Weak<T>>>);

impl<T> Open<T> {
    /// What `open` opens, unless it is open.
    fn get(&self, path: &Path, open: impl FnOnce() -> Result<Arc<T>, Failure>) -> Result<Arc<T>, Failure> {
        if let Some(shared) = lock(&self.0).get(path).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        let opened = open()?;
        let mut all = lock(&self.0);
        // Somebody may have been faster: all must share one.
        if let Some(shared) = all.get(path).and_then(Weak::upgrade) {
            return Ok(shared);
        }
        all.retain(|_, other| other.strong_count() > 0);
        all.insert(path.to_owned(), Arc::downgrade(&opened));
        Ok(opened)
    }

    fn count(&self) -> usize {
        lock(&self.0).values().filter(|shared| shared.strong_count() > 0).count()
    }
}

impl Layers {
    /// None yet. Blocks of layers that have to be decompressed take up to `cache_bytes` of memory.
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self {
            cache: Arc::new(BlockCache::new(cache_bytes)),
            files: Open(Mutex::default()),
            raw_images: Open(Mutex::default()),
        }
    }

    fn layer(&self, path: &Path) -> Result<Arc<Layer>, Failure> {
        self.files.get(path, || {
            let blob = open_layer_blob(Arc::new(FileBlob::open(path)?), &self.cache)?;
            Ok(Layer::from_blob(blob)?)
        })
    }

    fn raw_image(&self, path: &Path) -> Result<Arc<RawImage>, Failure> {
        // Its holes are looked for when it is opened, which takes time in a large one.
        self.raw_images.get(path, || Ok(Arc::new(RawImage::open(path)?)))
    }

    /// The image that the layers, bottom to top, make together; `None` when there are none.
    pub(crate) fn compose(&self, layers: &[Resolved]) -> Result<Option<Arc<dyn Image>>, Failure> {
        let (mut raw, mut files, mut tops) = (None, Vec::new(), Vec::new());
        for (position, layer) in layers.iter().enumerate() {
            match layer {
                Resolved::File(path) if tops.is_empty() => files.push(self.layer(path)?),
                Resolved::Raw(path) if position == 0 => raw = Some(self.raw_image(path)?),
                Resolved::Top(top) => tops.push(Arc::clone(top)),
                Resolved::File(path) | Resolved::Raw(path) => {
                    return Err(Failure::invalid(format!(
                        "{} cannot lie above the layers below it: one raw file comes first, then layer files, then tops",
                        path.display()
                    )));
                }
            }
        }
        let bottom: Option<Arc<dyn Image>> = match (raw, files.is_empty()) {
            (Some(raw), true) => Some(raw),
            (Some(raw), false) => Some(Arc::new(OverlaidImage::new(raw, files)?)),
            (None, true) => None,
            (None, false) => Some(Arc::new(LayerChain::new(files)?)),
        };
        match (bottom, tops.is_empty()) {
            (bottom, true) => Ok(bottom),
            (Some(bottom), false) => Ok(Some(Arc::new(StackedImage::new(bottom, tops)))),
            (None, false) => Ok(Some(Arc::new(StackedImage::new(Arc::new(EmptyImage::new(0)), tops)))),
        }
    }

    /// Number of layer files that are open.
    pub(crate) fn count(&self) -> usize {
        self.files.count() + self.raw_images.count()
    }

    /// What the cache did.
    pub(crate) fn cache_view(&self) -> CacheView {
        let counts = self.cache.counts();
        CacheView {
            hits: counts.hits,
            misses: counts.misses,
            bytes: counts.bytes,
            capacity: counts.capacity_bytes,
        }
    }
}

/// The file that a layer is stored in, when it is one of its own.
pub(crate) fn file_of(layer: &LayerRef) -> Option<&Path> {
    match layer {
        LayerRef::File { file } => Some(file),
        LayerRef::Raw { raw } => Some(raw),
        LayerRef::Top { .. } => None,
    }
}
