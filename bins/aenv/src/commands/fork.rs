//! `aenv fork`: children that go on from the state that a sandbox has now.

use crate::arguments::ForkArguments;
use crate::commands::{Context, timeout::whole_seconds};
use crate::failure::{Exit, Failure};
use aenv_protocol::rest::{ChildBody, ForkBody, ForkedChild};
use serde::Serialize;
use std::collections::BTreeSet;

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
        ..ChildBody::default()
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
    match shortfall(children) {
        None => Ok(Exit::DONE),
        Some((what, hint)) => Err(Failure::new(what).with_hint(hint)),
    }
}

/// How many did not start, why, each reason once, and what to do.
fn shortfall(children: &[Child]) -> Option<(String, &'static str)> {
    let failed: Vec<&str> = children.iter().filter_map(|child| child.error.as_deref()).collect();
    let reasons: BTreeSet<&str> = failed.iter().copied().collect();
    let reasons: Vec<&str> = reasons.into_iter().collect();
    let what =
        format!("{} of {} children did not start\n  {}", failed.len(), children.len(), reasons.join("\n  "));
    let hint = match failed.len() {
        0 => return None,
        all if all == children.len() => "`aenv ls` lists what runs, `aenv rm` frees room",
        _ => "the others run: `aenv ls` lists them, `aenv rm` frees room",
    };
    Some((what, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_start_is_told_with_each_reason_once() {
        let child = |id: Option<&str>, error: Option<&str>| Child {
            id: id.map(str::to_owned),
            error: error.map(str::to_owned),
        };
        let runs = || child(Some("i1"), None);
        let full = || child(None, Some("full"));
        assert!(shortfall(&[runs()]).is_none());
        let (what, hint) =
            shortfall(&[full(), child(None, Some("away")), runs(), full()]).expect("some failed");
        assert_eq!(what, "3 of 4 children did not start\n  away\n  full");
        assert!(hint.contains("the others run"), "{hint}");
        let (what, hint) = shortfall(&[full(), full()]).expect("all failed");
        assert_eq!(what, "2 of 2 children did not start\n  full");
        assert!(!hint.contains("others"), "{hint}");
    }
}
