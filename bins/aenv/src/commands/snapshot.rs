//! `aenv snapshot`: states of sandboxes that are kept for themselves.

use crate::arguments::{
    SnapshotCommand, SnapshotCreateArguments, SnapshotListArguments, SnapshotRemoveArguments,
};
use crate::commands::{Context, list};
use crate::failure::{Exit, Failure};
use crate::output::{human_bytes, human_duration};
use aenv_protocol::rest::{NewSnapshot, Snapshot, SnapshotState};
use jiff::Timestamp;
use serde_json::json;

/// Does what is asked about snapshots.
pub(crate) async fn run(context: &Context, command: SnapshotCommand) -> Result<Exit, Failure> {
    match command {
        SnapshotCommand::Create(arguments) => create(context, arguments).await,
        SnapshotCommand::Ls(arguments) => list_all(context, arguments).await,
        SnapshotCommand::Rm(arguments) => remove(context, arguments).await,
    }
}

async fn create(context: &Context, arguments: SnapshotCreateArguments) -> Result<Exit, Failure> {
    let wish = NewSnapshot { name: arguments.name, memory: arguments.filesystem.then_some(false) };
    let spinner = context.printer.spinner("keeping the sandbox's state");
    let snapshot = context.api()?.take_snapshot(&arguments.sandbox, &wish).await?;
    drop(spinner);
    if context.printer.is_json() {
        context.printer.json(&snapshot)?;
    } else {
        let id = &snapshot.snapshot_id;
        context.printer.line(id)?;
        let called = snapshot.names.first().unwrap_or(id);
        context.printer.note(&format!("start sandboxes from it: aenv start {called}"));
    }
    Ok(Exit::DONE)
}

async fn list_all(context: &Context, arguments: SnapshotListArguments) -> Result<Exit, Failure> {
    let spinner = context.printer.spinner("asking the node");
    let sandbox = arguments.sandbox.as_ref();
    let snapshots = context.api()?.snapshots(sandbox, arguments.name.as_deref()).await?;
    drop(spinner);
    if context.printer.is_json() {
        context.printer.json(&snapshots)?;
        return Ok(Exit::DONE);
    }
    if snapshots.is_empty() {
        context.printer.note("no snapshots; `aenv snapshot create SANDBOX` makes one");
        return Ok(Exit::DONE);
    }
    let now = Timestamp::now();
    let header = ["ID", "NAME", "OF", "STATE", "KEEPS", "AGE", "STORED", "USED BY", "STANDBYS"];
    context.printer.table(header, snapshots.iter().map(|snapshot| row(snapshot, now)).collect())?;
    Ok(Exit::DONE)
}

fn row(snapshot: &Snapshot, now: Timestamp) -> [String; 9] {
    [
        snapshot.snapshot_id.clone(),
        snapshot.names.first().cloned().unwrap_or_else(|| "-".to_owned()),
        snapshot.sandbox_id.clone(),
        state_name(snapshot.state).to_owned(),
        snapshot.mode.as_str().to_owned(),
        human_duration(list::between(snapshot.created_at, now)),
        human_bytes(snapshot.stored_bytes),
        snapshot.users.to_string(),
        snapshot.standbys.to_string(),
    ]
}

/// The state as the API writes it.
pub(crate) fn state_name(state: SnapshotState) -> &'static str {
    match state {
        SnapshotState::Storing => "storing",
        SnapshotState::Ready => "ready",
    }
}

async fn remove(context: &Context, arguments: SnapshotRemoveArguments) -> Result<Exit, Failure> {
    let api = context.api()?;
    let (mut deleted, mut failed) = (Vec::new(), Vec::new());
    for snapshot in arguments.snapshots {
        match api.delete_snapshot(&snapshot).await {
            Ok(()) => deleted.push(snapshot),
            Err(error) => failed.push(format!("{snapshot}: {}", Failure::from(error))),
        }
    }
    if context.printer.is_json() {
        context.printer.json(&json!({ "deleted": deleted, "failed": failed }))?;
    } else {
        for snapshot in &deleted {
            context.printer.line(&format!("deleted {snapshot}"))?;
        }
    }
    if failed.is_empty() {
        return Ok(Exit::DONE);
    }
    let hint = "`aenv snapshot ls` lists those that there are";
    Err(Failure::new(format!("not deleted\n  {}", failed.join("\n  "))).with_hint(hint))
}
