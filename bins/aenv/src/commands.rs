//! What each command does, one module per command.
//!
//! Owns what they share: the way to the API. A command returns its exit code or a failure; it never ends the process.

pub(crate) mod doctor;
pub(crate) mod exec;
pub(crate) mod files;
pub(crate) mod fork;
pub(crate) mod inspect;
pub(crate) mod layer;
pub(crate) mod list;
pub(crate) mod pause;
pub(crate) mod remove;
pub(crate) mod snapshot;
pub(crate) mod start;
pub(crate) mod template;
pub(crate) mod timeout;
pub(crate) mod tree;

use crate::api_client::{ApiClient, ApiError};
use crate::envd_client::EnvdClient;
use crate::failure::Failure;
use crate::output::Printer;
use crate::settings::Settings;
use crate::transport::Transport;
use aenv_protocol::ids::SandboxId;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Asking why something failed must not take long.
const EXPLANATION_PATIENCE: Duration = Duration::from_secs(5);

/// What every command is given.
pub(crate) struct Context {
    /// Where results and words go.
    pub(crate) printer: Printer,
    /// Whether JSON was asked for, not only chosen because of where the output goes.
    pub(crate) json_demanded: bool,
    /// Where the API is.
    pub(crate) settings: Settings,
    /// Carries requests.
    pub(crate) transport: Transport,
}

impl Context {
    /// The API.
    ///
    /// # Errors
    /// When there is no key.
    pub(crate) fn api(&self) -> Result<ApiClient, Failure> {
        ApiClient::new(&self.settings, &self.transport)
    }

    /// The daemon of a sandbox that runs, or that requests wake.
    ///
    /// # Errors
    /// When there is no key or no such sandbox, or it is paused and stays so.
    pub(crate) async fn envd(&self, id: &SandboxId) -> Result<EnvdClient, Failure> {
        let detail = self.api()?.sandbox(id).await?;
        if !pause::answers(&detail) {
            return Err(pause::paused_failure(id));
        }
        EnvdClient::new(&self.settings, &self.transport, id, detail.envd_access_token.as_deref())
    }
}

/// Adds to a failure why the sandbox went out of reach, if the node knows.
pub(crate) async fn explain(
    context: &Context,
    envd: &EnvdClient,
    id: &SandboxId,
    failure: Failure,
) -> Failure {
    if !failure.is_lost_sandbox() {
        return failure;
    }
    let Ok(api) = context.api() else { return failure };
    let reason = match tokio::time::timeout(EXPLANATION_PATIENCE, api.sandbox(id)).await {
        Ok(Err(ApiError::Refused { message, .. })) => Some(message),
        // No question to its daemon then: that might wake it.
        Ok(Ok(detail)) if pause::is_paused(&detail.listed) => {
            return failure.because("the sandbox was paused").with_hint(pause::resume_hint(id));
        }
        _ => envd.why_unreachable().await,
    };
    match reason {
        Some(reason) => failure.because(&reason),
        None => failure,
    }
}

/// The signals by which a person or a supervisor asks us to end.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Interrupts {
    /// From now on these signals no longer end the process by themselves.
    ///
    /// # Errors
    /// When they cannot be caught.
    pub(crate) fn catch() -> Result<Self, Failure> {
        let caught =
            |kind| signal(kind).map_err(|error| Failure::new(format!("signals cannot be caught: {error}")));
        Ok(Self {
            interrupt: caught(SignalKind::interrupt())?,
            terminate: caught(SignalKind::terminate())?,
            hang_up: caught(SignalKind::hangup())?,
        })
    }

    /// The number of the next one. Cancel safe.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 2,
            _ = self.terminate.recv() => 15,
            _ = self.hang_up.recv() => 1,
        }
    }
}
