//! One live Firecracker machine: the commands, and the task that sees it end.
//!
//! Owns the process handle, the API connection, the console and the watching task. Dropping it leaves the VM alone.
//!
//! ```text
//! watcher:  console printed ─▶ kept; the guest halted? ─▶ kill, wait ┐
//!           process ended ───────────────────────────────────────────┴▶ read the rest ─▶ collect evidence ─▶ Exit
//! ```

use super::FirecrackerDriver;
use super::api::{Api, ApiError};
use super::capture::{self, CaptureDirectory, Content, Lineage, Written};
use super::ending::{Evidence, says_halted};
use super::guest_memory::GuestMemory;
use super::launch::{self, Launched, Parts};
use super::requests::{self, Request, Wanted};
use crate::confinement::Confined;
use crate::console::Console;
use crate::driver::{
    CaptureFiles, CaptureReport, Exit, Machine, MachineSpec, Placement, ProcessRecord, VmmError,
};
use crate::partial::{PartialFiles, failed};
use crate::process::{self, EXIT_GRACE, ExitWatch, Remains, blocking};
use crate::program::Version;
use aenv_sys::process::PidFd;
use async_trait::async_trait;
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, watch};
use tokio_util::task::AbortOnDropHandle;

/// Between two looks at the console: 64 KiB, the size of its pipe, in so much time is all that is kept of it.
const READ_PAUSE: Duration = Duration::from_millis(100);
/// A host that writes memory at fewer bytes per second is taken for a broken one when it is captured. Where everything is emulated
/// and the processor is shared, 10 MiB were measured.
const SLOWEST_HOST: u64 = 2 << 20;
/// Why differences are not asked for.
const BROKEN: &str = "Firecracker 1.14 mixes up the regions of a memory of more than 3 GiB";

/// A machine whose process is up.
#[derive(Debug)]
pub(super) struct FirecrackerMachine {
    driver: FirecrackerDriver,
    shared: Arc<Shared>,
    memory_mib: u64,
    captures: Arc<CaptureDirectory>,
    lineage: Mutex<Lineage>,
    /// Whether there is a capture in the jail that is still to be loaded.
    prepared: AtomicBool,
    /// Whether it was stopped by us: then its devices stand still, too, which after a load they do not.
    stopped: AtomicBool,
    exit: ExitWatch,
    _watcher: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    placement: Placement,
    record: ProcessRecord,
    process: Arc<PidFd>,
    api: Api,
    confined: Arc<Confined>,
    kill_requested: AtomicBool,
}

impl FirecrackerMachine {
    /// Takes over a launched process.
    pub(super) fn start(
        driver: &FirecrackerDriver,
        launched: Launched,
        spec: &MachineSpec,
        placement: Placement,
    ) -> Self {
        let (process, parts) = launched.into_parts();
        let Parts { api, console, record, captures, lineage, confined, prepared } = parts;
        let kill_requested = AtomicBool::new(false);
        let shared = Arc::new(Shared { placement, record, process, api, confined, kill_requested });
        let (sender, exit) = watch::channel(None);
        let watcher = tokio::spawn(Arc::clone(&shared).watch(console, sender));
        Self {
            driver: driver.clone(),
            shared,
            memory_mib: spec.memory_mib,
            captures: Arc::new(captures),
            lineage: Mutex::new(lineage),
            prepared: AtomicBool::new(prepared),
            stopped: AtomicBool::new(false),
            exit,
            _watcher: AbortOnDropHandle::new(watcher),
        }
    }

    async fn send(&self, request: &Request) -> Result<Value, VmmError> {
        self.send_within(request, self.driver.settings.command_limit).await
    }

    async fn send_within(&self, request: &Request, limit: Duration) -> Result<Value, VmmError> {
        let name = &self.shared.placement.name;
        match self.shared.api.send(request, limit).await {
            Ok(value) => Ok(value),
            Err(error @ (ApiError::Closed(_) | ApiError::Connect { .. })) => {
                // The connection ends a moment before the process does.
                match tokio::time::timeout(EXIT_GRACE, self.wait()).await {
                    Ok(Exit { cause, detail }) => Err(VmmError::Gone { name: name.clone(), cause, detail }),
                    Err(_) => Err(launch::command_error(name, &launch::describe(request), error)),
                }
            }
            Err(error) => Err(launch::command_error(name, &launch::describe(request), error)),
        }
    }

    async fn write(&self, into: &CaptureFiles, content: Content) -> Result<CaptureReport, VmmError> {
        if self.is_running().await? {
            return Err(self.refused("capture", "the machine runs: stop it first"));
        }
        if !self.stopped.load(Ordering::Relaxed) {
            self.stop().await?;
        }
        let partial = PartialFiles::begin(into)?;
        let mut lineage = self.lineage.lock().await;
        // Firecracker forgets what it writes, whatever goes wrong from here on.
        let cut_short = Lineage::Lost("the capture before was cut short".into());
        let known = std::mem::replace(&mut *lineage, cut_short);
        let known = if self.diff_is_broken() { Lineage::Lost(BROKEN.into()) } else { known };
        let memory = self.prepare_capture().await?;
        let (snapshot, whole_because) = known.snapshot(content, memory.is_ok());
        let started = Instant::now();
        let slowest = Duration::from_secs((self.memory_mib << 20) / SLOWEST_HOST);
        let limit = self.driver.settings.command_limit + slowest;
        self.send_within(&requests::snapshot(snapshot), limit).await?;
        let written = Written {
            directory: Arc::clone(&self.captures),
            partial,
            run_dir: self.shared.placement.run_dir.clone(),
            lineage: known,
            snapshot,
            whole_because,
            content,
            memory,
            memory_bytes: self.memory_mib << 20,
            written_in: started.elapsed(),
        };
        let finished = tokio::task::spawn_blocking(move || written.finish()).await;
        let finished = finished.unwrap_or_else(|error| Err(io::Error::other(error)));
        let (report, next) = finished.map_err(|source| failed(&into.memory, source))?;
        *lineage = next;
        Ok(report)
    }

    /// Makes ready what Firecracker writes into, and looks for the guest's memory in its process.
    async fn prepare_capture(&self) -> Result<Result<GuestMemory, &'static str>, VmmError> {
        let Placement { name, run_dir, user, .. } = &self.shared.placement;
        let (directory, run_dir, user) = (Arc::clone(&self.captures), run_dir.clone(), *user);
        let (pid, memory_bytes) = (self.shared.record.pid, self.memory_mib << 20);
        let writes_are_known = self.driver.writes_are_known;
        let prepare = move || {
            capture::begun(&run_dir)?;
            directory.prepare(user)?;
            if !writes_are_known {
                return Ok(Err(capture::NOT_KEPT));
            }
            Ok(GuestMemory::find(pid, memory_bytes)?.ok_or(capture::NOT_FOUND))
        };
        blocking(prepare, || format!("cannot prepare a capture of VMM {name}")).await
    }

    /// Versions 1.14 mix up the memory regions of a guest that has more than one, which is what more than 3 GiB needs.
    fn diff_is_broken(&self) -> bool {
        let version = self.driver.version;
        version >= Version(1, 14, 0) && version < Version(1, 15, 0) && self.memory_mib > 3072
    }

    fn refused(&self, command: &str, reason: &str) -> VmmError {
        let name = self.shared.placement.name.clone();
        VmmError::Command { name, command: command.to_owned(), reason: reason.to_owned() }
    }
}

#[async_trait]
impl Machine for FirecrackerMachine {
    fn record(&self) -> &ProcessRecord {
        &self.shared.record
    }

    async fn is_running(&self) -> Result<bool, VmmError> {
        let answer = self.send(&requests::describe()).await?;
        match answer["state"].as_str() {
            Some("Running") => Ok(true),
            Some("Paused" | "Not started") => Ok(false),
            _ => Err(self.refused("GET /", "the answer names no state that is known")),
        }
    }

    async fn resume(&self) -> Result<(), VmmError> {
        self.stopped.store(false, Ordering::Relaxed);
        self.send(&requests::run(Wanted::Running)).await.map(drop)
    }

    async fn stop(&self) -> Result<(), VmmError> {
        self.send(&requests::run(Wanted::Stopped)).await?;
        self.stopped.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn load(&self) -> Result<(), VmmError> {
        if !self.prepared.swap(false, Ordering::Relaxed) {
            return Err(self.refused("load", "it was not prepared for a capture, or has loaded it"));
        }
        self.send(&requests::load(self.driver.version, &self.shared.placement.tap)).await?;
        for request in requests::limit(&self.driver.settings.limits) {
            self.send(&request).await?;
        }
        Ok(())
    }

    async fn capture(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        self.write(into, Content::Whole).await
    }

    async fn capture_changes(&self, into: &CaptureFiles) -> Result<CaptureReport, VmmError> {
        self.write(into, Content::Changes).await
    }

    async fn confirm_capture(&self, files: &CaptureFiles) -> Result<(), VmmError> {
        let Placement { name, run_dir, .. } = &self.shared.placement;
        // A rename of a file that is not durable: it costs as much as this task's turn.
        let confirmed = self.lineage.lock().await.confirm(run_dir, &files.memory);
        confirmed.map_err(|source| {
            let context =
                format!("cannot note that capture {} of VMM {name} is kept", files.memory.display());
            VmmError::Io { context, source }
        })
    }

    async fn kill(&self) -> Result<Exit, VmmError> {
        self.shared.kill_requested.store(true, Ordering::Relaxed);
        let Shared { placement, process, confined, .. } = &*self.shared;
        let exit = process::kill_watched(&placement.name, process, confined, &self.exit).await?;
        launch::clean_up(&self.driver, &self.shared.placement).await?;
        Ok(exit)
    }

    async fn wait(&self) -> Exit {
        process::exit_of(&self.exit).await
    }
}

impl Shared {
    async fn watch(self: Arc<Self>, mut console: Console, exit: watch::Sender<Option<Exit>>) {
        let name = &self.placement.name;
        let halted = self.until_down(&mut console).await;
        if halted && let Err(error) = self.process.kill() {
            tracing::error!(vm = name, %error, "cannot end a VMM whose guest has halted");
        }
        if let Err(error) = self.process.exited().await {
            tracing::error!(vm = name, %error, "cannot wait for the VMM");
        }
        let remains = process::remains_of(name, &self.process, &self.confined, &mut console).await;
        let Remains { ended, out_of_memory, output } = remains;
        let kill_requested = self.kill_requested.load(Ordering::Relaxed);
        let found = Evidence { kill_requested, halted, ended, out_of_memory, output }.exit();
        tracing::debug!(vm = name, cause = ?found.cause, detail = found.detail, "VMM ended");
        exit.send_replace(Some(found));
    }

    /// Keeps what is printed until the process ends or, as the answer tells, the guest has halted.
    async fn until_down(&self, console: &mut Console) -> bool {
        loop {
            let read = tokio::select! {
                read = console.read() => read,
                _ = self.process.exited() => return false,
            };
            match read {
                Ok(Some(_)) => {}
                // Nobody has the pipe open: the process is ending.
                Ok(None) => return false,
                Err(error) => {
                    tracing::error!(vm = self.placement.name, %error, "cannot read the console any more");
                    return false;
                }
            }
            if says_halted(&console.tail()) {
                return true;
            }
            // A guest that floods its console byte by byte must not cost us more than it costs itself: what the pipe
            // cannot hold meanwhile is lost.
            tokio::select! {
                () = tokio::time::sleep(READ_PAUSE) => {}
                _ = self.process.exited() => return false,
            }
        }
    }
}
