//! Kept connections into guests, one set of pools for each lifecycle of a sandbox. Never keyed by address: the same
//! address belongs to every guest, and a sandbox that comes back is a different one.

use crate::proxy::guard::Guarded;
use crate::proxy::target::Target;
use aenv_orchestrator::{Dial, Route};
use aenv_protocol::envd::ENVD_PORT;
use axum::body::Body;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Exchanges that may be under way with one sandbox.
const MAX_EXCHANGES: usize = 1024;
/// Connections kept to one port of one sandbox.
const MAX_IDLE_CONNECTIONS: usize = 32;
/// Our own daemon never closes a silent connection.
const ENVD_IDLE: Duration = Duration::from_secs(90);
/// Common servers close a silent connection after five seconds: a request must not meet that moment.
const PROGRAM_IDLE: Duration = Duration::from_secs(4);
/// A guest that does not even accept in this time is stuck.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Body of a request into a guest: the client's, or none.
pub(crate) type GuestBody = Either<Guarded, Body>;
/// Counts one exchange.
pub(crate) type Permit = OwnedSemaphorePermit;

/// The pools of all lifecycles that were spoken to.
#[derive(Default)]
pub(crate) struct Upstreams {
    by_lifecycle: Arc<Mutex<HashMap<u64, Arc<Upstream>>>>,
}

impl Upstreams {
    /// The pools of a route's lifecycle; made when first asked for, dropped when the lifecycle ends.
    pub(crate) fn of(&self, route: &Route) -> Arc<Upstream> {
        let lifecycle = route.lifecycle;
        let mut pools = self.by_lifecycle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(upstream) = pools.get(&lifecycle) {
            return upstream.clone();
        }
        let upstream = Arc::new(Upstream::new(&route.dialer));
        pools.insert(lifecycle, upstream.clone());
        let (ended, by_lifecycle) = (route.ended.clone(), Arc::downgrade(&self.by_lifecycle));
        tokio::spawn(async move {
            ended.cancelled().await;
            if let Some(pools) = by_lifecycle.upgrade() {
                pools.lock().unwrap_or_else(PoisonError::into_inner).remove(&lifecycle);
            }
        });
        upstream
    }
}

/// The pools of one lifecycle.
pub(crate) struct Upstream {
    daemon: Client<Connector, GuestBody>,
    programs: Client<Connector, GuestBody>,
    exchanges: Arc<Semaphore>,
}

impl Upstream {
    fn new(dialer: &Arc<dyn Dial>) -> Self {
        let client = |idle| {
            Client::builder(TokioExecutor::new())
                .pool_timer(TokioTimer::new())
                .pool_idle_timeout(idle)
                .pool_max_idle_per_host(MAX_IDLE_CONNECTIONS)
                .set_host(false)
                .build(Connector(dialer.clone()))
        };
        Self {
            daemon: client(ENVD_IDLE),
            programs: client(PROGRAM_IDLE),
            exchanges: Arc::new(Semaphore::new(MAX_EXCHANGES)),
        }
    }

    /// Counts one more exchange; nothing when too many are under way.
    pub(crate) fn admit(&self) -> Option<Permit> {
        self.exchanges.clone().try_acquire_owned().ok()
    }

    /// Sends a request on a kept connection or a new one. One that turns out to be closed before anything was written to
    /// it is replaced.
    pub(crate) async fn send(
        &self,
        target: &Target,
        request: Request<GuestBody>,
    ) -> Result<Response<Incoming>, Error> {
        let client = if target.port == ENVD_PORT { &self.daemon } else { &self.programs };
        client.request(request).await
    }
}

/// The URI by which the pools know a port; only path and query reach the guest.
pub(crate) fn guest_uri(port: u16, path_and_query: Option<PathAndQuery>) -> Result<Uri, http::Error> {
    let authority = Authority::try_from(format!("guest:{port}"))?;
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(authority)
        .path_and_query(path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/")))
        .build()
}

/// Whether an error says that nothing listens on the port.
pub(crate) fn is_refused(error: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(error) = current.downcast_ref::<io::Error>() {
            return error.kind() == io::ErrorKind::ConnectionRefused;
        }
        cause = current.source();
    }
    false
}

/// Opens connections by a route's dialer.
#[derive(Clone)]
struct Connector(Arc<dyn Dial>);

impl tower::Service<Uri> for Connector {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let dialer = self.0.clone();
        Box::pin(async move {
            let port = uri.port_u16().ok_or(io::ErrorKind::InvalidInput)?;
            let stream = tokio::time::timeout(CONNECT_LIMIT, dialer.dial(port)).await??;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(stream))
        })
    }
}
