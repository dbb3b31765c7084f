//! The disks and images of this service: what there is, and what may be done at the same time.
//!
//! | file | what |
//! |---|---|
//! | `table.rs` | what there is, who needs whose tops |
//! | `disks.rs`, `images.rs` | making and removing |
//! | `tops.rs` | sealing, and what deleted disks leave for others |
//! | `compaction.rs` | merging long chains in the background |
//! | `recovery.rs` | the start: everything as it was, half-done work finished or undone |
//! | `reopening.rs` | what could not be opened for want of room |
//! | `garbage.rs` | files that nothing needs |
//! | `views.rs` | what is told |
//!
//! Locks, always in this order: one operation at a time for each disk or image (`operation`), then its present life
//! (`life`, never held while the disk works), then the table. Nobody holds the operations of two disks.
//! All of it blocks; HTTP calls it from threads for that.

pub(crate) mod compaction;
mod disks;
pub(crate) mod garbage;
mod images;
mod recovery;
pub(crate) mod reopening;
mod table;
pub(crate) mod tops;
mod views;

use crate::directories::Directories;
use crate::exports::Exports;
use crate::failure::Failure;
use crate::layers::{Layers, Resolved};
use crate::locks::lock;
use crate::numbers::Numbers;
use aenv_storage::Image;
use aenv_storage::block_service::{LayerRef, Name};
use std::sync::{Arc, Mutex, RwLock};
use table::{DiskLife, Table};

/// All of it.
#[derive(Debug)]
pub(crate) struct Service {
    directories: Directories,
    layers: Layers,
    exports: Exports,
    numbers: Numbers,
    table: Mutex<Table>,
    /// Written while files are looked for that nobody needs; read while somebody comes to need one.
    collecting: RwLock<()>,
}

impl Service {
    /// Layers as a client names them, as they are remembered: files without links, inside of the data directory.
    fn canonical(&self, layers: Vec<LayerRef>) -> Result<Vec<LayerRef>, Failure> {
        let canonical = |layer| {
            Ok(match layer {
                LayerRef::File { file } => LayerRef::File { file: self.directories.resolve(&file)? },
                LayerRef::Raw { raw } => LayerRef::Raw { raw: self.directories.resolve(&raw)? },
                top @ LayerRef::Top { .. } => top,
            })
        };
        layers.into_iter().map(canonical).collect()
    }

    /// The image that layers make, of which the record that names them is in the table already: nothing of it is removed
    /// meanwhile.
    fn compose(&self, layers: &[LayerRef]) -> Result<Option<Arc<dyn Image>>, Failure> {
        let resolved: Vec<Resolved> =
            layers.iter().map(|layer| self.resolve(layer)).collect::<Result<_, _>>()?;
        self.layers.compose(&resolved)
    }

    fn resolve(&self, layer: &LayerRef) -> Result<Resolved, Failure> {
        match layer {
            LayerRef::File { file } => Ok(Resolved::File(self.directories.resolve(file)?)),
            LayerRef::Raw { raw } => Ok(Resolved::Raw(self.directories.resolve(raw)?)),
            LayerRef::Top { disk, top } => {
                let entry = lock(&self.table).disks.get(disk).cloned();
                let entry = entry.ok_or_else(|| Failure::not_found(format!("there is no disk {disk}")))?;
                let found = match &*lock(&entry.life) {
                    DiskLife::Live { disk, .. } => tops::find(&disk.sealed_tops(), top),
                    DiskLife::Kept { tops } => tops::find(tops, top),
                    DiskLife::Failed { reason, .. } => {
                        return Err(Failure::unavailable(format!("disk {disk} cannot be used: {reason}")));
                    }
                    DiskLife::Waiting { .. } => return Err(no_room(disk)),
                    DiskLife::Making | DiskLife::Deleting | DiskLife::Gone => {
                        return Err(Failure::conflict(format!("disk {disk} is being made or removed")));
                    }
                };
                let missing = || Failure::not_found(format!("disk {disk} has no sealed top {top}"));
                found.map(Resolved::Top).ok_or_else(missing)
            }
        }
    }
}

/// Why a disk, and what is made of it, cannot be opened now.
fn no_room(disk: &Name) -> Failure {
    Failure::no_space(format!("disk {disk} cannot be opened before the host has room"))
}
