//! The figures of a node: what it has for sandboxes, and what of it is taken. Owns nothing.

use crate::node::Node;
use crate::standby::Readiness;
use crate::view::{Capacity, SandboxState};

/// As it is now.
pub(crate) fn measure(node: &Node) -> Capacity {
    let (limits, taken) = node.admission.figures();
    let reading = node.parts.memory.read();
    if let Err(error) = &reading {
        tracing::debug!(%error, "the host's memory cannot be read");
    }
    let states: Vec<SandboxState> = node.table.list().into_iter().map(|view| view.state).collect();
    let count = |wanted| states.iter().filter(|state| **state == wanted).count();
    let of_templates = |readiness| node.templates.iter().map(move |template| template.pool.len(readiness));
    let of_snapshots = node.snapshots.all().into_iter().map(|snapshot| snapshot.standbys.ready());
    Capacity {
        memory_limit_bytes: (limits.bytes < u64::MAX).then_some(limits.bytes),
        committed_bytes: taken.bytes,
        available_bytes: reading.ok().map(|reading| reading.available_bytes),
        low_memory_bytes: node.settings.low_memory_bytes,
        starting: taken.starting,
        max_starting: limits.places,
        waiting: taken.waiting,
        running: count(SandboxState::Running),
        paused: count(SandboxState::Paused),
        hot: node.table.hot().len(),
        standbys: of_templates(Readiness::Hot).chain(of_templates(Readiness::Warm)).chain(of_snapshots).sum(),
    }
}
