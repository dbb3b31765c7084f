//! One live QEMU machine: the commands, and the task that sees it end.
//!
//! Owns the process handle, the monitor connection and the watching task. Dropping it leaves the VM alone.
//!
//! ```text
//! watcher:  process ended ───────────────────────────────▶ collect evidence ─▶ Exit
//!           SHUTDOWN event, or a run state that is final ─▶ read console, kill, wait ─▶ the same
//! ```

use super::capture::{self, Content};
use super::command_line::{CONSOLE, CONSOLE_BYTES};
use super::ending::{Evidence, Stopped};
use super::jail;
use super::launch::{self, Launched, Parts, Pending};
use super::monitor::{Event, Monitor, MonitorError};
use crate::confinement::Confined;
use crate::console::Console;
use crate::driver::{
    CaptureFiles, CaptureReport, Exit, Machine, MachineSpec, Placement, ProcessRecord, VmmError,
};
use crate::partial::PartialFiles;
use crate::process::{self, EXIT_GRACE, ExitWatch, Remains};
use aenv_sys::process::PidFd;
use async_trait::async_trait;
use base64::Engine;
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, watch};
use tokio_util::task::AbortOnDropHandle;

/// Between two looks at what QEMU prints.
const READ_PAUSE: Duration = Duration::from_millis(100);

/// A machine whose process is up.
#[derive(Debug)]
pub(super) struct QemuMachine {
    shared: Arc<Shared>,
    memory_bytes: u64,
    /// What a prepared process is to load, until it does.
    pending: Mutex<Option<Pending>>,
    exit: ExitWatch,
    _watcher: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    placement: Placement,
    record: ProcessRecord,
    process: Arc<PidFd>,
    monitor: Monitor,
    confined: Arc<Confined>,
    kill_requested: AtomicBool,
}

impl QemuMachine {
    /// Takes over a launched process.
    pub(super) fn start(
        launched: Launched,
        spec: &MachineSpec,
        placement: Placement,
        pending: Option<Pending>,
    ) -> Self {
        let (process, parts) = launched.into_parts();
        let Parts { monitor, record, confined, console } = parts;
        let kill_requested = AtomicBool::new(false);
        let shared = Arc::new(Shared { placement, record, process, monitor, confined, kill_requested });
        let (sender, exit) = watch::channel(None);
        let watcher = tokio::spawn(Arc::clone(&shared).watch(console, sender));
        let watcher = AbortOnDropHandle::new(watcher);
        let (memory_bytes, pending) = (spec.memory_mib << 20, Mutex::new(pending));
        Self { shared, memory_bytes, pending, exit, _watcher: watcher }
    }

    async fn execute(&self, command: &str, arguments: Value) -> Result<Value, VmmError> {
        let name = &self.shared.placement.name;
        match self.shared.monitor.execute(command, arguments).await {
            Ok(value) => Ok(value),
            Err(error @ (MonitorError::Closed | MonitorError::Io(_))) => {
                // The connection ends a moment before the process does.
                match tokio::time::timeout(EXIT_GRACE, self.wait()).await {
                    Ok(Exit { cause, detail }) => Err(VmmError::Gone { name: name.clone(), cause, detail }),
                    Err(_) => Err(launch::command_error(name, command, error)),
                }
            }
            Err(error) => Err(launch::command_error(name, command, error)),
        }
    }

    async fn write(&self, into: &CaptureFiles, content: Content) -> Result<CaptureReport, VmmError> {
        if self.is_running().await? {
            return Err(self.refused("capture", "the machine runs: stop it first"));
        }
        let partial = PartialFiles::begin(into)?;
        let started = std::time::Instant::now();
        // Made for Xen, but not bound to it: device state of a stopped machine without its memory.
        self.execute("xen-save-devices-state", json!({"filename": jail::STATE, "live": false})).await?;
        capture::take_state(&partial, jail::state_file(&self.shared.placement)).await?;
        let state_time = started.elapsed();
        capture::finish(partial, self.shared.record.pid, self.memory_bytes, content, state_time).await
    }

    fn refused(&self, command: &str, reason: &str) -> VmmError {
        let name = self.shared.placement.name.clone();
        VmmError::Command { name, command: command.to_owned(), reason: reason.to_owned() }
    }
}

#[async_trait]
impl Machine for QemuMachine {
    fn record(&self) -> &ProcessRecord {
        &self.shared.record
    }

    async fn is_running(&self) -> Result<bool, VmmError> {
        let status = self.execute("query-status", json!({})).await?;
        status["running"].as_bool().ok_or_else(|| self.refused("query-status", "the answer has no `running`"))
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.execute("cont", json!({})).await.map(drop)
    }

    async fn stop(&self) -> Result<(), VmmError> {
        self.execute("stop", json!({})).await.map(drop)
    }

    async fn load(&self) -> Result<(), VmmError> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(pending) = pending else {
            return Err(self.refused("load", "it was not prepared for a capture, or has loaded it"));
        };
        let Shared { placement, monitor, process, .. } = &*self.shared;
        launch::load_state(pending, placement, monitor, process).await
    }

    async fn capture(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        self.write(into, Content::Whole).await
    }

    async fn capture_changes(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        self.write(into, Content::Changes).await
    }

    async fn kill(&self) -> Result<Exit, VmmError> {
        self.shared.kill_requested.store(true, Ordering::Relaxed);
        let Shared { placement, process, confined, .. } = &*self.shared;
        let exit = process::kill_watched(&placement.name, process, confined, &self.exit).await?;
        for path in launch::scratch_files(&self.shared.placement) {
            match tokio::fs::remove_file(&path).await {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(VmmError::Io {
                        context: format!("cannot remove {}", path.display()),
                        source: error,
                    });
                }
                _ => {}
            }
        }
        Ok(exit)
    }

    async fn wait(&self) -> Exit {
        process::exit_of(&self.exit).await
    }
}

impl Shared {
    async fn watch(self: Arc<Self>, mut console: Console, exit: watch::Sender<Option<Exit>>) {
        let stopped = tokio::select! {
            stopped = self.stopped_for_good() => Some(stopped),
            () = self.keep_output(&mut console) => None,
            ended = self.process.exited() => {
                if let Err(error) = ended {
                    tracing::error!(vm = self.placement.name, %error, "cannot wait for the VMM");
                }
                None
            }
        };
        if stopped.is_some()
            && let Err(error) = self.end().await
        {
            tracing::error!(vm = self.placement.name, %error, "cannot end a VMM whose guest is down");
        }
        let name = &self.placement.name;
        let remains = process::remains_of(name, &self.process, &self.confined, &mut console).await;
        let Remains { ended, out_of_memory, output } = remains;
        let kill_requested = self.kill_requested.load(Ordering::Relaxed);
        let found = Evidence { kill_requested, stopped, ended, out_of_memory, log: output }.exit();
        tracing::debug!(vm = self.placement.name, cause = ?found.cause, detail = found.detail, "VMM ended");
        exit.send_replace(Some(found));
    }

    /// Keeps what QEMU prints, for ever: also when there is nothing more to come, since its end is seen elsewhere.
    async fn keep_output(&self, console: &mut Console) {
        loop {
            match console.read().await {
                Ok(Some(_)) => tokio::time::sleep(READ_PAUSE).await,
                Ok(None) => break,
                Err(error) => {
                    tracing::error!(vm = self.placement.name, %error, "cannot read what the VMM prints any more");
                    break;
                }
            }
        }
        std::future::pending::<()>().await;
    }

    async fn end(&self) -> io::Result<()> {
        self.process.kill()?;
        self.process.exited().await
    }

    /// Waits until the guest can never run again though the VMM lives, and saves what the console says.
    async fn stopped_for_good(&self) -> Stopped {
        let mut events = self.monitor.subscribe();
        loop {
            // Asked first: it may have happened while nobody listened.
            if let Some(reason) = self.final_state().await {
                return self.evidence(reason).await;
            }
            match events.recv().await {
                Ok(Event { name, data }) if name == "SHUTDOWN" => {
                    let reason = data["reason"].as_str().unwrap_or("unknown").to_owned();
                    return self.evidence(reason).await;
                }
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                // The monitor belongs to us, so this does not happen; the process handle sees the end.
                Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            }
        }
    }

    async fn final_state(&self) -> Option<String> {
        let status = self.monitor.execute("query-status", json!({})).await.ok()?;
        let status = status["status"].as_str()?;
        matches!(status, "shutdown" | "internal-error" | "guest-panicked").then(|| status.to_owned())
    }

    async fn evidence(&self, reason: String) -> Stopped {
        let arguments = json!({"device": CONSOLE, "size": CONSOLE_BYTES, "format": "base64"});
        let console = match self.monitor.execute("ringbuf-read", arguments).await {
            Ok(text) => base64::engine::general_purpose::STANDARD
                .decode(text.as_str().unwrap_or_default())
                .map_or_else(
                    |error| format!("(console lost: {error})"),
                    |raw| String::from_utf8_lossy(&raw).into_owned(),
                ),
            Err(error) => format!("(console lost: {error})"),
        };
        Stopped { reason, console }
    }
}
