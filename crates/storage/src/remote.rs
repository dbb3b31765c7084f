//! Opens an object store from its location.
//!
//! ```text
//! file:///shared/dir       a directory, of this host or shared; it is there already
//! s3://bucket/prefix       S3 and what speaks its protocol; further settings are pairs of name and value
//! ```
//! Owns nothing but the client's connections. Must not read the environment, nor interpret what is stored.

pub mod chunk_list;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::path::Path as ObjectPath;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreScheme};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use url::Url;

/// An opened object store; keys are relative to the location. A handle: clones share the client's connections.
#[derive(Clone)]
pub struct RemoteStore {
    objects: Arc<dyn ObjectStore>,
    parts: Option<Arc<dyn MultipartStore>>,
    directory: Option<PathBuf>,
}

/// Why a location cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    /// The text is no location of a form that is known here.
    #[error(
        "{location:?} is no location of an object store ({reason}): use file:///DIRECTORY or s3://BUCKET/PREFIX"
    )]
    Malformed {
        /// What was given, without what may be a password.
        location: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The directory is not there. It is not made: where it is a mount that is missing, objects would end up below it.
    #[error("the directory {path} cannot be used ({source}): make it, or mount what it is on")]
    NoDirectory {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A setting that the client does not know.
    #[error(
        "{name:?} is no setting of S3; those known are for instance AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID"
    )]
    UnknownSetting {
        /// The setting's name.
        name: String,
    },
    /// The client refuses the settings as a whole.
    #[error("{location} cannot be opened with these settings: {source}")]
    Refused {
        /// The location.
        location: String,
        /// The client's error. It names settings, never their values that are secret.
        source: object_store::Error,
    },
}

impl RemoteStore {
    /// A store of which the parts are opened already. `parts` is the same store as `objects`, for uploads that go on after
    /// the process died; `directory` is where a directory's objects lie.
    #[must_use]
    pub fn new(
        objects: Arc<dyn ObjectStore>,
        parts: Option<Arc<dyn MultipartStore>>,
        directory: Option<PathBuf>,
    ) -> Self {
        Self { objects, parts, directory }
    }

    /// Reads, writes, lists.
    #[must_use]
    pub fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.objects
    }

    /// Uploads in parts that can be gone on with, if the store has them.
    #[must_use]
    pub fn parts(&self) -> Option<&Arc<dyn MultipartStore>> {
        self.parts.as_ref()
    }

    /// The directory, if it is one.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "RemoteStore({})", self.objects)
    }
}

/// Whether `name` is a setting of S3 that [`open`] takes, in capitals or not: whoever reads them from an environment passes
/// on those alone.
#[must_use]
pub fn is_setting(name: &str) -> bool {
    name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>().is_ok()
}

/// Opens the store at `location`. Nothing is read or written yet: a server that is away is found out by the first request.
/// `settings` are those of S3 (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ALLOW_HTTP`, …; capitals or not), of no concern to a
/// directory. Writes to a directory are durable when they return: the file, its name, and the directories made for it.
///
/// # Errors
/// As [`LocationError`] says.
pub fn open(location: &str, settings: &[(String, String)]) -> Result<RemoteStore, LocationError> {
    let shown = shown(location);
    let malformed = |reason: String| LocationError::Malformed { location: shown.clone(), reason };
    let url = Url::parse(location).map_err(|error| malformed(error.to_string()))?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err(malformed("it has a query or a fragment".to_owned()));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(malformed("keys are given as settings, not in the location".to_owned()));
    }
    let (scheme, prefix) = ObjectStoreScheme::parse(&url).map_err(|error| malformed(error.to_string()))?;
    match scheme {
        ObjectStoreScheme::Local => open_directory(&url, malformed),
        ObjectStoreScheme::AmazonS3 if url.scheme() == "s3" => open_bucket(&url, prefix, settings, &shown),
        _ => Err(malformed(format!("{}: is not supported", url.scheme()))),
    }
}

fn open_directory(
    url: &Url,
    malformed: impl Fn(String) -> LocationError,
) -> Result<RemoteStore, LocationError> {
    let path = url.to_file_path().map_err(|()| malformed("it names no path of this host".to_owned()))?;
    let no_directory = |source| LocationError::NoDirectory { path: path.clone(), source };
    let path = path.canonicalize().map_err(no_directory)?;
    if !path.is_dir() {
        return Err(no_directory(std::io::Error::from(std::io::ErrorKind::NotADirectory)));
    }
    let files = LocalFileSystem::new_with_prefix(&path)
        .map_err(|source| LocationError::Refused { location: url.to_string(), source })?
        .with_fsync(true)
        .with_automatic_cleanup(true);
    Ok(RemoteStore::new(Arc::new(files), None, Some(path)))
}

fn open_bucket(
    url: &Url,
    prefix: ObjectPath,
    settings: &[(String, String)],
    shown: &str,
) -> Result<RemoteStore, LocationError> {
    let mut builder = AmazonS3Builder::new();
    for (name, value) in settings {
        let key = name
            .to_ascii_lowercase()
            .parse::<AmazonS3ConfigKey>()
            .map_err(|_| LocationError::UnknownSetting { name: name.clone() })?;
        builder = builder.with_config(key, value);
    }
    // Last, so that no setting puts another bucket in the location's place.
    builder = builder.with_bucket_name(url.host_str().unwrap_or_default());
    let bucket =
        builder.build().map_err(|source| LocationError::Refused { location: shown.to_owned(), source })?;
    let store = Arc::new(PrefixStore::new(bucket, prefix));
    Ok(RemoteStore::new(store.clone(), Some(store), None))
}

/// The location as messages may show it: what stands before an `@` may be a password.
fn shown(location: &str) -> String {
    match (location.find("://"), location.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme => {
            format!("{}…{}", &location[..scheme + 3], &location[at..])
        }
        _ => location.to_owned(),
    }
}

#[cfg(test)]
mod tests;
