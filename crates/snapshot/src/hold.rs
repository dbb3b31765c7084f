//! Keeps the blobs of a snapshot for somebody who reads them by range, even when the snapshot is deleted meanwhile.
//!
//! A hold is a publication that becomes no snapshot. Owns its document. Must not read blobs.

use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::manifest::{Manifest, Object};
use crate::objects::Objects;
use crate::publication::{Begun, Publication};
use crate::repository::Repository;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

/// Blobs that are looked for at the same time.
const PARALLEL: usize = 8;

/// Blobs that no collection removes. It must be renewed, and is ended by [`Hold::release`]; one that is neither is over
/// when a publication would be taken for dead.
#[derive(Debug)]
pub struct Hold {
    objects: Objects,
    begun: Begun,
}

impl Repository {
    /// Holds everything that `manifest` names. Of a copy that is marked although its snapshot is there (see the decision),
    /// it counts from the next collection on that begins.
    ///
    /// # Errors
    /// [`RepositoryError::NotFound`] when some of it is gone already, or condemned: the snapshot was deleted.
    pub async fn hold(&self, manifest: &Manifest) -> Result<Hold> {
        let objects: Vec<_> = manifest.contents().flat_map(|blob| blob.objects()).collect();
        let contents = objects.iter().map(|object| object.digest).collect();
        let begun = Begun::begin(&self.objects, &Publication { snapshot: None, contents }).await?;
        let hold = Hold { objects: self.objects.clone(), begun };
        let checked = stream::iter(objects)
            .map(|object| self.check_held(manifest, object))
            .buffer_unordered(PARALLEL)
            .try_for_each(|()| std::future::ready(Ok(())));
        if let Err(error) = checked.await {
            hold.release().await?;
            return Err(error);
        }
        Ok(hold)
    }

    /// Whether a blob is there and stays, now that the hold is written.
    async fn check_held(&self, manifest: &Manifest, object: &Object) -> Result<()> {
        let key = object.blob_key();
        // First the marker, as for a publication that takes a copy.
        let is_marked = self.objects.look(&key.marker()).await?.is_some();
        let is_there = self.objects.look(&key.path()).await?.is_some();
        // A copy that was condemned in the very moment it was taken stays marked, and stays, while its snapshot is there.
        if !is_there || (is_marked && !self.is_published(manifest).await?) {
            return Err(RepositoryError::NotFound { what: format!("the blob {}", key.path()) });
        }
        Ok(())
    }

    async fn is_published(&self, manifest: &Manifest) -> Result<bool> {
        match self.get(&manifest.id).await {
            Ok(_) => Ok(true),
            Err(RepositoryError::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Hold {
    /// Says that its owner lives. Called more often than every quarter of an hour, it writes once in that time.
    ///
    /// # Errors
    /// [`RepositoryError::Unavailable`]: call it again soon.
    pub async fn renew(&self) -> Result<()> {
        self.begun.renew_if_due(&self.objects).await
    }

    /// Ends it.
    ///
    /// # Errors
    /// [`RepositoryError::Unavailable`]: it ends by itself later.
    pub async fn release(&self) -> Result<()> {
        self.begun.end(&self.objects).await
    }

    /// Where its document lies, for messages.
    #[must_use]
    pub fn key(&self) -> object_store::path::Path {
        layout::publication(&self.begun.name)
    }
}
