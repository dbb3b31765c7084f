//! Wire types and ids shared by the node, the guest daemon, the command line and tests.
//!
//! Owns no state and performs no I/O. Three surfaces live here, each in its own module:
//!
//! * [`rest`]: bodies of the public HTTP API (compatible with E2B's control plane);
//! * [`envd`]: what the node and clients say to the guest daemon (REST bodies, RPC messages, constants);
//! * [`doctor`]: the host report that the node writes and `aenv doctor` renders.
//!
//! Persisted records are *not* protocol types: they belong to the crate that writes them.

pub mod doctor;
pub mod envd;
pub mod ids;
pub mod rest;
