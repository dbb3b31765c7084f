//! What can go wrong with a repository, and what the caller does about it.
//!
//! Pure. Must not know what any caller answers to its own clients.

use std::path::PathBuf;

/// Every variant says who has to do what next.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    /// There is no such snapshot, alias or head. Nothing to do.
    #[error("{what} is not in the repository")]
    NotFound {
        /// What was asked for.
        what: String,
    },
    /// Somebody else changed it meanwhile: read it again and decide anew.
    #[error("{what} was changed by somebody else meanwhile: read it again and decide anew")]
    Conflict {
        /// What was to be changed.
        what: String,
    },
    /// Another owner has claimed the sandbox since: this one must let go of it.
    #[error(
        "{sandbox} was claimed by {owner} with generation {newer}, generation {generation} counts no more: let go of it"
    )]
    Fenced {
        /// The sandbox.
        sandbox: String,
        /// The generation that was shown.
        generation: u64,
        /// The one that counts.
        newer: u64,
        /// Whose it is.
        owner: String,
    },
    /// The publication did nothing for so long that it was taken for dead: publish again, what was uploaded is found.
    #[error(
        "the publication of {snapshot} was taken for dead: publish it again, what is uploaded already is found"
    )]
    Expired {
        /// The snapshot.
        snapshot: String,
    },
    /// A local file is not what it was when it was digested: publish again when nobody writes it.
    #[error("{path} changed while it was published: publish again when nobody writes it")]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Something that is stored is not what its format demands. A snapshot that is damaged can only be deleted.
    #[error("{object} in the repository is damaged: {reason}")]
    Damaged {
        /// Its key.
        object: String,
        /// What is wrong.
        reason: String,
    },
    /// Something that is stored was written by a newer program: use that one.
    #[error(
        "{object} in the repository has version {version}, this program knows up to {known}: use a newer one"
    )]
    UnknownVersion {
        /// Its key.
        object: String,
        /// Its version.
        version: u64,
        /// The newest that is known.
        known: u64,
    },
    /// What the caller gave is not allowed.
    #[error("{what} is refused: {reason}")]
    Invalid {
        /// What was given.
        what: String,
        /// Why.
        reason: String,
    },
    /// A local file cannot be read or written.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was being done.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The store does not answer as it must. Whether a write took place is not known: ask again later, every call may be
    /// repeated.
    #[error(
        "the repository is not available: cannot {action} {object} ({source}): try again, every call may be repeated"
    )]
    Unavailable {
        /// What was being done.
        action: &'static str,
        /// The key.
        object: String,
        /// The store's error.
        source: object_store::Error,
    },
}

impl RepositoryError {
    /// Whether the same call may succeed later with nothing else changed.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }
}

pub(crate) type Result<T, E = RepositoryError> = std::result::Result<T, E>;

/// The store's error, for `action` on `object`.
pub(crate) fn unavailable(
    action: &'static str,
    object: &impl ToString,
) -> impl FnOnce(object_store::Error) -> RepositoryError {
    let object = object.to_string();
    move |source| RepositoryError::Unavailable { action, object, source }
}
