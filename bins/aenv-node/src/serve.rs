//! `serve`: the node itself, from its settings to its shutdown, in reading order.
//!
//! ```text
//! log ─▶ instance locked ─▶ port bound ─▶ VMM driver ─▶ disks ─▶ networks ─▶ orchestrator (adopts, sweeps) ─▶ HTTP … signal ─▶ (pauses) ─▶ HTTP ─▶ orchestrator ─▶ networks
//! ```

use crate::arguments::{OnStop, ServeOptions};
use crate::host_memory::Memory;
use crate::instance_lock::InstanceLock;
use crate::stored;
use crate::vmm;
use aenv_api::{ApiKey, Server};
use aenv_network::{LinuxSlots, SlotSettings};
use aenv_orchestrator::{
    DiskSettings, GuestArtifacts, Orchestrator, Parts, PausedAll, Settings, host_boot_id,
};
use anyhow::{Context as _, Result, bail};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Serves until a signal asks for the end.
pub(crate) async fn serve(options: Box<ServeOptions>) -> Result<()> {
    aenv_daemon::start_log(&options.log)?;
    let api_settings = api_settings(&options)?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    aenv_daemon::raise_descriptor_limit()?;
    let _lock = InstanceLock::take(&options.instance.instance, &options.instance.data_dir)?;
    let listener = TcpListener::bind(&options.listen).await.with_context(|| {
        format!("cannot listen on {}: choose another address with --listen", options.listen)
    })?;

    let chosen = vmm::choose(&options.instance, vmm::confinement(&options.instance)?).await?;
    tracing::info!(identity = ?chosen.vmm.identity(), reason = %chosen.reason, "VMM driver");
    let guest = guest(&options.guest_dir, chosen.kernel)?;
    // The service goes on when the node ends; only the watch over it does not.
    let watching = CancellationToken::new();
    let disks = tokio::select! {
        disks = stored::disks(&options.instance, options.log.clone(), watching.clone()) => disks?,
        name = either(&mut terminate, &mut interrupt) => {
            tracing::info!(signal = name, "ending before the block service answered; it goes on");
            return Ok(());
        }
    };
    let slots = LinuxSlots::start(slot_settings(&options)).await.context("cannot prepare networks")?;
    let slots = Arc::new(slots);
    let memory = Memory::of(&options.instance)?;
    let settings = orchestrator_settings(&options, guest, disks, &memory)?;
    let parts = Parts { vmm: chosen.vmm, slots: slots.clone(), memory: Arc::new(memory), journal: None };
    let orchestrator = match Orchestrator::start(settings, parts).await {
        Ok(orchestrator) => orchestrator,
        Err(error) => {
            slots.shutdown().await.context("cannot remove fresh networks")?;
            return Err(error.into());
        }
    };

    let router = aenv_api::router(orchestrator.clone(), api_settings);
    let server = Server::new(router, Arc::new(orchestrator.clone()));
    tracing::info!(listen = %options.listen, instance = %options.instance.instance, "serving");
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(server.run(listener, shutdown.clone()));
    let name = either(&mut terminate, &mut interrupt).await;

    let ending = async {
        match options.on_stop {
            OnStop::Leave => tracing::info!(signal = name, "shutting down; sandboxes run on"),
            OnStop::Pause => pause_all(&orchestrator, options.stop_seconds, name).await,
        }
        shutdown.cancel();
        serving.await.context("the HTTP server failed")?;
        orchestrator.shutdown().await;
        watching.cancel();
        slots.shutdown().await.context("cannot remove fresh networks")
    };
    tokio::select! {
        ended = ending => ended,
        name = either(&mut terminate, &mut interrupt) => {
            // As after a kill: what is half-done is for the next start to put in order.
            tracing::warn!(signal = name, "a second signal: ending at once");
            Ok(())
        }
    }
}

/// Pauses what runs, while the API still answers.
async fn pause_all(orchestrator: &Orchestrator, seconds: u32, signal: &str) {
    tracing::info!(signal, seconds, "pausing all sandboxes before the end");
    let started = Instant::now();
    let PausedAll { paused, left } = orchestrator.pause_all(Duration::from_secs(u64::from(seconds))).await;
    let took = started.elapsed();
    match left {
        0 => tracing::info!(paused, ?took, "all sandboxes are paused; shutting down"),
        _ => tracing::warn!(paused, left, ?took, "not all sandboxes are paused; those run on"),
    }
}

/// The name of the signal that came first.
async fn either(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn api_settings(options: &ServeOptions) -> Result<aenv_api::Settings> {
    let mut texts = Vec::from_iter(options.api_key.clone());
    if let Some(path) = &options.api_keys_file {
        let file =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = file.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        texts.extend(lines.map(str::to_owned));
    }
    if texts.is_empty() {
        bail!("no API key: set AENV_API_KEY, or name a file with --api-keys-file");
    }
    let keys = texts.iter().map(|text| ApiKey::new(text)).collect::<Result<Vec<_>, _>>()?;
    let domain = options.domain.clone().filter(|domain| !domain.is_empty());
    Ok(aenv_api::Settings { keys, domain, max_timeout: max_timeout(options) })
}

fn guest(directory: &Path, kernel: &str) -> Result<GuestArtifacts> {
    let guest =
        GuestArtifacts { kernel: directory.join(kernel), initramfs: directory.join("initramfs.cpio") };
    for path in [&guest.kernel, &guest.initramfs] {
        if !path.is_file() {
            bail!("{} is missing: `make up` makes it, --guest-dir says where it is", path.display());
        }
    }
    Ok(guest)
}

fn slot_settings(options: &ServeOptions) -> SlotSettings {
    let mut settings = SlotSettings::new(options.instance.instance.clone(), options.subnet);
    settings.pool_size = options.slot_pool;
    settings
}

fn orchestrator_settings(
    options: &ServeOptions,
    guest: GuestArtifacts,
    disks: DiskSettings,
    memory: &Memory,
) -> Result<Settings> {
    let boot_id = host_boot_id().context("cannot read the host's boot id")?;
    let instance = options.instance.instance.to_string();
    let mut settings = Settings::new(&instance, options.instance.data_dir.clone(), guest, boot_id);
    settings.disks = disks;
    settings.standbys = options.standbys;
    settings.warm = options.warm;
    settings.max_starting = match options.max_starting {
        Some(number) => number,
        None => std::thread::available_parallelism().context("cannot count processors")?.get() + 1,
    };
    settings.max_waiting = options.max_waiting;
    settings.memory_limit_bytes = memory.limit_bytes(options.memory_limit_mib)?;
    settings.low_memory_bytes = memory.low_bytes(options)?;
    settings.deadlines.queue = Duration::from_secs(u64::from(options.start_wait_seconds));
    settings.max_timeout = max_timeout(options);
    settings.hot_for = Duration::from_secs(u64::from(options.hot_seconds));
    settings.fresh_after_bytes = u64::from(options.fresh_after_mib) << 20;
    settings.min_free_bytes = options.min_free_mib.saturating_mul(1 << 20);
    Ok(settings)
}

fn max_timeout(options: &ServeOptions) -> Duration {
    Duration::from_secs(u64::from(options.max_timeout_hours) * 3600)
}
