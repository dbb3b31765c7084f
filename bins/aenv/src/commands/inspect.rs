//! `aenv inspect`: everything the API tells about one sandbox, except the secret.

use crate::arguments::InspectArguments;
use crate::commands::{Context, list, pause};
use crate::failure::{Exit, Failure};
use crate::output::{human_bytes, human_duration, human_mebibytes};
use aenv_protocol::rest::{OnTimeout, SandboxDetail, SandboxState, SavedState};
use jiff::Timestamp;

/// Shows one sandbox. Its access token is left out: results end up in logs.
pub(crate) async fn run(context: &Context, arguments: InspectArguments) -> Result<Exit, Failure> {
    let mut detail = context.api()?.sandbox(&arguments.sandbox).await?;
    detail.envd_access_token = None;
    if context.printer.is_json() {
        context.printer.json(&detail)?;
        return Ok(Exit::DONE);
    }
    let sandbox = &detail.listed;
    let now = Timestamp::now();
    let mut rows = vec![
        ["id".to_owned(), sandbox.sandbox_id.clone()],
        ["template".to_owned(), sandbox.alias.clone().unwrap_or_else(|| sandbox.template_id.clone())],
        ["state".to_owned(), list::state_name(sandbox.state).to_owned()],
        ["started".to_owned(), told(sandbox.started_at, "ago", list::between(sandbox.started_at, now))],
        ["ends".to_owned(), ends(&detail, now)],
        ["cpu".to_owned(), sandbox.cpu_count.to_string()],
        ["memory".to_owned(), memory(&detail)],
        ["disk".to_owned(), human_mebibytes(sandbox.disk_size_mb)],
        ["internet".to_owned(), if detail.allow_internet_access { "yes" } else { "no" }.to_owned()],
    ];
    if let Some(parent) = &sandbox.parent_id {
        rows.push(["made from".to_owned(), format!("the state of sandbox {parent}")]);
    }
    if let Some(saved) = &detail.saved {
        rows.extend(saved_rows(saved, now));
    }
    if let Some(reason) = &detail.wait_reason {
        let evidence = detail.wait_detail.as_deref().unwrap_or_default();
        rows.push(["waits".to_owned(), format!("{reason}: {evidence}")]);
    }
    rows.extend(sandbox.metadata.iter().map(|(key, value)| [format!("label {key}"), value.clone()]));
    context.printer.table(["WHAT", "VALUE"], rows)?;
    Ok(Exit::DONE)
}

/// How much it has, and whether the node counts that as taken.
fn memory(detail: &SandboxDetail) -> String {
    let size = human_mebibytes(detail.listed.memory_mb);
    let cold = detail.saved.as_ref().is_some_and(|saved| saved.tier != "hot");
    match detail.listed.state {
        SandboxState::Lost => size,
        SandboxState::Paused if cold => format!("{size}, free for others while it is paused"),
        SandboxState::Paused => {
            format!("{size}, held so that a resume is hot; given way when others need it")
        }
        SandboxState::Running => format!("{size}, committed"),
    }
}

/// When its time is over, and what happens then. The time of a paused one does not run.
fn ends(detail: &SandboxDetail, now: Timestamp) -> String {
    let sandbox = &detail.listed;
    if pause::is_paused(sandbox) {
        let wakes = if pause::answers(detail) { ", or by a request to it" } else { "" };
        return format!("never; goes on by `aenv resume`{wakes}");
    }
    let time = told(sandbox.end_at, "from now", list::between(now, sandbox.end_at));
    match detail.lifecycle.on_timeout {
        OnTimeout::Kill => time,
        OnTimeout::Pause => format!("{time}, then it is paused"),
    }
}

/// What is known of the state it was saved in last.
fn saved_rows(saved: &SavedState, now: Timestamp) -> Vec<[String; 2]> {
    let bytes = |bytes: Option<u64>| bytes.map_or("not known yet".to_owned(), human_bytes);
    let mut rows = vec![
        ["saved".to_owned(), told(saved.saved_at, "ago", list::between(saved.saved_at, now))],
        ["saved state".to_owned(), format!("number {}, {}", saved.number, saved.mode.as_str())],
        [
            "durability".to_owned(),
            format!("{}: survives {}", saved.durability.as_str(), pause::survived_by(saved.durability)),
        ],
        ["tier".to_owned(), saved.tier.clone()],
        ["layers of memory".to_owned(), saved.memory_layers.to_string()],
        ["memory added".to_owned(), bytes(saved.memory_bytes)],
        ["disk stored".to_owned(), saved.disk_bytes.map_or("not known".to_owned(), human_bytes)],
        ["guest stood still".to_owned(), format!("{:.1} ms", saved.stopped_ms)],
    ];
    if !saved.flushed {
        let what = "no: its daemon did not answer, what was not written out is in its memory only";
        rows.push(["flushed".to_owned(), what.to_owned()]);
    }
    if let Some(cause) = &saved.fallback {
        rows.push(["fell back".to_owned(), format!("what came after this state was lost: {cause}")]);
    }
    if let Some(pending) = &saved.pending {
        rows.push(["pending".to_owned(), pending.clone()]);
    }
    if let Some(bytes) = saved.unstored_bytes {
        rows.push(["memory to be stored".to_owned(), human_bytes(bytes)]);
    }
    rows
}

fn told(at: Timestamp, direction: &str, distance: std::time::Duration) -> String {
    format!("{at:.0} ({} {direction})", human_duration(distance))
}
