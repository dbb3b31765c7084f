//! The disks and images of this service: what there is, and what may be done at the same time.
//!
//! | file | what |
//! |---|---|
//! | `table.rs` | what there is, who needs whose tops |
//! | `disks.rs`, `images.rs` | making and removing |
//! | `named_layers.rs` | what a request or record is made of |
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
mod named_layers;
mod recovery;
pub(crate) mod reopening;
mod table;
pub(crate) mod tops;
mod views;

use crate::directories::Directories;
use crate::exports::Exports;
use crate::failure::Failure;
use crate::layers::Layers;
use crate::numbers::Numbers;
use aenv_storage::block_service::Name;
use std::sync::{Mutex, RwLock};
use table::Table;

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

/// Why a disk, and what is made of it, cannot be opened now.
fn no_room(disk: &Name) -> Failure {
    Failure::no_space(format!("disk {disk} cannot be opened before the host has room"))
}
