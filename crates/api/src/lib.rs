//! HTTP: routes, authentication, error mapping and the sandbox proxy. Translates; decides nothing about sandboxes.
//!
//! One port serves two things, told apart for each request by [`proxy::target`]:
//!
//! ```text
//!  accept ─▶ server ─┬─ aimed at a sandbox ─▶ proxy::forward ─▶ pool of the sandbox's lifecycle ─▶ guest port
//!                    └─ everything else ────▶ router ─▶ auth ─▶ sandboxes | templates | storage | node ─▶ Orchestrator
//! ```
//!
//! Owns the connections of clients and the kept connections into guests; all state of sandboxes is the orchestrator's.

mod auth;
mod error;
mod extract;
mod node;
mod page;
pub mod proxy;
mod router;
mod sandboxes;
mod server;
mod settings;
mod snapshots;
mod storage;
mod templates;

pub use router::router;
pub use server::Server;
pub use settings::{ApiKey, InvalidApiKey, Settings};
