//! Sandboxes of the orchestrator as bodies of answers.

use crate::error::loss_word;
use crate::settings::Settings;
use aenv_orchestrator::{SandboxState, SandboxView, WaitCause, Waiting};
use aenv_protocol::envd::ENVD_VERSION;
use aenv_protocol::rest::{self, ListedSandbox, OnTimeout, Sandbox, SandboxDetail, SandboxLifecycle};

/// Old clients append it to the sandbox id; it is dropped again on arrival.
const CLIENT_ID: &str = "aenv";

/// How to reach it.
pub(crate) fn reach(view: SandboxView, settings: &Settings) -> Sandbox {
    Sandbox {
        template_id: view.template_id.to_string(),
        sandbox_id: view.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        envd_version: ENVD_VERSION.to_owned(),
        alias: Some(view.template_name),
        envd_access_token: view.access_token,
        domain: settings.domain.clone(),
    }
}

/// Its line in a list; nothing for a sandbox that is not visible at that moment.
pub(crate) fn listed(view: SandboxView) -> Option<ListedSandbox> {
    let (state, lost_reason, lost_detail) = match view.state {
        SandboxState::Running => (rest::SandboxState::Running, None, None),
        SandboxState::Paused => (rest::SandboxState::Paused, None, None),
        SandboxState::Lost { cause, detail } => {
            (rest::SandboxState::Lost, Some(loss_word(cause).to_owned()), Some(detail))
        }
        SandboxState::Starting | SandboxState::Killing => return None,
    };
    Some(ListedSandbox {
        template_id: view.template_id.to_string(),
        sandbox_id: view.id.to_string(),
        client_id: CLIENT_ID.to_owned(),
        started_at: microseconds(view.started_at),
        end_at: microseconds(view.end_at),
        cpu_count: view.vcpus,
        memory_mb: view.memory_mib,
        disk_size_mb: view.disk_mib,
        state,
        envd_version: ENVD_VERSION.to_owned(),
        alias: Some(view.template_name),
        metadata: view.metadata,
        lost_reason,
        lost_detail,
    })
}

/// Everything about it.
pub(crate) fn detail(
    view: SandboxView,
    waiting: Option<Waiting>,
    settings: &Settings,
) -> Option<SandboxDetail> {
    let envd_access_token = view.access_token.clone();
    let allow_internet_access = view.internet_access;
    let (wait_reason, wait_detail) = match waiting {
        Some(Waiting { cause, detail }) => (Some(wait_word(cause).to_owned()), Some(detail)),
        None => (None, None),
    };
    Some(SandboxDetail {
        listed: listed(view)?,
        envd_access_token,
        domain: settings.domain.clone(),
        allow_internet_access,
        lifecycle: SandboxLifecycle { auto_resume: false, on_timeout: OnTimeout::Kill },
        wait_reason,
        wait_detail,
    })
}

/// The word for what a guest waits for in `waitReason`.
fn wait_word(cause: WaitCause) -> &'static str {
    match cause {
        WaitCause::DiskWaitsForRoom => "disk_waits_for_room",
        WaitCause::BlockServiceAway => "block_service_away",
    }
}

/// Clients' time types have no more digits; cut, not rounded, so that a time shown is never later than the real one.
fn microseconds(time: jiff::Timestamp) -> jiff::Timestamp {
    jiff::Timestamp::from_microsecond(time.as_microsecond()).unwrap_or(time)
}
