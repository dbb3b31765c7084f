//! Files that nothing needs: layer files that no disk, no image and no caller names.
//!
//! Removes nothing outside of the layer directory and the directory of disks.

use super::Service;
use crate::directories::{remove_file, remove_tree, stored_bytes};
use crate::failure::Failure;
use crate::locks::lock;
use aenv_storage::block_service::{CollectGarbage, Collected, Name};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

/// A layer that is being written changes at least once in this time.
const WRITING: Duration = Duration::from_secs(3600);

impl Service {
    /// Removes layer files that are neither in use nor named by the caller, and directories of no disk.
    pub(crate) fn collect_garbage(&self, request: &CollectGarbage) -> Result<Collected, Failure> {
        if lock(&self.table).has_unreadable() {
            return Err(Failure::conflict(
                "a record cannot be read, so what it needs is not known: mend it, or delete its disk or image",
            ));
        }
        self.prune();
        let layers = self.directories.layers();
        // Nobody comes to need a file while it is looked at and removed.
        let _alone = self.collecting.write().unwrap_or_else(PoisonError::into_inner);
        let mut keep = lock(&self.table).files_in_use();
        for path in &request.keep_layers {
            // One that is gone needs no keeping; anything else wrong with it may be a mistake that would lose a layer.
            if path.exists() {
                keep.insert(self.directories.resolve(path)?);
            } else {
                keep.insert(path.clone());
            }
        }
        let mut collected = Collected::default();
        for entry in std::fs::read_dir(&layers).map_err(Failure::io("list", &layers))? {
            let entry = entry.map_err(Failure::io("list", &layers))?;
            let path = entry.path();
            let metadata = entry.metadata().map_err(Failure::io("look at", &path))?;
            if metadata.is_file() && !keep.contains(&path) && !is_being_written(&path, &metadata) {
                collected.bytes = collected
                    .bytes
                    .saturating_add(stored_bytes(&path).map_err(Failure::io("look at", &path))?);
                remove_file(&path)?;
                collected.layers += 1;
                tracing::info!(path = %path.display(), "removed a layer that nothing needs");
            }
        }
        self.collect_directories(&mut collected)?;
        Ok(collected)
    }

    fn collect_directories(&self, collected: &mut Collected) -> Result<(), Failure> {
        let disks = self.directories.disks();
        for entry in std::fs::read_dir(&disks).map_err(Failure::io("list", &disks))? {
            let entry = entry.map_err(Failure::io("list", &disks))?;
            let path: PathBuf = entry.path();
            let name = entry.file_name().to_str().and_then(|text| text.parse::<Name>().ok());
            // Looked up after the directory was seen: a disk enters the table before it gets a directory.
            let known: BTreeSet<Name> = lock(&self.table).disks.keys().cloned().collect();
            if let Some(name) = name.filter(|name| !known.contains(name)) {
                collected.bytes = collected
                    .bytes
                    .saturating_add(stored_bytes(&path).map_err(Failure::io("look at", &path))?);
                remove_tree(&self.directories.disk(&name))?;
                collected.directories += 1;
                tracing::info!(path = %path.display(), "removed a directory of no disk");
            }
        }
        Ok(())
    }
}

/// Layers get their names when they are complete; until then they are called `.layer-…`.
fn is_being_written(path: &Path, metadata: &Metadata) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    // A time in the future is that of a clock that was set back.
    let young = |changed: SystemTime| changed.elapsed().is_ok_and(|age| age < WRITING);
    hidden && metadata.modified().is_ok_and(young)
}
