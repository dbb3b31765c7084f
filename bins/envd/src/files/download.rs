//! `GET /files`: sends a file, whole or in part.

use super::range::{Part, part};
use super::{Query, authorize, blocking, refuse, resolve};
use crate::daemon::Daemon;
use crate::http::Refusal;
use aenv_protocol::envd::signature::Operation;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use std::fs::{File, Metadata};
use std::io::{self, Read as _, Seek as _};
use std::path::Path;

/// Bytes read from a file at once.
const CHUNK_BYTES: usize = 256 * 1024;

/// Handler of `GET /files`.
///
/// # Errors
/// See [`super`].
pub(crate) async fn download(
    State(daemon): State<Daemon>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let query = Query::parse(&query.unwrap_or_default());
    let user = authorize(&daemon, &query, &headers, Operation::Read)?;
    let path = resolve(&daemon, query.path.as_deref().unwrap_or_default(), &user)?;
    let opened_path = path.clone();
    let (file, metadata, first) =
        blocking(move || open(&opened_path)).await.map_err(|error| refuse(&path, &error))?;
    let modified = metadata.modified().ok().and_then(|time| jiff::Timestamp::try_from(time).ok());
    let mut answer = describe(&path, &first, modified);
    if is_unmodified(&headers, modified) {
        return Ok((StatusCode::NOT_MODIFIED, answer).into_response());
    }
    // Files of kernel filesystems say that they are empty and are not: their end is known only by reading.
    if metadata.len() == 0 && !first.is_empty() {
        return Ok((answer, stream(file, first, u64::MAX)).into_response());
    }
    let length = metadata.len();
    answer.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    let wanted = if range_applies(&headers, modified) { headers.get(header::RANGE) } else { None };
    match part(wanted.and_then(|value| value.to_str().ok()), length) {
        Part::Whole => {
            answer.insert(header::CONTENT_LENGTH, length.into());
            Ok((answer, stream(file, first, length)).into_response())
        }
        Part::Bytes(from, to) => {
            answer.insert(header::CONTENT_LENGTH, (to - from + 1).into());
            answer.insert(header::CONTENT_RANGE, text(&format!("bytes {from}-{to}/{length}")));
            let file = blocking(move || seek(file, from)).await.map_err(|error| refuse(&path, &error))?;
            let body = stream(file, Bytes::new(), to - from + 1);
            Ok((StatusCode::PARTIAL_CONTENT, answer, body).into_response())
        }
        Part::Unsatisfiable => {
            answer.insert(header::CONTENT_RANGE, text(&format!("bytes */{length}")));
            Ok((StatusCode::RANGE_NOT_SATISFIABLE, answer).into_response())
        }
    }
}

/// Opens a regular file and reads its first piece.
fn open(path: &Path) -> io::Result<(File, Metadata, Bytes)> {
    use std::os::unix::fs::OpenOptionsExt as _;
    // Opening a pipe must not wait for its writer.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidFilename, "not a regular file"));
    }
    let first = read(&mut file, CHUNK_BYTES as u64)?;
    Ok((file, metadata, first))
}

fn read(file: &mut File, limit: u64) -> io::Result<Bytes> {
    let wanted = limit.min(CHUNK_BYTES as u64);
    let mut chunk = Vec::new();
    // The length of a file may grow or shrink meanwhile; memory is taken for what is there.
    file.take(wanted).read_to_end(&mut chunk)?;
    Ok(chunk.into())
}

fn seek(mut file: File, from: u64) -> io::Result<File> {
    file.seek(io::SeekFrom::Start(from))?;
    Ok(file)
}

/// Sends `first`, then the file from where it stands, `length` bytes in all. A file that became shorter breaks the
/// connection, as the length was announced.
fn stream(file: File, mut first: Bytes, length: u64) -> Body {
    first.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    let left = length - first.len() as u64;
    let state = (Some(file), first, left);
    Body::from_stream(futures_util::stream::try_unfold(state, |(file, first, left)| async move {
        if !first.is_empty() {
            return Ok::<_, io::Error>(Some((first, (file, Bytes::new(), left))));
        }
        let Some(mut file) = file.filter(|_| left > 0) else { return Ok(None) };
        let (file, chunk) = blocking(move || {
            let chunk = read(&mut file, left)?;
            Ok((file, chunk))
        })
        .await?;
        if chunk.is_empty() {
            return Ok(None);
        }
        let left = left - chunk.len() as u64;
        Ok(Some((chunk, (Some(file), Bytes::new(), left))))
    }))
}

fn text(value: &str) -> HeaderValue {
    HeaderValue::from_str(value).unwrap_or(HeaderValue::from_static(""))
}

fn describe(path: &Path, first: &[u8], modified: Option<jiff::Timestamp>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(path, first)));
    headers.insert(header::CONTENT_DISPOSITION, text(&disposition(&crate::paths::name_of(path))));
    if let Some(date) = modified
        .and_then(|time| jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&time).ok())
    {
        headers.insert(header::LAST_MODIFIED, text(&date));
    }
    headers
}

/// `inline; filename=…`: a bare token where it can be, quoted where it must be, percent-encoded where it is not ASCII.
fn disposition(name: &str) -> String {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_token) {
        format!("inline; filename={name}")
    } else if name.bytes().all(|byte| (0x20..0x7f).contains(&byte)) {
        format!("inline; filename=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        let encoded = percent_encoding::utf8_percent_encode(name, percent_encoding::NON_ALPHANUMERIC);
        format!("inline; filename*=utf-8''{encoded}")
    }
}

fn content_type(path: &Path, first: &[u8]) -> &'static str {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "txt" | "log" | "md" | "py" | "rs" | "c" | "h" | "sh" => "text/plain; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "xml" => "text/xml; charset=utf-8",
        "json" => "application/json",
        "pdf" => "application/pdf",
        "wasm" => "application/wasm",
        "zip" => "application/zip",
        "gz" => "application/gzip",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "svg" => "image/svg+xml",
        _ => {
            let head = &first[..first.len().min(512)];
            let is_text = !head.contains(&0)
                && std::str::from_utf8(head).map_or_else(|error| error.error_len().is_none(), |_| true);
            if is_text { "text/plain; charset=utf-8" } else { "application/octet-stream" }
        }
    }
}

fn date(headers: &HeaderMap, name: header::HeaderName) -> Option<jiff::Timestamp> {
    jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(headers.get(name)?.as_bytes()).ok()
}

fn is_unmodified(headers: &HeaderMap, modified: Option<jiff::Timestamp>) -> bool {
    match (date(headers, header::IF_MODIFIED_SINCE), modified) {
        (Some(since), Some(modified)) => modified.as_second() <= since.as_second(),
        _ => false,
    }
}

/// `If-Range`: a part is only of use to a client that has the other parts of the same content.
fn range_applies(headers: &HeaderMap, modified: Option<jiff::Timestamp>) -> bool {
    if !headers.contains_key(header::IF_RANGE) {
        return true;
    }
    match (date(headers, header::IF_RANGE), modified) {
        (Some(date), Some(modified)) => modified.as_second() == date.as_second(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_so_that_headers_stay_headers() {
        assert_eq!(disposition("a.txt"), "inline; filename=a.txt");
        assert_eq!(disposition("a \"b\".txt"), "inline; filename=\"a \\\"b\\\".txt\"");
        assert_eq!(disposition("ä\r\nx"), "inline; filename*=utf-8''%C3%A4%0D%0Ax");
    }

    #[test]
    fn content_types_come_from_the_name_or_the_content() {
        assert_eq!(content_type(Path::new("/a/B.PNG"), b"x"), "image/png");
        assert_eq!(content_type(Path::new("/a/b"), "grün".as_bytes()), "text/plain; charset=utf-8");
        assert_eq!(content_type(Path::new("/a/b"), &"ä".as_bytes()[..1]), "text/plain; charset=utf-8");
        assert_eq!(content_type(Path::new("/a/b"), b"\x00\x01"), "application/octet-stream");
        assert_eq!(content_type(Path::new("/a/b"), b"\xff\xff\xff"), "application/octet-stream");
    }

    #[test]
    fn conditions_compare_whole_seconds() {
        let modified = "2026-11-30T12:00:00.5Z".parse().ok();
        let headers = |name: header::HeaderName, value: &'static str| {
            HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
        };
        assert!(is_unmodified(
            &headers(header::IF_MODIFIED_SINCE, "Mon, 30 Nov 2026 12:00:00 GMT"),
            modified
        ));
        assert!(!is_unmodified(
            &headers(header::IF_MODIFIED_SINCE, "Mon, 30 Nov 2026 11:59:59 GMT"),
            modified
        ));
        assert!(!is_unmodified(&headers(header::IF_MODIFIED_SINCE, "yesterday"), modified));
        assert!(range_applies(&headers(header::IF_RANGE, "Mon, 30 Nov 2026 12:00:00 GMT"), modified));
        assert!(!range_applies(&headers(header::IF_RANGE, "\"etag\""), modified));
    }
}
