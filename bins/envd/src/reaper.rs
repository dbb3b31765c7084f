//! The one place where child processes are waited for.
//!
//! As PID 1 the daemon inherits every orphan of the guest and must reap it; at the same time it wants the exit statuses
//! of the processes it started. So only this reaper ever calls `waitpid`, for any child, and hands the statuses of those
//! in its table to whoever started them. The table's lock makes three things safe:
//!
//! * it is held while a process is started, so that its end cannot be reaped before it stands in the table;
//! * it is held while children are reaped, so an id in the table always means the process that was started
//!   (running or not yet reaped) and a signal can never hit a stranger that got the same id;
//! * a program whose exec failed is reaped by the starting code itself, inside the lock.
//!
//! ```text
//! start ──lock──▶ fork, exec, entry ──unlock        SIGCHLD ──lock──▶ waitpid(-1)… ─▶ entry? hand over : drop ──unlock
//! ```

use aenv_sys::guest::{Program, SpawnError, Spawned};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, oneshot};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By itself, with this code.
    Exited(i32),
    /// By this signal.
    Killed(i32),
}

type Table = HashMap<i32, oneshot::Sender<Ending>>;

/// Starts processes and reaps all children of the daemon. Clones share one table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reaper {
    table: Arc<Mutex<Table>>,
}

/// A process that was started, with the promise of its end.
#[derive(Debug)]
pub(crate) struct Started {
    /// Id and pipes.
    pub(crate) process: Spawned,
    /// Resolves when the process was reaped.
    pub(crate) ending: oneshot::Receiver<Ending>,
}

/// Why a signal was not sent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SignalError {
    /// The process has ended.
    #[error("process with pid {0} has ended")]
    Ended(i32),
    /// The kernel refused.
    #[error("cannot send the signal")]
    Kernel(#[source] io::Error),
}

impl Reaper {
    /// Starts `program` and enters it into the table.
    ///
    /// # Errors
    /// When the program does not start.
    pub(crate) async fn start(&self, program: Program) -> Result<Started, SpawnError> {
        let mut table = Arc::clone(&self.table).lock_owned().await;
        let starting = tokio::task::spawn_blocking(move || {
            let process = aenv_sys::guest::spawn(&program)?;
            let (sender, ending) = oneshot::channel();
            table.insert(process.pid, sender);
            Ok(Started { process, ending })
        });
        starting.await.map_err(|error| SpawnError::Kernel(io::Error::other(error)))?
    }

    /// Sends a signal to a started process, or to its whole process group.
    ///
    /// # Errors
    /// When the process was reaped already, or the kernel refuses.
    pub(crate) async fn signal(
        &self,
        pid: i32,
        signal: Signal,
        whole_group: bool,
    ) -> Result<(), SignalError> {
        let table = self.table.lock().await;
        let target =
            Pid::from_raw(pid).filter(|_| table.contains_key(&pid)).ok_or(SignalError::Ended(pid))?;
        let sent = if whole_group {
            rustix::process::kill_process_group(target, signal)
        } else {
            rustix::process::kill_process(target, signal)
        };
        sent.map_err(|error| SignalError::Kernel(error.into()))
    }

    /// Reaps children for as long as the daemon lives.
    ///
    /// # Errors
    /// When the notice of ended children cannot be had.
    pub(crate) async fn run(self) -> io::Result<()> {
        let mut ended = signal(SignalKind::child())?;
        loop {
            self.reap().await;
            if ended.recv().await.is_none() {
                return Ok(());
            }
        }
    }

    async fn reap(&self) {
        let mut table = self.table.lock().await;
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => {
                    let entry = table.remove(&pid.as_raw_nonzero().get());
                    if let (Some(waiting), Some(ending)) = (entry, ending_of(status)) {
                        // Nobody may be left to hear it.
                        let _unheard = waiting.send(ending);
                    }
                }
                Ok(None) | Err(rustix::io::Errno::CHILD) => return,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot reap children");
                    return;
                }
            }
        }
    }
}

fn ending_of(status: WaitStatus) -> Option<Ending> {
    status.exit_status().map(Ending::Exited).or_else(|| status.terminating_signal().map(Ending::Killed))
}

#[cfg(test)]
mod tests;
