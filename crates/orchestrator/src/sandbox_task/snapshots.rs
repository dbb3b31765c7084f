//! Snapshots of a sandbox as its task sees them: taken, waited for until they stand by themselves, answered.
//!
//! ```text
//! running  ─ copied: as a pause, but the guest goes on ─┐
//! paused   ─ its last save is claimed ──────────────────┴─▶ stored, handed over (background) ─▶ answered
//!                                                              └ fails: the claim is withdrawn, the caller told why
//! ```

use super::background::SavingTrouble;
use super::transitions::{Done, Kind};
use super::{Reply, SandboxTask, answer};
use crate::error::Error;
use crate::journal::{Purpose, SnapshotRecord, Step, Tenancy};
use crate::lifecycle::{Event, Phase};
use crate::pausing::{PauseEnd, Pausing};
use crate::random;
use crate::snapshot::{Snapshot, remove_when_unused};
use crate::view::{PauseMode, PauseRequest, Stage};
use std::sync::Arc;
use std::time::Duration;

/// What is wanted of a sandbox's state.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotWish {
    pub(crate) purpose: Purpose,
    pub(crate) name: Option<(String, String)>,
    pub(crate) mode: PauseMode,
}

/// A snapshot that can be started from.
pub(crate) struct Taken {
    pub(crate) snapshot: Arc<Snapshot>,
    /// Where the time went while the guest was copied; nothing of one that was paused.
    pub(crate) stages: Vec<Stage>,
    /// How long the guest stood still; zero of one that was paused.
    pub(crate) stopped: Duration,
    /// What the sandbox was then.
    pub(crate) parent: Tenancy,
}

/// Who waits until a snapshot stands by itself.
pub(super) struct SnapshotWaiter {
    taken: Taken,
    reply: Reply<Taken>,
}

impl SnapshotWaiter {
    /// When it is settled.
    fn answer(self) {
        let gone = self.taken.snapshot.gone();
        answer(self.reply, gone.map_or(Ok(self.taken), Err));
    }

    /// It is tried on, but nobody waits for ever.
    fn give_up(self, limit: Duration) {
        let id = self.taken.snapshot.read(|record| record.id.clone());
        let reason =
            format!("not done within {limit:?}; it is tried again, and listed as ready when it is done");
        let context = format!("storing snapshot {id}, whose source ended");
        answer(self.reply, Err(Error::Internal { context, reason }));
    }
}

impl SandboxTask {
    pub(super) async fn snapshot(&mut self, wish: SnapshotWish, reply: Reply<Taken>) {
        let phase = self.vm.record.phase;
        let allowed = match phase {
            // Neither of these two changes it.
            Phase::Paused => Ok(phase),
            _ => self.allows(Event::Pause),
        };
        let is_held = phase == Phase::Running && (self.vm.machine.is_none() || self.adoption.is_some());
        let refused = match allowed {
            Err(error) => Some(error),
            Ok(_) if is_held || self.work.is_some() => Some(Error::Transitioning(self.vm.record.id.clone())),
            Ok(_) => None,
        };
        if let Some(error) = refused {
            return answer(reply, Err(error));
        }
        match self.new_snapshot(wish) {
            Err(error) => answer(reply, Err(error)),
            Ok(record) if phase == Phase::Paused => self.claim_save(record, reply).await,
            Ok(record) => self.begin_copy(record, reply),
        }
    }

    fn new_snapshot(&self, wish: SnapshotWish) -> Result<SnapshotRecord, Error> {
        let record = &self.vm.record;
        let id = random::snapshot_id().map_err(|error| Error::Internal {
            context: "naming a snapshot".to_owned(),
            reason: error.to_string(),
        })?;
        Ok(SnapshotRecord {
            id,
            purpose: wish.purpose,
            name: wish.name,
            source: record.id.clone(),
            template_id: record.template_id.clone(),
            template_name: record.template_name.clone(),
            created_at: jiff::Timestamp::now(),
            mode: wish.mode,
            spec: record.spec.clone(),
            disk_mib: record.disk_mib,
            root_bytes: record.root_bytes,
            binding: self.node.binding.clone(),
            access_token: self.tenancy.access_token.clone(),
            parts: None,
            stored_bytes: 0,
            is_deleted: false,
        })
    }

    fn begin_copy(&mut self, snapshot: SnapshotRecord, reply: Reply<Taken>) {
        let request = PauseRequest { mode: snapshot.mode, ..PauseRequest::default() };
        self.snapshotter = Some(reply);
        let pausing = Pausing {
            node: Arc::clone(&self.node),
            vm: self.vm.clone(),
            tenancy: self.tenancy.clone(),
            request,
            snapshot: Some(snapshot),
            view: self.view(),
            ended: self.ended.clone(),
            cancelled: self.new_cancel(),
        };
        self.work =
            Some((Kind::Snapshot, Box::pin(async move { Done::Copied(Box::new(pausing.run().await)) })));
    }

    /// A paused sandbox: what was saved last is what is wanted.
    async fn claim_save(&mut self, mut snapshot: SnapshotRecord, reply: Reply<Taken>) {
        let mut record = self.vm.record.clone();
        let Some(save) = record.saves.kept.last_mut() else {
            return answer(reply, Err(Error::Transitioning(record.id)));
        };
        if snapshot.mode == PauseMode::Filesystem && save.mode == PauseMode::Full && !save.flushed {
            let reason = "it had not flushed its disk before it was paused, and what it had not written is in its memory \
                          only: keep that too, or resume the sandbox first";
            return answer(reply, Err(Error::GuestUnresponsive { id: record.id, reason: reason.to_owned() }));
        }
        if save.mode == PauseMode::Filesystem {
            snapshot.mode = PauseMode::Filesystem;
        }
        (snapshot.created_at, snapshot.binding) = (save.saved_at, save.binding.clone());
        save.claims.push(snapshot.id.clone());
        let journalled = self.node.journal.put_with_snapshots(&record, std::slice::from_ref(&snapshot)).await;
        if let Err(error) = journalled {
            let context = "taking a snapshot of a paused sandbox".to_owned();
            return answer(reply, Err(Error::Internal { context, reason: error.to_string() }));
        }
        self.vm.record = record;
        self.wait_for(snapshot, Vec::new(), Duration::ZERO, reply);
    }

    /// Takes over what came of copying a guest that runs.
    pub(super) fn copy_done(&mut self, end: PauseEnd) {
        let PauseEnd { vm, tenancy, result, stages, snapshot, stood_still } = end;
        (self.vm, self.tenancy) = (vm, tenancy);
        let reply = self.snapshotter.take();
        if let (Ok(()), Some(snapshot)) = (&result, &snapshot) {
            let stopped = self.vm.record.saves.last().map_or(Duration::ZERO, |save| save.stopped);
            tracing::info!(sandbox = %self.vm.record.id, snapshot = %snapshot.id, ?stopped, "snapshot taken");
            match reply {
                Some(reply) => self.wait_for(snapshot.clone(), stages.into_vec(), stopped, reply),
                None => drop(self.node.snapshots.enter(snapshot.clone())),
            }
        } else if let (Err(error), Some(reply)) = (result, reply) {
            answer(reply, Err(error));
        }
        if stood_still && !self.is_killed() {
            self.make_sure_it_runs();
        }
        self.node.table.update(self.view());
    }

    fn wait_for(
        &mut self,
        record: SnapshotRecord,
        stages: Vec<Stage>,
        stopped: Duration,
        reply: Reply<Taken>,
    ) {
        let (snapshot, parent) = (self.node.snapshots.enter(record), self.tenancy.clone());
        let taken = Taken { snapshot, stages, stopped, parent };
        self.snapshot_waiters.push(SnapshotWaiter { taken, reply });
        self.save_on(true);
    }

    /// Tells those whose snapshot stands by itself by now.
    pub(super) fn answer_snapshot_waiters(&mut self) {
        let is_over = |waiter: &mut SnapshotWaiter| waiter.taken.snapshot.is_settled();
        for waiter in self.snapshot_waiters.extract_if(.., is_over) {
            waiter.answer();
        }
    }

    /// The sandbox ends, and its snapshots are handed over by who clears it: they are waited for beside that.
    pub(super) fn leave_snapshot_waiters(&mut self) {
        for waiter in self.snapshot_waiters.drain(..) {
            let node = Arc::clone(&self.node);
            let limit = node.settings.deadlines.memory;
            self.node.tasks.spawn(async move {
                let settled = tokio::time::timeout(limit, waiter.taken.snapshot.settled());
                match node.stopping.run_until_cancelled(settled).await {
                    Some(Ok(())) => waiter.answer(),
                    Some(Err(_)) => waiter.give_up(limit),
                    // Dropped by a shutdown, which the caller is told of.
                    None => {}
                }
            });
        }
    }

    /// What cannot be stored is no snapshot: whoever waits is told why, and nothing of it stays. Those that do not need the step
    /// which failed are waited for.
    pub(super) async fn withdraw_snapshots(&mut self, step: &Step, trouble: &SavingTrouble) {
        let behind = self.vm.record.saves.claims_behind(step);
        let needs_it = |waiter: &mut SnapshotWaiter| {
            behind.contains(&waiter.taken.snapshot.read(|record| record.id.clone()))
        };
        let waiters: Vec<_> = self.snapshot_waiters.extract_if(.., needs_it).collect();
        if waiters.is_empty() {
            return;
        }
        let mut record = self.vm.record.clone();
        let mut withdrawn = Vec::new();
        for SnapshotWaiter { taken, reply } in waiters {
            let snapshot = taken.snapshot.record();
            record.saves.drop_claim(&snapshot.id);
            withdrawn.push((taken.snapshot, SnapshotRecord { is_deleted: true, ..snapshot }, reply));
        }
        record.saves.drop_unneeded(&record.present);
        let records: Vec<_> = withdrawn.iter().map(|(_, record, _)| record.clone()).collect();
        match self.node.journal.put_with_snapshots(&record, &records).await {
            Ok(()) => self.vm.record = record,
            // The claims stay: what was told to have failed may come to be after all, and is in the list then.
            Err(error) => {
                tracing::warn!(sandbox = %self.vm.record.id, %error, "snapshots that failed could not be withdrawn");
                for (_, _, reply) in withdrawn {
                    answer(reply, Err(trouble.to_error("taking a snapshot")));
                }
                return;
            }
        }
        for (snapshot, record, reply) in withdrawn {
            snapshot.replace(record);
            self.node.tasks.spawn(remove_when_unused(Arc::clone(&self.node), snapshot));
            answer(reply, Err(trouble.to_error("taking a snapshot")));
        }
    }
}
