//! Exports as files of one FUSE mount: a flat directory, one regular file per export.
//!
//! ```text
//! a process ──▶ kernel ──▶ descriptors ──▶ workers (one per descriptor) ──▶ Content
//!                              │                  └── no room: parked, tried again
//!                              └── kept by the holder, with the memory that requests are read into
//! ```
//! The daemon may be killed at any time: the holder keeps the mount and its descriptors, so requests wait; the next daemon
//! attaches, recovers its exports, does again what was in flight, and serves. See
//! `docs/decisions/2026-11-30-fuse-recovery.md`.
//!
//! | module | its job |
//! |---|---|
//! | [`holder`] | the process that keeps the mount; attaching to it |
//! | `files` | which file stands for which export |
//! | `requests` | what a request asks for, and the answer |
//! | `data` | reading, writing, discarding, finding data |
//! | `directory` | look-ups and listings |
//! | `session` | the workers: slots, answers, recovery |
//! | `notifier` | what the kernel is told without having asked |
//! | `parked` | requests that wait for room |
//!
//! Rules. The exporter never opens a file of its own mount, which could wait for itself; only to end its workers it looks
//! up a name. Nothing is allocated per read or
//! write. A change of owner made through the mount lasts as long as the daemon: whoever exports records it and passes it
//! to [`Exporter::recover`].

mod data;
mod directory;
mod files;
pub mod holder;
mod notifier;
mod parked;
mod requests;
mod session;

use crate::{Content, Export, ExportError, Exporter, Stall};
use aenv_sys::fuse::slots;
use files::Files;
use holder::Attachment;
use notifier::Notifier;
use parked::Parked;
use session::Session;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most bytes of requests that wait for room before workers wait, too.
const PARKED_BYTES: usize = 64 << 20;

/// Serves exports through the mount that a holder keeps.
#[derive(Debug)]
pub struct FuseExporter {
    mount: PathBuf,
    /// Nobody served this mount before: there is nothing to recover.
    fresh: bool,
    files: Arc<Files>,
    parked: Arc<Parked>,
    notifier: Notifier,
    state: Mutex<State>,
}

/// ```text
/// Attached ──start──▶ Serving ──drop──▶ (workers ended, attachment closed)
///     └── start fails ──▶ Ended
/// ```
#[derive(Debug)]
enum State {
    /// Exports are added and recovered; requests wait.
    Attached { attachment: Attachment, slots: Vec<slots::Slot>, notifications: Vec<Removed> },
    /// Requests are answered.
    Serving(Session),
    /// A start failed, or the exporter is being dropped.
    Ended,
}

/// An export that was removed before the kernel could be told.
#[derive(Debug)]
struct Removed {
    number: u32,
    name: String,
}

impl FuseExporter {
    /// Attaches to the holder that listens at `socket`. Waits for up to `patience` for it to listen, and for an earlier
    /// daemon to be gone.
    ///
    /// # Errors
    /// [`ExportError::Unavailable`] when there is no holder, another daemon is attached, or its memory is not as it says.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self, ExportError> {
        let mut attachment = holder::attach(socket, patience)?;
        let memory = attachment.take_memory()?;
        let slots = slots::map(memory, attachment.slots()).map_err(|source| ExportError::Io {
            action: format!("map the requests that the holder at {} keeps", socket.display()),
            source,
        })?;
        let notifier = Notifier::new(attachment.connection()?);
        Ok(Self {
            mount: attachment.mount().to_owned(),
            fresh: attachment.is_fresh(),
            files: Arc::new(Files::default()),
            parked: Arc::new(Parked::new(PARKED_BYTES)),
            notifier,
            state: Mutex::new(State::Attached { attachment, slots, notifications: Vec::new() }),
        })
    }

    /// Directory of the exports' files.
    #[must_use]
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Whether the holder still keeps the mount. Without it everything goes on until this process ends, and with it the
    /// mount: the next daemon finds no request.
    #[must_use]
    pub fn is_held(&self) -> bool {
        match &*self.lock() {
            State::Attached { attachment, .. } => !holder::is_gone(attachment.socket()),
            State::Serving(session) => !holder::is_gone(session.socket()),
            State::Ended => false,
        }
    }

    /// Exports with requests that wait for room on the host, the longest wait first.
    #[must_use]
    pub fn stalled(&self) -> Vec<Stall> {
        self.parked.stalled()
    }

    /// Tries requests that wait for room at once, and not after the usual pause.
    pub fn retry_stalled(&self) {
        self.parked.retry_now();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn path_of(&self, export: &Export) -> PathBuf {
        self.mount.join(&export.name)
    }

    fn tell_removed(&self, removed: &Removed) -> Result<(), ExportError> {
        let node = files::node_of(removed.number);
        self.notifier.deleted(node, &removed.name).map_err(|source| ExportError::Io {
            action: format!("tell the kernel that {} is gone", self.mount.join(&removed.name).display()),
            source,
        })
    }
}

impl Exporter for FuseExporter {
    fn add(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError> {
        self.files.add(export, content)?;
        // An entry of that name may be left from an export that an earlier daemon did not know to be gone.
        let serving = match *self.lock() {
            State::Serving(_) => true,
            State::Attached { .. } => false,
            State::Ended => {
                self.files.remove(export);
                let reason = "its start has failed".to_owned();
                return Err(ExportError::Unavailable { way: "FUSE", reason });
            }
        };
        let told = if serving { self.notifier.entry_changed(&export.name) } else { Ok(()) };
        if let Err(source) = told {
            self.files.remove(export);
            let action = format!("tell the kernel of {}", self.path_of(export).display());
            return Err(ExportError::Io { action, source });
        }
        Ok(self.path_of(export))
    }

    fn recover(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError> {
        if self.fresh {
            let reason = format!("the mount at {} is new", self.mount.display());
            return Err(ExportError::Lost { name: export.name.clone(), reason });
        }
        self.files.recover(export, content)?;
        Ok(self.path_of(export))
    }

    fn start(&self) -> Result<(), ExportError> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Ended) {
            State::Attached { attachment, slots, notifications } => {
                let (files, parked) = (Arc::clone(&self.files), Arc::clone(&self.parked));
                *state = State::Serving(Session::start(attachment, slots, files, parked)?);
                drop(state);
                notifications.iter().try_for_each(|removed| self.tell_removed(removed))
            }
            other => {
                *state = other;
                let reason = "it was started already".to_owned();
                Err(ExportError::Unavailable { way: "FUSE", reason })
            }
        }
    }

    fn remove(&self, export: &Export) -> Result<(), ExportError> {
        let removed = Removed { number: export.number, name: export.name.clone() };
        // Requests that wait fail first, else the kernel would wait for them when told.
        self.files.remove(export);
        self.parked.retry_now();
        match &mut *self.lock() {
            // Nobody answers yet what the kernel may wait for.
            State::Attached { notifications, .. } => {
                notifications.push(removed);
                return Ok(());
            }
            State::Serving(_) => {}
            State::Ended => return Ok(()),
        }
        self.tell_removed(&removed)
    }
}

impl Drop for FuseExporter {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Serving(session) = std::mem::replace(state, State::Ended) {
            session.stop(&self.mount);
        }
    }
}
