//! What callers see of the sandboxes: copies, kept by the driver tasks, read without ever waiting for one.
//!
//! Starting sandboxes are in it so that they can be killed; they are not shown. A sandbox that is being ended is taken
//! out first, so nobody finds it any more.

use crate::error::Error;
use crate::sandbox_task::Command;
use crate::view::{Durability, Route, SandboxState, SandboxView, Tier};
use aenv_protocol::ids::SandboxId;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::mpsc;

struct Entry {
    /// None while starting.
    view: Option<SandboxView>,
    /// While running.
    route: Option<Route>,
    commands: mpsc::Sender<Command>,
}

/// A paused sandbox whose VMM stands by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HotSandbox {
    pub(crate) id: SandboxId,
    /// What its VMM holds.
    pub(crate) memory_bytes: u64,
    /// When it was paused.
    pub(crate) saved_at: jiff::Timestamp,
    /// Whether what was saved survives a loss of power.
    pub(crate) is_durable: bool,
}

/// The sandboxes of one node as callers see them.
#[derive(Default)]
pub(crate) struct SandboxTable {
    entries: RwLock<HashMap<SandboxId, Entry>>,
}

impl SandboxTable {
    /// Enters a sandbox that is being made.
    pub(crate) fn begin(&self, id: &SandboxId, commands: mpsc::Sender<Command>) {
        self.write().insert(id.clone(), Entry { view: None, route: None, commands });
    }

    /// Shows the sandbox as it is now; a route is given while it runs only.
    pub(crate) fn show(&self, view: SandboxView, route: Option<Route>) {
        if let Some(entry) = self.write().get_mut(&view.id) {
            entry.view = Some(view);
            entry.route = route;
        }
    }

    /// Changes what is shown, without touching the route.
    pub(crate) fn update(&self, view: SandboxView) {
        if let Some(entry) = self.write().get_mut(&view.id) {
            entry.view = Some(view);
        }
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.write().remove(id);
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Result<SandboxView, Error> {
        let entries = self.read();
        let view = entries.get(id).and_then(|entry| entry.view.as_ref());
        match view {
            None => Err(Error::SandboxNotFound(id.clone())),
            Some(SandboxView { state: SandboxState::Lost { cause, detail }, .. }) => {
                Err(Error::SandboxLost { id: id.clone(), cause: *cause, detail: detail.clone() })
            }
            Some(view) => Ok(view.clone()),
        }
    }

    /// The paused sandboxes whose VMM stands by.
    pub(crate) fn hot(&self) -> Vec<HotSandbox> {
        let entries = self.read();
        let views = entries.values().filter_map(|entry| entry.view.as_ref());
        let hot = views.filter_map(|view| {
            let saved = view.saved.as_ref().filter(|saved| saved.tier == Tier::Hot)?;
            (view.state == SandboxState::Paused).then(|| HotSandbox {
                id: view.id.clone(),
                memory_bytes: view.memory_mib.saturating_mul(1 << 20),
                saved_at: saved.saved_at,
                is_durable: saved.durability >= Durability::Local,
            })
        });
        hot.collect()
    }

    pub(crate) fn list(&self) -> Vec<SandboxView> {
        self.read().values().filter_map(|entry| entry.view.clone()).collect()
    }

    pub(crate) fn route(&self, id: &SandboxId) -> Option<Route> {
        self.read().get(id).and_then(|entry| entry.route.clone())
    }

    pub(crate) fn routes(&self) -> Vec<Route> {
        self.read().values().filter_map(|entry| entry.route.clone()).collect()
    }

    /// The queue of the sandbox's driver task.
    pub(crate) fn commands(&self, id: &SandboxId) -> Result<mpsc::Sender<Command>, Error> {
        self.read()
            .get(id)
            .map(|entry| entry.commands.clone())
            .ok_or_else(|| Error::SandboxNotFound(id.clone()))
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<SandboxId, Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<SandboxId, Entry>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}
