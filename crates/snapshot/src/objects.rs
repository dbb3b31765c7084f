//! Reading, writing, listing of a store, with answers that mean something when a response was lost.
//!
//! Owns no state. Must not know what the objects are.

use crate::error::{Result, unavailable};
use aenv_storage::remote::RemoteStore;
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStoreExt as _, PutMode, PutOptions, PutPayload};
use std::time::Duration;

/// Times that a write is tried. The client of S3 tries again by itself: this is for what it leaves open.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(50);

/// What became of an object that must not be there yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Created {
    /// It is what was given.
    New,
    /// Somebody else's is there.
    Exists(Bytes),
}

/// A store by what is done with it here.
#[derive(Debug, Clone)]
pub(crate) struct Objects {
    store: RemoteStore,
}

impl Objects {
    pub(crate) fn new(store: RemoteStore) -> Self {
        Self { store }
    }

    pub(crate) fn store(&self) -> &RemoteStore {
        &self.store
    }

    /// The object's bytes; none when it is not there.
    pub(crate) async fn read(&self, key: &Path) -> Result<Option<Bytes>> {
        let failed = unavailable("read", key);
        match self.store.objects().get(key).await {
            Ok(found) => found.bytes().await.map(Some).map_err(failed),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// What is known of the object; none when it is not there.
    pub(crate) async fn look(&self, key: &Path) -> Result<Option<ObjectMeta>> {
        match self.store.objects().head(key).await {
            Ok(found) => Ok(Some(found)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(unavailable("look for", key)(error)),
        }
    }

    /// All objects below `prefix`, in the order of their keys.
    pub(crate) async fn list(&self, prefix: &Path) -> Result<Vec<ObjectMeta>> {
        let found = self.store.objects().list(Some(prefix)).try_collect::<Vec<_>>().await;
        let mut found = found.map_err(unavailable("list", prefix))?;
        // Directories list in no order.
        found.sort_by(|a, b| a.location.cmp(&b.location));
        Ok(found)
    }

    /// Writes the object, in place of what is there.
    pub(crate) async fn write(&self, key: &Path, bytes: impl Into<Bytes>) -> Result<()> {
        let payload = PutPayload::from_bytes(bytes.into());
        let mut attempt = 1;
        loop {
            match self.store.objects().put(key, payload.clone()).await {
                Ok(_) => return Ok(()),
                Err(error) if attempt == ATTEMPTS => return Err(unavailable("write", key)(error)),
                Err(_) => tokio::time::sleep(PAUSE * attempt).await,
            }
            attempt += 1;
        }
    }

    /// Writes the object unless there is one. `bytes` must be such that nobody else writes the same: what is there and equals
    /// them was written by this call, although its response was lost.
    pub(crate) async fn create(&self, key: &Path, bytes: impl Into<Bytes>) -> Result<Created> {
        let bytes = bytes.into();
        let mut attempt = 1;
        loop {
            let options = PutOptions::from(PutMode::Create);
            let put = self.store.objects().put_opts(key, PutPayload::from_bytes(bytes.clone()), options);
            let Err(error) = put.await else { return Ok(Created::New) };
            // Refused, or not known: what is there decides. S3 may also refuse because another writer is not done yet.
            match self.read(key).await {
                Ok(Some(found)) if found == bytes => return Ok(Created::New),
                Ok(Some(found)) => return Ok(Created::Exists(found)),
                Ok(None) if attempt < ATTEMPTS => tokio::time::sleep(PAUSE * attempt).await,
                Ok(None) | Err(_) => return Err(unavailable("create", key)(error)),
            }
            attempt += 1;
        }
    }

    /// Removes the object. No error when it is gone already.
    pub(crate) async fn remove(&self, key: &Path) -> Result<()> {
        match self.store.objects().delete(key).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(unavailable("remove", key)(error)),
        }
    }

    /// Makes the object `to` of the content of `from`, inside of the store; false when `from` is not there.
    pub(crate) async fn copy(&self, from: &Path, to: &Path) -> Result<bool> {
        match self.store.objects().copy(from, to).await {
            Ok(()) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(unavailable("copy", from)(error)),
        }
    }
}
