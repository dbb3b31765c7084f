//! `aenv doctor`: what this machine offers, whether the API and the key work, and how full the node is.
//!
//! The machine is examined by `aenv-node doctor --json`: the program that runs sandboxes here is the one to ask.
//! Owns no check of the machine itself.

use crate::api_client::{ApiError, health};
use crate::commands::Context;
use crate::failure::{Exit, Failure};
use crate::output::human_bytes;
use aenv_protocol::doctor::{Check, Report, Status};
use aenv_protocol::rest::NodeStatus;
use http::StatusCode;
use std::path::PathBuf;
use std::time::Duration;

const NODE: &str = "aenv-node";
/// The examination boots nothing; if it takes this long, something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Examines and reports; fails if anything that sandboxes need is missing.
pub(crate) async fn run(context: &Context) -> Result<Exit, Failure> {
    let spinner = context.printer.spinner("examining");
    let (mut checks, reachability) = tokio::join!(machine(context), api(context));
    drop(spinner);
    checks.extend(reachability);
    let report = Report { checks };
    let missing = report.checks.iter().filter(|check| check.status == Status::Missing).count();
    if context.printer.is_json() {
        context.printer.json(&report)?;
    } else {
        let rows = report.checks.iter().map(|check| {
            let advice = check.advice.clone().unwrap_or_default();
            [check.name.clone(), status_name(check.status).to_owned(), check.found.clone(), advice]
        });
        context.printer.table(["CHECK", "STATUS", "FOUND", "WHAT TO DO"], rows.collect())?;
        context.printer.note(match missing {
            0 => "sandboxes can run",
            _ => "sandboxes cannot run until what is missing is there",
        });
    }
    Ok(if missing == 0 { Exit::DONE } else { Exit::FAILED })
}

fn status_name(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Degraded => "degraded",
        Status::Missing => "missing",
    }
}

fn check(name: &str, status: Status, found: impl Into<String>, advice: Option<&str>) -> Check {
    Check { name: name.to_owned(), status, found: found.into(), advice: advice.map(str::to_owned) }
}

/// What the node program says of this machine.
async fn machine(context: &Context) -> Vec<Check> {
    let program = node_program();
    let examination = tokio::process::Command::new(&program)
        .args(["doctor", "--json"])
        .envs(context.settings.data_dir.iter().map(|directory| ("AENV_DATA_DIR", directory)))
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let failed = |found: String| {
        vec![check("machine", Status::Degraded, found, Some("run it yourself to see more: aenv-node doctor"))]
    };
    match tokio::time::timeout(PATIENCE, examination).await {
        Ok(Ok(output)) => match serde_json::from_slice::<Report>(&output.stdout) {
            Ok(report) => report.checks,
            Err(error) => {
                let words = String::from_utf8_lossy(&output.stderr);
                let last = words.trim().lines().last().unwrap_or_default();
                failed(format!(
                    "not examined: {} gave no report ({}): {error} {last}",
                    program.display(),
                    output.status
                ))
            }
        },
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => vec![check(
            "machine",
            Status::Degraded,
            "not examined: aenv-node is neither beside aenv nor in PATH",
            Some("nothing, if the node runs on another machine; else `make up` builds it"),
        )],
        Ok(Err(error)) => failed(format!("not examined: {} cannot be run: {error}", program.display())),
        Err(_elapsed) => {
            failed(format!("not examined: {} took longer than {} s", program.display(), PATIENCE.as_secs()))
        }
    }
}

/// The node program that belongs to this one: beside it, else wherever PATH has it.
fn node_program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(NODE)));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PathBuf::from(NODE))
}

/// Whether a node answers, takes our key, and has room.
async fn api(context: &Context) -> Vec<Check> {
    let base = &context.settings.api;
    let answers = match health(&context.transport, base).await {
        Ok(()) => check("api", Status::Ok, format!("a node answers at {base}"), None),
        Err(error) => {
            let failure = Failure::from(error);
            return vec![check("api", Status::Missing, failure.to_string(), failure.hint())];
        }
    };
    let client = match context.api() {
        Err(failure) => {
            return vec![answers, check("key", Status::Missing, failure.to_string(), failure.hint())];
        }
        Ok(client) => client,
    };
    let templates = match client.templates().await {
        Ok(templates) => templates,
        Err(error) => {
            let refused = matches!(error, ApiError::Refused { status: StatusCode::UNAUTHORIZED, .. });
            let failure = Failure::from(error);
            let found = if refused { "the node does not accept it".to_owned() } else { failure.to_string() };
            return vec![answers, check("key", Status::Missing, found, failure.hint())];
        }
    };
    let key = check("key", Status::Ok, format!("accepted; number of templates: {}", templates.len()), None);
    vec![answers, key, capacity(client.node().await)]
}

/// Whether there is room for another sandbox.
fn capacity(answer: Result<NodeStatus, ApiError>) -> Check {
    const NAME: &str = "capacity";
    let status = match answer {
        Ok(status) => status,
        // An older node.
        Err(error) => return check(NAME, Status::Degraded, Failure::from(error).to_string(), None),
    };
    let limit = status.memory_limit_bytes;
    let of = limit.map_or("without a limit".to_owned(), |limit| format!("of {}", human_bytes(limit)));
    let available = match status.memory_available_bytes {
        Some(available) => format!("; the host has {} left", human_bytes(available)),
        None => String::new(),
    };
    let found = format!(
        "memory committed to guests: {} {of}{available}; {} running, {} paused, {} of them hot; {} standbys; {} of {} places to start taken, {} waiting",
        human_bytes(status.memory_committed_bytes),
        status.running,
        status.paused,
        status.hot,
        status.standbys,
        status.starting,
        status.max_starting,
        status.waiting,
    );
    let low = status.memory_available_bytes.is_some_and(|available| available < status.memory_low_bytes);
    let full = limit.is_some_and(|limit| status.memory_committed_bytes >= limit);
    // What only waits for somebody gives way.
    let spare = status.hot + status.standbys > 0;
    match (low, full && !spare) {
        (true, _) => {
            let advice = "end or pause sandboxes: those that run are not ended to make room";
            check(NAME, Status::Degraded, found, Some(advice))
        }
        (false, true) => {
            let advice = "end or pause sandboxes, or raise AENV_MEMORY_LIMIT_MIB if the host has memory left";
            check(NAME, Status::Degraded, found, Some(advice))
        }
        (false, false) => check(NAME, Status::Ok, found, None),
    }
}
