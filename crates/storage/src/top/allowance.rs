//! How many bytes of different blocks the tops of one disk may have together, and do. A block that several tops have counts
//! once, and one that the uppermost of them says is zeros not at all: the count is what is seen, not what is stored.
//!
//! Owns the count. Blocks are reserved before they are written, so that writers at the same time cannot pass the limit.

use crate::{BLOCK_BYTES, StorageError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub(crate) struct Allowance {
    path: PathBuf,
    quota: AtomicU64,
    used: AtomicU64,
}

impl Allowance {
    /// `quota` and `used` in bytes; `path` for messages.
    pub(crate) fn new(path: &Path, quota: u64, used: u64) -> Self {
        Self { path: path.to_owned(), quota: AtomicU64::new(quota), used: AtomicU64::new(used) }
    }

    pub(crate) fn quota(&self) -> u64 {
        self.quota.load(Ordering::Relaxed)
    }

    pub(crate) fn set_quota(&self, quota: u64) {
        self.quota.store(quota, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes room for `blocks` more. Nothing is ever refused to who needs none.
    pub(super) fn reserve(&self, blocks: u64) -> Result<Reservation<'_>, StorageError> {
        let quota = self.quota();
        let bytes = blocks * BLOCK_BYTES;
        let grow = |used: u64| used.checked_add(bytes).filter(|grown| bytes == 0 || *grown <= quota);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow) {
            Ok(_) => Ok(Reservation { allowance: self, bytes }),
            Err(_) => Err(StorageError::QuotaExceeded { path: self.path.clone(), quota }),
        }
    }

    /// Begins anew with so many bytes, while nobody writes.
    pub(crate) fn set_used(&self, bytes: u64) {
        self.used.store(bytes, Ordering::Relaxed);
    }

    /// Gives back the room of `blocks`.
    pub(crate) fn release(&self, blocks: u64) {
        self.used.fetch_sub(blocks * BLOCK_BYTES, Ordering::Relaxed);
    }
}

/// Room that is given back unless it is kept.
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    allowance: &'a Allowance,
    bytes: u64,
}

impl Reservation<'_> {
    pub(super) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.allowance.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_given_until_the_quota_and_comes_back() {
        let allowance = Allowance::new(Path::new("disk"), 3 * BLOCK_BYTES, BLOCK_BYTES);
        allowance.reserve(2).unwrap().keep();
        assert!(matches!(allowance.reserve(1), Err(StorageError::QuotaExceeded { quota: 12288, .. })));
        assert!(allowance.reserve(0).is_ok());
        allowance.release(2);
        drop(allowance.reserve(2).unwrap());
        assert_eq!(allowance.used(), BLOCK_BYTES);
        allowance.set_quota(0);
        assert!(allowance.reserve(0).is_ok(), "what is there may be overwritten");
    }
}
