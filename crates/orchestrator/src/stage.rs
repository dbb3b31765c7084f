//! The steps of an operation: their times, their limits, and the failure of one of them.

use crate::error::{Error, Shortage};
use crate::guest_channel::GuestError;
use crate::journal::JournalError;
use crate::random::NoRandomness;
use crate::view::Stage;
use aenv_network::NetworkError;
use aenv_storage::StorageError;
use aenv_storage::block_service::ServiceError;
use aenv_vmm::VmmError;
use std::time::Duration;
use tokio::time::Instant;

/// Why a step failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cause {
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error(transparent)]
    Disk(#[from] StorageError),
    #[error(transparent)]
    Service(ServiceError),
    #[error(transparent)]
    Vmm(#[from] VmmError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Random(#[from] NoRandomness),
    #[error("{context}: {source}")]
    File { context: String, source: std::io::Error },
    #[error("no answer within {0:?}")]
    Hung(Duration),
    #[error(transparent)]
    NoCapacity(#[from] Shortage),
    #[error("the sandbox was killed in the meantime")]
    Cancelled,
    #[error("{0}")]
    Unexpected(String),
}

impl Cause {
    /// Whether the host has no room for it.
    pub(crate) fn is_no_room(&self) -> bool {
        match self {
            Self::NoCapacity(_)
            | Self::Disk(StorageError::NoSpace { .. })
            | Self::Journal(JournalError::Full { .. }) => true,
            Self::Vmm(VmmError::Io { source, .. }) => source.kind() == std::io::ErrorKind::StorageFull,
            _ => false,
        }
    }
}

/// A step that failed.
#[derive(Debug, thiserror::Error)]
#[error("stage {stage}: {cause}")]
pub(crate) struct Failure {
    /// Which step.
    pub(crate) stage: &'static str,
    /// Why.
    pub(crate) cause: Cause,
}

impl Failure {
    pub(crate) fn new(stage: &'static str, cause: impl Into<Cause>) -> Self {
        Self { stage, cause: cause.into() }
    }

    /// What the caller of `operation` is told.
    pub(crate) fn into_error(self, operation: &str) -> Error {
        match self.cause {
            Cause::NoCapacity(shortage) => Error::NoCapacity(shortage),
            Cause::Network(error @ NetworkError::Exhausted(_)) => room(error.to_string()),
            cause if cause.is_no_room() => room(cause.to_string()),
            cause @ Cause::Service(ServiceError::Unavailable { .. }) => Error::Unavailable {
                context: format!("{operation}, stage {}", self.stage),
                reason: cause.to_string(),
            },
            cause @ Cause::Cancelled => Error::Conflict(cause.to_string()),
            cause => Error::Internal {
                context: format!("{operation}, stage {}", self.stage),
                reason: cause.to_string(),
            },
        }
    }
}

fn room(reason: String) -> Error {
    Error::NoCapacity(Shortage::Room(reason))
}

/// Times of the steps done so far, in order.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    done: Vec<Stage>,
}

impl Stages {
    /// Runs a step that must end within `limit`.
    pub(crate) async fn run<T, E: Into<Cause>>(
        &mut self,
        stage: &'static str,
        limit: Duration,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Failure> {
        let (result, took) = timed(limit, work).await;
        self.add(stage, took);
        result.map_err(|cause| Failure { stage, cause })
    }

    /// Notes a step that was timed elsewhere.
    pub(crate) fn add(&mut self, name: &'static str, duration: Duration) {
        self.done.push(Stage { name, duration });
    }

    /// The times.
    pub(crate) fn into_vec(self) -> Vec<Stage> {
        self.done
    }
}

/// Runs `work`, at most for `limit`; tells how long it took.
pub(crate) async fn timed<T, E: Into<Cause>>(
    limit: Duration,
    work: impl Future<Output = Result<T, E>>,
) -> (Result<T, Cause>, Duration) {
    let start = Instant::now();
    let result = match tokio::time::timeout(limit, work).await {
        Ok(result) => result.map_err(Into::into),
        Err(_) => Err(Cause::Hung(limit)),
    };
    (result, start.elapsed())
}
