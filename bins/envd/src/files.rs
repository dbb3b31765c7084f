//! `/files`: contents of files, streamed in both directions with constant memory.
//!
//! [`download`] and [`upload`] are the handlers; here is what both need: the query, who may, and errors. Owns no state.

pub(crate) mod download;
mod metadata;
mod range;
mod target;
pub(crate) mod upload;

use crate::accounts::{AccountError, User};
use crate::daemon::Daemon;
use crate::http::Refusal;
use crate::rpc::{basic_user, with_causes};
use aenv_protocol::envd::ACCESS_TOKEN_HEADER;
use aenv_protocol::envd::signature::{Operation, file_signature};
use http::{HeaderMap, StatusCode};
use percent_encoding::percent_decode_str;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use subtle::ConstantTimeEq as _;

/// What a query of `/files` says. `path` is bytes: file names need not be text.
#[derive(Debug, Default, PartialEq, Eq)]
struct Query {
    path: Option<OsString>,
    username: Option<String>,
    signature: Option<String>,
    expiration: Option<String>,
}

impl Query {
    /// Reads a query in which a space is `%20` or `+`.
    fn parse(text: &str) -> Self {
        let decode = |text: &str| percent_decode_str(&text.replace('+', " ")).collect::<Vec<u8>>();
        let text_of = |value: &str| String::from_utf8_lossy(&decode(value)).into_owned();
        let mut query = Self::default();
        for pair in text.split('&') {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            match text_of(key).as_str() {
                "path" => query.path = Some(OsString::from_vec(decode(value))),
                "username" => query.username = Some(text_of(value)),
                "signature" => query.signature = Some(text_of(value)),
                "signature_expiration" => query.expiration = Some(text_of(value)),
                _ => {}
            }
        }
        query
    }
}

/// Who may do what: the user of a request that passed all checks.
fn authorize(
    daemon: &Daemon,
    query: &Query,
    headers: &HeaderMap,
    operation: Operation,
) -> Result<User, Refusal> {
    let unauthorized = |message: &str| Refusal::new(StatusCode::UNAUTHORIZED, message);
    if let Some(token) = &daemon.settings().token {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        match headers.get(ACCESS_TOKEN_HEADER) {
            Some(given) if token.matches(given.as_bytes()) => {}
            Some(_) => return Err(unauthorized("access token present in header but does not match")),
            None => check_signature(query, token.secret(), operation, now).map_err(unauthorized)?,
        }
    }
    let name = match &query.username {
        Some(name) => Some(name.clone()),
        None => basic_user(headers).map_err(unauthorized)?,
    };
    daemon.user(name.as_deref()).map_err(|error| match error {
        AccountError::Unknown(_) => unauthorized(&error.to_string()),
        AccountError::Read { .. } => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, with_causes(&error)),
    })
}

fn check_signature(query: &Query, secret: &str, operation: Operation, now: i64) -> Result<(), &'static str> {
    let given = query.signature.as_deref().ok_or("missing signature query parameter")?;
    let expiration = query.expiration.as_deref().map(str::parse::<i64>).transpose();
    let expiration = expiration.map_err(|_| "invalid signature")?;
    // A path that is no text cannot have been signed by a client; its lossy form matches nothing that was.
    let path = query.path.as_deref().map(OsStr::to_string_lossy).unwrap_or_default();
    let user = query.username.as_deref().unwrap_or_default();
    let expected = file_signature(&path, operation, user, secret, expiration);
    if !bool::from(expected.as_bytes().ct_eq(given.as_bytes())) {
        return Err("invalid signature");
    }
    if expiration.is_some_and(|expiration| expiration < now) {
        return Err("signature is already expired");
    }
    Ok(())
}

/// The absolute path that a request means.
fn resolve(daemon: &Daemon, given: &OsStr, user: &User) -> Result<PathBuf, Refusal> {
    daemon.path(given, user).map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))
}

/// The status that a failed operation on a file deserves.
fn refuse(path: &Path, error: &io::Error) -> Refusal {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Refusal::new(StatusCode::NOT_FOUND, format!("path '{path}' does not exist"))
        }
        io::ErrorKind::IsADirectory => {
            Refusal::new(StatusCode::BAD_REQUEST, format!("path '{path}' is a directory"))
        }
        io::ErrorKind::InvalidFilename => {
            Refusal::new(StatusCode::BAD_REQUEST, format!("path '{path}': {error}"))
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            Refusal::new(
                StatusCode::INSUFFICIENT_STORAGE,
                format!("not enough disk space for '{path}': {error}"),
            )
        }
        _ => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("path '{path}': {error}")),
    }
}

/// Runs what blocks beside the event loop.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// Bytes of a path as text for an answer.
fn shown(path: &Path) -> String {
    String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed(path: &str, expiration: Option<i64>) -> Query {
        Query {
            path: Some(path.into()),
            username: Some("user".into()),
            signature: Some(file_signature(path, Operation::Read, "user", "secret", expiration)),
            expiration: expiration.map(|at| at.to_string()),
        }
    }

    #[test]
    fn queries_decode_both_forms_of_a_space_and_keep_bytes() {
        let query = Query::parse(
            "path=%2Fa+b%20c%2B%ff&username=us%65r&signature=v1_a%2Bb%2F&x&signature_expiration=5",
        );
        assert_eq!(query.path.as_deref().map(OsStr::as_bytes), Some(&b"/a b c+\xff"[..]));
        assert_eq!(query.username.as_deref(), Some("user"));
        assert_eq!(query.signature.as_deref(), Some("v1_a+b/"));
        assert_eq!(query.expiration.as_deref(), Some("5"));
        assert_eq!(Query::parse(""), Query::default());
    }

    #[test]
    fn signatures_are_checked_for_match_then_for_age() {
        let check = |query: &Query, operation| check_signature(query, "secret", operation, 100);
        assert_eq!(check(&signed("/a b", None), Operation::Read), Ok(()));
        assert_eq!(check(&signed("/a", Some(101)), Operation::Read), Ok(()));
        assert_eq!(check(&signed("/a", Some(99)), Operation::Read), Err("signature is already expired"));
        assert_eq!(check(&signed("/a", None), Operation::Write), Err("invalid signature"));
        assert_eq!(check(&Query::default(), Operation::Read), Err("missing signature query parameter"));
        for change in [
            |query: &mut Query| query.path = Some("/b".into()),
            |query: &mut Query| query.username = None,
            |query: &mut Query| query.expiration = Some("101".into()),
            |query: &mut Query| query.expiration = Some("soon".into()),
            |query: &mut Query| query.path = Some(OsString::from_vec(vec![b'/', b'a', 0xff])),
        ] {
            let mut query = signed("/a", Some(99));
            change(&mut query);
            assert_eq!(check(&query, Operation::Read), Err("invalid signature"));
        }
    }

    #[test]
    fn full_disks_and_missing_files_have_their_own_status() {
        let status = |kind: io::ErrorKind| refuse(Path::new("/x"), &kind.into()).status.as_u16();
        assert_eq!(status(io::ErrorKind::StorageFull), 507);
        assert_eq!(status(io::ErrorKind::QuotaExceeded), 507);
        assert_eq!(status(io::ErrorKind::NotFound), 404);
        assert_eq!(status(io::ErrorKind::IsADirectory), 400);
        assert_eq!(status(io::ErrorKind::PermissionDenied), 500);
    }
}
