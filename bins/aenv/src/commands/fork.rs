//! `aenv fork`: children that go on from the state that a sandbox has now.

use crate::arguments::ForkArguments;
use crate::commands::{Context, timeout::whole_seconds};
use crate::failure::{Exit, Failure};
use aenv_protocol::rest::{ChildBody, ForkBody, ForkedChild};
use serde::Serialize;

/// What became of one child.
#[derive(Debug, Serialize)]
struct Child {
    #[serde(rename = "sandboxID", skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Forks a sandbox. Access tokens are left out: results end up in logs.
pub(crate) async fn run(context: &Context, arguments: ForkArguments) -> Result<Exit, Failure> {
    let id = &arguments.sandbox;
    let child = ChildBody {
        metadata: (!arguments.metadata.is_empty()).then(|| arguments.metadata.iter().cloned().collect()),
        env_vars: (!arguments.environment.is_empty())
            .then(|| arguments.environment.iter().cloned().collect()),
    };
    let children = match (child == ChildBody::default(), usize::try_from(arguments.count)) {
        (false, Ok(count)) => vec![child; count],
        _ => Vec::new(),
    };
    let wish =
        ForkBody { timeout: Some(whole_seconds(arguments.timeout)), count: Some(arguments.count), children };
    let spinner = context.printer.spinner("forking the sandbox");
    let answer = context.api()?.fork(id, &wish).await?;
    drop(spinner);
    let child = |child| match child {
        ForkedChild::Sandbox(sandbox) => Child { id: Some(sandbox.sandbox_id), error: None },
        ForkedChild::Error(error) => Child { id: None, error: Some(error.message) },
    };
    let children: Vec<Child> = answer.into_iter().map(child).collect();
    report(context, &children)
}

fn report(context: &Context, children: &[Child]) -> Result<Exit, Failure> {
    let started: Vec<&String> = children.iter().filter_map(|child| child.id.as_ref()).collect();
    if context.printer.is_json() {
        context.printer.json(&children)?;
    } else {
        for id in &started {
            context.printer.line(id)?;
        }
        if let Some(first) = started.first() {
            context
                .printer
                .note(&format!("run a command in one: aenv exec {first} -- uname -a; see `aenv tree`"));
        }
    }
    let failed: Vec<&String> = children.iter().filter_map(|child| child.error.as_ref()).collect();
    if failed.is_empty() {
        return Ok(Exit::DONE);
    }
    let mut reasons: Vec<String> = failed.iter().map(ToString::to_string).collect();
    reasons.dedup();
    let what =
        format!("{} of {} children did not start\n  {}", failed.len(), children.len(), reasons.join("\n  "));
    Err(Failure::new(what).with_hint("the others run: `aenv ls` lists them, `aenv rm` frees room"))
}
