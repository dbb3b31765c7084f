//! The handle the API layer holds: finds the sandbox or template meant and passes the request on.

use crate::capacity;
use crate::create;
use crate::draining;
use crate::error::Error;
use crate::fork;
use crate::garbage;
use crate::journal::Purpose;
use crate::node::Node;
use crate::sandbox_task::{Asker, Command, SnapshotWish, Taken};
use crate::settings::{DiskSettings, Parts, Settings, StartError};
use crate::snapshot;
use crate::source::Source;
use crate::startup;
use crate::template::Progress;
use crate::view::{
    Capacity, Collected, CreateRequest, Created, ForkRequest, Forked, PauseRequest, Paused, PausedAll,
    ResumeRequest, Resumed, Route, SandboxView, SnapshotRequest, SnapshotTaken, SnapshotView, TemplateView,
    Waiting,
};
use aenv_protocol::ids::SandboxId;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Handle to all sandboxes of this node; cheap to clone.
#[derive(Clone)]
pub struct Orchestrator {
    node: Arc<Node>,
}

impl Orchestrator {
    /// Opens the data directory, adopts what still runs, clears what does not, and starts the background work.
    ///
    /// # Errors
    /// When the directory is in use or unusable, or what an earlier process left cannot be put in order.
    pub async fn start(settings: Settings, parts: Parts) -> Result<Self, StartError> {
        Ok(Self { node: startup::start(settings, parts).await? })
    }

    /// Makes a sandbox; returns when it runs. Dropping the future does not stop the making.
    ///
    /// # Errors
    /// Typed; what was made until then is undone.
    pub async fn create(&self, request: CreateRequest) -> Result<Created, Error> {
        self.check_admits()?;
        self.check_timeout(request.timeout)?;
        let source = self.source(&request.template).await?;
        let result = create::spawn(&self.node, request, source);
        result.await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// What an id or name of a template or snapshot means.
    async fn source(&self, asked: &str) -> Result<Source, Error> {
        let wanted = self.node.templates.iter().find(|template| template.answers_to(asked));
        let Some(template) = wanted else {
            let snapshot = self.node.snapshots.find(asked);
            let snapshot = snapshot.ok_or_else(|| Error::TemplateNotFound(asked.to_owned()))?;
            return Ok(Source::Snapshot(Arc::new(snapshot::start_of(&self.node, &snapshot).await?)));
        };
        let not_ready = |reason: String| Error::TemplateNotReady { name: template.file.name.clone(), reason };
        let capture = match template.progress() {
            Progress::Ready(capture) => capture,
            Progress::Preparing => {
                return Err(not_ready("its capture is being made, try again soon".to_owned()));
            }
            Progress::Failed(reason) => {
                return Err(not_ready(format!("its capture could not be made: {reason}")));
            }
        };
        Ok(Source::Template { template: Arc::clone(template), capture })
    }

    /// Keeps the state of a sandbox, which goes on (or stays paused): returns when sandboxes can be started from it. Dropping the
    /// future does not stop it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that a template has, or that looks like an id; others when the state cannot be saved or
    /// stored: then there is no snapshot.
    pub async fn snapshot(&self, id: &SandboxId, request: SnapshotRequest) -> Result<SnapshotTaken, Error> {
        self.check_admits()?;
        if let Some((name, _)) = &request.name
            && self.node.templates.iter().any(|template| template.answers_to(name))
        {
            let reason = format!("{name:?} is the name of a template");
            return Err(Error::InvalidArgument { field: "name", reason });
        }
        if let Some((name, _)) = request.name.as_ref().filter(|(name, _)| snapshot::is_like_id(name)) {
            let reason = format!("{name:?} could be the id of a snapshot or a template");
            return Err(Error::InvalidArgument { field: "name", reason });
        }
        let wish = SnapshotWish { purpose: Purpose::Kept, name: request.name, mode: request.mode };
        let Taken { snapshot, stages, stopped, .. } =
            self.ask(id, |reply| Command::Snapshot(wish, reply)).await?;
        Ok(SnapshotTaken { snapshot: snapshot.view(), stopped, stages })
    }

    /// Every snapshot, in no order.
    #[must_use]
    pub fn snapshots(&self) -> Vec<SnapshotView> {
        self.node.snapshots.views()
    }

    /// Deletes a snapshot by its id or name. What was started from it is not touched; what it stores goes when nothing needs it.
    ///
    /// # Errors
    /// [`Error::TemplateNotFound`]; [`Error::Conflict`] for a template.
    pub async fn delete_snapshot(&self, asked: &str) -> Result<(), Error> {
        self.check_open()?;
        match self.node.snapshots.find(asked) {
            Some(snapshot) => snapshot::delete(&self.node, &snapshot).await,
            None if self.node.templates.iter().any(|template| template.answers_to(asked)) => {
                let what =
                    format!("{asked:?} is a template, not a snapshot: this node does not delete templates");
                Err(Error::Conflict(what))
            }
            None => Err(Error::TemplateNotFound(asked.to_owned())),
        }
    }

    /// Starts children that go on from the state that a sandbox has now. It goes on itself (or stays paused) before any of them is
    /// there. Dropping the future does not stop it.
    ///
    /// # Errors
    /// When nothing can be saved, stored or started. That a single child could not be started is told beside the others.
    pub async fn fork(&self, id: &SandboxId, request: ForkRequest) -> Result<Forked, Error> {
        self.check_admits()?;
        self.check_timeout(request.timeout)?;
        request
            .children
            .iter()
            .filter_map(|child| child.timeout)
            .try_for_each(|it| self.check_timeout(it))?;
        if !(1..=fork::MOST_CHILDREN).contains(&request.children.len()) {
            let reason = format!("must be 1 to {}", fork::MOST_CHILDREN);
            return Err(Error::InvalidArgument { field: "count", reason });
        }
        let (this, id) = (self.clone(), id.clone());
        let forking = async move {
            fork::await_room(&this.node, &this.node.table.get(&id)?).await?;
            let taken = this.ask(&id, |reply| Command::Snapshot(fork::wish(), reply)).await?;
            fork::children_of(&this.node, taken, &request).await
        };
        self.node.tasks.spawn(forking).await.unwrap_or(Err(Error::ShuttingDown))
    }

    /// The sandbox as it is now.
    ///
    /// # Errors
    /// [`Error::SandboxLost`] when it died by itself, [`Error::SandboxNotFound`] when there is none to talk to.
    pub fn get(&self, id: &SandboxId) -> Result<SandboxView, Error> {
        self.check_open()?;
        self.node.table.get(id)
    }

    /// What the guest of a sandbox waits for when it uses its disk; asks the store of disks, for a second at most.
    pub async fn waiting(&self, id: &SandboxId) -> Option<Waiting> {
        self.node.disks.waiting(id).await.unwrap_or_else(|error| {
            // Whoever looks at a sandbox should see the rest of it.
            tracing::warn!(sandbox = %id, %error, "cannot ask whether the disk waits for something");
            None
        })
    }

    /// Every running or lost sandbox, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<SandboxView> {
        self.node.table.list()
    }

    /// Ends a sandbox, a lost one included. Returns when its VM is gone.
    ///
    /// # Errors
    /// [`Error::SandboxNotFound`] when there is none, or it is being ended already.
    pub async fn kill(&self, id: &SandboxId) -> Result<(), Error> {
        self.ask(id, Command::Kill).await
    }

    /// Sets the remaining life time, counted from now; may shorten it, zero ends the sandbox now.
    ///
    /// # Errors
    /// When there is no such sandbox, it is lost, or the time is longer than allowed.
    pub async fn set_timeout(&self, id: &SandboxId, timeout: Duration) -> Result<(), Error> {
        self.check_timeout(timeout)?;
        self.ask(id, |reply| Command::SetTimeout(timeout, reply)).await
    }

    /// Makes sure that at least so much life time remains from now; never shortens it.
    ///
    /// # Errors
    /// As [`Self::set_timeout`].
    pub async fn extend(&self, id: &SandboxId, at_least: Duration) -> Result<SandboxView, Error> {
        self.check_timeout(at_least)?;
        self.ask(id, |reply| Command::Extend(at_least, reply)).await
    }

    /// Saves the state of a sandbox and stops it. Returns when that state survives what the request asks for. Dropping the
    /// future does not stop the pause.
    ///
    /// # Errors
    /// [`Error::AlreadyPaused`]; [`Error::GuestUnresponsive`] when the request forbids that; others when the state could not
    /// be saved: the sandbox goes on then.
    pub async fn pause(&self, id: &SandboxId, request: PauseRequest) -> Result<Paused, Error> {
        self.ask(id, |reply| Command::Pause(request, reply)).await
    }

    /// Lets a paused sandbox go on; one that runs only gets its time. Dropping the future does not stop it.
    ///
    /// # Errors
    /// [`Error::Incompatible`]; others when it could not go on: it is still paused then.
    pub async fn resume(&self, id: &SandboxId, request: ResumeRequest) -> Result<Resumed, Error> {
        self.check_admits()?;
        self.check_timeout(request.timeout)?;
        self.ask(id, |reply| Command::Resume(request, Asker::Caller, reply)).await
    }

    /// Resumes a sandbox because there is traffic for it, so that it lives for `timeout` at least. A pause under way comes to its
    /// end first, and says whether traffic may wake what it leaves.
    ///
    /// # Errors
    /// [`Error::IsPaused`] when it is not to be woken by traffic; others as of [`Self::resume`].
    pub async fn wake(&self, id: &SandboxId, timeout: Duration) -> Result<Resumed, Error> {
        self.check_timeout(timeout)?;
        let request = ResumeRequest { timeout, reboot: false };
        self.ask(id, |reply| Command::Resume(request, Asker::Traffic, reply)).await
    }

    /// Ends the VMM that stands by for a paused sandbox, whose memory and network are free then: the next resume starts another
    /// one from what was saved. No error when there is none.
    ///
    /// # Errors
    /// When the sandbox is not paused, or its VMM cannot be ended: that is tried again.
    pub async fn release(&self, id: &SandboxId) -> Result<(), Error> {
        self.ask(id, Command::Release).await
    }

    /// How to reach a sandbox, if it runs.
    #[must_use]
    pub fn route(&self, id: &SandboxId) -> Option<Route> {
        self.node.table.route(id)
    }

    /// The routes of every running sandbox.
    #[must_use]
    pub fn routes(&self) -> Vec<Route> {
        self.node.table.routes()
    }

    /// The templates of this node.
    #[must_use]
    pub fn templates(&self) -> Vec<TemplateView> {
        self.node.templates.iter().map(|template| template.view()).collect()
    }

    /// Removes layers, and disks of captures, that nothing is made of. May be called at any time.
    ///
    /// # Errors
    /// [`Error::Conflict`] where disks are files that share blocks, not layers; [`Error::Internal`] when the store of disks
    /// fails: what it removed until then is gone, another call goes on.
    pub async fn collect_garbage(&self) -> Result<Collected, Error> {
        self.check_open()?;
        match self.node.settings.disks {
            DiskSettings::Service(_) => {
                let collected = garbage::collect(&self.node).await;
                collected.map_err(|failure| failure.into_error("removing what nothing is made of"))
            }
            DiskSettings::Reflink(_) => Err(Error::Conflict(
                "this node's disks are files that share blocks (AENV_DISKS=reflink): there are no layers to collect"
                    .to_owned(),
            )),
        }
    }

    /// What this node has for sandboxes, and what of it is taken.
    #[must_use]
    pub fn capacity(&self) -> Capacity {
        capacity::measure(&self.node)
    }

    /// Pauses all sandboxes, before a [`Self::shutdown`]: returns when what was saved of them survives the loss of power, or after
    /// `limit`. From now on creates and resumes are refused with [`Error::ShuttingDown`].
    pub async fn pause_all(&self, limit: Duration) -> PausedAll {
        self.node.draining.cancel();
        draining::pause_all(self, limit).await
    }

    /// Ends standbys and background work and frees the data directory. Running sandboxes stay, for the next process to
    /// adopt; later calls answer [`Error::ShuttingDown`].
    pub async fn shutdown(&self) {
        self.node.stopping.cancel();
        self.node.tasks.close();
        self.node.tasks.wait().await;
        self.node.journal.close().await;
    }

    /// Longest life time that may be asked for.
    #[must_use]
    pub fn max_timeout(&self) -> Duration {
        self.node.settings.max_timeout
    }

    fn check_admits(&self) -> Result<(), Error> {
        if self.node.draining.is_cancelled() { Err(Error::ShuttingDown) } else { self.check_open() }
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.node.stopping.is_cancelled() { Err(Error::ShuttingDown) } else { Ok(()) }
    }

    fn check_timeout(&self, timeout: Duration) -> Result<(), Error> {
        let longest = self.node.settings.max_timeout;
        if timeout > longest {
            let reason = format!("must not be longer than {} seconds", longest.as_secs());
            return Err(Error::InvalidArgument { field: "timeout", reason });
        }
        Ok(())
    }

    async fn ask<T>(
        &self,
        id: &SandboxId,
        command: impl FnOnce(oneshot::Sender<Result<T, Error>>) -> Command,
    ) -> Result<T, Error> {
        self.check_open()?;
        let gone = || Error::SandboxNotFound(id.clone());
        let (reply, answer) = oneshot::channel();
        self.node.table.commands(id)?.send(command(reply)).await.map_err(|_| gone())?;
        match answer.await {
            Ok(result) => result,
            Err(_) => {
                self.check_open()?;
                Err(gone())
            }
        }
    }
}
