//! Forgets all sandboxes of a data directory that no node uses, paused ones and all that was saved of them included. Templates,
//! their captures, and snapshots stay.
//!
//! Only files: the caller has ended the VMs and networks before, while it holds the directory.

use crate::data_dir::{DataDir, DataDirLock};
use crate::journal;
use crate::settings::StartError;
use std::path::Path;

/// A data directory held so that no node starts on it.
pub struct HeldDataDir {
    dir: DataDir,
    _lock: DataDirLock,
}

/// Takes the data directory for this process.
///
/// # Errors
/// [`StartError::InUse`] while a node runs on it; [`StartError::DataDir`] when it cannot be used.
pub fn hold_data_dir(root: &Path) -> Result<HeldDataDir, StartError> {
    let dir = DataDir::open(root)?;
    let lock = dir.lock()?;
    Ok(HeldDataDir { dir, _lock: lock })
}

impl HeldDataDir {
    /// Removes the files of all sandboxes, and the journal but for snapshots; returns how many sandboxes, standbys included, there were.
    ///
    /// # Errors
    /// When something cannot be removed; calling again continues.
    pub fn forget_sandboxes(&self) -> Result<usize, StartError> {
        let sandboxes = self.dir.sandboxes();
        let fail = |action, path: &Path, error: &std::io::Error| StartError::DataDir {
            action,
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let entries = std::fs::read_dir(&sandboxes).map_err(|error| fail("list", &sandboxes, &error))?;
        let mut count = 0;
        for entry in entries {
            let path = entry.map_err(|error| fail("list", &sandboxes, &error))?.path();
            std::fs::remove_dir_all(&path).map_err(|error| fail("remove", &path, &error))?;
            count += 1;
        }
        let path = self.dir.journal();
        // One that cannot be read is left: it may be what knows of snapshots.
        let exists = path.try_exists().map_err(|error| fail("look for", &path, &error))?;
        if exists {
            let snapshots =
                journal::forget_vms(&path).map_err(|reason| StartError::Journal { path, reason })?;
            if snapshots > 0 {
                return Ok(count);
            }
        }
        for path in self.dir.journal_files() {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(fail("remove", &path, &error));
                }
                _ => {}
            }
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_go_and_templates_stay() {
        let root = tempfile::tempdir().unwrap();
        let held = hold_data_dir(root.path()).unwrap();
        std::fs::create_dir_all(root.path().join("sandboxes/iabc/run")).unwrap();
        std::fs::write(root.path().join("templates/kept"), "x").unwrap();
        assert_eq!(journal::forget_vms(&held.dir.journal()), Ok(0), "an empty one is made");
        assert_eq!(held.forget_sandboxes().unwrap(), 1);
        assert_eq!(held.forget_sandboxes().unwrap(), 0);
        assert!(root.path().join("templates/kept").exists());
        assert!(held.dir.journal_files().iter().all(|path| !path.exists()));
    }

    #[test]
    fn a_journal_that_cannot_be_read_stays() {
        let root = tempfile::tempdir().unwrap();
        let held = hold_data_dir(root.path()).unwrap();
        std::fs::write(held.dir.journal(), "it may know of snapshots").unwrap();
        assert!(matches!(held.forget_sandboxes(), Err(StartError::Journal { .. })));
        assert!(held.dir.journal().exists());
    }

    #[test]
    fn a_directory_in_use_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let _held = hold_data_dir(root.path()).unwrap();
        assert!(matches!(hold_data_dir(root.path()), Err(StartError::InUse(_))));
    }
}
