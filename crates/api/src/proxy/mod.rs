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
//! | `wake` | lets traffic resume paused sandboxes |
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
mod wake;

pub use wake::{RouteTable, Signer};

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
use wake::Wakes;

/// Where the guest daemon says that it is there.
const HEALTH: &str = "/health";

/// Forwards requests into sandboxes. Owns the kept connections.
pub struct Proxy {
    routes: Arc<dyn RouteTable>,
    upstreams: Upstreams,
    wakes: Wakes,
    stop: CancellationToken,
}

impl Proxy {
    /// A proxy without connections; `stop` breaks the upgraded ones.
    #[must_use]
    pub fn new(routes: Arc<dyn RouteTable>, stop: CancellationToken) -> Self {
        Self { routes, upstreams: Upstreams::default(), wakes: Wakes::default(), stop }
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
        let target = self.resolve(to, &request)?;
        let asks_for_health = target.port == ENVD_PORT && request.uri().path() == HEALTH;
        let route = match self.wakes.route(&*self.routes, &target.id).await {
            // How E2B's clients find out whether a sandbox runs: this text means that it does not.
            Err(Refusal::Paused(id)) if asks_for_health => return Err(Refusal::NotFound(id)),
            route => route?,
        };
        let upstream = self.upstreams.of(&route);
        let permit = upstream.admit().ok_or_else(|| Refusal::TooManyRequests(target.id.clone()))?;
        let exchange = forward::Exchange { route, target, upstream, permit, from, stop: self.stop.clone() };
        match exchange.run(request).await {
            // The guest's connections break a moment before its sandbox is known to be gone, or after: ask again.
            Err(Refusal::Failed { target, .. }) if self.routes.route(&target.id).is_none() => {
                Err(self.went_away(target.id))
            }
            Err(Refusal::NotFound(id)) => Err(self.went_away(id)),
            other => other,
        }
    }

    /// Why a sandbox that had a route gave no answer: only a sandbox that will not come back is "not found".
    fn went_away(&self, id: SandboxId) -> Refusal {
        if self.routes.may_wake(&id) {
            Refusal::Transitioning(id)
        } else {
            wake::without_route(&*self.routes, id)
        }
    }

    /// Which port of which sandbox is meant, if anybody may talk to it.
    fn resolve(&self, to: Destination, request: &Request<Incoming>) -> Result<Target, Refusal> {
        let target = match to {
            Destination::SignedFile => {
                let id = signed::find(self.routes.signers(), request.method(), request.uri().query())?;
                Target { id, port: ENVD_PORT }
            }
            Destination::Port(target) => target,
            Destination::Invalid(why) => return Err(Refusal::Invalid(why)),
        };
        if target.port == ENVD_PORT && target::is_reserved(request.uri().path()) {
            return Err(Refusal::Reserved(request.uri().path().to_owned()));
        }
        // Speaks no HTTP and exists for the node alone: no reason to wake anybody.
        if target.port == RELAY_PORT {
            let runs = self.routes.route(&target.id).is_some();
            let without = |id| wake::without_route(&*self.routes, id);
            return Err(if runs { Refusal::PortClosed(target) } else { without(target.id) });
        }
        Ok(target)
    }
}
