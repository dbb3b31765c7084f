//! Templates: what sandboxes are made from.
//!
//! On disk a template is an image with a root filesystem and the captures made of it; in memory it is a [`Template`], read once when
//! the node starts. Whether sandboxes can be made from it is its [`Progress`]:
//!
//! ```text
//! Preparing ──▶ Ready(capture)        a capture for the present key was found or made
//!     └───────▶ Failed(reason) ──▶ … until another attempt succeeds; they are made with growing pauses
//! ```

mod file;
mod image;
mod import;
mod prepare;

pub(crate) use file::{
    Capture, TemplateFile, capture_key, capture_keys, key_of_memory, memory_of_capture, read_all,
    remove_stale_captures, sha256,
};
pub(crate) use image::{ImageForm, TemplateImage, find_image};
pub use import::{ImportError, Imported, import_template};
pub(crate) use prepare::prepare;

use crate::disks::{Base, CaptureName};
use crate::standby::{Readiness, StandbyPool, Targets};
use crate::view::{TemplateState, TemplateView};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// How far a template is.
#[derive(Clone)]
pub(crate) enum Progress {
    /// Its capture is being made.
    Preparing,
    /// Sandboxes can be made.
    Ready(Arc<Capture>),
    /// Its capture could not be made yet.
    Failed(String),
}

/// A template of this node.
pub(crate) struct Template {
    /// As it is on disk.
    pub(crate) file: TemplateFile,
    /// Where it lies.
    pub(crate) dir: PathBuf,
    /// Its image.
    pub(crate) image: Base,
    /// Size of its root filesystem.
    pub(crate) disk_mib: u64,
    /// What a capture must have been made with to be usable now.
    pub(crate) key: String,
    /// Its standbys.
    pub(crate) pool: StandbyPool,
    progress: RwLock<Progress>,
    spawned: AtomicU64,
    stored_bytes: AtomicU64,
    /// What the filesystem stores for the image.
    image_bytes: u64,
}

impl Template {
    pub(crate) fn new(
        file: TemplateFile,
        dir: PathBuf,
        image: TemplateImage,
        key: String,
        standbys: Targets,
    ) -> Self {
        let file_disk_mib = file.disk_mib.unwrap_or(image.bytes.div_ceil(1 << 20));
        Self {
            file,
            dir,
            disk_mib: file_disk_mib,
            image: image.base,
            image_bytes: image.stored_bytes,
            key,
            pool: StandbyPool::new(standbys),
            progress: RwLock::new(Progress::Preparing),
            spawned: AtomicU64::new(0),
            stored_bytes: AtomicU64::new(0),
        }
    }

    /// Whether `name` (id or name, the tag `default` accepted) means this template.
    pub(crate) fn answers_to(&self, name: &str) -> bool {
        let name = match name.split_once(':') {
            Some((name, "default")) => name,
            Some(_) => return false,
            None => name,
        };
        name == self.file.name || name == self.file.id.as_str()
    }

    /// Memory of every guest of it.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.file.memory_mib.saturating_mul(1 << 20)
    }

    /// What its present capture is called.
    pub(crate) fn capture_name(&self) -> CaptureName {
        CaptureName { template: self.file.id.clone(), key: self.key.clone() }
    }

    pub(crate) fn progress(&self) -> Progress {
        self.progress.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_progress(&self, progress: Progress) {
        *self.progress.write().unwrap_or_else(PoisonError::into_inner) = progress;
    }

    pub(crate) fn count_sandbox(&self) {
        self.spawned.fetch_add(1, Ordering::Relaxed);
    }

    /// Measures again how much the template's files occupy. Blocks on the filesystem.
    pub(crate) fn measure(&self) {
        match file::stored_bytes(&self.dir) {
            Ok(bytes) => {
                self.stored_bytes.store(bytes.saturating_add(self.image_bytes), Ordering::Relaxed);
            }
            Err(error) => {
                tracing::warn!(template = %self.file.name, %error, "size of the template's files unknown");
            }
        }
    }

    pub(crate) fn view(&self) -> TemplateView {
        TemplateView {
            id: self.file.id.clone(),
            name: self.file.name.clone(),
            state: match self.progress() {
                Progress::Preparing => TemplateState::Preparing,
                Progress::Ready(_) => TemplateState::Ready,
                Progress::Failed(reason) => TemplateState::Failed(reason),
            },
            vcpus: self.file.vcpus,
            memory_mib: self.file.memory_mib,
            disk_mib: self.disk_mib,
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
            created_at: self.file.created_at,
            spawn_count: self.spawned.load(Ordering::Relaxed),
            standbys: self.pool.len(Readiness::Hot),
            warm: self.pool.len(Readiness::Warm),
        }
    }
}
