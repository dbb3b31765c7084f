//! Bodies of the public HTTP API, compatible with E2B's control plane as its Python client 2.63 models it.
//!
//! Requests tolerate unknown fields. Answers carry every field that a client model requires. Both directions derive both
//! serde traits, because the node and the command line read what the other writes. Times are RFC 3339 in UTC.

mod error;
mod node;
mod pause;
mod sandbox;
mod snapshot;
mod storage;
mod template;

pub use error::{ApiError, code};
pub use node::NodeStatus;
pub use pause::{ConnectRequest, Durability, OnResume, PauseBody, PauseMode, SavedState};
pub use sandbox::{
    AutoResume, ListedSandbox, NewSandbox, OnTimeout, RefreshRequest, Sandbox, SandboxDetail,
    SandboxLifecycle, SandboxState, TimeoutRequest,
};
pub use snapshot::{ChildBody, ForkBody, ForkedChild, NewSnapshot, Snapshot, SnapshotState};
pub use storage::CollectedGarbage;
pub use template::{Template, TemplateAlias, TemplateBuildStatus};
