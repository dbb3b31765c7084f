//! Sandboxes of the orchestrator as bodies of answers.

use crate::error::loss_word;
use crate::settings::Settings;
use aenv_orchestrator::{
    self as orchestrator, SandboxState, SandboxView, SaveTrouble, SavedView, WaitCause, Waiting,
};
use aenv_protocol::envd::ENVD_VERSION;
use aenv_protocol::rest::{
    self, ListedSandbox, OnTimeout, Sandbox, SandboxDetail, SandboxLifecycle, SavedState, code,
};

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
    let is_unflushed = is_paused(&view) && view.saved.as_ref().is_some_and(|saved| !saved.flushed);
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
        envd_unresponsive_at_pause: is_unflushed.then_some(true),
        parent_id: view.parent.map(String::from),
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
    let lifecycle =
        SandboxLifecycle { auto_resume: view.auto_resume, on_timeout: on_timeout(view.on_timeout) };
    let saved = view.saved.as_ref().map(saved_state);
    let pause_mode = saved.as_ref().filter(|_| is_paused(&view)).map(|saved| saved.mode);
    let (wait_reason, wait_detail) = match waiting {
        Some(Waiting { cause, detail }) => (Some(wait_word(cause).to_owned()), Some(detail)),
        None => (None, None),
    };
    Some(SandboxDetail {
        listed: listed(view)?,
        envd_access_token,
        domain: settings.domain.clone(),
        allow_internet_access,
        lifecycle,
        pause_mode,
        saved,
        wait_reason,
        wait_detail,
    })
}

fn is_paused(view: &SandboxView) -> bool {
    view.state == SandboxState::Paused
}

fn on_timeout(on_timeout: orchestrator::OnTimeout) -> OnTimeout {
    match on_timeout {
        orchestrator::OnTimeout::Kill => OnTimeout::Kill,
        orchestrator::OnTimeout::Pause(_) => OnTimeout::Pause,
    }
}

fn saved_state(saved: &SavedView) -> SavedState {
    SavedState {
        number: saved.number,
        saved_at: microseconds(saved.saved_at),
        mode: match saved.mode {
            orchestrator::PauseMode::Full => rest::PauseMode::Full,
            orchestrator::PauseMode::Filesystem => rest::PauseMode::Filesystem,
        },
        durability: durability(saved.durability),
        tier: saved.tier.as_str().to_owned(),
        memory_layers: saved.memory_layers as u64,
        memory_bytes: saved.memory_bytes,
        disk_bytes: saved.disk_bytes,
        // Whole microseconds, which is as exact as a clock of the host.
        stopped_ms: saved.stopped.as_micros() as f64 / 1000.0,
        flushed: saved.flushed,
        fallback: saved.fallback.map(|cause| loss_word(cause).to_owned()),
        pending: saved.pending.clone(),
        trouble: saved.trouble.map(|trouble| trouble_word(trouble).to_owned()),
        unstored_bytes: Some(saved.unstored_bytes).filter(|bytes| *bytes > 0),
    }
}

fn trouble_word(trouble: SaveTrouble) -> &'static str {
    match trouble {
        SaveTrouble::NoCapacity => code::CAPACITY,
        SaveTrouble::BlockServiceAway => wait_word(WaitCause::BlockServiceAway),
        SaveTrouble::Internal => code::INTERNAL,
    }
}

/// A level of durability as the API writes it.
pub(crate) fn durability(durability: orchestrator::Durability) -> rest::Durability {
    match durability {
        orchestrator::Durability::Process => rest::Durability::Process,
        orchestrator::Durability::Local => rest::Durability::Local,
        orchestrator::Durability::Published => rest::Durability::Published,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_orchestrator::LossCause;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::time::Duration;

    fn paused() -> SandboxView {
        SandboxView {
            id: "ione".parse().unwrap(),
            template_id: "t1".parse().unwrap(),
            template_name: "base".to_owned(),
            parent: None,
            state: SandboxState::Paused,
            started_at: jiff::Timestamp::UNIX_EPOCH,
            end_at: jiff::Timestamp::UNIX_EPOCH,
            life_time: Duration::from_secs(300),
            vcpus: 2,
            memory_mib: 512,
            disk_mib: 1024,
            metadata: BTreeMap::new(),
            access_token: Some("secret".to_owned()),
            internet_access: true,
            on_timeout: orchestrator::OnTimeout::Pause(orchestrator::PauseMode::Full),
            auto_resume: true,
            woken_by_traffic: true,
            is_changing: false,
            saved: Some(SavedView {
                number: 3,
                saved_at: jiff::Timestamp::from_nanosecond(1_999).unwrap(),
                mode: orchestrator::PauseMode::Filesystem,
                durability: orchestrator::Durability::Local,
                pending: Some("writing the layer of memory".to_owned()),
                trouble: Some(SaveTrouble::NoCapacity),
                unstored_bytes: 8192,
                tier: orchestrator::Tier::Cold,
                memory_layers: 2,
                memory_bytes: None,
                disk_bytes: Some(4096),
                stopped: Duration::from_nanos(12_345_678),
                flushed: false,
                fallback: Some(LossCause::HostRestarted),
            }),
        }
    }

    fn shown(view: SandboxView) -> Value {
        let settings = Settings { keys: Vec::new(), domain: None, max_timeout: Duration::from_secs(1) };
        serde_json::to_value(detail(view, None, &settings).unwrap()).unwrap()
    }

    #[test]
    fn a_paused_sandbox_tells_all_about_its_saved_state() {
        let shown = shown(paused());
        assert_eq!(shown["state"], "paused");
        assert_eq!(shown["pauseMode"], "filesystem");
        assert_eq!(shown["envdUnresponsiveAtPause"], true);
        assert_eq!(shown["lifecycle"], json!({"autoResume": true, "onTimeout": "pause"}));
        let saved = json!({
            "number": 3, "savedAt": "1970-01-01T00:00:00.000001Z", "mode": "filesystem", "durability": "local",
            "tier": "cold", "memoryLayers": 2, "diskBytes": 4096, "stoppedMs": 12.345, "flushed": false,
            "fallback": "host_restarted",
            "pending": "writing the layer of memory",
            "trouble": "sandbox_capacity_unavailable", "unstoredBytes": 8192,
        });
        assert_eq!(shown["saved"], saved);
    }

    #[test]
    fn one_that_runs_again_keeps_the_numbers_but_is_not_paused() {
        let shown = shown(SandboxView { state: SandboxState::Running, ..paused() });
        assert_eq!((&shown["state"], &shown["saved"]["number"]), (&json!("running"), &json!(3)));
        for field in ["pauseMode", "envdUnresponsiveAtPause"] {
            assert!(shown.get(field).is_none(), "{field}");
        }
    }
}
