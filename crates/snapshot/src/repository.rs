//! A repository: finds, lists and deletes snapshots. What writes them is in `publish`, what removes their bytes in `collect`.
//!
//! Owns the opened store. Must not keep anything of it in memory: other nodes change it at any time.

use crate::document;
use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::manifest::{Alias, Manifest, Stored};
use crate::name::Name;
use crate::objects::Objects;
use aenv_storage::remote::RemoteStore;
use futures_util::{StreamExt as _, stream};
use object_store::path::Path;
use std::collections::BTreeMap;

/// The tag that is meant when none is named.
pub const DEFAULT_TAG: &str = "default";

/// Snapshots that are read at the same time.
const PARALLEL: usize = 8;

/// A repository of snapshots that any number of nodes use at the same time. A handle: clones share the connections.
#[derive(Debug, Clone)]
pub struct Repository {
    pub(crate) objects: Objects,
}

/// Some of the snapshots, in the order of their ids.
#[derive(Debug, Default)]
pub struct Page {
    /// Those that can be read.
    pub snapshots: Vec<Manifest>,
    /// Why others cannot.
    pub unreadable: Vec<RepositoryError>,
    /// What to ask for the next page after; none when this is the last.
    pub next: Option<Name>,
}

/// The manifest that was found, and where.
pub(crate) struct Found {
    pub(crate) key: Path,
    pub(crate) stored: Result<Stored>,
}

impl Repository {
    /// Times that a change is tried anew when others change the same.
    pub(crate) const SWAPS: usize = 32;

    /// The repository in `store`, whose location has nothing else in it. Nothing is read or written yet.
    #[must_use]
    pub fn new(store: RemoteStore) -> Self {
        Self { objects: Objects::new(store) }
    }

    /// The store, for readers of blobs.
    #[must_use]
    pub fn store(&self) -> &RemoteStore {
        self.objects.store()
    }

    /// The snapshot with this id.
    ///
    /// # Errors
    /// [`RepositoryError::NotFound`]; [`RepositoryError::Damaged`] and [`RepositoryError::UnknownVersion`] when it is there
    /// but cannot be read; [`RepositoryError::Unavailable`].
    pub async fn get(&self, id: &Name) -> Result<Manifest> {
        published(id, self.manifests(id).await?)
    }

    /// The snapshot that `reference` means: `NAME:TAG`, an id, or a name whose tag is [`DEFAULT_TAG`].
    ///
    /// # Errors
    /// As [`Self::get`]; [`RepositoryError::Invalid`] when it is none of the three.
    pub async fn resolve(&self, reference: &str) -> Result<Manifest> {
        let (name, tag) = match reference.split_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (reference, None),
        };
        let alias = Alias { name: name.parse()?, tag: tag.unwrap_or(DEFAULT_TAG).parse()? };
        if tag.is_none() {
            match self.get(&alias.name).await {
                Err(RepositoryError::NotFound { .. }) => {}
                other => return other,
            }
        }
        match self.alias(&alias).await? {
            Some(snapshot) => self.get(&snapshot).await,
            None => Err(RepositoryError::NotFound { what: format!("the snapshot {alias}") }),
        }
    }

    /// At most `limit` snapshots whose ids are greater than `after`.
    ///
    /// # Errors
    /// [`RepositoryError::Unavailable`].
    pub async fn list(&self, after: Option<&Name>, limit: usize) -> Result<Page> {
        let mut keys: BTreeMap<Name, Vec<Path>> = BTreeMap::new();
        for meta in self.objects.list(&Path::from(layout::MANIFESTS)).await? {
            if let Some((id, _)) = layout::parse_manifest(&meta.location)
                && after.is_none_or(|after| id > *after)
            {
                keys.entry(id).or_default().push(meta.location);
            }
        }
        let mut reads = stream::iter(keys)
            .map(|(id, keys)| async move {
                let found = self.read_manifests(keys).await;
                found.map(|found| (published(&id, found), id))
            })
            .buffered(PARALLEL);
        let mut page = Page::default();
        let mut last = None;
        while let Some(read) = reads.next().await {
            let (read, id) = read?;
            if page.snapshots.len() + page.unreadable.len() == limit {
                // Those after it may all be deleted ones: then the next page is empty.
                page.next = last;
                break;
            }
            last = Some(id);
            match read {
                Ok(manifest) => page.snapshots.push(manifest),
                Err(RepositoryError::NotFound { .. }) => {}
                Err(error) => page.unreadable.push(error),
            }
        }
        Ok(page)
    }

    /// Deletes a snapshot, with the alias it was published under if that still means it. Its bytes go with a later
    /// collection, unless other snapshots have them. False when there was none.
    ///
    /// # Errors
    /// [`RepositoryError::UnknownVersion`] when a newer program must do it; [`RepositoryError::Unavailable`], after which it
    /// may have been deleted.
    pub async fn delete(&self, id: &Name) -> Result<bool> {
        let mut was_there = false;
        for found in self.manifests(id).await? {
            let alias = match found.stored {
                Ok(Stored::Expired | Stored::Deleted) => continue,
                Ok(Stored::Published { snapshot, .. }) => snapshot.alias,
                // What it says is of no use to anybody.
                Err(RepositoryError::Damaged { .. }) => None,
                Err(error) => return Err(error),
            };
            // First the alias: without the manifest nobody knows which it was.
            if let Some(alias) = alias {
                self.clear_alias(&alias, id).await?;
            }
            // In its place, not away: its publisher may not know yet that it was published, and would create it again.
            let deleted = document::write(&found.key, &Stored::Deleted)?;
            self.objects.write(&found.key, deleted).await?;
            was_there = true;
        }
        Ok(was_there)
    }

    /// What stands at the keys of a snapshot, in their order.
    pub(crate) async fn manifests(&self, id: &Name) -> Result<Vec<Found>> {
        let listed = self.objects.list(&layout::manifests(id)).await?;
        self.read_manifests(listed.into_iter().map(|meta| meta.location)).await
    }

    async fn read_manifests(&self, keys: impl IntoIterator<Item = Path>) -> Result<Vec<Found>> {
        let mut found = Vec::new();
        for key in keys {
            if layout::parse_manifest(&key).is_none() {
                continue;
            }
            // Removed since it was listed: as if it had not been there.
            let Some(bytes) = self.objects.read(&key).await? else { continue };
            let stored = document::read(&key, &bytes);
            found.push(Found { key, stored });
        }
        Ok(found)
    }
}

/// The snapshot among what stands at its keys.
fn published(id: &Name, found: Vec<Found>) -> Result<Manifest> {
    let mut unreadable = None;
    for found in found {
        match found.stored {
            Ok(Stored::Published { snapshot, .. }) => return Ok(*snapshot),
            Ok(Stored::Expired | Stored::Deleted) => {}
            Err(error) => unreadable = Some(error),
        }
    }
    Err(unreadable.unwrap_or_else(|| RepositoryError::NotFound { what: format!("the snapshot {id}") }))
}
