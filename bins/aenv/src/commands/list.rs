//! `aenv ls`: the sandboxes of a node.

use crate::arguments::ListArguments;
use crate::commands::Context;
use crate::failure::{Exit, Failure};
use crate::output::{human_duration, human_mebibytes};
use aenv_protocol::rest::{ListedSandbox, SandboxState};
use jiff::Timestamp;
use std::time::Duration;

/// Sandboxes that can still be used.
pub(crate) const LIVING: &str = "running,paused";
/// The dead ones too.
pub(crate) const ALL: &str = "running,paused,lost";

/// Lists sandboxes.
pub(crate) async fn run(context: &Context, arguments: ListArguments) -> Result<Exit, Failure> {
    let api = context.api()?;
    let spinner = context.printer.spinner("asking the node");
    let sandboxes = api.sandboxes(if arguments.all { ALL } else { LIVING }, &arguments.metadata).await?;
    drop(spinner);
    if context.printer.is_json() {
        context.printer.json(&sandboxes)?;
        return Ok(Exit::DONE);
    }
    if sandboxes.is_empty() {
        context.printer.note("no sandboxes; `aenv start` starts one");
        return Ok(Exit::DONE);
    }
    let now = Timestamp::now();
    let header = ["ID", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY", "METADATA"];
    if arguments.all {
        let [id, template, state, age, ends, cpu, memory, metadata] = header;
        let header = [id, template, state, age, ends, cpu, memory, metadata, "REASON"];
        let rows = sandboxes.iter().map(|sandbox| {
            let [id, template, state, age, ends, cpu, memory, metadata] = row(sandbox, now);
            [id, template, state, age, ends, cpu, memory, metadata, reason(sandbox)]
        });
        context.printer.table(header, rows.collect())?;
    } else {
        context.printer.table(header, sandboxes.iter().map(|sandbox| row(sandbox, now)).collect())?;
    }
    Ok(Exit::DONE)
}

fn row(sandbox: &ListedSandbox, now: Timestamp) -> [String; 8] {
    let labels: Vec<String> = sandbox.metadata.iter().map(|(key, value)| format!("{key}={value}")).collect();
    [
        sandbox.sandbox_id.clone(),
        sandbox.alias.clone().unwrap_or_else(|| sandbox.template_id.clone()),
        state_name(sandbox.state).to_owned(),
        human_duration(between(sandbox.started_at, now)),
        match sandbox.state {
            // Its time does not run.
            SandboxState::Paused => "-".to_owned(),
            SandboxState::Running | SandboxState::Lost => human_duration(between(now, sandbox.end_at)),
        },
        sandbox.cpu_count.to_string(),
        human_mebibytes(sandbox.memory_mb),
        labels.join(" "),
    ]
}

fn reason(sandbox: &ListedSandbox) -> String {
    match (&sandbox.lost_reason, &sandbox.lost_detail) {
        (Some(reason), Some(detail)) => format!("{reason}: {detail}"),
        (Some(text), None) | (None, Some(text)) => text.clone(),
        (None, None) => String::new(),
    }
}

/// The state as the API writes it.
pub(crate) fn state_name(state: SandboxState) -> &'static str {
    match state {
        SandboxState::Running => "running",
        SandboxState::Paused => "paused",
        SandboxState::Lost => "lost",
    }
}

/// The time from one moment to a later one; zero if it is not later.
pub(crate) fn between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or(Duration::ZERO)
}
