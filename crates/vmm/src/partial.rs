//! The two files of a capture while they are being written.
//!
//! Owns them until the capture is complete: a caller who gives up, and an error, leave nothing.

use crate::driver::{CaptureFiles, VmmError};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two files that are removed unless the capture is completed; shared with the thread that writes them.
#[derive(Debug)]
pub(crate) struct PartialFiles {
    files: CaptureFiles,
    complete: AtomicBool,
}

impl PartialFiles {
    /// Makes sure that none of the files exists yet.
    pub(crate) fn begin(files: &CaptureFiles) -> Result<Arc<Self>, VmmError> {
        for path in [&files.memory, &files.state] {
            match path.try_exists() {
                Ok(false) => {}
                Ok(true) => return Err(failed(path, io::ErrorKind::AlreadyExists.into())),
                Err(error) => return Err(failed(path, error)),
            }
        }
        Ok(Arc::new(Self { files: files.clone(), complete: AtomicBool::new(false) }))
    }

    /// Where the files are.
    pub(crate) fn files(&self) -> &CaptureFiles {
        &self.files
    }

    /// From now on they stay.
    pub(crate) fn complete(&self) {
        self.complete.store(true, Ordering::Relaxed);
    }
}

impl Drop for PartialFiles {
    fn drop(&mut self) {
        if self.complete.load(Ordering::Relaxed) {
            return;
        }
        for path in [&self.files.memory, &self.files.state] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(path = %path.display(), %error, "cannot remove a partial capture");
                }
                _ => {}
            }
        }
    }
}

/// The error of a capture that cannot be written.
pub(crate) fn failed(path: &Path, source: io::Error) -> VmmError {
    VmmError::Io { context: format!("cannot write capture {}", path.display()), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_complete_stays() {
        let directory = tempfile::tempdir().unwrap();
        let files = CaptureFiles { memory: directory.path().join("m"), state: directory.path().join("s") };
        let partial = PartialFiles::begin(&files).unwrap();
        std::fs::write(&files.memory, "half").unwrap();
        drop(partial);
        assert!(!files.memory.exists());
        let partial = PartialFiles::begin(&files).unwrap();
        std::fs::write(&files.memory, "all").unwrap();
        partial.complete();
        drop(partial);
        assert!(files.memory.exists());
        assert!(PartialFiles::begin(&files).is_err());
    }
}
