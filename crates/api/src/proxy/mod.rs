//! The sandbox proxy: carries HTTP/1.1 and upgraded connections to ports inside sandboxes.
//!
//! | module | what |
//! |---|---|
//! | [`target`] | is a request aimed at a sandbox, and at which port: a pure function of its head |
//! | `signed` | which sandbox a signed file URL without any address belongs to |
//! | `upstream` | kept connections, one pool for each lifecycle of a sandbox |
//! | `forward` | one request there and its answer back |
//! | `guard` | bodies that break when the sandbox ends or nothing moves |
//! | `upgrade` | connections that stopped being HTTP |
//! | `refusal` | the answers that the proxy gives itself |
//!
//! A stream of a sandbox that ends is **broken**, never ended: clients could not tell a clean end from success.
//! Needs no API key: what listens in the guest checks its own tokens.

mod forward;
mod guard;
mod headers;
mod refusal;
mod signed;
pub mod target;
mod upgrade;
mod upstream;

use aenv_orchestrator::{Orchestrator, Route};
use aenv_protocol::envd::{ENVD_PORT, RELAY_PORT};
use aenv_protocol::ids::SandboxId;
use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use refusal::{Audience, Refusal};
use std::net::SocketAddr;
use std::sync::Arc;
use target::{Destination, Target};
use tokio_util::sync::CancellationToken;
use upstream::Upstreams;

/// Tells how to reach running sandboxes.
pub trait RouteTable: Send + Sync + 'static {
    /// The route of a running sandbox.
    fn route(&self, id: &SandboxId) -> Option<Route>;
    /// The routes of all running sandboxes.
    fn routes(&self) -> Vec<Route>;
}

impl RouteTable for Orchestrator {
    fn route(&self, id: &SandboxId) -> Option<Route> {
        Self::route(self, id)
    }
    fn routes(&self) -> Vec<Route> {
        Self::routes(self)
    }
}

/// Forwards requests into sandboxes. Owns the kept connections.
pub struct Proxy {
    routes: Arc<dyn RouteTable>,
    upstreams: Upstreams,
    stop: CancellationToken,
}

impl Proxy {
    /// A proxy without connections; `stop` breaks the upgraded ones.
    #[must_use]
    pub fn new(routes: Arc<dyn RouteTable>, stop: CancellationToken) -> Self {
        Self { routes, upstreams: Upstreams::default(), stop }
    }

    /// Answers a request that is aimed at a sandbox.
    pub async fn handle(
        &self,
        to: Destination,
        request: Request<Incoming>,
        from: SocketAddr,
    ) -> Response<Body> {
        let audience = Audience::of(request.headers());
        match self.try_handle(to, request, from).await {
            Ok(response) => response,
            Err(refusal) => {
                tracing::debug!(?refusal, "request refused");
                refusal.into_response(audience)
            }
        }
    }

    async fn try_handle(
        &self,
        to: Destination,
        request: Request<Incoming>,
        from: SocketAddr,
    ) -> Result<Response<Body>, Refusal> {
        let (route, target) = self.resolve(to, &request)?;
        let upstream = self.upstreams.of(&route);
        let permit = upstream.admit().ok_or_else(|| Refusal::TooManyRequests(target.id.clone()))?;
        let exchange = forward::Exchange { route, target, upstream, permit, from, stop: self.stop.clone() };
        match exchange.run(request).await {
            // The guest's connections break a moment before its sandbox is known to be gone, or after: ask again.
            Err(Refusal::Failed { target, .. }) if self.routes.route(&target.id).is_none() => {
                Err(Refusal::NotFound(target.id))
            }
            other => other,
        }
    }

    fn resolve(&self, to: Destination, request: &Request<Incoming>) -> Result<(Route, Target), Refusal> {
        let (route, target) = match to {
            Destination::SignedFile => {
                let route = signed::find(&self.routes.routes(), request.method(), request.uri().query())?;
                let target = Target { id: route.id.clone(), port: ENVD_PORT };
                (Some(route), target)
            }
            Destination::Port(target) => (self.routes.route(&target.id), target),
            Destination::Invalid(why) => return Err(Refusal::Invalid(why)),
        };
        if target.port == ENVD_PORT && target::is_reserved(request.uri().path()) {
            return Err(Refusal::Reserved(request.uri().path().to_owned()));
        }
        let Some(route) = route else { return Err(Refusal::NotFound(target.id)) };
        if target.port == RELAY_PORT {
            // Speaks no HTTP and exists for the node alone.
            return Err(Refusal::PortClosed(target));
        }
        Ok((route, target))
    }
}
