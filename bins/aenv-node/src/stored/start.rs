//! Starting the block service, and waiting until it answers.
//!
//! ```text
//! started ──▶ lives, silent: it recovers ──answers──▶ found
//!    ▲              │ ends
//!    │              ├─ another one holds the data: waited for ──answers──▶ found
//!    └── it let go ─┘                        └ nobody holds it: an error, with its last words
//! ```
//! Recovery takes the longer the more there is, and guests wait for its end: a service that lives is never ended for being
//! slow. Whoever calls may stop to wait at any time; the service goes on.
//! Owns nothing that lasts.

use super::{GLANCE, Service};
use aenv_sys::process::{Detached, Isolation, PidFd};
use anyhow::{Context as _, Result, bail};
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;

/// Between two looks at a service that another process started.
const PAUSE: Duration = Duration::from_millis(100);
/// Between two warnings that it does not answer yet.
const WARNING_PAUSE: Duration = Duration::from_secs(30);
/// As much of a log is told.
const LAST_BYTES: u64 = 2000;

impl Service {
    /// Starts one and waits until it answers, or another one that holds the data does.
    pub(super) async fn start(&self) -> Result<PidFd> {
        loop {
            let (process, log, begin) = self.spawn().await?;
            if let Some(found) = self.wait_for_answer(&process).await? {
                if found.pid() == process.pid() {
                    tracing::info!(pid = found.pid(), log = %log.display(), "started the block service");
                } else {
                    tracing::info!(pid = found.pid(), "another block service was faster");
                    tokio::spawn(reap_at_end(process));
                }
                return Ok(found);
            }
            let status = process.reap().context("cannot reap the block service")?;
            if !self.data_is_held().await? {
                let words = last_words(log, begin).await;
                bail!("{words}: the block service ended at once ({status:?})");
            }
            tracing::info!("another block service holds the data: waiting for its answer");
            if let Some(found) = self.wait_for_other().await? {
                return Ok(found);
            }
        }
    }

    /// The process, its log, and where in it its own lines begin.
    async fn spawn(&self) -> Result<(PidFd, PathBuf, u64)> {
        let log = self.data_dir.join("stored.log");
        let output = tokio::fs::OpenOptions::new().create(true).append(true).open(&log).await;
        let output = output.with_context(|| format!("cannot open {}", log.display()))?;
        let metadata =
            output.metadata().await.with_context(|| format!("cannot measure {}", log.display()))?;
        let process = Detached {
            program: &self.program,
            arg0: "aenv-stored",
            args: &self.arguments("serve"),
            directory: Path::new("/"),
            netns: None,
            log: output.into_std().await,
            inherit: &[],
            // It sets its own.
            oom_score_adj: None,
            huge_pages: true,
            cgroup: None,
            isolation: Isolation::default(),
        };
        let process = process.spawn().context("cannot start the block service")?;
        Ok((process, log, metadata.len()))
    }

    /// Whoever answers while `process` lives; `None` when it has ended.
    async fn wait_for_answer(&self, process: &PidFd) -> Result<Option<PidFd>> {
        let mut waiting = Waiting::new();
        loop {
            tokio::select! {
                ended = process.exited() => {
                    ended.context("cannot wait for the block service")?;
                    return Ok(None);
                }
                found = self.find_within(self.client_patience) => match found {
                    Ok(Some(found)) => return Ok(Some(found)),
                    Ok(None) => waiting.warn(Some(process.pid()), "it does not answer yet"),
                    Err(error) => waiting.warn(Some(process.pid()), &format!("{error:#}")),
                },
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The one that holds the data, when it answers; `None` when it has let go.
    async fn wait_for_other(&self) -> Result<Option<PidFd>> {
        let mut waiting = Waiting::new();
        while self.data_is_held().await? {
            match self.find_within(GLANCE).await {
                Ok(Some(found)) => return Ok(Some(found)),
                Ok(None) => waiting.warn(None, "it does not answer yet"),
                Err(error) => waiting.warn(None, &format!("{error:#}")),
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(None)
    }

    /// Whether a block service works on the data directory.
    async fn data_is_held(&self) -> Result<bool> {
        let path = self.data_dir.join("storage/lock");
        let looked = tokio::task::spawn_blocking(move || {
            let file = match File::open(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
                opened => opened.with_context(|| format!("cannot open {}", path.display()))?,
            };
            // Shared and for a moment: a service that starts just then asks again.
            match file.try_lock_shared() {
                Ok(()) => Ok(false),
                Err(TryLockError::WouldBlock) => Ok(true),
                Err(TryLockError::Error(error)) => {
                    Err(error).with_context(|| format!("cannot look who holds {}", path.display()))
                }
            }
        });
        looked.await.context("the look at the data directory failed")?
    }
}

/// One that finds the data held ends soon, and must not stay in the process table.
async fn reap_at_end(process: PidFd) {
    let reaped = match process.exited().await {
        Ok(()) => process.reap().map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = reaped {
        tracing::warn!(%error, "the exit status of a block service cannot be read");
    }
}

/// Warns once in a while.
struct Waiting {
    since: Instant,
    warned: Option<Instant>,
}

impl Waiting {
    fn new() -> Self {
        Self { since: Instant::now(), warned: None }
    }

    fn warn(&mut self, pid: Option<u32>, reason: &str) {
        if self.warned.is_none_or(|warned| warned.elapsed() >= WARNING_PAUSE) {
            self.warned = Some(Instant::now());
            tracing::warn!(pid, reason, waited = ?self.since.elapsed(), "waiting for the block service");
        }
    }
}

/// What a service that failed wrote to its log from `begin` on, at most the last lines.
async fn last_words(log: PathBuf, begin: u64) -> String {
    let place = log.display().to_string();
    let read = move || {
        let mut file = File::open(log)?;
        let end = file.metadata()?.len();
        file.seek(SeekFrom::Start(begin.max(end.saturating_sub(LAST_BYTES))))?;
        let mut text = Vec::new();
        file.take(LAST_BYTES).read_to_end(&mut text)?;
        std::io::Result::Ok(text)
    };
    match tokio::task::spawn_blocking(read).await.map_err(std::io::Error::other).and_then(|read| read) {
        Ok(text) => format!("its log {place} ends with: {}", String::from_utf8_lossy(&text).trim()),
        Err(error) => format!("its log {place} cannot be read ({error})"),
    }
}
