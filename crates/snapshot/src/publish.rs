//! Publishes a snapshot: contents first, the manifest last, then its alias.
//!
//! ```text
//! digest the files ─▶ publication ─▶ each content: is a copy there that is not condemned? ─┬ yes: taken
//!                                                                                          └ no: uploaded under a new key
//!                     ─▶ manifest, unless it is there ─▶ alias ─▶ publication removed
//! ```
//! Every step may be repeated, and the whole call: what is uploaded is found by its digest, what is half uploaded is gone on
//! with from the progress file. Owns nothing that outlives the call but that file. Must not remove blobs.

mod bandwidth;
mod content;
mod progress;
mod upload;

use crate::document;
use crate::error::{RepositoryError, Result};
use crate::layout::{self, BlobKey};
use crate::manifest::{Blob, Content, Draft, Manifest, Object, Stored};
use crate::objects::{Created, Objects};
use crate::publication::{Begun, Publication};
use crate::repository::Repository;
use aenv_storage::digest::Digest;
use bandwidth::Bandwidth;
use content::{Digested, Source};
pub use progress::Progress;
use progress::ProgressFile;
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::path::PathBuf;
use tokio::sync::watch;
use upload::Uploader;

/// How much of the host and of the network a publication may take.
#[derive(Debug, Clone)]
pub struct PublishOptions {
    /// Bytes that are uploaded in a second, on average; none means as many as can be.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Parts that are uploaded at the same time. Each takes [`Self::part_bytes`] of memory.
    pub parallel: usize,
    /// Bytes of a part; rounded up to whole chunks, and more where a blob would have more than 10 000 parts. S3 takes none
    /// below 5 MiB.
    pub part_bytes: u64,
    /// Where to note which parts are uploaded, so that another process can go on. One file for one snapshot; removed at the
    /// end. Without it an upload that is interrupted begins anew.
    pub progress_file: Option<PathBuf>,
}

impl Default for PublishOptions {
    fn default() -> Self {
        Self { bytes_per_second: None, parallel: 4, part_bytes: 8 << 20, progress_file: None }
    }
}

impl Repository {
    /// Publishes `draft`. A snapshot that is published already is answered as it is, and its alias is set again.
    ///
    /// `progress` is told what is done; who does not care drops its receivers.
    ///
    /// # Errors
    /// [`RepositoryError::Changed`] and [`RepositoryError::File`] for local files; [`RepositoryError::NotFound`] when what was
    /// said to be stored is not, or the snapshot was deleted meanwhile; [`RepositoryError::Expired`];
    /// [`RepositoryError::Unavailable`], after which it may have been published.
    pub async fn publish(
        &self,
        draft: &Draft,
        options: &PublishOptions,
        progress: &watch::Sender<Progress>,
    ) -> Result<Manifest> {
        let manifest = match self.get(&draft.id).await {
            Ok(published) => published,
            Err(RepositoryError::NotFound { .. }) => self.publish_anew(draft, options, progress).await?,
            Err(error) => return Err(error),
        };
        if let Some(alias) = &manifest.alias {
            self.set_alias(alias, &manifest.id).await?;
        }
        if let Some(path) = &options.progress_file {
            ProgressFile::remove(path).await?;
        }
        Ok(manifest)
    }

    async fn publish_anew(
        &self,
        draft: &Draft,
        options: &PublishOptions,
        progress: &watch::Sender<Progress>,
    ) -> Result<Manifest> {
        let files = content::digest_files(draft).await?;
        let contents = content::all(draft, &files);
        progress.send_modify(|progress| {
            *progress = Progress {
                total_bytes: contents.values().map(|content| content.size).sum(),
                ..Progress::default()
            };
        });
        let document =
            Publication { snapshot: Some(draft.id.clone()), contents: contents.keys().copied().collect() };
        let publication = Begun::begin(&self.objects, &document).await?;
        let published = self.publish_contents(draft, &files, contents, &publication, options, progress).await;
        match &published {
            // Whether the manifest is there is not known, and the caller tries again: it expires otherwise.
            Err(error) if error.is_passing() => {}
            _ => publication.end(&self.objects).await?,
        }
        published
    }

    async fn publish_contents(
        &self,
        draft: &Draft,
        files: &BTreeMap<PathBuf, Digested>,
        contents: BTreeMap<Digest, Source>,
        publication: &Begun,
        options: &PublishOptions,
        progress: &watch::Sender<Progress>,
    ) -> Result<Manifest> {
        let uploader = Uploader {
            objects: &self.objects,
            publication,
            options,
            bandwidth: Bandwidth::new(options),
            notes: ProgressFile::open(options.progress_file.as_deref()).await?,
            progress,
        };
        uploader.abandon_foreign(&contents).await?;
        let mut stored = BTreeMap::new();
        for (digest, source) in contents {
            progress.send_modify(|progress| progress.blob = Some(digest));
            publication.renew_if_due(&self.objects).await?;
            let copy = match find_copy(&self.objects, digest, source.size).await? {
                Some(copy) => {
                    uploader.found(digest, source.size).await?;
                    copy
                }
                None => uploader.bring(digest, &source).await?,
            };
            stored.insert(digest, Object { digest, size: source.size, copy: copy.publication });
        }
        let manifest = draft.try_map(|content| blob_of(content, files, &stored))?;
        self.write_manifest(&manifest, publication).await
    }

    /// The moment from which the snapshot is there.
    async fn write_manifest(&self, manifest: &Manifest, publication: &Begun) -> Result<Manifest> {
        let key = layout::manifest(&manifest.id, &publication.name);
        let stored =
            Stored::Published { publication: publication.name.clone(), snapshot: Box::new(manifest.clone()) };
        match self.objects.create(&key, document::write(&key, &stored)?).await? {
            Created::New => Ok(manifest.clone()),
            Created::Exists(found) => match document::read::<Stored>(&key, &found)? {
                Stored::Deleted => Err(RepositoryError::NotFound {
                    what: format!("the snapshot {}, deleted meanwhile,", manifest.id),
                }),
                Stored::Expired | Stored::Published { .. } => {
                    Err(RepositoryError::Expired { snapshot: manifest.id.to_string() })
                }
            },
        }
    }
}

/// A copy of the content that may be named by a manifest that is not written yet.
///
/// The publication that names the content was written before. The markers are read before the copies: a marker that is made
/// after they were read belongs to a collection that has seen the publication when it comes to remove anything; one that
/// was removed before they were read went after its copy.
pub(crate) async fn find_copy(objects: &Objects, digest: Digest, size: u64) -> Result<Option<BlobKey>> {
    let markers = objects.list(&layout::copies(layout::CONDEMNED, &digest)).await?;
    let condemned: Vec<_> = markers.iter().filter_map(|meta| BlobKey::parse(&meta.location)).collect();
    let copies = objects.list(&layout::copies(layout::BLOBS, &digest)).await?;
    let copies = copies.iter().filter(|meta| meta.size == size);
    Ok(copies.filter_map(|meta| BlobKey::parse(&meta.location)).find(|copy| !condemned.contains(copy)))
}

/// What the manifest says of a content of the draft.
fn blob_of(
    content: &Content,
    files: &BTreeMap<PathBuf, Digested>,
    stored: &BTreeMap<Digest, Object>,
) -> Result<Blob> {
    let object = |digest: &Digest| {
        stored
            .get(digest)
            .cloned()
            .ok_or_else(|| RepositoryError::NotFound { what: format!("the blob {digest}") })
    };
    match content {
        Content::File(path) => {
            let digested = files.get(path).ok_or_else(|| RepositoryError::NotFound {
                what: format!("the digest of {}", path.display()),
            })?;
            let chunks = digested.list_object.as_ref().map(|(digest, _)| object(digest)).transpose()?;
            Ok(Blob { object: object(&digested.list.blob())?, chunks })
        }
        Content::Stored(blob) => Ok(Blob {
            object: object(&blob.object.digest)?,
            chunks: blob.chunks.as_ref().map(|chunks| object(&chunks.digest)).transpose()?,
        }),
    }
}
