//! Hands disks and images to the kernel, behind one trait: as block devices by ublk, as files by FUSE.
//!
//! Owns the kernel's side of every export (device or file, request loop). Knows neither layers nor sandboxes, keeps no
//! record: whoever exports remembers number and name, and recovers with them after a restart.

pub mod fuse;
mod stall;
pub mod ublk;
mod vital;

use aenv_storage::{BlockDevice, Image, StorageError};
use std::path::PathBuf;
use std::sync::Arc;

pub use stall::Stall;

/// What is exported, and how it is found again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Export {
    /// Number of the device or inode, 1 or more; the same again at a recovery, and not given to another export while the
    /// kernel may remember it.
    pub number: u32,
    /// Unique; letters, digits and `-`. With FUSE the name of the file.
    pub name: String,
    /// User and group the file or device belongs to; nobody else but root opens it.
    pub owner: u32,
}

/// What stands behind an export.
#[derive(Debug, Clone)]
pub enum Content {
    /// Read and written by one VM, never cached by the kernel on our side.
    Disk(Arc<dyn BlockDevice>),
    /// Mapped by any number of VMs; the kernel caches it.
    Image(Arc<dyn Image>),
}

/// A way to export.
pub trait Exporter: std::fmt::Debug + Send + Sync {
    /// Makes a new export and returns the path of its file or device, ready to be opened.
    ///
    /// # Errors
    /// When the number or name is taken, or the kernel refuses.
    fn add(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError>;

    /// Takes over an export that an earlier process made, before [`Exporter::start`]. Requests that wait in the kernel
    /// are answered from then on; those in flight when that process died are done again.
    ///
    /// # Errors
    /// When there is no such export any more: make it anew then.
    fn recover(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError>;

    /// Begins to answer. To be called once, after everything was recovered.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn start(&self) -> Result<(), ExportError>;

    /// Ends an export. Whoever still has it open gets errors; to remove one that is gone is no error.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn remove(&self, export: &Export) -> Result<(), ExportError>;
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// This kernel or this process cannot do it at all.
    #[error("{way} cannot be used: {reason}")]
    Unavailable {
        /// `ublk` or `FUSE`.
        way: &'static str,
        /// Why not, and what to do.
        reason: String,
    },
    /// The number or name belongs to another export.
    #[error("{what} {value} is in use by another export")]
    Taken {
        /// `number` or `name`.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// Number or name are none that an export can have.
    #[error("export {name:?} is not valid: {reason}")]
    Invalid {
        /// The name that was asked for.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// There is nothing to take over.
    #[error("there is no export {name} to take over: {reason}")]
    Lost {
        /// Of the export.
        name: String,
        /// What was found instead.
        reason: String,
    },
    /// The content failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was being done, on what.
        action: String,
        /// The system's error.
        source: std::io::Error,
    },
}
