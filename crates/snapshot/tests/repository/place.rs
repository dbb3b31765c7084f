//! Where a repository lies in a test: a directory, or a bucket of a real S3 server in this process.
//!
//! Owns the directory and the server's task.

use crate::hooked::{Hook, Hooked};
use aenv_snapshot::Repository;
use aenv_storage::remote::{self, RemoteStore};
use futures_util::TryStreamExt as _;
use hyper_util::rt::TokioIo;
use object_store::local::LocalFileSystem;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, aws};
use s3s::auth::SimpleAuth;
use s3s::service::S3ServiceBuilder;
use std::collections::BTreeSet;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const KEY: &str = "key";
const SECRET: &str = "not-so-secret";

/// Which kind of store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    Bucket,
}

/// The place.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) directory: TempDir,
    server: Option<(JoinHandle<()>, String)>,
}

impl Place {
    pub(crate) async fn new(kind: Kind) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let server = match kind {
            Kind::Directory => None,
            Kind::Bucket => {
                std::fs::create_dir(directory.path().join("bucket")).unwrap();
                Some(serve(directory.path()).await)
            }
        };
        Self { kind, directory, server }
    }

    /// The store as programs open it.
    pub(crate) fn store(&self) -> RemoteStore {
        match &self.server {
            None => remote::open(&format!("file://{}", self.directory.path().display()), &[]).unwrap(),
            Some((_, address)) => {
                let settings = [
                    ("AWS_ENDPOINT_URL", format!("http://{address}")),
                    ("AWS_ALLOW_HTTP", "true".to_owned()),
                    ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
                    ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
                ];
                let settings: Vec<_> = settings.map(|(name, value)| (name.to_owned(), value)).into();
                remote::open("s3://bucket/some/prefix", &settings).unwrap()
            }
        }
    }

    pub(crate) fn repository(&self) -> Repository {
        Repository::new(self.store())
    }

    /// A repository in the same place, whose requests are asked about.
    pub(crate) fn hooked(&self, hook: Arc<dyn Hook>) -> Repository {
        let store = match &self.server {
            None => {
                let files = LocalFileSystem::new_with_prefix(self.directory.path()).unwrap();
                let inner = Arc::new(files.with_fsync(false).with_automatic_cleanup(true));
                let objects: Arc<dyn ObjectStore> = Arc::new(Hooked { inner, hook });
                RemoteStore::new(objects, None, Some(self.directory.path().to_owned()))
            }
            Some((_, address)) => {
                let bucket = aws::AmazonS3Builder::new()
                    .with_endpoint(format!("http://{address}"))
                    .with_allow_http(true)
                    .with_bucket_name("bucket")
                    .with_access_key_id(KEY)
                    .with_secret_access_key(SECRET)
                    .build()
                    .unwrap();
                let inner = Arc::new(PrefixStore::new(bucket, "some/prefix"));
                let hooked = Arc::new(Hooked { inner, hook });
                let parts: Arc<dyn MultipartStore> = hooked.clone();
                RemoteStore::new(hooked, Some(parts), None)
            }
        };
        Repository::new(store)
    }

    /// All keys that there are.
    pub(crate) async fn keys(&self) -> BTreeSet<String> {
        let store = self.store();
        let listed: Vec<_> = store.objects().list(None::<&Path>).try_collect().await.unwrap();
        listed.into_iter().map(|meta| meta.location.to_string()).collect()
    }

    /// Everything in the directory that is no object, and no directory of one: what stays behind otherwise.
    pub(crate) fn unnamed(&self) -> Vec<String> {
        fn walk(directory: &std::path::Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, found);
                } else {
                    found.push(path.display().to_string());
                }
            }
        }
        let mut found = Vec::new();
        walk(self.directory.path(), &mut found);
        let marks: &[&str] =
            if self.kind == Kind::Directory { &["#"] } else { &[".upload_id-", "/.upload-"] };
        found.retain(|path| marks.iter().any(|mark| path.contains(mark)));
        found
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some((server, _)) = &self.server {
            server.abort();
        }
    }
}

/// A server of everything below `root`: its task and address.
async fn serve(root: &std::path::Path) -> (JoinHandle<()>, String) {
    let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(root).unwrap());
    builder.set_auth(SimpleAuth::from_single(KEY, SECRET));
    let service = builder.build();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // This server looks first and writes then. What it is told to create only once goes one after the other, as with S3.
    let conditional = Arc::new(tokio::sync::Mutex::new(()));
    let task = tokio::spawn(async move {
        loop {
            let Ok((socket, _)) = listener.accept().await else { continue };
            socket.set_nodelay(true).unwrap();
            let (service, conditional) = (service.clone(), Arc::clone(&conditional));
            let answer = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let (service, conditional) = (service.clone(), Arc::clone(&conditional));
                async move {
                    let is_conditional = request.headers().contains_key(http::header::IF_NONE_MATCH);
                    let _turn = if is_conditional { Some(conditional.lock_owned().await) } else { None };
                    service.call(request.map(s3s::Body::from)).await
                }
            });
            let connection =
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), answer);
            tokio::spawn(connection);
        }
    });
    (task, address)
}
