//! Accepts connections and tells for each request whether it is for the control plane or for a sandbox.
//!
//! Shutdown: no new connections, then requests under way get [`DRAIN_LIMIT`] to finish, then what is left is broken.

use crate::proxy::{Proxy, RouteTable, target};
use axum::Router;
use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

/// How long requests under way may take to finish at shutdown.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);
/// How long a client may keep a connection without sending a request on it: longer than E2B's clients do, so that it is
/// never the server who closes first.
const KEEP_ALIVE: Duration = Duration::from_secs(620);
/// Silence after which the kernel begins to ask whether the client still exists.
const PROBE_AFTER: Duration = Duration::from_secs(60);
/// Pause after a failure to accept that is ours, such as having no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The one server of a node.
pub struct Server {
    router: Router,
    proxy: Proxy,
    stop: CancellationToken,
}

impl Server {
    /// A server that has no connection yet.
    #[must_use]
    pub fn new(router: Router, routes: Arc<dyn RouteTable>) -> Self {
        let stop = CancellationToken::new();
        Self { router, proxy: Proxy::new(routes, stop.clone()), stop }
    }

    /// Serves until `shutdown` is cancelled and what was under way has finished or been broken.
    pub async fn run(self, listener: TcpListener, shutdown: CancellationToken) {
        let server = Arc::new(self);
        let connections = TaskTracker::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = shutdown.cancelled() => break,
            };
            match accepted {
                Ok((stream, from)) => {
                    connections.spawn(connection(server.clone(), stream, from, shutdown.clone()));
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(listener);
        connections.close();
        if tokio::time::timeout(DRAIN_LIMIT, connections.wait()).await.is_err() {
            tracing::info!(connections = connections.len(), "breaking connections that are still in use");
        }
        server.stop.cancel();
        connections.wait().await;
    }

    async fn answer(&self, request: Request<Incoming>, from: SocketAddr) -> Response<Body> {
        let (head, body) = request.into_parts();
        let destination = target::destination(&head);
        let request = Request::from_parts(head, body);
        match destination {
            Some(destination) => self.proxy.handle(destination, request, from).await,
            None => match self.router.clone().oneshot(request.map(Body::new)).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        }
    }
}

async fn connection(server: Arc<Server>, stream: TcpStream, from: SocketAddr, shutdown: CancellationToken) {
    if let Err(error) = tune(&stream) {
        tracing::debug!(%from, %error, "client went away at once");
        return;
    }
    let stop = server.stop.clone();
    let service = hyper::service::service_fn(move |request| {
        let server = server.clone();
        async move { Ok::<_, Infallible>(server.answer(request, from).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(KEEP_ALIVE)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let mut draining = false;
    let result = loop {
        tokio::select! {
            result = connection.as_mut() => break result,
            () = stop.cancelled() => return,
            () = shutdown.cancelled(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    };
    if let Err(error) = result {
        tracing::debug!(%from, %error, "connection broke");
    }
}

/// Small answers leave at once; a client that vanished, or that stopped reading, is noticed.
fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    let limit = u32::try_from(KEEP_ALIVE.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, limit)?;
    Ok(())
}
