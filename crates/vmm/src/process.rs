//! What every driver does with VMM processes: name them, end them, and end those whose start was given up.
//!
//! Owns a process only through [`OwnedProcess`], until the machine takes it over. Knows no VMM.

use crate::confinement::Confined;
use crate::console::Console;
use crate::driver::{Exit, ExitCause, VmmError};
use aenv_sys::process::{Ended, PidFd};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

const PROCESS_PREFIX: &str = "aenv-";
/// What stands in place of a VM's name for a VMM without a guest that is only looked at. No VM has such a name: theirs begin
/// with that of an instance and a dash.
pub const PROBE_NAME: &str = "probe";

/// How long the exit of a VMM is awaited after its connection closed, to tell "gone" from "mute".
pub(crate) const EXIT_GRACE: Duration = Duration::from_secs(2);
/// How long SIGKILL may take: a process in the middle of a disk write ends only after it.
const KILL_LIMIT: Duration = Duration::from_secs(30);
/// How long the rest of the output is awaited: it is there when the process has ended.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);

/// Name of a VM's process in the process list.
pub(crate) fn process_name(vm_name: &str) -> String {
    format!("{PROCESS_PREFIX}{vm_name}")
}

/// The reverse of [`process_name`].
pub(crate) fn vm_name(process_name: &str) -> Option<&str> {
    process_name.strip_prefix(PROCESS_PREFIX)
}

/// A process that is ended when this is dropped, unless it was released or never ours.
#[derive(Debug)]
pub(crate) struct OwnedProcess {
    handle: Arc<PidFd>,
    kill_on_drop: bool,
}

impl OwnedProcess {
    /// Of a process we started.
    pub(crate) fn new(process: PidFd) -> Self {
        Self { handle: Arc::new(process), kill_on_drop: true }
    }

    /// Of a process that somebody else started: left alone.
    pub(crate) fn foreign(process: PidFd) -> Self {
        Self { handle: Arc::new(process), kill_on_drop: false }
    }

    pub(crate) fn handle(&self) -> &PidFd {
        &self.handle
    }

    /// Lets it live on.
    pub(crate) fn release(mut self) -> Arc<PidFd> {
        self.kill_on_drop = false;
        Arc::clone(&self.handle)
    }
}

impl Drop for OwnedProcess {
    fn drop(&mut self) {
        if !self.kill_on_drop {
            return;
        }
        let handle = Arc::clone(&self.handle);
        if let Err(error) = handle.kill() {
            tracing::error!(pid = handle.pid(), %error, "cannot end a VMM whose start was given up");
        }
        // Its entry in the process table goes as soon as it has ended; without a runtime, with us.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if let Err(error) = wait_and_reap(&handle).await {
                    tracing::error!(pid = handle.pid(), %error, "cannot wait for a VMM whose start was given up");
                }
            });
        }
    }
}

/// Where a machine's watching task tells how its VM ended.
pub(crate) type ExitWatch = watch::Receiver<Option<Exit>>;

/// Waits until the watching task has told.
pub(crate) async fn exit_of(watch: &ExitWatch) -> Exit {
    let mut watch = watch.clone();
    // The watcher lives as long as its machine and ends only by telling, unless it panics.
    match watch.wait_for(Option::is_some).await.map(|exit| exit.clone()) {
        Ok(Some(exit)) => exit,
        Ok(None) | Err(_) => {
            Exit { cause: ExitCause::VmmCrashed, detail: "the task that watches the VMM failed".to_owned() }
        }
    }
}

/// Ends a VM that is watched, and its control group; returns when both are gone.
pub(crate) async fn kill_watched(
    vm_name: &str,
    process: &PidFd,
    confined: &Confined,
    watch: &ExitWatch,
) -> Result<Exit, VmmError> {
    if watch.borrow().is_none() {
        let context = || format!("cannot end VMM {vm_name}");
        process.kill().map_err(|source| VmmError::Io { context: context(), source })?;
    }
    let exit = tokio::time::timeout(KILL_LIMIT, exit_of(watch)).await.map_err(|_| VmmError::Timeout {
        name: vm_name.to_owned(),
        command: "kill".to_owned(),
        limit: KILL_LIMIT,
    })?;
    confined.remove().await?;
    Ok(exit)
}

/// What a process that has ended leaves to those who want to know why.
#[derive(Debug)]
pub(crate) struct Remains {
    /// Exit status of a child of ours.
    pub(crate) ended: Option<Ended>,
    /// Whose memory ran out, if its control group counts a process that was killed for that.
    pub(crate) out_of_memory: Option<crate::cgroups::OutOfMemory>,
    /// What was printed last.
    pub(crate) output: String,
}

/// Gathers them; what cannot be read is logged and counts as absent.
pub(crate) async fn remains_of(
    vm_name: &str,
    process: &PidFd,
    confined: &Confined,
    console: &mut Console,
) -> Remains {
    let ended = process.reap().unwrap_or_else(|error| {
        tracing::error!(vm = vm_name, %error, "cannot read the VMM's exit status");
        None
    });
    drain(console, OUTPUT_GRACE).await;
    let out_of_memory = confined.out_of_memory().unwrap_or_else(|error| {
        tracing::warn!(vm = vm_name, %error, "cannot read whether the VMM was killed for memory");
        None
    });
    Remains { ended, out_of_memory, output: console.tail() }
}

/// Reads what is there, and what comes within `grace` of the last that came.
pub(crate) async fn drain(console: &mut Console, grace: Duration) {
    while let Ok(Ok(Some(_))) = tokio::time::timeout(grace, console.read()).await {}
}

async fn wait_and_reap(process: &PidFd) -> io::Result<Option<Ended>> {
    process.exited().await?;
    process.reap()
}

/// Kills a process known by number and start time, and returns when it is gone.
pub(crate) async fn end(pid: u32, start_time: u64) -> io::Result<()> {
    let process = match PidFd::open(pid, Some(start_time)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    process.kill()?;
    wait_and_reap(&process).await.map(drop)
}

/// Runs a blocking call on the runtime's threads for such calls.
pub(crate) async fn blocking<T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
    context: impl FnOnce() -> String,
) -> Result<T, VmmError> {
    let result = match tokio::task::spawn_blocking(call).await {
        Ok(result) => result,
        Err(error) => Err(io::Error::other(error)),
    };
    result.map_err(|source| VmmError::Io { context: context(), source })
}
