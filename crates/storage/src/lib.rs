//! Disks and memory images: layers that disks share, with a writable top on them, or raw files that share blocks by reflink.
//!
//! Owns the files it is told to make; knows nothing of sandboxes, templates or VMMs.
//!
//! | handle | file | life |
//! |---|---|---|
//! | [`Disk`] | raw, sparse, of the disk's size | cloned from a base, written by one VM, removed with it |
//! | [`layered_disk::LayeredDisk`] | a directory of tops on a chain of layers | made on an image, written by one VM, sealed for children |
//! | [`MemoryImage`] | flat, sparse, of the guest's memory size | written once, sealed, mapped privately by any number of VMs |

pub mod blob;
pub mod block_service;
pub mod cache;
pub mod chain;
pub mod commit;
mod contents;
pub mod digest;
mod empty_image;
pub mod index;
pub mod layer;
pub mod layered_disk;
pub mod lsmt;
mod memory_blob;
pub mod memory_chain;
pub mod merge;
pub mod open;
mod overlaid;
mod raw_file;
pub mod raw_image;
pub mod remote;
pub mod stored_form;
pub mod tar_wrap;
pub mod top;
pub mod zfile;

pub use contents::{BLOCK_BYTES, Blob, BlockDevice, Change, ChangeKind, Delta, Image};
pub use empty_image::EmptyImage;
pub use memory_blob::MemoryBlob;
pub use overlaid::OverlaidImage;
use raw_file::RawFile;
pub use raw_image::RawImage;
use std::path::{Path, PathBuf};

/// What can go wrong. What was being made is removed; where that fails as well, the log tells it.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The filesystem cannot share blocks between these two files.
    #[error(
        "{path} cannot share blocks with {base}: put the data directory on XFS or btrfs, all of it on one filesystem"
    )]
    ReflinkUnsupported {
        /// The file whose blocks were to be shared.
        base: PathBuf,
        /// The file that was to be made.
        path: PathBuf,
    },
    /// The filesystem is full, or a quota is.
    #[error("no space left to make {path}")]
    NoSpace {
        /// The file that was to be made.
        path: PathBuf,
    },
    /// A disk has as many different blocks as it may.
    #[error("{path} has reached its quota of {quota} bytes")]
    QuotaExceeded {
        /// The disk.
        path: PathBuf,
        /// What they may have, in bytes.
        quota: u64,
    },
    /// The host could not make writes durable. Nothing can be said of what was written since the last flush that
    /// succeeded, until the disk is opened again: a second attempt of the kernel's would claim success.
    #[error("a flush of {path} failed ({reason}): what was written since the last one may be lost")]
    NotDurable {
        /// The file that could not be flushed.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The host lost its power before the disk was flushed for the first time: there is nothing to open.
    #[error("the host stopped before {path} was ever flushed: make the disk anew")]
    NeverDurable {
        /// The disk's directory.
        path: PathBuf,
    },
    /// Another process, or another handle of this one, has it open.
    #[error("{path} is in use")]
    InUse {
        /// The disk's directory or the top's file.
        path: PathBuf,
    },
    /// Stored bytes are not what their format demands, or fail their checksum: no read of them can be trusted.
    #[error("{name} is damaged: {reason}")]
    Damaged {
        /// The blob.
        name: String,
        /// What is wrong, where.
        reason: String,
    },
    /// Valid by its format, but more than this implementation takes or knows.
    #[error("{name} cannot be used: {reason}")]
    Unsupported {
        /// The blob.
        name: String,
        /// What it has that is not supported.
        reason: String,
    },
    /// A range that does not lie in an image or blob.
    #[error("{length} bytes at {offset} are not all inside of {name}, which has {size}")]
    OutOfRange {
        /// The image or blob.
        name: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
        /// Bytes there are.
        size: u64,
    },
    /// Anything else.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was being done.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A raw disk. The handle owns no descriptor and may be dropped freely: the file stays until [`Disk::remove`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk(RawFile);

impl Disk {
    /// The disk that is stored at `path`.
    ///
    /// # Errors
    /// When there is no such regular file.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        RawFile::open(path).map(Self)
    }

    /// Makes a new disk at `path` that shares all blocks of `base` until one of the two is written. Takes time in
    /// proportion to the number of extents of `base`, not to its bytes.
    ///
    /// # Errors
    /// When `path` exists, the filesystem cannot share blocks or is full.
    pub fn clone_from_base(base: &Path, path: &Path) -> Result<Self, StorageError> {
        RawFile::clone_from_base(base, path).map(Self)
    }

    /// Where it is stored.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Its virtual size in bytes.
    ///
    /// # Errors
    /// When the file is gone.
    pub fn size(&self) -> Result<u64, StorageError> {
        self.0.size()
    }

    /// Bytes the filesystem stores for it. Shared blocks count in full for every disk that has them.
    ///
    /// # Errors
    /// When the file is gone.
    pub fn stored_bytes(&self) -> Result<u64, StorageError> {
        self.0.stored_bytes()
    }

    /// Removes the file. No error when it is gone already.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(self) -> Result<(), StorageError> {
        self.0.remove()
    }
}

/// The memory of a captured guest. Never written after it was sealed; removed only when no VM maps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryImage(RawFile);

impl MemoryImage {
    /// The image that is stored at `path`.
    ///
    /// # Errors
    /// When there is no such regular file.
    pub fn open(path: &Path) -> Result<Self, StorageError> {
        RawFile::open(path).map(Self)
    }

    /// Takes the right to write from the file, as a guard against mistakes (root may write nevertheless).
    ///
    /// # Errors
    /// The system's error.
    pub fn seal(&self) -> Result<(), StorageError> {
        self.0.make_read_only()
    }

    /// Where it is stored.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The guest's memory size in bytes.
    ///
    /// # Errors
    /// When the file is gone.
    pub fn size(&self) -> Result<u64, StorageError> {
        self.0.size()
    }

    /// Bytes the filesystem stores for it; holes, which read as zeros, do not count.
    ///
    /// # Errors
    /// When the file is gone.
    pub fn stored_bytes(&self) -> Result<u64, StorageError> {
        self.0.stored_bytes()
    }

    /// Removes the file. No error when it is gone already.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove(self) -> Result<(), StorageError> {
        self.0.remove()
    }
}
