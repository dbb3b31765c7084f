//! `aenv upload` and `aenv download`: one file, streamed, whole or not at all.
//!
//! Owns the local file. A download becomes visible under its name only when it is complete; until then it is a temporary
//! file beside it that disappears on failure and on signals. Memory use does not depend on the file's size.

use crate::arguments::{DownloadArguments, UploadArguments};
use crate::commands::{Context, Interrupts, explain};
use crate::failure::{Exit, Failure, chain};
use crate::output::{Transfer, output_failure};
use crate::transport::RequestBody;
use bytes::Bytes;
use futures_util::Stream;
use http::header;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body, Frame, Incoming};
use serde_json::json;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio_util::io::ReaderStream;

/// Bytes read from the local file at once.
const CHUNK: usize = 256 << 10;
/// A copy in which the sandbox does nothing for this long is broken.
const SILENCE: Duration = Duration::from_secs(60);

/// Copies a local file into a sandbox.
pub(crate) async fn upload(context: &Context, arguments: UploadArguments) -> Result<Exit, Failure> {
    let (input, length) = open_local(&arguments.local).await?;
    let remote = remote_name(&arguments.local, arguments.remote)?;
    let envd = context.envd(&arguments.sandbox).await?;
    let flow = Arc::new(Flow::default());
    let body = upload_body(
        ReaderStream::with_capacity(input, CHUNK),
        context.printer.transfer(length),
        flow.clone(),
    );
    let doing = format!("{} was not uploaded", arguments.local.display());
    let written = tokio::select! {
        written = envd.write_file(&remote, arguments.user.as_deref(), body) => written.map_err(Failure::from),
        () = flow.stalled() => {
            Err(Failure::connection_broke(&format!("it took nothing for {} s", SILENCE.as_secs())))
        }
    };
    let written = match (written, flow.local_error()) {
        (Ok(written), _) => written,
        (Err(_abandoned), Some(error)) => {
            return Err(Failure::new(format!(
                "{doing}: {} cannot be read: {error}",
                arguments.local.display()
            )));
        }
        (Err(failure), None) => {
            return Err(explain(context, &envd, &arguments.sandbox, failure).await.while_doing(&doing));
        }
    };
    let bytes = flow.bytes();
    let path = written.unwrap_or_else(|| remote.to_string_lossy().into_owned());
    if context.printer.is_json() {
        context.printer.json(&json!({ "path": path, "bytes": bytes }))?;
    } else {
        context.printer.note(&format!("{} is {path} in {} now", described(bytes), arguments.sandbox));
    }
    Ok(Exit::DONE)
}

/// Opens what is to be uploaded; its length is absent when it cannot be known.
async fn open_local(path: &Path) -> Result<(Pin<Box<dyn AsyncRead + Send + Sync>>, Option<u64>), Failure> {
    if path.as_os_str() == "-" {
        return Ok((Box::pin(tokio::io::stdin()), None));
    }
    let unreadable =
        |error: std::io::Error| Failure::new(format!("{} cannot be read: {error}", path.display()));
    let metadata = tokio::fs::metadata(path).await.map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(Failure::new(format!("{} is a directory, upload copies one file", path.display())).with_hint(
            "send a directory as an archive: tar -c -C DIRECTORY . | aenv exec ID -- tar -x -C /remote/directory",
        ));
    }
    let file = tokio::fs::File::open(path).await.map_err(unreadable)?;
    Ok((Box::pin(file), metadata.is_file().then_some(metadata.len())))
}

/// Where the file goes: a remote path that ends in `/` gets the local name.
fn remote_name(local: &Path, remote: OsString) -> Result<OsString, Failure> {
    if remote.is_empty() {
        return Err(Failure::new("the remote path is empty").with_exit(Exit::USAGE));
    }
    if !remote.as_bytes().ends_with(b"/") {
        return Ok(remote);
    }
    let name = local.file_name().filter(|_| local.as_os_str() != "-").ok_or_else(|| {
        Failure::new("the remote path ends in `/`, but the local file has no name to add")
            .with_exit(Exit::USAGE)
    })?;
    let mut whole = remote;
    whole.push(name);
    Ok(whole)
}

/// What is known of an upload under way.
#[derive(Debug, Default)]
struct Flow {
    state: Mutex<FlowState>,
}

#[derive(Debug, Default)]
struct FlowState {
    bytes: u64,
    /// Since when the other side owes the next step; absent while we wait for local input.
    owed_since: Option<Instant>,
    local_error: Option<String>,
}

impl Flow {
    fn state(&self) -> MutexGuard<'_, FlowState> {
        // No holder of this lock can panic half-way: each does a single assignment or addition.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> u64 {
        self.state().bytes
    }

    fn local_error(&self) -> Option<String> {
        self.state().local_error.clone()
    }

    /// Returns when the other side has owed the next step for too long.
    async fn stalled(&self) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.state().owed_since.is_some_and(|since| since.elapsed() > SILENCE) {
                return;
            }
        }
    }
}

/// The file as a request body that notes what goes through it.
fn upload_body(
    chunks: impl Stream<Item = std::io::Result<Bytes>> + Send + Sync + 'static,
    mut progress: Transfer,
    flow: Arc<Flow>,
) -> RequestBody {
    let mut chunks = Box::pin(chunks);
    let frames = futures_util::stream::poll_fn(move |context| {
        flow.state().owed_since = None;
        let next = std::task::ready!(chunks.as_mut().poll_next(context));
        let mut state = flow.state();
        state.owed_since = Some(Instant::now());
        Poll::Ready(match next {
            Some(Ok(bytes)) => {
                state.bytes += bytes.len() as u64;
                progress.advance(bytes.len());
                Some(Ok(Frame::data(bytes)))
            }
            Some(Err(error)) => {
                state.local_error = Some(error.to_string());
                Some(Err(error))
            }
            None => None,
        })
    });
    BodyExt::boxed(StreamBody::new(frames))
}

/// Copies a file out of a sandbox.
pub(crate) async fn download(context: &Context, arguments: DownloadArguments) -> Result<Exit, Failure> {
    let to_stdout = arguments.local.as_os_str() == "-";
    let target =
        if to_stdout { Target::StandardOutput } else { local_target(&arguments.local, &arguments.remote)? };
    let envd = context.envd(&arguments.sandbox).await?;
    let mut interrupts = Interrupts::catch()?;
    let copying = async {
        let answer = envd.read_file(&arguments.remote, arguments.user.as_deref()).await?;
        let length =
            answer.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let progress = context.printer.transfer(length);
        target.receive(answer.into_body(), progress).await
    };
    // Dropping the copy removes its temporary file.
    let copied = tokio::select! {
        copied = copying => copied,
        signal = interrupts.next() => return Err(Failure::quiet(Exit::signalled(signal))),
    };
    let bytes = match copied {
        Ok(bytes) => bytes,
        Err(failure) if failure.is_quiet() => return Err(failure),
        Err(failure) => {
            let doing = format!("{} was not downloaded", arguments.remote.to_string_lossy());
            return Err(explain(context, &envd, &arguments.sandbox, failure).await.while_doing(&doing));
        }
    };
    match &target {
        Target::StandardOutput => {}
        Target::File { path, .. } | Target::Device(path) => {
            if context.printer.is_json() {
                context.printer.json(&json!({ "path": path.to_string_lossy(), "bytes": bytes }))?;
            } else {
                context.printer.note(&format!("{} in {}", described(bytes), path.display()));
            }
        }
    }
    Ok(Exit::DONE)
}

/// Where a download goes.
#[derive(Debug)]
enum Target {
    StandardOutput,
    /// A regular file, to be replaced or made; `mode` is that of the file that is there.
    File {
        path: PathBuf,
        mode: Option<u32>,
    },
    /// Something that must be written in place: a device, a pipe.
    Device(PathBuf),
}

/// Resolves directories and links: a link stays a link, what it points at is replaced.
fn local_target(local: &Path, remote: &OsStr) -> Result<Target, Failure> {
    let ends_as_directory = local.as_os_str().as_bytes().ends_with(b"/");
    let unusable = |error: &dyn std::fmt::Display| {
        Failure::new(format!("{} cannot be written: {error}", local.display()))
    };
    match std::fs::metadata(local) {
        Ok(metadata) if metadata.is_dir() => {
            let name = Path::new(remote).file_name().ok_or_else(|| {
                Failure::new(format!("{:?} has no name to put into {}", remote, local.display()))
                    .with_exit(Exit::USAGE)
            })?;
            let inside = local.join(name);
            if inside.is_dir() {
                return Err(unusable(&format!("it has a directory named {}", name.to_string_lossy())));
            }
            local_target(&inside, remote)
        }
        Ok(metadata) if metadata.is_file() => {
            let path = std::fs::canonicalize(local).map_err(|error| unusable(&error))?;
            Ok(Target::File { path, mode: Some(metadata.permissions().mode() & 0o7777) })
        }
        Ok(_special) => Ok(Target::Device(local.to_owned())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !ends_as_directory => {
            Ok(Target::File { path: local.to_owned(), mode: None })
        }
        Err(error) => Err(unusable(&error)),
    }
}

impl Target {
    /// Writes everything; returns how much it was.
    async fn receive(&self, body: Incoming, progress: Transfer) -> Result<u64, Failure> {
        match self {
            Self::StandardOutput => pour(body, &mut tokio::io::stdout(), progress, output_failure).await,
            Self::Device(path) => {
                let failed = |error: &std::io::Error| unwritable(path, error);
                let mut device = tokio::fs::OpenOptions::new()
                    .write(true)
                    .open(path)
                    .await
                    .map_err(|error| failed(&error))?;
                pour(body, &mut device, progress, failed).await
            }
            Self::File { path, mode } => {
                let failed = |error: &std::io::Error| unwritable(path, error);
                let directory = match path.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => parent,
                    _ => Path::new("."),
                };
                // Without a mode to keep, the umask decides as for any new file.
                let temporary = tempfile::Builder::new()
                    .prefix(".aenv-download-")
                    .permissions(std::fs::Permissions::from_mode(mode.map_or(0o666, |_| 0o600)))
                    .tempfile_in(directory)
                    .map_err(|error| failed(&error))?;
                let file = temporary.as_file().try_clone().map_err(|error| failed(&error))?;
                let mut file = tokio::fs::File::from_std(file);
                let bytes = pour(body, &mut file, progress, failed).await?;
                if let Some(mode) = mode {
                    file.set_permissions(std::fs::Permissions::from_mode(*mode))
                        .await
                        .map_err(|error| failed(&error))?;
                }
                temporary.persist(path).map_err(|error| failed(&error.error))?;
                Ok(bytes)
            }
        }
    }
}

/// Moves a body into a writer, frame by frame.
async fn pour(
    mut body: Incoming,
    output: &mut (impl AsyncWrite + Unpin),
    mut progress: Transfer,
    failed: impl Fn(&std::io::Error) -> Failure,
) -> Result<u64, Failure> {
    let broken = Failure::connection_broke;
    let mut total = 0_u64;
    while !body.is_end_stream() {
        let next = tokio::time::timeout(SILENCE, body.frame());
        let frame = match next.await {
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(error))) => return Err(broken(&chain(&error))),
            Ok(None) => break,
            Err(_elapsed) => return Err(broken(&format!("nothing came for {} s", SILENCE.as_secs()))),
        };
        if let Ok(bytes) = frame.into_data() {
            output.write_all(&bytes).await.map_err(|error| failed(&error))?;
            progress.advance(bytes.len());
            total += bytes.len() as u64;
        }
    }
    output.flush().await.map_err(|error| failed(&error))?;
    Ok(total)
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    let failure = Failure::new(format!("{} cannot be written: {error}", path.display()));
    match error.kind() {
        std::io::ErrorKind::StorageFull => failure.with_hint("free room on this machine and try again"),
        std::io::ErrorKind::NotFound => failure.with_hint("make its directory first"),
        _ => failure,
    }
}

fn described(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_directory_gets_the_local_name() {
        let name = |local: &str, remote: &str| remote_name(Path::new(local), remote.into()).ok();
        assert_eq!(name("a/b.txt", "/tmp/"), Some("/tmp/b.txt".into()));
        assert_eq!(name("a/b.txt", "/tmp/c"), Some("/tmp/c".into()));
        assert_eq!(name("-", "/tmp/c"), Some("/tmp/c".into()));
        assert_eq!(name("-", "/tmp/"), None);
        assert_eq!(name("..", "/tmp/"), None);
        assert_eq!(name("a", ""), None);
    }

    #[test]
    fn links_and_devices_are_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (real, link) = (directory.path().join("real"), directory.path().join("link"));
        std::fs::write(&real, "x").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let resolved = std::fs::canonicalize(&real).unwrap();
        assert!(
            matches!(local_target(&link, OsStr::new("r")), Ok(Target::File { path, mode: Some(_) }) if path == resolved)
        );
        assert!(matches!(local_target(Path::new("/dev/null"), OsStr::new("r")), Ok(Target::Device(_))));
        let inside = local_target(directory.path(), OsStr::new("/x/new")).unwrap();
        assert!(matches!(inside, Target::File { path, mode: None } if path == directory.path().join("new")));
        assert!(local_target(&directory.path().join("missing/"), OsStr::new("r")).is_err());
        assert!(local_target(directory.path(), OsStr::new("..")).is_err());
    }
}
