//! Why a request was not done, as its caller is told. Values only.

use aenv_export::ExportError;
use aenv_storage::StorageError;
use aenv_storage::block_service::{ErrorBody, ErrorCode};
use std::io;
use std::path::Path;

/// A request that was not done.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Failure {
    pub(crate) code: ErrorCode,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::Invalid, message: message.into() }
    }

    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::NotFound, message: message.into() }
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::Conflict, message: message.into() }
    }

    pub(crate) fn no_space(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::NoSpace, message: message.into() }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::Unavailable, message: message.into() }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self { code: ErrorCode::Internal, message: message.into() }
    }

    /// Whether something that was named is not there.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self.code, ErrorCode::NotFound)
    }

    /// For `map_err` on what the system refuses.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |error| {
            let code = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
                _ => ErrorCode::Internal,
            };
            Self { code, message: format!("cannot {action} {}: {error}", path.display()) }
        }
    }

    /// What is answered.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { code: self.code, message: self.message.clone() }
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        let code = match &error {
            StorageError::NoSpace { .. } => ErrorCode::NoSpace,
            StorageError::Damaged { .. }
            | StorageError::Unsupported { .. }
            | StorageError::OutOfRange { .. } => ErrorCode::Invalid,
            StorageError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                ErrorCode::NotFound
            }
            _ => ErrorCode::Internal,
        };
        Self { code, message: error.to_string() }
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Storage(error) => error.into(),
            ExportError::Unavailable { .. } => Self::unavailable(error.to_string()),
            ExportError::Taken { .. } => Self::conflict(error.to_string()),
            other => Self::internal(other.to_string()),
        }
    }
}
