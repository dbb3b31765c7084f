//! Layers and images of them: each layer file is open once, however many disks and images are made of it.
//!
//! ```text
//! {"file"} … {"file"}   a chain of layer files   ┐ one of these at the bottom, or nothing
//! {"raw"}               a flat file              ┘
//! {"disk", "top"} …     sealed tops above
//! ```
//! Owns the open layers, which close with their last user, and the block cache. Does not know which disks there are: sealed
//! tops are handed in.

use crate::failure::Failure;
use crate::locks::lock;
use aenv_storage::blob::FileBlob;
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::layer::Layer;
use aenv_storage::open::open_layer_blob;
use aenv_storage::service::{CacheView, LayerRef};
use aenv_storage::top::{SealedTop, StackedImage};
use aenv_storage::{EmptyImage, Image, RawImage};
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
    open: Mutex<HashMap<PathBuf, Weak<Layer>>>,
}

impl Layers {
    /// None yet. Blocks of layers that have to be decompressed take up to `cache_bytes` of memory.
    pub(crate) fn new(cache_bytes: u64) -> Self {
        Self { cache: Arc::new(BlockCache::new(cache_bytes)), open: Mutex::default() }
    }

    /// The layer that is stored at `path`, opened unless it is open.
    fn layer(&self, path: &Path) -> Result<Arc<Layer>, Failure> {
        if let Some(layer) = lock(&self.open).get(path).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        let blob = open_layer_blob(Arc::new(FileBlob::open(path)?), &self.cache)?;
        let opened = Layer::from_blob(blob)?;
        let mut open = lock(&self.open);
        // Somebody may have been faster: all must share one.
        if let Some(layer) = open.get(path).and_then(Weak::upgrade) {
            return Ok(layer);
        }
        open.retain(|_, layer| layer.strong_count() > 0);
        open.insert(path.to_owned(), Arc::downgrade(&opened));
        Ok(opened)
    }

    /// The image that the layers, bottom to top, make together; `None` when there are none.
    pub(crate) fn compose(&self, layers: &[Resolved]) -> Result<Option<Arc<dyn Image>>, Failure> {
        let (mut raw, mut files, mut tops) = (None, Vec::new(), Vec::new());
        for (position, layer) in layers.iter().enumerate() {
            match layer {
                Resolved::File(path) if raw.is_none() && tops.is_empty() => files.push(self.layer(path)?),
                Resolved::Raw(path) if position == 0 => raw = Some(RawImage::open(path)?),
                Resolved::Top(top) => tops.push(Arc::clone(top)),
                Resolved::File(path) | Resolved::Raw(path) => {
                    return Err(Failure::invalid(format!(
                        "{} cannot lie above the layers below it: layer files come first, or one raw file, then tops",
                        path.display()
                    )));
                }
            }
        }
        let bottom: Option<Arc<dyn Image>> = match raw {
            Some(raw) => Some(Arc::new(raw)),
            None if files.is_empty() => None,
            None => Some(Arc::new(LayerChain::new(files)?)),
        };
        match (bottom, tops.is_empty()) {
            (bottom, true) => Ok(bottom),
            (Some(bottom), false) => Ok(Some(Arc::new(StackedImage::new(bottom, tops)))),
            (None, false) => Ok(Some(Arc::new(StackedImage::new(Arc::new(EmptyImage::new(0)), tops)))),
        }
    }

    /// Number of layer files that are open.
    pub(crate) fn count(&self) -> usize {
        lock(&self.open).values().filter(|layer| layer.strong_count() > 0).count()
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
