//! How far a publication is: told to who looks, and noted in a file for the process that goes on with it.
//!
//! ```text
//! {"version": 1, "uploads": {DIGEST: {"copy": …, "upload": …, "part_bytes": …, "parts": {"0": ETAG, …}}}}
//! ```
//! Owns the file. What it says is only ever a hint: an upload that the server does not know is begun anew.

use crate::document;
use crate::error::{RepositoryError, Result};
use crate::name::Name;
use aenv_storage::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use tokio::sync::Mutex;

/// How far a publication is, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Progress {
    /// Of all contents.
    pub total_bytes: u64,
    /// What is in the repository by now, found there or uploaded.
    pub done_bytes: u64,
    /// What was sent by this call.
    pub uploaded_bytes: u64,
    /// The content that is worked on.
    pub blob: Option<Digest>,
}

/// An upload in parts that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Upload {
    /// Which copy of the content it becomes.
    pub(super) copy: Name,
    /// The server's name for it.
    pub(super) upload: String,
    pub(super) part_bytes: u64,
    /// The server's names for the parts it has.
    pub(super) parts: BTreeMap<u64, String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Notes {
    uploads: BTreeMap<Digest, Upload>,
}

/// The file, or what would be in it when there is none.
#[derive(Debug)]
pub(super) struct ProgressFile {
    path: Option<PathBuf>,
    notes: Mutex<Notes>,
}

impl ProgressFile {
    /// Reads it. Uploads of other contents are in it, too.
    pub(super) async fn open(path: Option<&Path>) -> Result<Self> {
        let notes = match path {
            Some(path) => read(path).await?,
            None => Notes::default(),
        };
        Ok(Self { path: path.map(Path::to_owned), notes: Mutex::new(notes) })
    }

    pub(super) async fn remove(path: &Path) -> Result<()> {
        match tokio::fs::remove_file(path).await {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                Err(RepositoryError::File { action: "remove", path: path.to_owned(), source })
            }
            _ => Ok(()),
        }
    }

    pub(super) async fn uploads(&self) -> BTreeMap<Digest, Upload> {
        self.notes.lock().await.uploads.clone()
    }

    pub(super) async fn get(&self, digest: &Digest) -> Option<Upload> {
        self.notes.lock().await.uploads.get(digest).cloned()
    }

    /// Notes an upload that was begun.
    pub(super) async fn begin(&self, digest: Digest, upload: Upload) -> Result<()> {
        self.change(|notes| {
            notes.uploads.insert(digest, upload);
        })
        .await
    }

    /// Notes a part that the server has.
    pub(super) async fn part(&self, digest: &Digest, index: u64, part: String) -> Result<()> {
        self.change(|notes| {
            if let Some(upload) = notes.uploads.get_mut(digest) {
                upload.parts.insert(index, part);
            }
        })
        .await
    }

    /// Notes that there is no such upload any more.
    pub(super) async fn forget(&self, digest: &Digest) -> Result<()> {
        if self.get(digest).await.is_none() {
            return Ok(());
        }
        self.change(|notes| {
            notes.uploads.remove(digest);
        })
        .await
    }

    async fn change(&self, change: impl FnOnce(&mut Notes)) -> Result<()> {
        let mut notes = self.notes.lock().await;
        change(&mut notes);
        let Some(path) = &self.path else { return Ok(()) };
        let text = document::write(&name_of(path), &*notes)?;
        // Under the lock: what is written later is in the file later.
        blocking(path, move |path| replace(path, &text)).await
    }
}

async fn read(path: &Path) -> Result<Notes> {
    let found = blocking(path, |path| match std::fs::read(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    })
    .await?;
    let Some(found) = found else { return Ok(Notes::default()) };
    match document::read(&name_of(path), &found) {
        Ok(notes) => Ok(notes),
        Err(error) => {
            tracing::warn!(%error, "uploads that were begun are begun anew");
            Ok(Notes::default())
        }
    }
}

/// Puts `text` in the place of the file, durably.
fn replace(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    std::fs::File::open(directory)?.sync_all()
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let owned = path.to_owned();
    let worked = tokio::task::spawn_blocking(move || work(&owned)).await;
    worked.unwrap_or_else(|error| Err(std::io::Error::other(error))).map_err(|source| RepositoryError::File {
        action: "keep the progress in",
        path: path.to_owned(),
        source,
    })
}

/// The file's name for messages that otherwise name objects.
fn name_of(path: &Path) -> object_store::path::Path {
    object_store::path::Path::from(path.to_string_lossy().as_ref())
}
