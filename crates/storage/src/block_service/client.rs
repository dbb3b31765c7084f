//! Client of the block service.
//!
//! Owns its connections, which are kept alive. A request whose connection fails is sent again, since the service may be
//! starting: every request of the interface may be delivered twice. Must not decide anything about disks.

use super::messages::{
    CollectGarbage, Collected, CreateDisk, CreateImage, DiskList, DiskView, ErrorBody, ErrorCode, ImageList,
    ImageView, ReleaseLayer, Released, RewindDisk, SealDisk, Sealed, Status,
};
use super::name::Name;
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use hyperlocal::{UnixConnector, Uri};
use serde::Serialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};

/// Largest answer that is read into memory, in bytes: some ten thousand disks.
const MAX_ANSWER_BYTES: usize = 32 << 20;
/// Before the second attempt; doubled for each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
/// Between attempts at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);
/// A connection that was not used for this long is closed.
const IDLE: Duration = Duration::from_secs(60);

/// Why the block service did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    /// The request makes no sense.
    #[error("the block service refuses: {0}")]
    Invalid(String),
    /// There is no such disk, image, top or file.
    #[error("the block service has no such thing: {0}")]
    NotFound(String),
    /// It contradicts what there is.
    #[error("the block service has something else already: {0}")]
    Conflict(String),
    /// The host has no room.
    #[error("the block service has no room: {0}")]
    NoSpace(String),
    /// The service did not answer in time, or this machine cannot do it now. Whether it was done is not known.
    #[error("the block service at {socket} cannot be used: {reason}")]
    Unavailable {
        /// Where it was looked for.
        socket: PathBuf,
        /// What happened.
        reason: String,
    },
    /// The service failed, or its answer is not understood.
    #[error("the block service failed: {0}")]
    Internal(String),
}

/// Speaks to one block service. Clones share their connections.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    patience: Duration,
    http: hyper_util::client::legacy::Client<UnixConnector, Full<Bytes>>,
}

/// One attempt that may be repeated.
enum Attempt {
    Answered(StatusCode, Bytes),
    Failed(String),
}

impl Client {
    /// A client of the service that listens, or will, on `socket`. Opens nothing yet. A request that is not answered within
    /// `patience`, all attempts together, fails as [`ServiceError::Unavailable`].
    #[must_use]
    pub fn new(socket: &Path, patience: Duration) -> Self {
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(UnixConnector);
        Self { socket: socket.to_owned(), patience, http }
    }

    /// The same, with another patience.
    #[must_use]
    pub fn with_patience(&self, patience: Duration) -> Self {
        Self { patience, ..self.clone() }
    }

    /// Where the service listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// How the service is.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn status(&self) -> Result<Status, ServiceError> {
        self.get("/v1/status").await
    }

    /// Makes a disk, which can be opened when this returns.
    ///
    /// # Errors
    /// See [`ServiceError`]; `Conflict` when there is another disk of this name.
    pub async fn create_disk(&self, disk: &CreateDisk) -> Result<DiskView, ServiceError> {
        self.post("/v1/disks", disk).await
    }

    /// All disks.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn disks(&self) -> Result<DiskList, ServiceError> {
        self.get("/v1/disks").await
    }

    /// One disk.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn disk(&self, name: &Name) -> Result<DiskView, ServiceError> {
        self.get(&format!("/v1/disks/{name}")).await
    }

    /// Returns when everything that was written to the disk before is durable.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn flush_disk(&self, name: &Name) -> Result<(), ServiceError> {
        self.post::<_, IgnoredAny>(&format!("/v1/disks/{name}/flush"), &()).await.map(drop)
    }

    /// Seals the disk's writable top `top`, or the present one. Sealing a top that is sealed already tells what it told
    /// then.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn seal_disk(&self, name: &Name, top: Option<Name>) -> Result<Sealed, ServiceError> {
        // Without a name a request that is sent twice would seal twice.
        let top = match top {
            Some(top) => Some(top),
            None => self.disk(name).await?.writable_top,
        };
        self.post(&format!("/v1/disks/{name}/seal"), &SealDisk { top }).await
    }

    /// Makes a disk, which nobody uses, what it was when its top `top` was sealed.
    ///
    /// # Errors
    /// See [`ServiceError`]; `NotFound` when it has no such top, `Conflict` when others are made of a later one.
    pub async fn rewind_disk(&self, name: &Name, top: &Name) -> Result<DiskView, ServiceError> {
        self.post(&format!("/v1/disks/{name}/rewind"), &RewindDisk { top: top.clone() }).await
    }

    /// Returns when all sealed tops of the disk, and its list of them, survive the loss of power.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn make_disk_durable(&self, name: &Name) -> Result<(), ServiceError> {
        self.post::<_, IgnoredAny>(&format!("/v1/disks/{name}/durable"), &()).await.map(drop)
    }

    /// Removes a disk. No error when there is none. What other disks and images are made of stays until the last of them is
    /// gone.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn delete_disk(&self, name: &Name) -> Result<(), ServiceError> {
        self.delete(&format!("/v1/disks/{name}")).await
    }

    /// Makes an image, which can be mapped when this returns.
    ///
    /// # Errors
    /// See [`ServiceError`]; `Conflict` when there is another image of this name.
    pub async fn create_image(&self, image: &CreateImage) -> Result<ImageView, ServiceError> {
        self.post("/v1/images", image).await
    }

    /// All images.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn images(&self) -> Result<ImageList, ServiceError> {
        self.get("/v1/images").await
    }

    /// One image.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn image(&self, name: &Name) -> Result<ImageView, ServiceError> {
        self.get(&format!("/v1/images/{name}")).await
    }

    /// Removes an image, which no process maps any more. No error when there is none.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn delete_image(&self, name: &Name) -> Result<(), ServiceError> {
        self.delete(&format!("/v1/images/{name}")).await
    }

    /// Removes a layer file, unless a disk or an image is made of it. No error when there is none.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn release_layer(&self, release: &ReleaseLayer) -> Result<Released, ServiceError> {
        self.post("/v1/layers/release", release).await
    }

    /// Removes stored files that no disk, no image and no entry of `collect` needs.
    ///
    /// # Errors
    /// See [`ServiceError`].
    pub async fn collect_garbage(&self, collect: &CollectGarbage) -> Result<Collected, ServiceError> {
        self.post("/v1/gc", collect).await
    }

    async fn get<A: DeserializeOwned>(&self, path: &str) -> Result<A, ServiceError> {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    async fn delete(&self, path: &str) -> Result<(), ServiceError> {
        self.ask::<IgnoredAny>(Method::DELETE, path, Bytes::new()).await.map(drop)
    }

    async fn post<B: Serialize, A: DeserializeOwned>(&self, path: &str, body: &B) -> Result<A, ServiceError> {
        let body = serde_json::to_vec(body)
            .map_err(|error| ServiceError::Invalid(format!("the request for {path} is not JSON: {error}")))?;
        self.ask(Method::POST, path, body.into()).await
    }

    async fn ask<A: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<A, ServiceError> {
        let deadline = Instant::now() + self.patience;
        let mut pause = FIRST_PAUSE;
        loop {
            let reason = match timeout_at(deadline, self.attempt(&method, path, body.clone())).await {
                Ok(Attempt::Answered(status, answer)) => return self.understand(path, status, &answer),
                Ok(Attempt::Failed(reason)) => reason,
                Err(_elapsed) => format!("no answer to {method} {path}"),
            };
            if Instant::now() + pause >= deadline {
                let reason = format!("{reason} (for {} ms)", self.patience.as_millis());
                return Err(ServiceError::Unavailable { socket: self.socket.clone(), reason });
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn attempt(&self, method: &Method, path: &str, body: Bytes) -> Attempt {
        let request = Request::builder()
            .method(method)
            .uri(Uri::new(&self.socket, path))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(body));
        let request = match request {
            Ok(request) => request,
            Err(error) => return Attempt::Failed(chain(&error)),
        };
        let (head, body) = match self.http.request(request).await {
            Ok(response) => response.into_parts(),
            Err(error) => return Attempt::Failed(chain(&error)),
        };
        match Limited::new(body, MAX_ANSWER_BYTES).collect().await {
            Ok(collected) => Attempt::Answered(head.status, collected.to_bytes()),
            Err(error) => Attempt::Failed(error.to_string()),
        }
    }

    fn understand<A: DeserializeOwned>(
        &self,
        path: &str,
        status: StatusCode,
        answer: &[u8],
    ) -> Result<A, ServiceError> {
        if status.is_success() {
            return serde_json::from_slice(answer).map_err(|error| {
                ServiceError::Internal(format!("its answer to {path} is not understood: {error}"))
            });
        }
        let Ok(ErrorBody { code, message }) = serde_json::from_slice(answer) else {
            return Err(ServiceError::Internal(format!("it answered {path} with status {status}")));
        };
        Err(match code {
            ErrorCode::Invalid => ServiceError::Invalid(message),
            ErrorCode::NotFound => ServiceError::NotFound(message),
            ErrorCode::Conflict => ServiceError::Conflict(message),
            ErrorCode::NoSpace => ServiceError::NoSpace(message),
            ErrorCode::Unavailable => {
                ServiceError::Unavailable { socket: self.socket.clone(), reason: message }
            }
            ErrorCode::Internal => ServiceError::Internal(message),
        })
    }
}

/// An error with all its causes: the outermost alone says no more than that there is one.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
