//! An object store that asks before every request what is to become of it.
//!
//! Owns the store below. Must not decide anything itself.

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt as _, StreamExt as _};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartId, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    UploadPart,
};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::OwnedMutexGuard;

/// What is to become of a request.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// It is made. The guard is dropped when it is answered.
    Make(Option<OwnedMutexGuard<()>>),
    /// It is not made.
    Fail,
    /// It is made, and its answer lost.
    Lose,
}

/// Decides about requests; may let them wait.
#[async_trait]
pub(crate) trait Hook: fmt::Debug + Send + Sync + 'static {
    async fn verdict(&self, operation: &'static str, key: &Path) -> Verdict;
}

/// The store.
#[derive(Debug)]
pub(crate) struct Hooked<T> {
    pub(crate) inner: Arc<T>,
    pub(crate) hook: Arc<dyn Hook>,
}

async fn ask<R>(
    hook: &dyn Hook,
    operation: &'static str,
    key: &Path,
    request: impl Future<Output = Result<R>>,
) -> Result<R> {
    let failed =
        || Error::Generic { store: "hooked", source: format!("{operation} {key} was made to fail").into() };
    match hook.verdict(operation, key).await {
        Verdict::Make(guard) => {
            let answer = request.await;
            drop(guard);
            answer
        }
        Verdict::Fail => Err(failed()),
        Verdict::Lose => {
            // Whatever it says, nobody hears it.
            let _ = request.await;
            Err(failed())
        }
    }
}

impl<T: fmt::Display> fmt::Display for Hooked<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Hooked({})", self.inner)
    }
}

#[async_trait]
impl<T: ObjectStore> ObjectStore for Hooked<T> {
    async fn put_opts(&self, key: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        ask(self.hook.as_ref(), "put", key, self.inner.put_opts(key, payload, options)).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let begun =
            ask(self.hook.as_ref(), "begin", key, self.inner.put_multipart_opts(key, options)).await?;
        Ok(Box::new(HookedUpload { inner: begun, hook: Arc::clone(&self.hook), key: key.clone() }))
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        ask(self.hook.as_ref(), "get", key, self.inner.get_opts(key, options)).await
    }

    async fn get_ranges(&self, key: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        ask(self.hook.as_ref(), "get ranges", key, self.inner.get_ranges(key, ranges)).await
    }

    fn delete_stream(&self, keys: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (inner, hook) = (Arc::clone(&self.inner), Arc::clone(&self.hook));
        keys.then(move |key| {
            let (inner, hook) = (Arc::clone(&inner), Arc::clone(&hook));
            async move {
                let key = key?;
                ask(hook.as_ref(), "delete", &key, inner.delete(&key)).await.map(|()| key)
            }
        })
        .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (inner, hook) = (Arc::clone(&self.inner), Arc::clone(&self.hook));
        let prefix = prefix.cloned().unwrap_or_default();
        let listed = async move {
            let all = async { Ok(inner.list(Some(&prefix)).collect::<Vec<_>>().await) };
            match ask(hook.as_ref(), "list", &prefix, all).await {
                Ok(listed) => listed,
                Err(error) => vec![Err(error)],
            }
        };
        listed.into_stream().flat_map(stream::iter).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let key = prefix.cloned().unwrap_or_default();
        ask(self.hook.as_ref(), "list", &key, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        ask(self.hook.as_ref(), "copy", to, self.inner.copy_opts(from, to, options)).await
    }
}

#[async_trait]
impl<T: MultipartStore + ObjectStore> MultipartStore for Hooked<T> {
    async fn create_multipart(&self, key: &Path) -> Result<MultipartId> {
        ask(self.hook.as_ref(), "begin", key, self.inner.create_multipart(key)).await
    }

    async fn put_part(&self, key: &Path, id: &MultipartId, part: usize, data: PutPayload) -> Result<PartId> {
        ask(self.hook.as_ref(), "part", key, self.inner.put_part(key, id, part, data)).await
    }

    async fn complete_multipart(
        &self,
        key: &Path,
        id: &MultipartId,
        parts: Vec<PartId>,
    ) -> Result<PutResult> {
        ask(self.hook.as_ref(), "complete", key, self.inner.complete_multipart(key, id, parts)).await
    }

    async fn abort_multipart(&self, key: &Path, id: &MultipartId) -> Result<()> {
        ask(self.hook.as_ref(), "abort", key, self.inner.abort_multipart(key, id)).await
    }
}

#[derive(Debug)]
struct HookedUpload {
    inner: Box<dyn MultipartUpload>,
    hook: Arc<dyn Hook>,
    key: Path,
}

#[async_trait]
impl MultipartUpload for HookedUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (hook, key, part) = (Arc::clone(&self.hook), self.key.clone(), self.inner.put_part(data));
        async move { ask(hook.as_ref(), "part", &key, part).await }.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        ask(self.hook.as_ref(), "complete", &self.key, self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        ask(self.hook.as_ref(), "abort", &self.key, self.inner.abort()).await
    }
}
