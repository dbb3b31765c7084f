//! `aenv inspect`: everything the API tells about one sandbox, except the secret.

use crate::arguments::InspectArguments;
use crate::commands::{Context, list};
use crate::failure::{Exit, Failure};
use crate::output::{human_duration, human_mebibytes};
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
        ["ends".to_owned(), told(sandbox.end_at, "from now", list::between(now, sandbox.end_at))],
        ["cpu".to_owned(), sandbox.cpu_count.to_string()],
        ["memory".to_owned(), human_mebibytes(sandbox.memory_mb)],
        ["disk".to_owned(), human_mebibytes(sandbox.disk_size_mb)],
        ["internet".to_owned(), if detail.allow_internet_access { "yes" } else { "no" }.to_owned()],
    ];
    if let Some(reason) = &detail.wait_reason {
        let evidence = detail.wait_detail.as_deref().unwrap_or_default();
        rows.push(["waits".to_owned(), format!("{reason}: {evidence}")]);
    }
    rows.extend(sandbox.metadata.iter().map(|(key, value)| [format!("label {key}"), value.clone()]));
    context.printer.table(["WHAT", "VALUE"], rows)?;
    Ok(Exit::DONE)
}

fn told(at: Timestamp, direction: &str, distance: std::time::Duration) -> String {
    format!("{at:.0} ({} {direction})", human_duration(distance))
}
