//! The journal: what this node has made and is about to make, so that a killed node loses and leaks nothing.
//!
//! One SQLite file with three tables:
//!
//! ```text
//! meta(key PRIMARY KEY, value)              schema_version, boot_id
//! vm(id PRIMARY KEY, role, phase, payload)  one row per VM; payload is the JSON of `VmRecord`
//! snapshot(id PRIMARY KEY, payload)         one row per snapshot; payload is the JSON of `SnapshotRecord`
//! ```
//!
//! `role` and `phase` repeat fields of the payload so that the claim of a standby is one conditional `UPDATE`.
//! WAL with `synchronous=NORMAL`: a commit is one `write()`, which survives the death of every process of ours; only a
//! power cut can lose the last commits, and then the VMs are gone too. One commit must survive that as well: the one that
//! says of a saved state that it is `local`. It is made with `synchronous=FULL`, which syncs the WAL, and with it all commits
//! before.
//!
//! A thread of its own owns the connection (and the lock of the data directory, which must outlive it): no async thread
//! ever waits for a disk, and the order of the calls is the order of the commits. See
//! docs/decisions/2026-11-30-journal.md.

mod record;
mod saves;
mod snapshots;
mod store;
#[cfg(test)]
mod tests;

pub(crate) use record::{Loss, Role, Tenancy, VmRecord};
pub(crate) use saves::{MemoryBinding, PAGE_BYTES, Present, Save, Saves, Start, Step};
pub(crate) use snapshots::{Purpose, SnapshotRecord};

use crate::data_dir::DataDirLock;
use crate::settings::{JournalWatch, StartError};
use aenv_protocol::ids::{SandboxId, TemplateId};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use store::{Store, StoreError};
use tokio::sync::{mpsc, oneshot};

/// Version of the tables and of the payload's meaning; a journal of another version is refused.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// The journal could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum JournalError {
    #[error("journal: {0}")]
    Failed(String),
    /// What was to be journalled has not happened, and may when there is room.
    #[error("no room for the journal {path}, {reason}: remove sandboxes or templates, or enlarge its disk")]
    Full { path: PathBuf, reason: String },
}

type Job = Box<dyn FnOnce(&mut Store) + Send>;

/// Handle to the journal; the file is closed when the last one is dropped, or by [`Journal::close`].
#[derive(Clone)]
pub(crate) struct Journal {
    jobs: mpsc::UnboundedSender<Request>,
    /// The file.
    path: Arc<Path>,
}

enum Request {
    Run(Job, Effect),
    Close(oneshot::Sender<()>),
}

/// Whether a job changes anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    None,
    Commit,
}

impl Journal {
    /// Opens or makes the journal; `lock` is held until it is closed again. Every commit is shown to `watch`.
    pub(crate) async fn open(
        path: &Path,
        lock: DataDirLock,
        watch: Option<Arc<dyn JournalWatch>>,
    ) -> Result<Self, StartError> {
        let (jobs, requests) = mpsc::unbounded_channel();
        let (opened, result) = oneshot::channel();
        let fail = |reason: String| StartError::Journal { path: path.to_owned(), reason };
        let file = path.to_owned();
        std::thread::Builder::new()
            .name("aenv-journal".to_owned())
            .spawn(move || match Store::open(&file) {
                Ok(store) => {
                    if opened.send(Ok(())).is_ok() {
                        serve(store, lock, requests, watch.as_deref());
                    }
                }
                Err(error) => {
                    // First the lock: whoever sees the error may try again at once.
                    drop(lock);
                    // Nobody left to tell when the opener has gone.
                    drop(opened.send(Err(error)));
                }
            })
            .map_err(|error| fail(format!("cannot start its thread: {error}")))?;
        match result.await {
            Ok(Ok(())) => Ok(Self { jobs, path: path.into() }),
            Ok(Err(error)) => Err(fail(error.reason)),
            Err(_) => Err(fail("its thread ended".to_owned())),
        }
    }

    /// Writes a record, whether or not there is one of that id.
    pub(crate) async fn put(&self, record: &VmRecord) -> Result<(), JournalError> {
        let record = record.clone();
        self.commit(move |store| store.put(&record)).await
    }

    /// As [`Self::put`]; survives a power cut when it returns.
    pub(crate) async fn put_durably(&self, record: &VmRecord) -> Result<(), JournalError> {
        let record = record.clone();
        self.commit(move |store| store.durably(|store| store.put(&record))).await
    }

    /// Writes a record and those of snapshots, all of them or none.
    pub(crate) async fn put_with_snapshots(
        &self,
        record: &VmRecord,
        snapshots: &[SnapshotRecord],
    ) -> Result<(), JournalError> {
        let (record, snapshots) = (record.clone(), snapshots.to_vec());
        self.commit(move |store| store.put_with_snapshots(&record, &snapshots)).await
    }

    /// As [`Self::put_with_snapshots`]; survives a power cut when it returns.
    pub(crate) async fn put_with_snapshots_durably(
        &self,
        record: &VmRecord,
        snapshots: &[SnapshotRecord],
    ) -> Result<(), JournalError> {
        let (record, snapshots) = (record.clone(), snapshots.to_vec());
        self.commit(move |store| store.durably(|store| store.put_with_snapshots(&record, &snapshots))).await
    }

    /// Writes the record of a snapshot; survives a power cut when it returns.
    pub(crate) async fn put_snapshot_durably(&self, snapshot: &SnapshotRecord) -> Result<(), JournalError> {
        let snapshot = snapshot.clone();
        self.commit(move |store| store.durably(|store| store.put_snapshot(&snapshot))).await
    }

    /// Forgets a snapshot of which nothing is left.
    pub(crate) async fn remove_snapshot(&self, id: &TemplateId) -> Result<(), JournalError> {
        let id = id.clone();
        self.commit(move |store| store.remove_snapshot(&id)).await
    }

    /// Every snapshot.
    pub(crate) async fn snapshots(&self) -> Result<Vec<SnapshotRecord>, JournalError> {
        self.run(Effect::None, |store| store.snapshots()).await
    }

    /// Turns a standby into a sandbox that is being started; false when it is no standby (any more).
    pub(crate) async fn claim(&self, record: &VmRecord) -> Result<bool, JournalError> {
        let record = record.clone();
        self.commit(move |store| store.claim(&record)).await
    }

    /// Forgets a VM of which nothing is left.
    pub(crate) async fn remove(&self, id: &SandboxId) -> Result<(), JournalError> {
        let id = id.clone();
        self.commit(move |store| store.remove(&id)).await
    }

    /// Every record.
    pub(crate) async fn all(&self) -> Result<Vec<VmRecord>, JournalError> {
        self.run(Effect::None, |store| store.all()).await
    }

    /// Notes the host's present boot; returns the one noted before.
    pub(crate) async fn replace_boot_id(&self, boot_id: &str) -> Result<Option<String>, JournalError> {
        let boot_id = boot_id.to_owned();
        self.commit(move |store| store.replace_boot_id(&boot_id)).await
    }

    /// Closes the file and frees the data directory; later calls fail.
    pub(crate) async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.jobs.send(Request::Close(done)).is_ok() {
            // An error means that the thread has ended, which is what is wanted.
            drop(closed.await);
        }
    }

    async fn commit<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, JournalError> {
        self.run(Effect::Commit, job).await
    }

    async fn run<T: Send + 'static>(
        &self,
        effect: Effect,
        job: impl FnOnce(&mut Store) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |store| {
            // A caller that went away loses only the answer; the write is done.
            drop(reply.send(job(store)));
        });
        let closed = || JournalError::Failed("it is closed".to_owned());
        self.jobs.send(Request::Run(job, effect)).map_err(|_| closed())?;
        let done = answer.await.map_err(|_| closed())?;
        done.map_err(|StoreError { reason, is_full }| match is_full {
            true => JournalError::Full { path: self.path.to_path_buf(), reason },
            false => JournalError::Failed(reason),
        })
    }
}

/// Forgets all VMs in a journal that nobody else uses, and none of the snapshots; tells how many of these it knows. Blocks.
///
/// # Errors
/// What SQLite said.
pub(crate) fn forget_vms(path: &Path) -> Result<usize, String> {
    let mut store = Store::open(path).map_err(|error| error.reason)?;
    let forgotten = store.forget_vms().and_then(|()| Ok(store.snapshots()?.len()));
    store.close();
    forgotten.map_err(|error| error.reason)
}

fn serve(
    mut store: Store,
    lock: DataDirLock,
    mut requests: mpsc::UnboundedReceiver<Request>,
    watch: Option<&dyn JournalWatch>,
) {
    let mut closer = None;
    while let Some(request) = requests.blocking_recv() {
        match request {
            Request::Run(job, effect) => match watch.filter(|_| effect == Effect::Commit) {
                None => job(&mut store),
                Some(watch) => {
                    if watch.before_commit().is_break() {
                        break;
                    }
                    job(&mut store);
                    if watch.after_commit().is_break() {
                        break;
                    }
                }
            },
            Request::Close(done) => {
                closer = Some(done);
                break;
            }
        }
    }
    drop(requests);
    store.close();
    drop(lock);
    if let Some(done) = closer {
        // An error means that nobody waits any more: then nobody needs to know.
        let _unheard = done.send(());
    }
}
