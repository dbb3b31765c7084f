//! The handle the API layer holds. Decides nothing itself.

use crate::error::Error;
use crate::settings::{Parts, Settings, StartError};
use crate::view::{CreateRequest, Created, Route, SandboxView, TemplateView};
use aenv_protocol::ids::SandboxId;
use std::time::Duration;

/// Handle to all sandboxes of this node; cheap to clone.
#[derive(Clone)]
pub struct Orchestrator {}

impl Orchestrator {
    /// Opens the data directory, adopts what still runs, clears what does not, and starts the background work.
    ///
    /// # Errors
    /// When the directory is in use or unusable, or what an earlier process left cannot be put in order.
    
    pub async fn start(_settings: Settings, _parts: Parts) -> Result<Self, StartError> {
        Ok(Self {})
    }

    /// Makes a sandbox; returns when it runs. Dropping the future does not stop the making.
    ///
    /// # Errors
    /// Typed; what was made until then is undone.
    pub async fn create(&self, _request: CreateRequest) -> Result<Created, Error> {
        Err(Error::ShuttingDown)
    }

    /// The sandbox as it is now.
    ///
    /// # Errors
    /// [`Error::SandboxLost`] when it died by itself, [`Error::SandboxNotFound`] when there is none to talk to.
    pub fn get(&self, id: &SandboxId) -> Result<SandboxView, Error> {
        Err(Error::SandboxNotFound(id.clone()))
    }

    /// Every running or lost sandbox, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<SandboxView> {
        Vec::new()
    }

    /// Ends a sandbox, a lost one included. Returns when its VM is gone.
    ///
    /// # Errors
    /// [`Error::SandboxNotFound`] when there is none, or it is being ended already.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), Error> {
        Err(Error::SandboxNotFound(id.clone()))
    }

    /// Sets the remaining life time, counted from now; may shorten it, zero ends the sandbox now.
    ///
    /// # Errors
    /// When there is no such sandbox or the time is longer than allowed.
    pub async fn set_timeout(&self, id: &SandboxId, _timeout: Duration) -> Result<(), Error> {
        Err(Error::SandboxNotFound(id.clone()))
    }

    /// Makes sure that at least so much life time remains from now; never shortens it.
    ///
    /// # Errors
    /// As [`Self::set_timeout`].
    pub async fn extend(&self, id: &SandboxId, _at_least: Duration) -> Result<SandboxView, Error> {
        Err(Error::SandboxNotFound(id.clone()))
    }

    /// How to reach a sandbox, if it runs.
    #[must_use]
    pub fn route(&self, _id: &SandboxId) -> Option<Route> {
        None
    }

    /// The routes of every running sandbox.
    #[must_use]
    pub fn routes(&self) -> Vec<Route> {
        Vec::new()
    }

    /// The templates of this node.
    #[must_use]
    pub fn templates(&self) -> Vec<TemplateView> {
        Vec::new()
    }

    /// Ends standbys and background work. Running sandboxes stay, for the next process to adopt; later calls answer
    /// [`Error::ShuttingDown`].
    pub async fn shutdown(&self) {}
}
