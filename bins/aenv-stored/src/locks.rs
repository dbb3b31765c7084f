//! Locks that go on after a panic: every section that they guard here replaces whole values, so none is left half-changed.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
