//! A block service in memory and plain files: it speaks the real protocol on a real socket, and outlives the node as the real one does.
//!
//! Owns the files of its disks, tops and images below its directory. A disk has as many blocks as a fake guest uses, and each top is
//! a whole copy of it. Every request is a call of the [`FakeHost`], and may go wrong as such: a request that fails, or whose effect is
//! followed by a death, ends the service with all its connections, as `kill -9` does; it is back a moment later. What it has
//! answered it knows then, as the real one does, whose records are written before its answers.

mod tables;

use crate::fake_host::{FakeHost, Operation};
use aenv_storage::block_service::{Client, ErrorBody, ErrorCode};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tables::Tables;
use tokio::net::UnixListener;
use tokio::sync::watch;

/// How long nobody listens after a death.
const AWAY: Duration = Duration::from_millis(15);
/// How long a request is tried: longer than any absence, shorter than a test's patience.
const PATIENCE: Duration = Duration::from_secs(10);

/// The service of one host.
pub struct FakeStore {
    socket: PathBuf,
    tables: Mutex<Tables>,
    /// How often it died.
    deaths: watch::Sender<u64>,
    /// Its host has no room for an image.
    is_full: AtomicBool,
}

/// What a request comes to; an error is refused.
type Answer = Result<Bytes, (ErrorCode, String)>;

impl FakeStore {
    /// Starts it on `host`, which kills it when a fault says so; its files are below `directory`.
    ///
    /// # Panics
    /// When the directory cannot be used.
    #[must_use]
    pub fn start(host: &Arc<FakeHost>, directory: &Path) -> Arc<Self> {
        let store = Arc::new(Self {
            socket: directory.join("stored.sock"),
            tables: Mutex::new(Tables::new(directory)),
            deaths: watch::Sender::new(0),
            is_full: AtomicBool::new(false),
        });
        host.set_store(Arc::clone(&store));
        let (serving, host_of_store) = (Arc::clone(&store), Arc::downgrade(host));
        host.handle().spawn(async move { serving.serve(host_of_store).await });
        store
    }

    /// A client as the node has it.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.socket, PATIENCE)
    }

    /// Names of what is stored for VMs and their saves: not what belongs to captures.
    pub fn of_vms(&self) -> Vec<String> {
        self.tables().of_vms()
    }

    /// Whether it refuses images because its host has no room.
    pub fn set_full(&self, is_full: bool) {
        self.is_full.store(is_full, Ordering::SeqCst);
    }

    /// Ends it with all its connections; it is back soon.
    pub(crate) fn kill(&self) {
        self.deaths.send_modify(|deaths| *deaths += 1);
    }

    async fn serve(self: Arc<Self>, host: Weak<FakeHost>) {
        loop {
            // A socket of the life before.
            drop(std::fs::remove_file(&self.socket));
            let listener = UnixListener::bind(&self.socket).expect("a socket for the fake block service");
            let mut death = self.deaths.subscribe();
            death.mark_unchanged();
            let accept = async {
                while let Ok((stream, _)) = listener.accept().await {
                    let (store, host, mut death) = (Arc::clone(&self), host.clone(), death.clone());
                    tokio::spawn(async move {
                        let answer = service_fn(|request| answer(Arc::clone(&store), host.clone(), request));
                        let io = TokioIo::new(stream);
                        let connection =
                            hyper::server::conn::http1::Builder::new().serve_connection(io, answer);
                        tokio::select! {
                            // A connection that breaks is what tests are about.
                            _ = connection => {}
                            _ = death.changed() => {}
                        }
                    });
                }
            };
            let mut over = death.clone();
            tokio::select! {
                () = accept => return,
                _ = over.changed() => {}
            }
            drop(listener);
            tokio::time::sleep(AWAY).await;
        }
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(&self, operation: Operation, path: &str, body: &[u8]) -> Answer {
        let parts: Vec<&str> = path.trim_start_matches("/v1/").split('/').collect();
        let mut tables = self.tables();
        match (operation, parts.as_slice()) {
            (Operation::LookAtStore, ["status"]) => json(&tables.status()),
            (Operation::LookAtStore, ["disks"]) => json(&tables.disks()),
            (Operation::LookAtStore, ["disks", name]) => json(&tables.disk(name)?),
            (Operation::LookAtStore, ["images"]) => json(&tables.images()),
            (Operation::LookAtStore, ["images", name]) => json(&tables.image(name)?),
            (Operation::CreateDisk, _) => json(&tables.create_disk(parsed(body)?)?),
            (Operation::FlushDisk | Operation::MakeDiskDurable, [_, name, _]) => {
                tables.disk(name)?;
                json(&())
            }
            (Operation::SealDisk, [_, name, _]) => json(&tables.seal(name, &parsed(body)?)?),
            (Operation::RewindDisk, [_, name, _]) => json(&tables.rewind(name, &parsed(body)?)?),
            (Operation::DeleteDisk, [_, name]) => {
                tables.delete_disk(name);
                json(&())
            }
            (Operation::CreateImage, _) if self.is_full.load(Ordering::SeqCst) => {
                Err((ErrorCode::NoSpace, "the host of the fake block service is full".to_owned()))
            }
            (Operation::CreateImage, _) => json(&tables.create_image(parsed(body)?)?),
            (Operation::DeleteImage, [_, name]) => {
                tables.delete_image(name);
                json(&())
            }
            (Operation::ReleaseLayer, _) => json(&tables.release(&parsed(body)?)),
            (Operation::CollectLayers, _) => json(&tables.collect(&parsed(body)?)),
            _ => Err((ErrorCode::Invalid, format!("{operation:?} {path}"))),
        }
    }
}

fn operation_of(method: &Method, path: &str) -> Operation {
    match (method.as_str(), path.rsplit('/').next().unwrap_or_default()) {
        ("DELETE", _) if path.starts_with("/v1/disks") => Operation::DeleteDisk,
        ("DELETE", _) => Operation::DeleteImage,
        ("POST", "disks") => Operation::CreateDisk,
        ("POST", "images") => Operation::CreateImage,
        ("POST", "seal") => Operation::SealDisk,
        ("POST", "rewind") => Operation::RewindDisk,
        ("POST", "flush") => Operation::FlushDisk,
        ("POST", "durable") => Operation::MakeDiskDurable,
        ("POST", "release") => Operation::ReleaseLayer,
        ("POST", _) => Operation::CollectLayers,
        _ => Operation::LookAtStore,
    }
}

/// The connection breaks when this is an error.
async fn answer(
    store: Arc<FakeStore>,
    host: Weak<FakeHost>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, &'static str> {
    let host = host.upgrade().ok_or("the host is gone")?;
    let operation = operation_of(request.method(), request.uri().path());
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await.map_err(|_| "the request broke off")?.to_bytes();
    let Ok(call) = host.begin(operation).await else {
        store.kill();
        return Err("killed before the request was carried out");
    };
    let answer = store.carry_out(operation, &path, &body);
    if call.is_fatal() {
        store.kill();
        return Err("killed before the answer");
    }
    call.reply().await;
    let (status, body) = match answer {
        Ok(body) => (StatusCode::OK, body),
        Err((code, message)) => {
            let body =
                serde_json::to_vec(&ErrorBody { code, message }).map_err(|_| "an error is not JSON")?;
            (StatusCode::BAD_REQUEST, body.into())
        }
    };
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    Ok(response)
}

fn json(value: &impl Serialize) -> Answer {
    serde_json::to_vec(value).map(Into::into).map_err(|error| (ErrorCode::Internal, error.to_string()))
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, (ErrorCode, String)> {
    serde_json::from_slice(body).map_err(|error| (ErrorCode::Invalid, error.to_string()))
}
