//! The block service as this node uses it: found by its socket, or else started and kept running.
//!
//! ```text
//! somebody answers at RUN/stored.sock ──────────────────▶ watched ◀──────────────┐
//!  │ nobody does                                            │ it ends            │ answers
//!  └─▶ started (see `start`) ─▶ answers ──────────▶ watched ─▶ pause ─▶ asked, or started again
//! ```
//!
//! It survives the node: nothing of it is ended when the node is, and the next node finds it. Guests wait while it is away.
//! Under systemd it has a unit of its own, which may be faster than the node to start it again; only one can hold the data.

mod start;

use crate::arguments::{DisksChoice, Instance, StoredOptions};
use aenv_daemon::LogOptions;
use aenv_orchestrator::{DiskCopies, DiskSettings};
use aenv_storage::block_service::{Client, ServiceError};
use aenv_sys::process::PidFd;
use anyhow::{Context as _, Result, bail};
use std::path::PathBuf;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Longest time for one answer, a restart of the service included.
const PATIENCE: Duration = Duration::from_secs(30);
/// To find out whether there is one at all.
const GLANCE: Duration = Duration::from_millis(300);
/// Before the service is started again after its end; doubled each time, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A service that ran for this long is not one that cannot start.
const STEADY: Duration = Duration::from_secs(60);

/// How this node's disks are to be stored. Starts the block service where it is needed and not there, and keeps it running
/// until `stopping`; it logs as the node does. Takes as long as the service takes to recover; may be dropped meanwhile: the service goes on.
pub(crate) async fn disks(
    instance: &Instance,
    log: LogOptions,
    stopping: CancellationToken,
) -> Result<DiskSettings> {
    let data_dir = &instance.data_dir;
    std::fs::create_dir_all(data_dir).with_context(|| format!("cannot make {}", data_dir.display()))?;
    if instance.stored.disks == DisksChoice::Reflink {
        refuse_leftovers(instance)?;
        tracing::info!("disks are files that share blocks");
        return Ok(DiskSettings::Reflink(DiskCopies::ReflinkOnly));
    }
    tracing::info!("disks are those of the block service");
    let service = Service { log: Some(log), ..Service::of(instance) };
    let watched = service.find_or_start().await?;
    let client = service.client.clone();
    tokio::spawn(service.keep_running(watched, stopping));
    Ok(DiskSettings::Service(Box::new(client)))
}

/// Ends the block service of an instance and removes what it exports and stores for VMs; the disks of captures stay. Tells
/// what there was.
pub(crate) async fn purge(instance: &Instance) -> Result<Vec<String>> {
    let service = Service::of(instance);
    if !service.has_traces() {
        return Ok(Vec::new());
    }
    let mut ended = Vec::new();
    if let Some(process) = service.find().await? {
        process.kill().context("cannot end the block service")?;
        process.exited().await.context("cannot wait for the end of the block service")?;
        ended.push("block service".to_owned());
    }
    let output =
        tokio::process::Command::new(&service.program).args(service.arguments("purge")).output().await;
    let output = output.with_context(|| format!("cannot run {}", service.program.display()))?;
    if !output.status.success() {
        bail!("the block service's purge failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    ended.extend(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned));
    Ok(ended)
}

/// What the doctor says of the service: where it is, if it is there.
pub(crate) async fn describe(instance: &Instance) -> Result<String> {
    let service = Service::of(instance);
    match service.client.with_patience(GLANCE).status().await {
        Ok(status) => Ok(format!(
            "block service {} runs (process {}): {} disks by {} ({})",
            status.version, status.pid, status.disks, status.disks_by.way, status.disks_by.reason
        )),
        Err(ServiceError::Unavailable { .. }) if aenv_sys::process::is_installed(&service.program) => {
            Ok(format!("block service {} is started by the node", service.program.display()))
        }
        Err(ServiceError::Unavailable { .. }) => {
            bail!("there is no program {}", service.program.display())
        }
        Err(error) => Err(error.into()),
    }
}

/// Disks that only the service can remove would stay for ever.
fn refuse_leftovers(instance: &Instance) -> Result<()> {
    let directory = instance.data_dir.join("storage/disks");
    let left = match std::fs::read_dir(&directory) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => false,
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", directory.display())),
    };
    if left {
        bail!(
            "{} holds disks of the block service: choose AENV_DISKS=service, or remove them with `aenv-node purge`, then \
             those of captures with `aenv-stored purge --all`",
            directory.display()
        );
    }
    Ok(())
}

struct Service {
    program: PathBuf,
    instance: String,
    data_dir: PathBuf,
    run_dir: PathBuf,
    options: StoredOptions,
    /// How one that is started logs; as it wants to when absent.
    log: Option<LogOptions>,
    client: Client,
    /// For one answer of a service that was just started, before it is asked again.
    client_patience: Duration,
}

impl Service {
    fn of(instance: &Instance) -> Self {
        let options = instance.stored.clone();
        let run_dir = options.run_dir.clone();
        let run_dir = run_dir.unwrap_or_else(|| PathBuf::from(format!("/run/aenv/{}", instance.instance)));
        Self {
            program: options.stored.clone().unwrap_or_else(beside_us),
            instance: instance.instance.to_string(),
            data_dir: instance.data_dir.clone(),
            client: Client::new(&run_dir.join("stored.sock"), PATIENCE),
            client_patience: PATIENCE,
            run_dir,
            options,
            log: None,
        }
    }

    /// Whether there is, or was, a service on this data.
    fn has_traces(&self) -> bool {
        self.client.socket().exists() || self.data_dir.join("storage/disks").exists()
    }

    fn arguments(&self, task: &str) -> Vec<String> {
        let mut arguments = vec![task.to_owned()];
        let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        add("--data-dir", self.data_dir.display().to_string());
        add("--run-dir", self.run_dir.display().to_string());
        add("--instance", self.instance.clone());
        if task == "serve" {
            if let Some(export) = &self.options.export {
                add("--export", export.clone());
            }
            if let Some(bytes) = self.options.cache_bytes {
                add("--cache-bytes", bytes.to_string());
            }
            if let Some(seconds) = self.options.compaction_seconds {
                add("--compaction-seconds", seconds.to_string());
            }
            arguments.extend(self.log.iter().flat_map(LogOptions::arguments));
        }
        arguments
    }

    /// The process that answers at the socket, if one does.
    async fn find(&self) -> Result<Option<PidFd>> {
        self.find_within(GLANCE).await
    }

    /// The same, with another patience.
    async fn find_within(&self, patience: Duration) -> Result<Option<PidFd>> {
        match self.client.with_patience(patience).status().await {
            Ok(status) => match PidFd::open(status.pid, None) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                opened => Ok(Some(opened.with_context(|| format!("cannot open process {}", status.pid))?)),
            },
            Err(ServiceError::Unavailable { .. }) => Ok(None),
            Err(error) => Err(error).context("what answers at the block service's socket is none"),
        }
    }

    async fn find_or_start(&self) -> Result<PidFd> {
        match self.find().await? {
            Some(found) => {
                tracing::info!(pid = found.pid(), "the block service runs already");
                Ok(found)
            }
            None => self.start().await,
        }
    }

    /// Whenever it ends, sees to it that there is one again.
    async fn keep_running(self, first: PidFd, stopping: CancellationToken) {
        let (mut process, mut pause) = (first, FIRST_PAUSE);
        loop {
            let since = tokio::time::Instant::now();
            match stopping.run_until_cancelled(process.exited()).await {
                None => return,
                Some(ended) => {
                    // Of one that another process started there is no status.
                    let status = process.reap();
                    tracing::error!(?ended, ?status, "the block service has ended; guests wait for it");
                }
            }
            if since.elapsed() >= STEADY {
                pause = FIRST_PAUSE;
            }
            process = loop {
                if stopping.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                    return;
                }
                match stopping.run_until_cancelled(self.find_or_start()).await {
                    None => return,
                    Some(Ok(process)) => break process,
                    Some(Err(error)) => {
                        pause = (pause * 2).min(LONGEST_PAUSE);
                        tracing::error!(error = format!("{error:#}"), again_in = ?pause, "no block service");
                    }
                }
            };
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// The program that was installed together with this one, or else whichever is in the search path.
fn beside_us() -> PathBuf {
    const PROGRAM: &str = "aenv-stored";
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(PROGRAM));
    beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(PROGRAM))
}

#[cfg(test)]
mod tests;
