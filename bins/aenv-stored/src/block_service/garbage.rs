//! Files that nothing needs: layer files that no disk, no image and no caller names.
//!
//! ```text
//! looked for and set aside, by a rename (nobody comes to need a file meanwhile) ─▶ measured, removed (others go on)
//!                                                        killed here: removed at the next start
//! ```
//! Removes nothing outside of the layer directory and the directory of disks.

use super::Service;
use crate::directories::{Directories, remove_file, remove_tree, stored_bytes};
use crate::failure::Failure;
use crate::locks::lock;
use aenv_storage::block_service::{CollectGarbage, Collected, Name, ReleaseLayer, Released};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, SystemTime};

/// How the names of what is being removed begin; neither layers nor disks are called so.
const ASIDE: &str = ".removed-";

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
        self.prune_all();
        let (layers, directories) = {
            // Nobody comes to need a file while it is looked at; when it lies aside, nobody finds it.
            let _alone = self.collecting.write().unwrap_or_else(PoisonError::into_inner);
            (self.set_layers_aside(request)?, self.set_directories_aside()?)
        };
        let mut bytes = 0_u64;
        for path in layers.iter().chain(&directories) {
            bytes = bytes.saturating_add(stored_bytes(path).map_err(Failure::io("look at", path))?);
            remove(path)?;
        }
        Ok(Collected { layers: layers.len() as u64, directories: directories.len() as u64, bytes })
    }

    /// Removes a layer file that the caller needs no more, unless somebody else does.
    pub(crate) fn release_layer(&self, request: &ReleaseLayer) -> Result<Released, Failure> {
        let path = match self.directories.resolve(&request.file) {
            Ok(path) => path,
            Err(missing) if missing.is_not_found() => return Ok(Released { removed: true }),
            Err(failure) => return Err(failure),
        };
        if path.parent() != Some(self.directories.layers().as_path()) {
            let file = request.file.display();
            return Err(Failure::invalid(format!("file: {file} does not lie in the layer directory")));
        }
        // Nobody comes to need it while it is looked at.
        let _alone = self.collecting.write().unwrap_or_else(PoisonError::into_inner);
        let needed = {
            let table = lock(&self.table);
            table.has_unreadable() || table.uses_file(&path)
        };
        if !needed {
            remove_file(&path)?;
        }
        Ok(Released { removed: !needed })
    }

    fn set_layers_aside(&self, request: &CollectGarbage) -> Result<Vec<PathBuf>, Failure> {
        let mut keep = lock(&self.table).files_in_use();
        for path in &request.keep_layers {
            // One that is gone needs no keeping; anything else wrong with it may be a mistake that would lose a layer.
            if path.exists() {
                keep.insert(self.directories.resolve(path)?);
            } else {
                keep.insert(path.clone());
            }
        }
        let is_garbage = |path: &Path| {
            // Whoever puts layers there may take one away.
            let Some(metadata) =
                unless_gone(path.symlink_metadata()).map_err(Failure::io("look at", path))?
            else {
                return Ok(false);
            };
            Ok(metadata.is_file() && !keep.contains(path) && !is_being_written(path, &metadata))
        };
        set_aside(&self.directories.layers(), "a layer that nothing needs", is_garbage)
    }

    fn set_directories_aside(&self) -> Result<Vec<PathBuf>, Failure> {
        let known: BTreeSet<Name> = lock(&self.table).disks.keys().cloned().collect();
        let is_garbage = |path: &Path| {
            let name = path.file_name().and_then(|name| name.to_str()).map(str::parse::<Name>);
            Ok(matches!(name, Some(Ok(name)) if !known.contains(&name)))
        };
        set_aside(&self.directories.disks(), "a directory of no disk", is_garbage)
    }
}

/// Gives garbage of a directory names by which nobody finds it but the next start.
fn set_aside(
    directory: &Path,
    what: &str,
    is_garbage: impl Fn(&Path) -> Result<bool, Failure>,
) -> Result<Vec<PathBuf>, Failure> {
    let (mut aside, mut number) = (Vec::new(), 0_u64);
    for path in entries_of(directory)? {
        if is_aside(&path) || !is_garbage(&path)? {
            continue;
        }
        let new = loop {
            let new = directory.join(format!("{ASIDE}{number}"));
            number += 1;
            if unless_gone(new.symlink_metadata()).map_err(Failure::io("look at", &new))?.is_none() {
                break new;
            }
        };
        let renamed = unless_gone(std::fs::rename(&path, &new)).map_err(Failure::io("set aside", &path))?;
        if renamed.is_some() {
            tracing::info!(path = %path.display(), "removing {what}");
            aside.push(new);
        }
    }
    Ok(aside)
}

/// Removes what a collection had set aside when it was killed. What cannot be removed stays for the next start.
pub(crate) fn remove_set_aside(directories: &Directories) {
    for directory in [directories.layers(), directories.disks()] {
        let removed = entries_of(&directory)
            .and_then(|paths| paths.iter().filter(|path| is_aside(path)).try_for_each(|path| remove(path)));
        if let Err(left) = removed {
            tracing::error!(%left, "garbage stays until the next start");
        }
    }
}

fn entries_of(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(directory).map_err(Failure::io("list", directory))?;
    let paths = entries.map(|entry| Ok(entry.map_err(Failure::io("list", directory))?.path()));
    paths.collect()
}

fn is_aside(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(ASIDE.as_bytes()))
}

/// Removes a file or a tree.
fn remove(path: &Path) -> Result<(), Failure> {
    match unless_gone(path.symlink_metadata()).map_err(Failure::io("look at", path))? {
        Some(metadata) if metadata.is_dir() => remove_tree(path),
        Some(_) => remove_file(path),
        None => Ok(()),
    }
}

fn unless_gone<T>(done: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

/// Layers get their names when they are complete; until then they are called `.layer-…`.
fn is_being_written(path: &Path, metadata: &Metadata) -> bool {
    let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    // A time in the future is that of a clock that was set back.
    let young = |changed: SystemTime| changed.elapsed().is_ok_and(|age| age < WRITING);
    hidden && metadata.modified().is_ok_and(young)
}
