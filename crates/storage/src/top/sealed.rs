//! A top that never changes again, shared by every disk that stands on it.
//!
//! Owns the handles of its files, and holds them together with others: who wants to remove the files asks for them alone.

use super::{Access, BlockState, BootId, Directory, HostDirectory, Lock, Top};
use crate::layered_disk::Keeper;
use crate::{BLOCK_BYTES, Change, ChangeKind, StorageError, raw_file::failed};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A sealed top.
#[derive(Debug)]
pub struct SealedTop {
    name: String,
    top: Arc<Top>,
    directory: Arc<dyn Directory>,
    /// The books of the disk it was sealed by, when that is open.
    keeper: Option<Arc<Keeper>>,
}

impl SealedTop {
    /// Opens the sealed top of a disk that is not open, by the path of its log or data file.
    ///
    /// # Errors
    /// When it is damaged, or was never sealed durably; [`StorageError::InUse`] when it is about to be removed.
    pub fn open(path: &Path, boot: &BootId) -> Result<Arc<Self>, StorageError> {
        let unusable = |reason: &str| StorageError::Unsupported {
            name: path.display().to_string(),
            reason: reason.to_owned(),
        };
        let name = path.file_stem().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| unusable("this is no name of a top"))?;
        let parent = path.parent().ok_or_else(|| unusable("it lies in no directory"))?;
        let directory: Arc<dyn Directory> = Arc::new(HostDirectory::new(parent));
        Ok(Arc::new(Self::open_in(directory, name, None, boot)?))
    }

    pub(crate) fn open_in(
        directory: Arc<dyn Directory>,
        name: &str,
        keeper: Option<Arc<Keeper>>,
        boot: &BootId,
    ) -> Result<Self, StorageError> {
        let opened = Top::open(&*directory, name, Access::Read, boot)?;
        if !opened.sealed {
            let reason = "its log does not say that it was sealed".to_owned();
            let name = opened.top.data_path().display().to_string();
            return Err(StorageError::Damaged { name, reason });
        }
        Self::hold(name.to_owned(), Arc::new(opened.top), directory, keeper)
    }

    /// Shares a top that has just been sealed.
    pub(crate) fn hold(
        name: String,
        top: Arc<Top>,
        directory: Arc<dyn Directory>,
        keeper: Option<Arc<Keeper>>,
    ) -> Result<Self, StorageError> {
        if !top.hold(Lock::Shared)? {
            return Err(StorageError::InUse { path: top.data_path().to_owned() });
        }
        Ok(Self { name, top, directory, keeper })
    }

    /// Virtual size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.top.size()
    }

    /// Random id, given when the top was made.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.top.identity().id
    }

    /// Where its bytes are; for [`SealedTop::open`].
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.top.data_path().to_owned()
    }

    /// Bytes it stores.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.top.map().data_blocks() * BLOCK_BYTES
    }

    /// The first run at or after byte `from` that this top changes, whatever is below. `from` is a multiple of the block
    /// size.
    #[must_use]
    pub fn changes(&self, from: u64) -> Option<Change> {
        let map = self.top.map();
        let mut runs = map.runs(from.div_ceil(BLOCK_BYTES)..map.blocks());
        runs.find_map(|run| {
            let kind = match run.state {
                BlockState::Absent => return None,
                BlockState::Data => ChangeKind::Data,
                BlockState::Zero => ChangeKind::Zeros,
            };
            let blocks = run.blocks();
            Some(Change { range: blocks.start * BLOCK_BYTES..blocks.end * BLOCK_BYTES, kind })
        })
    }

    /// Fills the buffer from this top alone; what it does not change is zeros.
    ///
    /// # Errors
    /// When the range does not lie in the top, or it cannot be read.
    pub fn read_changed(&self, buffer: &mut [u8], offset: u64) -> Result<(), StorageError> {
        let (length, size) = (buffer.len() as u64, self.size());
        if offset.checked_add(length).is_none_or(|end| end > size) {
            let name = self.top.data_path().display().to_string();
            return Err(StorageError::OutOfRange { name, offset, length, size });
        }
        self.top.read_at(buffer, offset, |part, _| {
            part.fill(0);
            Ok(())
        })
    }

    /// Returns when it survives the loss of power, with the record of the disk that sealed it. Cheap when it does already.
    ///
    /// # Errors
    /// When the host cannot store it.
    pub fn make_durable(&self) -> Result<(), StorageError> {
        match &self.keeper {
            Some(keeper) => keeper.settle(),
            None => {
                self.top.flush()?;
                self.directory.sync().map_err(|error| failed("flush", self.directory.path(), error))
            }
        }
    }

    /// Whether no other handle, of this or another process, holds the files.
    pub(crate) fn is_held_by_us_alone(&self) -> Result<bool, StorageError> {
        let alone = self.top.hold(Lock::Exclusive)?;
        // A lock that could not be had alone may be lost altogether.
        if !self.top.hold(Lock::Shared)? {
            return Err(StorageError::InUse { path: self.path() });
        }
        Ok(alone)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn top(&self) -> &Arc<Top> {
        &self.top
    }
}
