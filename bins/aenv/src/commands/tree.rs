//! `aenv tree`: who was made from whom, sandboxes and snapshots together.
//!
//! ```text
//! ione…  running  base  3m
//! ├── sabc…  ready  after-setup  2m  12.4 MiB          a snapshot of it
//! │   ├── itwo…  running  1m                           started from that
//! │   └── ithree…  paused  1m
//! └── ifour…  running  30s                             a child of a fork
//! ```
//! Whose parent is gone is a root, and says so.

use crate::commands::{Context, list, snapshot};
use crate::failure::{Exit, Failure};
use crate::output::{human_bytes, human_duration};
use aenv_protocol::rest::{ListedSandbox, Snapshot};
use jiff::Timestamp;
use serde::Serialize;
use std::collections::BTreeMap;

/// One sandbox or snapshot, with all that was made from it.
#[derive(Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
struct Branch {
    id: String,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    state: &'static str,
    since: Timestamp,
    /// Of a snapshot: bytes of memory stored for it alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored_bytes: Option<u64>,
    /// What it was made from, when that is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    gone_parent: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    children: Vec<Branch>,
}

/// Branches by the id of what they belong to.
type Below = BTreeMap<Option<String>, Vec<Branch>>;

/// Shows the tree.
pub(crate) async fn run(context: &Context) -> Result<Exit, Failure> {
    let api = context.api()?;
    let spinner = context.printer.spinner("asking the node");
    let sandboxes = api.sandboxes(list::LIVING, &[]).await?;
    let snapshots = api.snapshots(None, None).await?;
    drop(spinner);
    let roots = grow(&sandboxes, &snapshots);
    if context.printer.is_json() {
        context.printer.json(&roots)?;
        return Ok(Exit::DONE);
    }
    if roots.is_empty() {
        context.printer.note("no sandboxes and no snapshots; `aenv start` starts one");
    }
    let now = Timestamp::now();
    for root in &roots {
        context.printer.line(&label(root, now))?;
        for line in lines(root, "", now) {
            context.printer.line(&line)?;
        }
    }
    Ok(Exit::DONE)
}

fn grow(sandboxes: &[ListedSandbox], snapshots: &[Snapshot]) -> Vec<Branch> {
    // Each belongs below what it was made from; below nothing when that is not there.
    let mut below: Below = BTreeMap::new();
    let is_sandbox = |id: &str| sandboxes.iter().any(|sandbox| sandbox.sandbox_id == id);
    for taken in snapshots {
        let parent = Some(taken.sandbox_id.as_str());
        let there = parent.filter(|id| is_sandbox(id));
        below
            .entry(there.map(str::to_owned))
            .or_default()
            .push(of_snapshot(taken, parent.filter(|_| there.is_none())));
    }
    for sandbox in sandboxes {
        let from = Some(sandbox.template_id.as_str());
        let of_snapshot = from.filter(|id| snapshots.iter().any(|taken| taken.snapshot_id == *id));
        let parent = sandbox.parent_id.as_deref();
        let there = of_snapshot.or(parent.filter(|id| is_sandbox(id)));
        below
            .entry(there.map(str::to_owned))
            .or_default()
            .push(of_sandbox(sandbox, parent.filter(|_| there.is_none())));
    }
    let mut roots = below.remove(&None).unwrap_or_default();
    sort(&mut roots);
    for root in &mut roots {
        attach(root, &mut below);
    }
    roots
}

fn attach(branch: &mut Branch, below: &mut Below) {
    branch.children = below.remove(&Some(branch.id.clone())).unwrap_or_default();
    sort(&mut branch.children);
    for child in &mut branch.children {
        attach(child, below);
    }
}

fn sort(branches: &mut [Branch]) {
    branches.sort_by(|one, other| (one.since, &one.id).cmp(&(other.since, &other.id)));
}

fn of_sandbox(sandbox: &ListedSandbox, gone_parent: Option<&str>) -> Branch {
    Branch {
        id: sandbox.sandbox_id.clone(),
        kind: "sandbox",
        name: sandbox.alias.clone(),
        state: list::state_name(sandbox.state),
        since: sandbox.started_at,
        stored_bytes: None,
        gone_parent: gone_parent.map(str::to_owned),
        children: Vec::new(),
    }
}

fn of_snapshot(taken: &Snapshot, gone_parent: Option<&str>) -> Branch {
    Branch {
        id: taken.snapshot_id.clone(),
        kind: "snapshot",
        name: taken.names.first().cloned(),
        state: snapshot::state_name(taken.state),
        since: taken.created_at,
        stored_bytes: Some(taken.stored_bytes),
        gone_parent: gone_parent.map(str::to_owned),
        children: Vec::new(),
    }
}

fn label(branch: &Branch, now: Timestamp) -> String {
    let mut parts = vec![branch.id.clone(), branch.kind.to_owned(), branch.state.to_owned()];
    parts.extend(branch.name.clone());
    parts.push(human_duration(list::between(branch.since, now)));
    parts.extend(branch.stored_bytes.map(human_bytes));
    parts.extend(branch.gone_parent.as_ref().map(|parent| format!("(of {parent}, which is gone)")));
    parts.join("  ")
}

/// What is below a branch, as it is drawn.
fn lines(branch: &Branch, indent: &str, now: Timestamp) -> Vec<String> {
    let mut drawn = Vec::new();
    let last = branch.children.len().saturating_sub(1);
    for (number, child) in branch.children.iter().enumerate() {
        let (knot, rest) = if number == last { ("└── ", "    ") } else { ("├── ", "│   ") };
        drawn.push(format!("{indent}{knot}{}", label(child, now)));
        drawn.extend(lines(child, &format!("{indent}{rest}"), now));
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;
    use aenv_protocol::rest::{PauseMode, SandboxState, SnapshotState};

    fn sandbox(id: &str, template: &str, parent: Option<&str>, second: i64) -> ListedSandbox {
        ListedSandbox {
            template_id: template.to_owned(),
            sandbox_id: id.to_owned(),
            client_id: "aenv".to_owned(),
            started_at: Timestamp::from_second(second).unwrap(),
            end_at: Timestamp::from_second(second).unwrap(),
            cpu_count: 2,
            memory_mb: 512,
            disk_size_mb: 1024,
            state: SandboxState::Running,
            envd_version: "1".to_owned(),
            alias: None,
            metadata: BTreeMap::new(),
            envd_unresponsive_at_pause: None,
            parent_id: parent.map(str::to_owned),
            lost_reason: None,
            lost_detail: None,
        }
    }

    fn taken(id: &str, of: &str, second: i64) -> Snapshot {
        Snapshot {
            snapshot_id: id.to_owned(),
            names: Vec::new(),
            sandbox_id: of.to_owned(),
            template_id: "base".to_owned(),
            alias: "base".to_owned(),
            created_at: Timestamp::from_second(second).unwrap(),
            mode: PauseMode::Full,
            state: SnapshotState::Ready,
            cpu_count: 2,
            memory_mb: 512,
            disk_size_mb: 1024,
            stored_bytes: 0,
            users: 0,
            standbys: 0,
        }
    }

    #[test]
    fn everything_is_in_the_tree_once() {
        let sandboxes = [
            sandbox("ifork", "base", Some("iroot"), 4),
            sandbox("iroot", "base", None, 1),
            sandbox("ifirst", "sone", Some("iroot"), 3),
            sandbox("ilate", "sgone", Some("iaway"), 5),
        ];
        let snapshots = [taken("sone", "iroot", 2), taken("slone", "iaway", 2), taken("sdeep", "ifirst", 6)];
        let roots = grow(&sandboxes, &snapshots);
        let ids: Vec<&str> = roots.iter().map(|root| root.id.as_str()).collect();
        assert_eq!(ids, ["iroot", "slone", "ilate"]);
        assert_eq!(roots[1].gone_parent.as_deref(), Some("iaway"));
        assert_eq!(roots[2].gone_parent.as_deref(), Some("iaway"));
        let drawn: Vec<String> = lines(&roots[0], "", Timestamp::from_second(7).unwrap());
        let starts = ["├── sone  ", "│   └── ifirst  ", "│       └── sdeep  ", "└── ifork  "];
        assert_eq!(drawn.len(), starts.len());
        for (line, start) in drawn.iter().zip(starts) {
            assert!(line.starts_with(start), "{line:?}");
        }
    }
}
