//! The contents of a draft: what they are digested to, and their bytes, as they were then.
//!
//! Owns no state but open files while it reads. Must not write.

use crate::error::{RepositoryError, Result};
use crate::manifest::{Content, Draft, Object};
use aenv_storage::digest::Digest;
use aenv_storage::remote::chunk_list::{ChunkList, ChunkListBuilder};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const READ_BYTES: usize = 1 << 20;

/// A local file, digested.
#[derive(Debug, Clone)]
pub(super) struct Digested {
    pub(super) list: Arc<ChunkList>,
    /// The list as an object of its own, when it has more than one chunk.
    pub(super) list_object: Option<(Digest, Bytes)>,
}

/// One content that the repository is to have.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) size: u64,
    pub(super) origin: Origin,
}

/// Where its bytes are.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    File(PathBuf, Arc<ChunkList>),
    Memory(Bytes),
    Stored(Object),
}

/// Digests every file of the draft, once.
pub(super) async fn digest_files(draft: &Draft) -> Result<BTreeMap<PathBuf, Digested>> {
    let mut files = BTreeMap::new();
    for content in draft.contents() {
        let Content::File(path) = content else { continue };
        if !files.contains_key(path) {
            let list = blocking(path, digest).await?;
            let stored = (list.chunks().len() > 1).then(|| Bytes::from(list.to_bytes()));
            let list_object = stored.map(|bytes| (Digest::of(&bytes), bytes));
            files.insert(path.clone(), Digested { list: Arc::new(list), list_object });
        }
    }
    Ok(files)
}

/// Everything that the manifest will name, each content once.
pub(super) fn all(draft: &Draft, files: &BTreeMap<PathBuf, Digested>) -> BTreeMap<Digest, Source> {
    let mut all = BTreeMap::new();
    for blob in draft.contents().filter_map(|content| match content {
        Content::Stored(blob) => Some(blob),
        Content::File(_) => None,
    }) {
        for object in blob.objects() {
            all.insert(object.digest, Source { size: object.size, origin: Origin::Stored(object.clone()) });
        }
    }
    // A file can always be uploaded: it comes before a copy that may be gone.
    for (path, digested) in files {
        let origin = Origin::File(path.clone(), Arc::clone(&digested.list));
        all.insert(digested.list.blob(), Source { size: digested.list.blob_bytes(), origin });
        if let Some((digest, bytes)) = &digested.list_object {
            all.insert(*digest, Source { size: bytes.len() as u64, origin: Origin::Memory(bytes.clone()) });
        }
    }
    all
}

/// The bytes of `range`, which begins and ends with a chunk, if they are still what was digested.
pub(super) async fn read(path: &Path, list: &Arc<ChunkList>, range: Range<u64>) -> Result<Bytes> {
    let list = Arc::clone(list);
    blocking(path, move |path| read_verified(path, &list, range)).await
}

fn digest(path: &Path) -> Result<ChunkList> {
    let mut file = File::open(path).map_err(failed("open", path))?;
    let mut builder = ChunkListBuilder::default();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(builder.finish()),
            Ok(length) => builder.update(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("read", path)(error)),
        }
    }
}

fn read_verified(path: &Path, list: &ChunkList, range: Range<u64>) -> Result<Bytes> {
    let changed = || RepositoryError::Changed { path: path.to_owned() };
    let file = File::open(path).map_err(failed("open", path))?;
    if file.metadata().map_err(failed("look at", path))?.len() != list.blob_bytes() {
        return Err(changed());
    }
    let length = usize::try_from(range.end - range.start).map_err(|_| changed())?;
    let mut bytes = vec![0; length];
    match file.read_exact_at(&mut bytes, range.start) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(changed()),
        Err(error) => return Err(failed("read", path)(error)),
    }
    let chunk = u64::from(list.chunk_bytes());
    for (index, piece) in (range.start / chunk..).zip(bytes.chunks(list.chunk_bytes() as usize)) {
        list.verify(index, piece).map_err(|_| changed())?;
    }
    Ok(Bytes::from(bytes))
}

async fn blocking<T: Send + 'static>(
    path: &Path,
    read: impl FnOnce(&Path) -> Result<T> + Send + 'static,
) -> Result<T> {
    let owned = path.to_owned();
    match tokio::task::spawn_blocking(move || read(&owned)).await {
        Ok(read) => read,
        Err(error) => Err(failed("read", path)(std::io::Error::other(error))),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> RepositoryError {
    let path = path.to_owned();
    move |source| RepositoryError::File { action, path, source }
}
