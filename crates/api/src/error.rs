//! Every error answer of the control plane is made here, in one shape and by one exhaustive table.

use aenv_orchestrator::{Error, LossCause, Shortage};
use aenv_protocol::rest::{ApiError, code};
use axum::Json;
use axum::response::{IntoResponse, Response};
use http::header::RETRY_AFTER;
use http::{HeaderName, HeaderValue, StatusCode};

/// Tells E2B's clients not to repeat a request that failed with a status they would repeat.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("should-retry");

/// What the caller should do with a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    /// The same request would fail again.
    Never,
    /// The same request may succeed after so many seconds.
    After(u32),
    /// Nobody can tell.
    Unknown,
}

/// An error answer.
#[derive(Debug)]
pub(crate) struct Failure {
    status: StatusCode,
    message: String,
    error_code: Option<&'static str>,
    retry: Retry,
}

impl Failure {
    /// An error that the same request would meet again.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), error_code: None, retry: Retry::Never }
    }

    /// 400: something about the request is wrong.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400: the value of a field is wrong.
    pub(crate) fn field(field: &str, reason: impl std::fmt::Display) -> Self {
        Self::bad_request(format!("{field}: {reason}"))
    }

    /// The body of the answer.
    pub(crate) fn body(self) -> ApiError {
        ApiError {
            code: self.status.as_u16(),
            message: self.message,
            error_code: self.error_code.map(str::to_owned),
        }
    }

    /// 404 in E2B's words.
    pub(crate) fn no_such_sandbox(id: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("Sandbox {id:?} doesn't exist or you don't have access to it"),
        )
    }
}

/// The word for a cause of loss in `error_code` and `lostReason`.
pub(crate) fn loss_word(cause: LossCause) -> &'static str {
    match cause {
        LossCause::GuestPanic => "guest_panic",
        LossCause::GuestShutdown => "guest_shutdown",
        LossCause::VmmKilled => "vmm_killed",
        LossCause::VmmCrashed => "vmm_crashed",
        LossCause::OutOfMemory => "out_of_memory",
        LossCause::GuestUnresponsive => "guest_unresponsive",
        LossCause::HostRestarted => "host_restarted",
    }
}

/// When it is worth to ask again a node that lacks something.
fn seconds_until_better(shortage: &Shortage) -> u32 {
    match shortage {
        // Starts take moments; memory is there again when a sandbox ends, a disk when somebody does something about it.
        Shortage::Places { .. } => 2,
        Shortage::Memory { .. } => 10,
        Shortage::Room(_) => 30,
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (status, error_code, retry) = match &error {
            Error::SandboxNotFound(_) | Error::TemplateNotFound(_) => {
                (StatusCode::NOT_FOUND, None, Retry::Never)
            }
            Error::SandboxLost { cause, .. } => {
                (StatusCode::NOT_FOUND, Some(loss_word(*cause)), Retry::Never)
            }
            Error::TemplateNotReady { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(code::TEMPLATE_NOT_READY), Retry::After(2))
            }
            Error::InvalidArgument { .. } => (StatusCode::BAD_REQUEST, None, Retry::Never),
            Error::Transitioning(_) => (StatusCode::CONFLICT, None, Retry::After(1)),
            Error::GuestUnresponsive { .. } => {
                (StatusCode::CONFLICT, Some(code::GUEST_UNRESPONSIVE), Retry::Unknown)
            }
            Error::Incompatible { .. } | Error::SnapshotIncompatible { .. } => {
                (StatusCode::CONFLICT, Some(code::NO_COMPATIBLE_NODE), Retry::Never)
            }
            Error::IsPaused(_) => (StatusCode::CONFLICT, Some(code::PAUSED), Retry::Never),
            Error::Conflict(_) | Error::AlreadyPaused(_) => (StatusCode::CONFLICT, None, Retry::Never),
            Error::NoCapacity(shortage) => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some(code::CAPACITY),
                Retry::After(seconds_until_better(shortage)),
            ),
            Error::Unavailable { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(code::UNAVAILABLE), Retry::After(5))
            }
            Error::ShuttingDown => {
                (StatusCode::SERVICE_UNAVAILABLE, Some(code::SHUTTING_DOWN), Retry::After(5))
            }
            Error::Internal { .. } => {
                (StatusCode::INTERNAL_SERVER_ERROR, Some(code::INTERNAL), Retry::Unknown)
            }
        };
        Self { status, message: error.to_string(), error_code, retry }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let (status, retry) = (self.status, self.retry);
        let mut response = (status, Json(self.body())).into_response();
        match retry {
            Retry::Never => {
                response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
            }
            Retry::After(seconds) => {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
            }
            Retry::Unknown => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_words_of_a_loss_are_those_of_the_journal() {
        for cause in [
            LossCause::GuestPanic,
            LossCause::GuestShutdown,
            LossCause::VmmKilled,
            LossCause::VmmCrashed,
            LossCause::OutOfMemory,
            LossCause::GuestUnresponsive,
            LossCause::HostRestarted,
        ] {
            assert_eq!(serde_json::to_value(cause).unwrap(), loss_word(cause));
        }
    }

    #[test]
    fn a_service_that_is_away_is_worth_another_try() {
        let away = Error::Unavailable { context: "taking a snapshot".to_owned(), reason: "away".to_owned() };
        let response = Failure::from(away).into_response();
        assert_eq!(
            (response.status(), &response.headers()[RETRY_AFTER]),
            (StatusCode::SERVICE_UNAVAILABLE, &HeaderValue::from(5))
        );
        assert!(response.headers().get(SHOULD_RETRY).is_none());
    }

    #[test]
    fn a_full_node_says_what_it_lacks_and_when_to_come_back() {
        let waited = Duration::from_secs(30);
        for (shortage, seconds, words) in [
            (Shortage::Room("the disk is full".to_owned()), "30", "the disk is full"),
            (
                Shortage::Memory {
                    needed_bytes: 1 << 29,
                    committed_bytes: 3 << 30,
                    limit_bytes: 13 << 28,
                    waited,
                },
                "10",
                "memory: 512 MiB needed, 3072 MiB committed of 3328 MiB, and nothing gave way within 30s",
            ),
            (
                Shortage::Places { starting: 3, most: 3, waiting: 256, waited: Duration::ZERO },
                "2",
                "places: 3 sandboxes are being started of 3 at once, and 256 wait",
            ),
        ] {
            let failure = Failure::from(Error::NoCapacity(shortage));
            assert!(failure.message.contains(words), "{}", failure.message);
            let response = failure.into_response();
            assert_eq!(response.status(), 503);
            assert_eq!(response.headers()[RETRY_AFTER], seconds);
            assert!(response.headers().get(SHOULD_RETRY).is_none());
        }
    }
}
