//! All sandboxes of one node.
//!
//! Owns the journal, the records of sandboxes and templates, and the driver task of every sandbox. It decides; the HTTP
//! layer above only translates, the crates below only act on one thing each.

pub mod error;
pub mod view;

pub use error::{Error, LossCause};
pub use view::{Created, CreateRequest, Route, SandboxState, SandboxView, Stage, TemplateState, TemplateView, Tier};

/// Handle to all sandboxes of this node; cheap to clone.
#[derive(Clone)]
pub struct Orchestrator {}
