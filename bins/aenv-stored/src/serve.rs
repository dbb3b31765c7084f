//! `serve`: the block service itself, from its settings to its shutdown, in reading order.
//!
//! ```text
//! log ─▶ data directory locked ─▶ exporters ─▶ records recovered ─▶ exports started ─▶ HTTP … signal ─▶ end
//! ```
//! The end stops nothing but this process: requests of guests wait in the kernel for the next one.

use crate::arguments::ServeOptions;
use crate::block_service::{Service, compaction, reopening};
use crate::directories::{Directories, remove_file};
use crate::exports::Exports;
use crate::http;
use crate::layers::Layers;
use anyhow::{Context as _, Result};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Before the node and any VMM: all guests wait while this process is away.
const OOM_SCORE: i16 = -900;

/// What the threads of this process inherit, so before there are any.
pub(crate) fn prepare_process() -> std::io::Result<()> {
    // Memory is never freed by writing to disks that this very process serves.
    aenv_sys::fuse::pressure::become_io_flusher()?;
    aenv_sys::fuse::pressure::set_oom_score(OOM_SCORE)
}

/// Serves until a signal asks for the end.
pub(crate) async fn serve(options: ServeOptions, protected: std::io::Result<()>) -> Result<()> {
    aenv_daemon::start_log(&options.log)?;
    if let Err(error) = protected {
        tracing::warn!(%error, "not protected when memory runs out: CAP_SYS_RESOURCE is missing");
    }
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    aenv_daemon::raise_descriptor_limit()?;
    let (data, run) = (&options.instance.data_dir, options.instance.run_dir());
    let directories = Directories::open(data, &run)
        .with_context(|| format!("cannot prepare {} and {}", data.display(), run.display()))?;
    // Held until the process is gone, and with it every thread that may still work on the directory.
    std::mem::forget(directories.lock()?);
    let (compaction_seconds, socket) = (options.compaction_seconds, directories.socket());
    let recovering = tokio::task::spawn_blocking(move || recover(&options, &directories));
    let service = tokio::select! {
        recovered = recovering => recovered.context("the recovery ended early")??,
        name = either(&mut terminate, &mut interrupt) => {
            tracing::info!(signal = name, "ending before everything is recovered; guests wait for the next start");
            return Ok(());
        }
    };
    compaction::start(&service, Duration::from_secs(compaction_seconds))
        .context("cannot start the thread that merges tops")?;
    reopening::start(&service).context("cannot start the thread that opens disks when there is room")?;
    let listener = listen(&socket)?;
    let router = http::router(service);
    tracing::info!(socket = %socket.display(), "serving");
    tokio::select! {
        served = axum::serve(listener, router).into_future() => served.context("the control interface failed"),
        name = either(&mut terminate, &mut interrupt) => {
            tracing::info!(signal = name, "ending; guests wait for the next start");
            Ok(())
        }
    }
}

/// The name of the signal that came first.
async fn either(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn recover(options: &ServeOptions, directories: &Directories) -> Result<Arc<Service>> {
    let exports = Exports::open(options.export, &options.instance.instance, directories)?;
    let layers = Layers::new(options.cache_bytes);
    let boot =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").context("cannot read the boot id")?;
    let service =
        Service::recover(directories.clone(), layers, exports, boot.trim(), &options.instance.instance)?;
    let service = Arc::new(service);
    // Never taken down: it ends with the process, at once. To end its exports in order would wait for requests that are under
    // way, and for the kernel, which may wait for one of them.
    std::mem::forget(Arc::clone(&service));
    service.start()?;
    let status = service.status();
    tracing::info!(
        disks = status.disks,
        images = status.images,
        failed = status.failed.len(),
        way = status.disks_by.way,
        reason = status.disks_by.reason,
        "recovered"
    );
    Ok(service)
}

/// The socket for root alone. One that a killed process left is replaced; the lock of the data directory says that there is
/// no other process.
fn listen(path: &Path) -> Result<UnixListener> {
    remove_file(path)?;
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot close {} to others", path.display()))?;
    Ok(listener)
}
