//! Removes what nothing needs, while others publish, without locks. Why it is sound: `docs/decisions/2026-12-01-repository.md`.
//!
//! ```text
//! 1 markers ─▶ 2 publications ─▶ 3 manifests ─▶ 4 blobs          what is read, in this order
//!                    │ not renewed: its manifest's key is taken, so it never becomes one
//! a blob that neither names:   no marker ──▶ marker              (old enough)
//!                              marker of 1 ─▶ blob removed ─▶ marker removed      (marker old enough)
//! ```
//! Owns no state; may be killed anywhere, and run on several nodes at once. Must not remove anything while something that
//! names blobs cannot be read.

mod leftovers;
mod roots;

use crate::document;
use crate::error::{RepositoryError, Result};
use crate::layout::{self, BlobKey};
use crate::name::Name;
use crate::repository::Repository;
use object_store::ObjectMeta;
use object_store::path::Path;
use roots::Roots;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

/// How long what is left over stays. None of it is needed for safety from publishers: that does not depend on clocks.
#[derive(Debug, Clone)]
pub struct CollectOptions {
    /// A publication or hold that was not renewed for so long is dead. Its owner, if it lives after all, is refused.
    pub expiry: Duration,
    /// A blob is condemned when it is so old, and removed when its marker is: who read a manifest just before it was deleted
    /// can go on reading for so long.
    pub grace: Duration,
    /// What says that a publication never becomes a snapshot, or that one was deleted, stays for so long. A publisher that
    /// slept for longer could bring a deleted snapshot back.
    pub keep_tombstones: Duration,
}

impl Default for CollectOptions {
    fn default() -> Self {
        let hour = Duration::from_secs(3600);
        Self { expiry: 24 * hour, grace: hour, keep_tombstones: 30 * 24 * hour }
    }
}

/// What a collection did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Blobs that are taken by nobody any more.
    pub condemned: u64,
    /// Blobs that were removed.
    pub removed: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Publications that were taken for dead.
    pub expired: u64,
    /// Other objects and files that were left over and removed.
    pub leftovers: u64,
}

/// An object that says all by being there. Not empty: some servers take no empty bodies.
#[derive(Serialize)]
struct Mark {}

impl Repository {
    /// Removes what nothing needs. To be called now and then, by any node: what was condemned in one call is removed by a
    /// later one.
    ///
    /// # Errors
    /// [`RepositoryError::Damaged`] and [`RepositoryError::UnknownVersion`] when something that names blobs cannot be read:
    /// then nothing was removed; [`RepositoryError::Unavailable`], after which some was.
    pub async fn collect(&self, options: &CollectOptions) -> Result<Collected> {
        let mut collected = Collected::default();
        let now = self.now().await?;
        let is_old = |meta: &ObjectMeta, age: Duration| {
            now.duration_since(meta.last_modified.into()).unwrap_or_default() >= age
        };
        // Before anything that names blobs is read: whoever took a blob of these did so before, and is seen.
        let markers = self.keyed(layout::CONDEMNED).await?;
        let roots = Roots::read(&self.objects, |meta| is_old(meta, options.expiry), &mut collected).await?;
        let blobs = self.keyed(layout::BLOBS).await?;
        for (key, meta) in &blobs {
            if roots.need(key) {
                continue;
            }
            match markers.get(key) {
                None if is_old(meta, options.grace) => {
                    self.objects.write(&key.marker(), document::write(&key.marker(), &Mark {})?).await?;
                    collected.condemned += 1;
                }
                Some(marker) if is_old(marker, options.grace) => {
                    // The marker last: while the blob is there, nobody takes it.
                    self.objects.remove(&key.path()).await?;
                    self.objects.remove(&key.marker()).await?;
                    collected.removed += 1;
                    collected.removed_bytes += meta.size;
                }
                _ => {}
            }
        }
        for key in markers.keys().filter(|key| !blobs.contains_key(key)) {
            // Its collector was killed between the two.
            self.objects.remove(&key.marker()).await?;
            collected.leftovers += 1;
        }
        for meta in roots.tombstones.iter().filter(|meta| is_old(meta, options.keep_tombstones)) {
            self.objects.remove(&meta.location).await?;
            collected.leftovers += 1;
        }
        collected.leftovers += self.collect_leftovers(now, options).await?;
        Ok(collected)
    }

    /// The store's own time: ages are told by its clock alone.
    async fn now(&self) -> Result<SystemTime> {
        let key = layout::collection(&Name::random());
        self.objects.write(&key, document::write(&key, &Mark {})?).await?;
        let looked = self.objects.look(&key).await?;
        self.objects.remove(&key).await?;
        let meta = looked.ok_or_else(|| RepositoryError::Conflict { what: key.to_string() })?;
        Ok(meta.last_modified.into())
    }

    async fn keyed(&self, kind: &str) -> Result<BTreeMap<BlobKey, ObjectMeta>> {
        let listed = self.objects.list(&Path::from(kind)).await?;
        Ok(listed.into_iter().filter_map(|meta| Some((BlobKey::parse(&meta.location)?, meta))).collect())
    }
}
