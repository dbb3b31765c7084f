//! What every driver does with VMM processes: name them, end them, and end those whose start was given up.
//!
//! Owns a process only through [`OwnedProcess`], until the machine takes it over. Knows no VMM.

use crate::driver::VmmError;
use aenv_sys::process::{Ended, PidFd};
use std::io;
use std::sync::Arc;

const PROCESS_PREFIX: &str = "aenv-";
/// What stands in place of a VM's name for a VMM without a guest that is only looked at. No VM has such a name: theirs begin
/// with that of an instance and a dash.
pub const PROBE_NAME: &str = "probe";

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
