//! `aenv rm`: kills sandboxes, several at once; one failure does not stop the others.

use crate::arguments::RemoveArguments;
use crate::commands::{Context, list};
use crate::failure::{Exit, Failure};
use aenv_protocol::ids::SandboxId;
use futures_util::StreamExt;
use serde::Serialize;

/// Sandboxes that are being killed at the same time.
const PARALLEL: usize = 16;

/// What became of one sandbox.
#[derive(Debug, Serialize)]
struct Outcome {
    #[serde(rename = "sandboxID")]
    id: String,
    killed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Kills the named or all sandboxes.
pub(crate) async fn run(context: &Context, arguments: RemoveArguments) -> Result<Exit, Failure> {
    let api = context.api()?;
    let spinner = context.printer.spinner("killing");
    let mut ids = if arguments.all { all_ids(context).await? } else { arguments.sandboxes };
    let mut seen = std::collections::BTreeSet::new();
    ids.retain(|id| seen.insert(id.clone()));
    let kill = |id: SandboxId| {
        let api = &api;
        async move {
            match api.kill(&id).await {
                Ok(()) => Outcome { id: id.to_string(), killed: true, error: None },
                // Of all sandboxes, one that has ended meanwhile is no failure.
                Err(error) if arguments.all && error.is_not_found() => {
                    Outcome { id: id.to_string(), killed: false, error: None }
                }
                Err(error) => Outcome {
                    id: id.to_string(),
                    killed: false,
                    error: Some(Failure::from(error).to_string()),
                },
            }
        }
    };
    let outcomes: Vec<Outcome> = futures_util::stream::iter(ids).map(kill).buffered(PARALLEL).collect().await;
    drop(spinner);
    report(context, &outcomes)
}

async fn all_ids(context: &Context) -> Result<Vec<SandboxId>, Failure> {
    let sandboxes = context.api()?.sandboxes(list::ALL, &[]).await?;
    let parse = |text: String| SandboxId::from_path(&text).map_err(|error| Failure::new(error.to_string()));
    sandboxes.into_iter().map(|sandbox| parse(sandbox.sandbox_id)).collect()
}

fn report(context: &Context, outcomes: &[Outcome]) -> Result<Exit, Failure> {
    let printer = &context.printer;
    if printer.is_json() {
        printer.json(&outcomes)?;
    } else {
        for outcome in outcomes.iter().filter(|outcome| outcome.killed) {
            printer.line(&format!("killed {}", outcome.id))?;
        }
    }
    if outcomes.is_empty() {
        printer.note("there are no sandboxes");
    }
    let failed: Vec<String> = outcomes
        .iter()
        .filter_map(|outcome| outcome.error.as_ref().map(|error| format!("{}: {error}", outcome.id)))
        .collect();
    match failed.as_slice() {
        [] => Ok(Exit::DONE),
        [only] if outcomes.len() == 1 => Err(Failure::new(only).with_hint("`aenv ls --all` lists sandboxes")),
        several => Err(Failure::new(format!(
            "{} of {} sandboxes were not killed\n  {}",
            several.len(),
            outcomes.len(),
            several.join("\n  ")
        ))
        .with_hint("`aenv ls --all` lists sandboxes")),
    }
}
