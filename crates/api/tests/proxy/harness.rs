//! A server whose sandboxes are programs of this test: routes made by hand, dialers that connect to loopback.

use aenv_api::Server;
use aenv_api::proxy::{RouteTable, Signer};
use aenv_orchestrator::{Dial, Error, Route};
use aenv_protocol::ids::SandboxId;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http::{HeaderMap, StatusCode};
use hyper_util::rt::TokioIo;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Port of the sandboxes' program.
pub(crate) const PROGRAM: u16 = 8080;
/// Bytes of one piece of a large body.
pub(crate) const PIECE: usize = 64 << 10;

/// Sandboxes as a list, those that run and those that traffic may wake.
#[derive(Clone, Default)]
pub(crate) struct Table(Arc<Sandboxes>);

#[derive(Default)]
struct Sandboxes {
    running: Mutex<Vec<Route>>,
    asleep: Mutex<HashMap<SandboxId, Asleep>>,
    /// Paused ones that traffic may not wake.
    paused: Mutex<HashSet<SandboxId>>,
    wakes: AtomicUsize,
}

/// A paused sandbox: what comes of waking it, once the test lets that happen.
#[derive(Clone)]
struct Asleep {
    outcome: Result<Route, Error>,
    let_go: CancellationToken,
}

impl RouteTable for Table {
    fn route(&self, id: &SandboxId) -> Option<Route> {
        self.0.running.lock().unwrap().iter().find(|route| route.id == *id).cloned()
    }
    fn signers(&self) -> Vec<Signer> {
        let running: Vec<SandboxId> =
            self.0.running.lock().unwrap().iter().map(|route| route.id.clone()).collect();
        let asleep: Vec<SandboxId> = self.0.asleep.lock().unwrap().keys().cloned().collect();
        let signer = |id: SandboxId| Signer { access_token: format!("token-of-{}", id.as_str()), id };
        running.into_iter().chain(asleep).map(signer).collect()
    }
    fn may_wake(&self, id: &SandboxId) -> bool {
        self.0.asleep.lock().unwrap().contains_key(id)
    }
    fn is_paused(&self, id: &SandboxId) -> bool {
        self.may_wake(id) || self.0.paused.lock().unwrap().contains(id)
    }
    fn wake(&self, id: &SandboxId) -> BoxFuture<'static, Result<(), Error>> {
        self.0.wakes.fetch_add(1, Ordering::SeqCst);
        let (sandboxes, id) = (Arc::clone(&self.0), id.clone());
        let asleep = sandboxes.asleep.lock().unwrap()[&id].clone();
        async move {
            asleep.let_go.cancelled().await;
            let route = asleep.outcome?;
            sandboxes.running.lock().unwrap().push(route);
            sandboxes.asleep.lock().unwrap().remove(&id);
            Ok(())
        }
        .boxed()
    }
}

struct Loopback(HashMap<u16, SocketAddr>);

#[async_trait::async_trait]
impl Dial for Loopback {
    async fn dial(&self, port: u16) -> std::io::Result<TcpStream> {
        match self.0.get(&port) {
            Some(address) => TcpStream::connect(address).await,
            None => Err(std::io::ErrorKind::ConnectionRefused.into()),
        }
    }
}

/// The server under test.
pub(crate) struct Harness {
    pub(crate) address: SocketAddr,
    pub(crate) table: Table,
    pub(crate) shutdown: CancellationToken,
    pub(crate) server: tokio::task::JoinHandle<()>,
}

impl Harness {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let table = Table::default();
        let shutdown = CancellationToken::new();
        let control_plane = Router::new().route("/health", get(|| async { "control plane" }));
        let server =
            tokio::spawn(Server::new(control_plane, Arc::new(table.clone())).run(listener, shutdown.clone()));
        Self { address, table, shutdown, server }
    }

    /// Adds a sandbox whose ports are these; the token ends it.
    pub(crate) fn add(&self, id: &str, lifecycle: u64, ports: &[(u16, SocketAddr)]) -> CancellationToken {
        let route = route(id, lifecycle, ports);
        let ended = route.ended.clone();
        self.table.0.running.lock().unwrap().push(route);
        ended
    }

    /// Ends a sandbox as the orchestrator does: first no route, then the news.
    pub(crate) fn end(&self, id: &str, ended: &CancellationToken) {
        self.table.0.running.lock().unwrap().retain(|route| route.id.as_str() != id);
        ended.cancel();
    }

    /// Adds a paused sandbox that has this route when it is woken; the token lets that happen.
    pub(crate) fn put_to_sleep(
        &self,
        id: &str,
        lifecycle: u64,
        ports: &[(u16, SocketAddr)],
    ) -> CancellationToken {
        self.sleep(id, Ok(route(id, lifecycle, ports)))
    }

    /// Adds a paused sandbox that cannot be woken.
    pub(crate) fn put_to_sleep_for_good(&self, id: &str, error: Error) {
        self.sleep(id, Err(error)).cancel();
    }

    /// Adds a paused sandbox that traffic may not wake.
    pub(crate) fn pause(&self, id: &str) {
        self.table.0.paused.lock().unwrap().insert(id.parse().unwrap());
    }

    fn sleep(&self, id: &str, outcome: Result<Route, Error>) -> CancellationToken {
        let let_go = CancellationToken::new();
        let asleep = Asleep { outcome, let_go: let_go.clone() };
        self.table.0.asleep.lock().unwrap().insert(id.parse().unwrap(), asleep);
        let_go
    }

    /// How often a sandbox was woken.
    pub(crate) fn wakes(&self) -> usize {
        self.table.0.wakes.load(Ordering::SeqCst)
    }

    /// Waits until somebody has begun to wake a sandbox.
    pub(crate) async fn until_waking(&self) {
        while self.wakes() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends a text as it is.
    pub(crate) async fn raw(&self, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream
    }

    /// Sends a whole request and reads until the server closes.
    pub(crate) async fn exchange(&self, line: &str, headers: &str) -> String {
        let text = format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n");
        let mut stream = self.raw(&text).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

fn route(id: &str, lifecycle: u64, ports: &[(u16, SocketAddr)]) -> Route {
    Route {
        id: id.parse().unwrap(),
        lifecycle,
        dialer: Arc::new(Loopback(ports.iter().copied().collect())),
        ended: CancellationToken::new(),
        access_token: Some(format!("token-of-{id}")),
        guest_address: IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}

/// Headers that aim at a sandbox.
pub(crate) fn aim(id: &str, port: u16) -> String {
    format!("e2b-sandbox-id: {id}\r\ne2b-sandbox-port: {port}\r\n")
}

/// Reads until `wanted` was seen.
pub(crate) async fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut seen = Vec::new();
    let mut piece = [0; 1024];
    while !String::from_utf8_lossy(&seen).contains(wanted) {
        let count = stream.read(&mut piece).await.unwrap();
        assert!(count > 0, "closed after {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..count]);
    }
    String::from_utf8(seen).unwrap()
}

/// Starts the program of a sandbox.
pub(crate) async fn program(name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new()
        .route("/", get(move || async move { name }))
        .route("/head", any(show_head))
        .route("/echo", post(|request: Request| async { request.into_body() }))
        .route("/count", post(count))
        .route("/large/{pieces}", get(large))
        .route("/drip", get(drip))
        .route("/hang", any(std::future::pending::<String>))
        .route("/files", any(move || async move { name }))
        .route("/upgrade", get(upgrade));
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

async fn show_head(headers: HeaderMap) -> String {
    headers.iter().map(|(name, value)| format!("{name}={}\n", value.to_str().unwrap())).collect()
}

async fn count(request: Request) -> String {
    let mut body = request.into_body().into_data_stream();
    let mut total = 0;
    while let Some(piece) = body.next().await {
        total += piece.unwrap().len();
    }
    total.to_string()
}

async fn large(axum::extract::Path(pieces): axum::extract::Path<usize>) -> Body {
    let piece = Bytes::from(vec![7; PIECE]);
    Body::from_stream(stream::iter(0..pieces).map(move |_| Ok::<_, Infallible>(piece.clone())))
}

async fn drip() -> Body {
    let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"first drop"))]);
    Body::from_stream(first.chain(stream::pending()))
}

async fn upgrade(mut request: Request) -> Response {
    let upgraded = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let mut io = TokioIo::new(upgraded.await.unwrap());
        let mut piece = [0; 64];
        while let Ok(count) = io.read(&mut piece).await {
            if count == 0 || io.write_all(&piece[..count]).await.is_err() {
                break;
            }
        }
    });
    (StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade"), ("upgrade", "echo")]).into_response()
}
