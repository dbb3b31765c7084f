//! `aenv pause` and `aenv resume`: a sandbox stands still with all it has, and goes on.

use crate::api_client::{ApiError, Resumed};
use crate::arguments::{DurabilityWish, PauseArguments, ResumeArguments};
use crate::commands::{Context, timeout::whole_seconds};
use crate::failure::{Exit, Failure};
use crate::output::human_duration;
use aenv_protocol::ids::SandboxId;
use aenv_protocol::rest::{
    ConnectRequest, Durability, ListedSandbox, OnResume, PauseBody, PauseMode, SandboxDetail, SandboxState,
    code,
};
use serde_json::json;

/// Pauses a sandbox.
pub(crate) async fn pause(context: &Context, arguments: PauseArguments) -> Result<Exit, Failure> {
    let id = arguments.sandbox;
    let wish = PauseBody {
        memory: arguments.filesystem.then_some(false),
        require_healthy_guest: arguments.require_healthy_guest.then_some(true),
        durability: arguments.durability.map(|wish| match wish {
            DurabilityWish::Process => Durability::Process,
            DurabilityWish::Local => Durability::Local,
        }),
    };
    let spinner = context.printer.spinner("pausing the sandbox");
    let durability = context.api()?.pause(&id, &wish).await.map_err(|error| pause_failure(&id, error))?;
    drop(spinner);
    let mode = if arguments.filesystem { PauseMode::Filesystem } else { PauseMode::Full };
    if context.printer.is_json() {
        let paused = json!({
            "sandboxID": id.as_str(), "state": "paused", "pauseMode": mode, "durability": durability,
        });
        context.printer.json(&paused)?;
    } else {
        context.printer.line(&format!("paused {id}"))?;
        let survives = durability.map_or("unknown", survived_by);
        context.printer.note(&format!("it survives {survives}; on with it: aenv resume {id}"));
    }
    Ok(Exit::DONE)
}

/// Resumes a sandbox. One that runs already gets the time only.
pub(crate) async fn resume(context: &Context, arguments: ResumeArguments) -> Result<Exit, Failure> {
    let id = arguments.sandbox;
    let wish = ConnectRequest {
        timeout: Some(whole_seconds(arguments.timeout)),
        on_resume: arguments.reboot.then_some(OnResume::Reboot),
        ..ConnectRequest::default()
    };
    let spinner = context.printer.spinner("resuming the sandbox");
    let Resumed { was_running, tier } =
        context.api()?.resume(&id, &wish).await.map_err(|error| resume_failure(&id, error))?;
    drop(spinner);
    if context.printer.is_json() {
        let resumed = json!({
            "sandboxID": id.as_str(), "state": "running", "wasRunning": was_running, "tier": tier,
        });
        context.printer.json(&resumed)?;
        return Ok(Exit::DONE);
    }
    let life = human_duration(arguments.timeout);
    if was_running {
        context.printer.line(&format!("{id} was running"))?;
        context.printer.note(&format!("it lives for {life} at least"));
        if arguments.reboot {
            context.printer.note("--reboot is for paused sandboxes: this one was not rebooted");
        }
    } else {
        context.printer.line(&format!("resumed {id}"))?;
        context.printer.note(&format!("it lives for {life}; run a command: aenv exec {id} -- uname -a"));
    }
    Ok(Exit::DONE)
}

fn pause_failure(id: &SandboxId, error: ApiError) -> Failure {
    let unresponsive = error.is(code::GUEST_UNRESPONSIVE);
    let conflict = error.is_conflict();
    let failure = Failure::from(error);
    if unresponsive {
        failure.with_hint("without --require-healthy-guest it is paused all the same, with all of its memory")
    } else if conflict {
        failure.with_hint(format!(
            "`aenv inspect {id}` shows its state; a paused one goes on with `aenv resume {id}`"
        ))
    } else {
        failure
    }
}

fn resume_failure(id: &SandboxId, error: ApiError) -> Failure {
    let incompatible = error.is(code::NO_COMPATIBLE_NODE);
    let failure = Failure::from(error);
    if incompatible {
        failure.with_hint(format!("boot its disk, its processes are lost then: aenv resume {id} --reboot"))
    } else {
        failure
    }
}

/// What a saved state of that level outlives, for people.
pub(crate) fn survived_by(durability: Durability) -> &'static str {
    match durability {
        Durability::Process => "the end of every process of the node",
        Durability::Local => "a power cut of the node",
        Durability::Published => "the loss of the node",
    }
}

/// The way out for whoever needs a sandbox that runs, and has a paused one.
pub(crate) fn resume_hint(id: &SandboxId) -> String {
    format!("resume it first: aenv resume {id}")
}

/// Whether it can be talked to: it runs, or traffic wakes it. What would have to boot is never woken by traffic.
pub(crate) fn answers(detail: &SandboxDetail) -> bool {
    let wakes = detail.lifecycle.auto_resume && detail.pause_mode != Some(PauseMode::Filesystem);
    !is_paused(&detail.listed) || wakes
}

/// Whether it is paused.
pub(crate) fn is_paused(sandbox: &ListedSandbox) -> bool {
    sandbox.state == SandboxState::Paused
}

/// What is told when a paused sandbox was to do something.
pub(crate) fn paused_failure(id: &SandboxId) -> Failure {
    Failure::new(format!("sandbox {id} is paused")).with_hint(resume_hint(id))
}
