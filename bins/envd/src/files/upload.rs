//! `POST /files`: takes one file as the whole body, or several as the parts of a form.

use super::target::Target;
use super::{Query, authorize, blocking, metadata, refuse, resolve, shown};
use crate::accounts::User;
use crate::daemon::Daemon;
use crate::http::Refusal;
use aenv_protocol::envd::files::{WrittenFile, WrittenKind};
use aenv_protocol::envd::signature::Operation;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt as _};
use http::{HeaderMap, StatusCode, header};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;
use tokio::sync::mpsc;

/// Name of the form's parts that are files.
const FILE_FIELD: &str = "file";
/// Compressed bytes inflated at once: bounds the memory that a hostile body can ask for (about a thousandfold).
const INFLATE_BYTES: usize = 8 * 1024;
/// How long a refused client may go on sending.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Handler of `POST /files`.
///
/// # Errors
/// See [`super`].
pub(crate) async fn upload(
    State(daemon): State<Daemon>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
    body: Body,
) -> Result<axum::Json<Vec<WrittenFile>>, Refusal> {
    let (sender, receiver) = mpsc::channel(1);
    let carry = carry(body, sender);
    let query = query.unwrap_or_default();
    let store = store(&daemon, &query, &headers, received(receiver));
    tokio::pin!(carry, store);
    let (stored, is_carried) = tokio::select! {
        biased;
        () = &mut carry => (store.await, true),
        stored = &mut store => (stored, false),
    };
    if stored.is_err() && !is_carried {
        // A client that is still sending would not see the refusal but a broken connection.
        let _given_up = tokio::time::timeout(DRAIN_TIMEOUT, carry).await;
    }
    stored.map(axum::Json)
}

type Content = BoxStream<'static, io::Result<Bytes>>;

/// Hands the body on for as long as somebody takes it, then drops the rest.
async fn carry(body: Body, sender: mpsc::Sender<io::Result<Bytes>>) {
    let mut body = body.into_data_stream();
    let mut taker = Some(sender);
    while let Some(chunk) = body.next().await {
        if let Some(sender) = &taker
            && sender.send(chunk.map_err(io::Error::other)).await.is_err()
        {
            taker = None;
        }
    }
}

fn received(receiver: mpsc::Receiver<io::Result<Bytes>>) -> Content {
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
    .boxed()
}

async fn store(
    daemon: &Daemon,
    query: &str,
    headers: &HeaderMap,
    content: Content,
) -> Result<Vec<WrittenFile>, Refusal> {
    let query = Query::parse(query);
    let user = authorize(daemon, &query, headers, Operation::Write)?;
    let upload = Upload { metadata: metadata::from_headers(headers)?, daemon: daemon.clone(), user };
    let content = decoded(headers, content)?;
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = content_type.to_ascii_lowercase();
    let given = query.path.filter(|path| !path.is_empty());
    if kind.starts_with("multipart/") {
        let boundary = multer::parse_boundary(content_type).map_err(|error| bad_form(&error))?;
        upload.form(multer::Multipart::new(content, boundary), given.as_deref()).await
    } else if kind.starts_with("application/octet-stream") {
        let given = given.ok_or_else(|| bad("the query parameter 'path' is missing"))?;
        let path = resolve(daemon, &given, &upload.user)?;
        let content = content.map(|chunk| chunk.map_err(|error| broken(&error)));
        Ok(vec![upload.file(path, content).await?])
    } else {
        Err(bad("the content type must be multipart/form-data or application/octet-stream"))
    }
}

fn bad(message: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, message)
}

fn bad_form(error: &multer::Error) -> Refusal {
    bad(format!("invalid form: {}", crate::rpc::with_causes(error)))
}

fn broken(error: &io::Error) -> Refusal {
    bad(format!("the body is broken: {error}"))
}

/// The content of a body after its `Content-Encoding`.
fn decoded(headers: &HeaderMap, plain: Content) -> Result<Content, Refusal> {
    let encoding = headers.get(header::CONTENT_ENCODING).map_or("", |value| value.to_str().unwrap_or("?"));
    match encoding.to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(plain),
        "gzip" => Ok(inflated(plain).boxed()),
        other => Err(bad(format!("content encoding '{other}' is not supported"))),
    }
}

/// Inflates a gzip stream; a truncated one ends with an error.
fn inflated(compressed: Content) -> impl Stream<Item = io::Result<Bytes>> + Send + 'static {
    type Decoder = flate2::write::MultiGzDecoder<Vec<u8>>;
    let state = (compressed, Some(Decoder::new(Vec::new())), Bytes::new());
    futures_util::stream::try_unfold(state, |(mut compressed, decoder, mut pending)| async move {
        let Some(mut decoder) = decoder else { return Ok(None) };
        loop {
            if pending.is_empty() {
                match compressed.next().await.transpose()? {
                    Some(chunk) => pending = chunk,
                    None => {
                        decoder.try_finish()?;
                        let rest = std::mem::take(decoder.get_mut());
                        return Ok((!rest.is_empty()).then(|| (rest.into(), (compressed, None, pending))));
                    }
                }
            }
            let piece = pending.split_to(pending.len().min(INFLATE_BYTES));
            decoder.write_all(&piece)?;
            if !decoder.get_ref().is_empty() {
                let plain = std::mem::take(decoder.get_mut());
                return Ok(Some((plain.into(), (compressed, Some(decoder), pending))));
            }
        }
    })
}

/// What all files of one request share.
struct Upload {
    daemon: Daemon,
    user: User,
    metadata: BTreeMap<String, String>,
}

impl Upload {
    async fn form(
        &self,
        mut form: multer::Multipart<'static>,
        given: Option<&OsStr>,
    ) -> Result<Vec<WrittenFile>, Refusal> {
        let mut written: Vec<(PathBuf, WrittenFile)> = Vec::new();
        while let Some(part) = form.next_field().await.map_err(|error| bad_form(&error))? {
            if part.name() != Some(FILE_FIELD) {
                continue;
            }
            let path = match given.or_else(|| part.file_name().map(OsStr::new)) {
                Some(given) if !given.is_empty() => resolve(&self.daemon, given, &self.user)?,
                _ => return Err(bad("neither the query nor the part of the form names a path")),
            };
            if written.iter().any(|(earlier, _)| *earlier == path) {
                let message = format!("path '{}' is given twice; give each file its own", path.display());
                return Err(bad(message));
            }
            let content = part.map(|chunk| chunk.map_err(|error| bad_form(&error)));
            let file = self.file(path.clone(), content).await?;
            written.push((path, file));
        }
        if written.is_empty() {
            return Err(bad(format!("the form has no part named '{FILE_FIELD}'")));
        }
        Ok(written.into_iter().map(|(_, file)| file).collect())
    }

    /// Writes one file.
    async fn file(
        &self,
        path: PathBuf,
        mut content: impl Stream<Item = Result<Bytes, Refusal>> + Unpin,
    ) -> Result<WrittenFile, Refusal> {
        let (opened, user) = (path.clone(), self.user.clone());
        let mut target =
            blocking(move || Target::open(opened, &user)).await.map_err(|error| refuse(&path, &error))?;
        while let Some(chunk) = content.next().await {
            let chunk = chunk?;
            target = blocking(move || {
                target.write(&chunk)?;
                Ok(target)
            })
            .await
            .map_err(|error| refuse(&path, &error))?;
        }
        let metadata = self.metadata.clone();
        blocking(move || target.finish(&metadata)).await.map_err(|error| refuse(&path, &error))?;
        Ok(WrittenFile {
            name: crate::paths::name_of(&path),
            path: shown(&path),
            kind: WrittenKind::File,
            metadata: self.metadata.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gzip(content: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(content).expect("compresses");
        encoder.finish().expect("compresses")
    }

    async fn inflate(compressed: &[u8], chunk: usize) -> io::Result<Vec<u8>> {
        let chunks: Vec<_> = compressed.chunks(chunk).map(|c| Ok(Bytes::copy_from_slice(c))).collect();
        let plain: Vec<_> = inflated(futures_util::stream::iter(chunks).boxed()).collect().await;
        let plain: io::Result<Vec<Bytes>> = plain.into_iter().collect();
        Ok(plain?.concat())
    }

    #[tokio::test]
    async fn gzip_bodies_are_inflated_whatever_the_chunks_and_truncation_is_an_error() {
        let content: Vec<u8> = (0..200_000_u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        let compressed = gzip(&content);
        for chunk in [1000, 100_000, 10_000_000] {
            assert_eq!(inflate(&compressed, chunk).await.expect("inflates"), content);
        }
        assert_eq!(inflate(&gzip(b""), 7).await.expect("inflates"), b"");
        assert!(inflate(&compressed[..compressed.len() - 9], 1000).await.is_err());
        assert!(inflate(b"this is no gzip", 1000).await.is_err());
    }
}
