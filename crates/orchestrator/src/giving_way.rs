//! Who gives way when memory is short: VMs that only wait for somebody, never one that runs.
//!
//! ```text
//! the next start lacks memory, or more is committed than may be ─┐
//! the host has little left, or everything waits for memory ──────┴─▶ one after the other, until it suffices:
//!
//!   1 warm standbys       a create is served cold instead: it is slower by the start of a process
//!   2 paused sandboxes    oldest pause first: whoever stayed away longest is the least likely to be back soon; the resume is cold
//!   3 hot standbys        the next create would have been served by one, whoever it comes from
//!   4 paused sandboxes whose last save is not durable yet: that first; nothing that a loss of power would take is dropped
//! ```
//! Unless all of them together suffice, nobody gives way to a start. The order among those that have something to give is [`choose`], a pure function.

use crate::clearing;
use crate::host_memory::MemoryReading;
use crate::journal::SnapshotRecord;
use crate::node::Node;
use crate::sandbox_task::{Command, GaveWay};
use crate::snapshot::Snapshot;
use crate::stage::timed;
use crate::standby::{Readiness, StandbyPool};
use crate::table::HotSandbox;
use crate::template::Template;
use aenv_protocol::ids::SandboxId;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior};

/// Between two looks at the host's memory, and at who may have become able to give way.
const INTERVAL: Duration = Duration::from_secs(1);
/// A host on which everything waited for memory for longer than this share of the last ten seconds has too little.
const STALLED: f32 = 0.1;
/// So much more than the low-water mark must be available until standbys are made again: a quarter of it.
const RECOVERY_DIVISOR: u64 = 4;
/// How often it is told at most that the host's memory cannot be read.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// One that could give way.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Candidate<T> {
    /// Of so many bytes together.
    Standby {
        stock: T,
        readiness: Readiness,
        bytes: u64,
    },
    Paused(HotSandbox),
}

impl<T> Candidate<T> {
    fn bytes(&self) -> u64 {
        match self {
            Self::Standby { bytes, .. } => *bytes,
            Self::Paused(hot) => hot.memory_bytes,
        }
    }
}

/// Who has standbys.
#[derive(Clone)]
enum Stock {
    Template(Arc<Template>),
    Snapshot(Arc<Snapshot>),
}

impl Stock {
    fn pool(&self) -> &StandbyPool {
        match self {
            Self::Template(template) => &template.pool,
            Self::Snapshot(snapshot) => &snapshot.standbys.pool,
        }
    }

    fn memory_bytes(&self) -> u64 {
        match self {
            Self::Template(template) => template.memory_bytes(),
            Self::Snapshot(snapshot) => snapshot.read(SnapshotRecord::memory_bytes),
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Template(template) => template.file.name.clone(),
            Self::Snapshot(snapshot) => snapshot.read(|record| record.id.to_string()),
        }
    }
}

/// Until the node shuts down.
pub(crate) async fn watch(node: Arc<Node>) {
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut gauge = Gauge { low: false, told: None };
    loop {
        let look = tokio::select! {
            () = node.admission.until_lacking() => false,
            _ = interval.tick() => true,
            () = node.stopping.cancelled() => return,
        };
        let low = look && gauge.is_low(&node);
        if node.stopping.run_until_cancelled(make_room(&node, low)).await.is_none() {
            return;
        }
    }
}

/// What is known of the host's memory.
struct Gauge {
    low: bool,
    told: Option<Instant>,
}

impl Gauge {
    fn is_low(&mut self, node: &Node) -> bool {
        let reading = match node.parts.memory.read() {
            Ok(reading) => reading,
            Err(error) => {
                if self.told.is_none_or(|told| told.elapsed() > TOLD_EVERY) {
                    self.told = Some(Instant::now());
                    tracing::warn!(%error, "the host's memory cannot be read: nothing gives way to a lack of it");
                }
                MemoryReading::PLENTY
            }
        };
        let low = is_low(self.low, node.settings.low_memory_bytes, reading);
        if low != self.low {
            let available_mib = reading.available_bytes >> 20;
            match low {
                true => {
                    tracing::warn!(available_mib, stalled = %reading.stalled, "the host has little memory left");
                }
                false => tracing::info!(available_mib, "the host has memory again"),
            }
            self.low = low;
            node.admission.set_low(low);
        }
        low
    }
}

/// Whether a host has little memory left, which it had, or had not, until now.
fn is_low(was_low: bool, mark: u64, reading: MemoryReading) -> bool {
    let mark = if was_low { mark.saturating_add(mark / RECOVERY_DIVISOR) } else { mark };
    // Without a mark nothing is ever low.
    mark > 0 && (reading.available_bytes < mark || reading.stalled > STALLED)
}

/// Lets give way until what is lacking is there, or nobody is left who can. On a host that has little memory left, one at a
/// time: what that gave is seen at the next look.
async fn make_room(node: &Arc<Node>, low: bool) {
    let mut asked = HashSet::new();
    let (mut promised, mut given) = (0_u64, 0_u32);
    loop {
        let low_still = low && given == 0 && promised == 0;
        if node.admission.lacking() <= promised && !low_still {
            return;
        }
        let candidates = candidates(node, &asked);
        let possible = candidates.iter().map(Candidate::bytes).fold(promised, u64::saturating_add);
        if !low && possible < node.admission.lacking() {
            // Nobody would be helped.
            return;
        }
        let Some(candidate) = choose(candidates) else { return };
        match candidate {
            Candidate::Standby { stock, readiness, .. } => {
                // Another may have been faster.
                if let Some(standby) = stock.pool().take(readiness) {
                    tracing::info!(source = %stock.name(), ?readiness, "a standby gives way: memory is short");
                    clearing::discard(node, standby.vm).await;
                    given += 1;
                }
            }
            Candidate::Paused(hot) => {
                asked.insert(hot.id.clone());
                match ask(node, &hot.id).await {
                    Some(GaveWay::Now) => {
                        tracing::info!(sandbox = %hot.id, "the VMM of a paused sandbox gave way: memory is short");
                        given += 1;
                    }
                    Some(GaveWay::WhenDurable) => promised = promised.saturating_add(hot.memory_bytes),
                    // It goes on, or is gone: the next look tells.
                    None => {}
                }
            }
        }
    }
}

/// Asks a paused sandbox to end its VMM.
async fn ask(node: &Node, id: &SandboxId) -> Option<GaveWay> {
    let commands = node.table.commands(id).ok()?;
    let (reply, answer) = oneshot::channel();
    commands.send(Command::GiveWay(reply)).await.ok()?;
    let answered = async { answer.await.map_err(|_| crate::error::Error::SandboxNotFound(id.clone()))? };
    match timed(node.settings.deadlines.step, async { Ok::<_, crate::stage::Cause>(answered.await) }).await.0
    {
        Ok(Ok(gave)) => Some(gave),
        Ok(Err(error)) => {
            tracing::debug!(sandbox = %id, %error, "a paused sandbox did not give way");
            None
        }
        Err(cause) => {
            tracing::warn!(sandbox = %id, error = %cause, "a paused sandbox did not give way");
            None
        }
    }
}

/// All who could give way but those that were asked already.
fn candidates(node: &Node, asked: &HashSet<SandboxId>) -> Vec<Candidate<Stock>> {
    let mut found = Vec::new();
    let templates = node.templates.iter().map(|template| Stock::Template(Arc::clone(template)));
    for stock in templates.chain(node.snapshots.all().into_iter().map(Stock::Snapshot)) {
        for readiness in [Readiness::Warm, Readiness::Hot] {
            let ready = stock.pool().len(readiness) as u64;
            if ready > 0 {
                let bytes = stock.memory_bytes().saturating_mul(ready);
                found.push(Candidate::Standby { stock: stock.clone(), readiness, bytes });
            }
        }
    }
    let paused = node.table.hot().into_iter().filter(|hot| !asked.contains(&hot.id));
    found.extend(paused.map(Candidate::Paused));
    found
}

/// Who gives way next.
fn choose<T>(candidates: Vec<Candidate<T>>) -> Option<Candidate<T>> {
    let rank = |candidate: &Candidate<T>| match candidate {
        Candidate::Standby { readiness: Readiness::Warm, .. } => (1, None),
        Candidate::Paused(hot) if hot.is_durable => (2, Some(hot.saved_at)),
        Candidate::Standby { readiness: Readiness::Hot, .. } => (3, None),
        Candidate::Paused(hot) => (4, Some(hot.saved_at)),
    };
    candidates.into_iter().min_by_key(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paused(name: &str, second: i64, is_durable: bool) -> Candidate<u8> {
        let saved_at = jiff::Timestamp::from_second(second).unwrap();
        let id = name.parse().unwrap();
        Candidate::Paused(HotSandbox { id, memory_bytes: 1, saved_at, is_durable })
    }

    #[test]
    fn those_give_way_first_that_cost_users_least() {
        let standby = |readiness| Candidate::Standby { stock: 0, readiness, bytes: 1 };
        let order = [
            standby(Readiness::Warm),
            paused("iold", 10, true),
            paused("inew", 20, true),
            standby(Readiness::Hot),
            paused("iolder", 1, false),
            paused("inewer", 2, false),
        ];
        let mut left = order.to_vec();
        left.reverse();
        for expected in order {
            let chosen = choose(left.clone()).unwrap();
            assert_eq!(chosen, expected);
            left.retain(|candidate| *candidate != chosen);
        }
        assert_eq!(choose(left), None);
    }

    #[test]
    fn a_host_is_low_below_its_mark_and_until_there_is_clearly_more() {
        let with = |available_bytes, stalled| MemoryReading { available_bytes, stalled };
        for (was, reading, now) in [
            (false, with(1000, 0.0), false),
            (false, with(999, 0.0), true),
            (true, with(1200, 0.0), true),
            (true, with(1250, 0.0), false),
            (false, with(5000, 0.2), true),
            (false, MemoryReading::PLENTY, false),
        ] {
            assert_eq!(is_low(was, 1000, reading), now, "{was} {reading:?}");
        }
        assert!(!is_low(false, 0, with(0, 1.0)), "no mark was set");
    }
}
