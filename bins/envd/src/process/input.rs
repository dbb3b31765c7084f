//! Standard input of a process: written in order, by one writer at a time, closed once.

use std::os::fd::OwnedFd;
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe::Sender;
use tokio::sync::Mutex;

/// The writing end, or its absence.
#[derive(Debug)]
pub(crate) struct Input {
    pipe: Mutex<Option<Sender>>,
    enabled: bool,
}

/// Why input was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InputError {
    /// The process was started without an input.
    #[error("stdin not enabled or closed")]
    Closed,
    /// The process has closed its end.
    #[error("cannot write to stdin: {0}")]
    Write(#[from] std::io::Error),
}

impl Input {
    /// Wraps the pipe of a new process.
    ///
    /// # Errors
    /// When it cannot be watched for readiness.
    pub(crate) fn new(pipe: Option<OwnedFd>) -> std::io::Result<Self> {
        let enabled = pipe.is_some();
        let pipe = pipe.map(Sender::from_owned_fd).transpose()?;
        Ok(Self { pipe: Mutex::new(pipe), enabled })
    }

    /// Whether the process was started with an input.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Writes all of `bytes`; waits while the pipe is full.
    ///
    /// # Errors
    /// When there is no input any more.
    pub(crate) async fn write(&self, bytes: &[u8]) -> Result<(), InputError> {
        let mut pipe = self.pipe.lock().await;
        let pipe = pipe.as_mut().ok_or(InputError::Closed)?;
        Ok(pipe.write_all(bytes).await?)
    }

    /// Closes the input, after what is being written. A second time is fine.
    pub(crate) async fn close(&self) {
        self.pipe.lock().await.take();
    }
}
