//! Brings one content into the store, under a key of its own.
//!
//! ```text
//! in the store, condemned   copied there
//! one part                  written at once
//! more parts, S3            begun ─▶ parts, several at a time, each noted ─▶ completed ─▶ forgotten
//! more parts, directory     written to a file of another name, synced, renamed: all of it or nothing
//! ```
//! An object is whole once it can be seen at all. Owns nothing but what is noted. Must not touch other copies.

use super::PublishOptions;
use super::bandwidth::Bandwidth;
use super::content::{self, Origin, Source};
use super::progress::{Progress, ProgressFile, Upload};
use crate::error::{RepositoryError, Result, unavailable};
use crate::layout::BlobKey;
use crate::objects::Objects;
use crate::publication::Begun;
use aenv_storage::digest::Digest;
use aenv_storage::remote::chunk_list::ChunkList;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use object_store::multipart::{MultipartStore, PartId};
use object_store::{Error, ObjectStoreExt as _, PutPayload};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use tokio::sync::watch;

const ATTEMPTS: u32 = 3;
/// What S3 takes.
const MOST_PARTS: u64 = 10_000;

/// What an upload needs.
pub(super) struct Uploader<'a> {
    pub(super) objects: &'a Objects,
    pub(super) publication: &'a Begun,
    pub(super) options: &'a PublishOptions,
    pub(super) bandwidth: Bandwidth,
    pub(super) notes: ProgressFile,
    pub(super) progress: &'a watch::Sender<Progress>,
}

/// A local file that goes in parts.
struct LargeFile<'a> {
    digest: Digest,
    path: &'a Path,
    list: &'a Arc<ChunkList>,
}

impl Uploader<'_> {
    /// Makes a copy of the content: its key.
    pub(super) async fn bring(&self, digest: Digest, source: &Source) -> Result<BlobKey> {
        let key = BlobKey { digest, publication: self.publication.name.clone() };
        match &source.origin {
            Origin::Stored(object) => {
                if !self.objects.copy(&object.key(), &key.path()).await? {
                    return Err(RepositoryError::NotFound { what: format!("the blob {}", object.key()) });
                }
                self.done(source.size);
            }
            Origin::Memory(bytes) => {
                self.bandwidth.take(source.size).await?;
                self.objects.write(&key.path(), bytes.clone()).await?;
                self.sent(source.size);
            }
            Origin::File(path, list) if source.size <= self.part_bytes(source.size) => {
                let bytes = content::read(path, list, 0..source.size).await?;
                self.bandwidth.take(source.size).await?;
                self.objects.write(&key.path(), bytes).await?;
                self.sent(source.size);
            }
            Origin::File(path, list) => return self.bring_parts(LargeFile { digest, path, list }, key).await,
        }
        Ok(key)
    }

    /// Takes note that a copy was there.
    pub(super) async fn found(&self, digest: Digest, size: u64) -> Result<()> {
        self.done(size);
        match self.notes.get(&digest).await {
            Some(upload) => self.abandon(digest, &upload).await,
            None => Ok(()),
        }
    }

    /// Gives up uploads of contents that are not to be published any more.
    pub(super) async fn abandon_foreign(&self, contents: &BTreeMap<Digest, Source>) -> Result<()> {
        for (digest, upload) in self.notes.uploads().await {
            if !contents.contains_key(&digest) {
                self.abandon(digest, &upload).await?;
            }
        }
        Ok(())
    }

    async fn bring_parts(&self, file: LargeFile<'_>, key: BlobKey) -> Result<BlobKey> {
        let mut attempt = 1;
        loop {
            let (tried, key) = match self.objects.store().parts() {
                Some(parts) => {
                    let upload = self.begun(&file, &key, parts.as_ref()).await?;
                    let key = BlobKey { digest: file.digest, publication: upload.copy.clone() };
                    (self.put_parts(&file, &key, parts.as_ref(), upload).await, key)
                }
                None => (self.put_stream(&file, &key).await, key.clone()),
            };
            let error = match tried {
                Ok(()) => return Ok(key),
                Err(error) => error,
            };
            let RepositoryError::Unavailable { source, .. } = &error else { return Err(error) };
            // The answer to its completion may have been lost: by an earlier call, perhaps, and its copy condemned since. First the
            // marker, as for every copy that is taken.
            let is_condemned = self.objects.look(&key.marker()).await?.is_some();
            let found = self.objects.look(&key.path()).await?;
            let is_whole = found.is_some_and(|meta| meta.size == file.list.blob_bytes());
            if is_whole && !is_condemned {
                self.done(file.list.blob_bytes());
                self.notes.forget(&file.digest).await?;
                return Ok(key);
            }
            if is_condemned || is_unknown(source) {
                self.notes.forget(&file.digest).await?;
            }
            if attempt == ATTEMPTS {
                return Err(error);
            }
            attempt += 1;
        }
    }

    /// The upload that was begun for this content, or a new one.
    async fn begun(&self, file: &LargeFile<'_>, key: &BlobKey, parts: &dyn MultipartStore) -> Result<Upload> {
        let part_bytes = self.part_bytes(file.list.blob_bytes());
        if let Some(upload) = self.notes.get(&file.digest).await {
            if upload.part_bytes == part_bytes {
                return Ok(upload);
            }
            self.abandon(file.digest, &upload).await?;
        }
        let path = key.path();
        let id = parts.create_multipart(&path).await.map_err(unavailable("begin the upload of", &path))?;
        let upload = Upload { copy: key.publication.clone(), upload: id, part_bytes, parts: BTreeMap::new() };
        self.notes.begin(file.digest, upload.clone()).await?;
        Ok(upload)
    }

    async fn put_parts(
        &self,
        file: &LargeFile<'_>,
        key: &BlobKey,
        parts: &dyn MultipartStore,
        upload: Upload,
    ) -> Result<()> {
        let path = key.path();
        let size = file.list.blob_bytes();
        let count = size.div_ceil(upload.part_bytes);
        let range = |index: u64| index * upload.part_bytes..((index + 1) * upload.part_bytes).min(size);
        let missing = (0..count).filter(|index| !upload.parts.contains_key(index));
        let (path, id) = (&path, &upload.upload);
        let sent = stream::iter(missing)
            .map(|index| async move {
                let bytes = self.next_part(file, range(index)).await?;
                let length = bytes.content_length() as u64;
                let number = usize::try_from(index).unwrap_or(usize::MAX);
                let part = parts
                    .put_part(path, id, number, bytes)
                    .await
                    .map_err(unavailable("upload a part of", path))?;
                self.notes.part(&file.digest, index, part.content_id.clone()).await?;
                self.progress.send_modify(|progress| progress.uploaded_bytes += length);
                Ok::<_, RepositoryError>((index, part.content_id))
            })
            .buffer_unordered(self.options.parallel.max(1))
            .try_collect::<BTreeMap<_, _>>()
            .await?;
        let all: BTreeMap<_, _> = upload.parts.clone().into_iter().chain(sent).collect();
        let all = all.into_values().map(|content_id| PartId { content_id }).collect();
        parts.complete_multipart(path, id, all).await.map_err(unavailable("complete the upload of", path))?;
        self.done(size);
        self.notes.forget(&file.digest).await
    }

    async fn put_stream(&self, file: &LargeFile<'_>, key: &BlobKey) -> Result<()> {
        let path = key.path();
        let size = file.list.blob_bytes();
        let part_bytes = self.part_bytes(size);
        let begun = self.objects.store().objects().put_multipart(&path).await;
        let mut upload = begun.map_err(unavailable("begin the upload of", &path))?;
        let written = async {
            for start in (0..size).step_by(usize::try_from(part_bytes).unwrap_or(usize::MAX)) {
                let bytes = self.next_part(file, start..(start + part_bytes).min(size)).await?;
                let length = bytes.content_length() as u64;
                upload.put_part(bytes).await.map_err(unavailable("upload a part of", &path))?;
                self.progress.send_modify(|progress| progress.uploaded_bytes += length);
            }
            Ok(())
        };
        if let Err(error) = written.await {
            if let Err(leftover) = upload.abort().await {
                tracing::warn!(%path, error = %leftover, "what was uploaded stays until a collection");
            }
            return Err(error);
        }
        upload.complete().await.map_err(unavailable("complete the upload of", &path))?;
        self.done(size);
        Ok(())
    }

    /// The bytes of a part, when they may go.
    async fn next_part(&self, file: &LargeFile<'_>, range: Range<u64>) -> Result<PutPayload> {
        self.publication.renew_if_due(self.objects).await?;
        self.bandwidth.take(range.end - range.start).await?;
        Ok(PutPayload::from_bytes(content::read(file.path, file.list, range).await?))
    }

    async fn abandon(&self, digest: Digest, upload: &Upload) -> Result<()> {
        if let Some(parts) = self.objects.store().parts() {
            let key = BlobKey { digest, publication: upload.copy.clone() }.path();
            match parts.abort_multipart(&key, &upload.upload).await {
                Err(error) if !is_unknown(&error) => {
                    tracing::warn!(%key, %error, "an upload that was given up stays until the bucket's own rule ends it");
                }
                _ => {}
            }
        }
        self.notes.forget(&digest).await
    }

    fn part_bytes(&self, size: u64) -> u64 {
        let chunk = u64::from(aenv_storage::remote::chunk_list::CHUNK_BYTES);
        self.options.part_bytes.max(size.div_ceil(MOST_PARTS)).max(1).next_multiple_of(chunk)
    }

    fn done(&self, bytes: u64) {
        self.progress.send_modify(|progress| progress.done_bytes += bytes);
    }

    fn sent(&self, bytes: u64) {
        self.progress.send_modify(|progress| {
            progress.done_bytes += bytes;
            progress.uploaded_bytes += bytes;
        });
    }
}

/// Whether the server says that it knows no such upload: it was completed, given up, or ended by the bucket's own rule. Some
/// say that it is not allowed.
fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::PermissionDenied { .. })
}
