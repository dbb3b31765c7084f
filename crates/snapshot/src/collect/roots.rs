//! What needs blobs: publications, then manifests.
//!
//! In this order: a publication that is gone when they are listed has its manifest by then. Must not remove blobs.

use super::Collected;
use crate::document;
use crate::error::{RepositoryError, Result};
use crate::layout::{self, BlobKey};
use crate::manifest::Stored;
use crate::name::Name;
use crate::objects::Objects;
use crate::publication::Publication;
use aenv_storage::digest::Digest;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectMeta;
use object_store::path::Path;
use std::collections::BTreeSet;

/// Documents that are read at the same time.
const PARALLEL: usize = 8;

/// Everything that is needed.
#[derive(Debug, Default)]
pub(super) struct Roots {
    /// Any copy of these.
    contents: BTreeSet<Digest>,
    /// These copies.
    copies: BTreeSet<BlobKey>,
    /// Keys of manifests where none is and none ever will be.
    pub(super) tombstones: Vec<ObjectMeta>,
}

impl Roots {
    pub(super) async fn read(
        objects: &Objects,
        is_dead: impl Fn(&ObjectMeta) -> bool,
        collected: &mut Collected,
    ) -> Result<Self> {
        let mut roots = Self::default();
        for (meta, bytes) in read_all(objects, layout::PUBLICATIONS).await? {
            let publication: Publication = document::read(&meta.location, &bytes)?;
            if is_dead(&meta) {
                expire(objects, &meta.location, &publication).await?;
                collected.expired += 1;
            } else {
                roots.contents.extend(publication.contents);
            }
        }
        for (meta, bytes) in read_all(objects, layout::MANIFESTS).await? {
            match document::read::<Stored>(&meta.location, &bytes)? {
                Stored::Published { snapshot, .. } => {
                    let named = snapshot.contents().flat_map(|blob| blob.objects());
                    roots.copies.extend(named.map(|object| object.blob_key()));
                }
                Stored::Expired | Stored::Deleted => roots.tombstones.push(meta),
            }
        }
        Ok(roots)
    }

    /// Whether anything needs this copy.
    pub(super) fn need(&self, key: &BlobKey) -> bool {
        self.contents.contains(&key.digest) || self.copies.contains(key)
    }
}

/// Ends a publication whose owner is taken for dead. It may live: from the first step on, it cannot become a snapshot.
async fn expire(objects: &Objects, key: &Path, publication: &Publication) -> Result<()> {
    if let Some(snapshot) = &publication.snapshot {
        let name = name_of(key)?;
        let manifest = layout::manifest(snapshot, &name);
        // What is there already is its manifest, which is read below, or the same from another collection.
        objects.create(&manifest, document::write(&manifest, &Stored::Expired)?).await?;
    }
    objects.remove(key).await
}

fn name_of(key: &Path) -> Result<Name> {
    let stem = key.filename().and_then(|name| name.strip_suffix(".json"));
    stem.and_then(|stem| stem.parse().ok()).ok_or_else(|| RepositoryError::Damaged {
        object: key.to_string(),
        reason: "it is not called as a publication is".to_owned(),
    })
}

/// All documents below `kind` that are still there when they come to be read.
async fn read_all(objects: &Objects, kind: &str) -> Result<Vec<(ObjectMeta, bytes::Bytes)>> {
    let listed = objects.list(&Path::from(kind)).await?;
    stream::iter(listed)
        .map(|meta| async move { Ok(objects.read(&meta.location).await?.map(|bytes| (meta, bytes))) })
        .buffered(PARALLEL)
        .try_filter_map(|read| std::future::ready(Ok(read)))
        .try_collect()
        .await
}
