//! What killed programs leave behind besides blobs: superseded generations, aliases of deleted snapshots, objects of
//! collections, and in a directory files that never got their names.
//!
//! Must not touch what counts.

use super::CollectOptions;
use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::manifest::Alias;
use crate::register;
use crate::repository::Repository;
use object_store::path::Path;
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

impl Repository {
    /// How many objects and files were removed.
    pub(super) async fn collect_leftovers(&self, now: SystemTime, options: &CollectOptions) -> Result<u64> {
        let mut removed = 0;
        for kind in [layout::ALIASES, layout::HEADS] {
            for register in self.registers(kind).await? {
                removed += register::prune(&self.objects, &register).await?;
            }
        }
        for alias in self.aliases().await? {
            // A manifest comes before its alias, and no id is used twice: if it is not there now, it never will be.
            let Some(snapshot) = self.alias(&alias).await? else { continue };
            match self.get(&snapshot).await {
                Err(RepositoryError::NotFound { .. }) => self.clear_alias(&alias, &snapshot).await?,
                Err(error @ RepositoryError::Unavailable { .. }) => return Err(error),
                _ => {}
            }
        }
        for meta in self.objects.list(&Path::from(layout::COLLECTIONS)).await? {
            if now.duration_since(meta.last_modified.into()).unwrap_or_default() >= options.grace {
                self.objects.remove(&meta.location).await?;
                removed += 1;
            }
        }
        if let Some(directory) = self.store().directory() {
            removed += remove_unnamed(directory, now, options.expiry).await?;
        }
        Ok(removed)
    }

    async fn registers(&self, kind: &str) -> Result<BTreeSet<Path>> {
        let listed = self.objects.list(&Path::from(kind)).await?;
        let generations = listed.iter().filter(|meta| layout::parse_generation(&meta.location).is_some());
        let parents = generations.filter_map(|meta| meta.location.as_ref().rsplit_once('/'));
        Ok(parents.map(|(register, _)| Path::from(register)).collect())
    }

    async fn aliases(&self) -> Result<Vec<Alias>> {
        let registers = self.registers(layout::ALIASES).await?;
        let names = registers.iter().filter_map(|register| {
            let (name, tag) =
                register.as_ref().strip_prefix(layout::ALIASES)?.strip_prefix('/')?.split_once('/')?;
            Some(Alias { name: name.parse().ok()?, tag: tag.parse().ok()? })
        });
        Ok(names.collect())
    }
}

/// Removes files that were being written when their writer was killed: `NAME#NUMBER`, which are listed by no object store.
async fn remove_unnamed(directory: &std::path::Path, now: SystemTime, age: Duration) -> Result<u64> {
    let failed = |source| RepositoryError::File {
        action: "remove what was left over below",
        path: directory.to_owned(),
        source,
    };
    let root = directory.to_owned();
    let work = move || {
        let mut removed = 0;
        for kind in [
            layout::BLOBS,
            layout::CONDEMNED,
            layout::PUBLICATIONS,
            layout::MANIFESTS,
            layout::ALIASES,
            layout::HEADS,
            layout::COLLECTIONS,
        ] {
            remove_unnamed_below(&root.join(kind), now, age, &mut removed)?;
        }
        Ok(removed)
    };
    tokio::task::spawn_blocking(work)
        .await
        .map_err(std::io::Error::other)
        .and_then(|done| done)
        .map_err(failed)
}

fn remove_unnamed_below(
    directory: &std::path::Path,
    now: SystemTime,
    age: Duration,
    removed: &mut u64,
) -> std::io::Result<()> {
    let Some(entries) = if_there(std::fs::read_dir(directory))? else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        let Some(kind) = if_there(entry.file_type())? else { continue };
        if kind.is_dir() {
            remove_unnamed_below(&entry.path(), now, age, removed)?;
        } else if is_unnamed(&entry.file_name()) {
            let Some(metadata) = if_there(entry.metadata())? else { continue };
            if now.duration_since(metadata.modified()?).unwrap_or_default() >= age {
                if_there(std::fs::remove_file(entry.path()))?;
                *removed += 1;
            }
        }
    }
    Ok(())
}

/// As `object_store` calls a file until it is whole.
fn is_unnamed(name: &std::ffi::OsStr) -> bool {
    let Some((_, number)) = name.to_str().and_then(|name| name.rsplit_once('#')) else { return false };
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// None when it is gone: others remove as well.
fn if_there<T>(result: std::io::Result<T>) -> std::io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
