//! All processes that clients started, by process id.

use super::input::Input;
use super::output::{Pipes, carry};
use super::{Event, Process, Progress};
use crate::reaper::{Reaper, SignalError};
use aenv_protocol::envd::process::{ProcessConfig, ProcessSelector, process_selector::Selector};
use aenv_sys::guest::{Program, SpawnError};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// How long an ended process can still be followed, to learn its end.
const RETENTION: Duration = Duration::from_secs(300);
/// Most ended processes kept: those that ended first go first.
const MAX_ENDED: usize = 256;

/// The processes. Clones share one table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Processes {
    reaper: Reaper,
    table: Arc<Mutex<BTreeMap<i32, Arc<Process>>>>,
}

/// Why a process was not found.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SelectError {
    /// The request names none.
    #[error("no process is selected")]
    Nothing,
    /// No process has this id.
    #[error("process with pid {0} not found")]
    Pid(u32),
    /// No process has this tag.
    #[error("process with tag {0} not found")]
    Tag(String),
}

impl Processes {
    /// A table whose processes are reaped by `reaper`.
    #[must_use]
    pub(crate) fn new(reaper: Reaper) -> Self {
        Self { reaper, table: Arc::default() }
    }

    /// Starts a process. It goes on when the caller is dropped meanwhile.
    ///
    /// # Errors
    /// When it does not start.
    pub(crate) async fn start(
        &self,
        program: Program,
        config: ProcessConfig,
        tag: Option<String>,
    ) -> Result<(Arc<Process>, mpsc::Receiver<Event>), SpawnError> {
        let this = self.clone();
        let starting = tokio::spawn(async move {
            let started = this.reaper.start(program).await?;
            let pipes = Pipes::new(started.process.output, started.process.errors)?;
            let process = Arc::new(Process {
                pid: started.process.pid,
                config,
                tag,
                input: Input::new(started.process.input)?,
                progress: Mutex::new(Progress::Running(Vec::new())),
            });
            let events = process.follow();
            this.keep(&process);
            tokio::spawn(carry(Arc::clone(&process), pipes, started.ending));
            Ok((process, events))
        });
        starting.await.map_err(|error| SpawnError::Kernel(std::io::Error::other(error)))?
    }

    /// Processes that run, by process id.
    pub(crate) fn running(&self) -> Vec<Arc<Process>> {
        self.table().values().filter(|process| process.is_running()).cloned().collect()
    }

    /// The selected process, running or ended a while ago. Of several with one tag the running one, then the last.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn select(&self, selector: Option<&ProcessSelector>) -> Result<Arc<Process>, SelectError> {
        let selector =
            selector.and_then(|selector| selector.selector.as_ref()).ok_or(SelectError::Nothing)?;
        let table = self.table();
        match selector {
            Selector::Pid(pid) => {
                let found = i32::try_from(*pid).ok().and_then(|pid| table.get(&pid));
                found.cloned().ok_or(SelectError::Pid(*pid))
            }
            Selector::Tag(tag) => {
                let tagged = table.values().filter(|process| process.tag.as_ref() == Some(tag));
                let best = tagged
                    .max_by_key(|process| process.ended_at().map_or((true, None), |at| (false, Some(at))));
                best.cloned().ok_or_else(|| SelectError::Tag(tag.clone()))
            }
        }
    }

    /// The selected process, if it still runs.
    ///
    /// # Errors
    /// When there is none or it has ended.
    pub(crate) fn select_running(
        &self,
        selector: Option<&ProcessSelector>,
    ) -> Result<Arc<Process>, SelectError> {
        let process = self.select(selector)?;
        if process.is_running() { Ok(process) } else { Err(SelectError::Pid(process.pid.cast_unsigned())) }
    }

    /// Sends a signal to a process: SIGKILL to its whole group, so that nothing it started goes on without it.
    ///
    /// # Errors
    /// When it has ended, or the kernel refuses.
    pub(crate) async fn signal(&self, process: &Process, signal: Signal) -> Result<(), SignalError> {
        self.reaper.signal(process.pid, signal, signal == Signal::KILL).await
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<i32, Arc<Process>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process and forgets those that ended long ago.
    fn keep(&self, process: &Arc<Process>) {
        let mut table = self.table();
        table.insert(process.pid, Arc::clone(process));
        let mut ended: Vec<_> = table.values().filter_map(|p| Some((p.ended_at()?, p.pid))).collect();
        ended.sort_unstable();
        let surplus = ended.len().saturating_sub(MAX_ENDED);
        for (index, (at, pid)) in ended.into_iter().enumerate() {
            if index < surplus || at.elapsed() > RETENTION {
                table.remove(&pid);
            }
        }
    }
}
