//! Makes a sandbox: from a standby if there is one, else from the template's capture, or from the snapshot.
//!
//! ```text
//! room on the disk?
//!  │ a hot standby is there
//!  ├──────────▶ claim (journal) ────────────────▶ resume ─▶ init ─▶ Running                 hot
//!  │ none           │ failed
//!  ├─▶ turn ────────│─▶ claim (journal) ─▶ load ─▶ resume ─▶ init ─▶ Running                 warm
//!  │   none         │           │ failed
//!  └─▶ turn, memory ┴───────────┘
//!        ├─▶ slot ∥ disk ─▶ prepare ─▶ load ─▶ resume ─▶ init ─▶ Running                     cold
//!        └─▶ slot ∥ disk ─▶ boot ─▶ guest daemon answers ─▶ init ─▶ Running      cold, of a snapshot without memory
//! ```
//!
//! Only a hot claim needs no turn: the others make an emulating host busy. The memory of a standby is counted already. After
//! one standby failed no other is tried: it may be no better, and the caller has waited enough.
//!
//! Runs in the sandbox's own task, so a caller that goes away stops nothing. A failed step, a kill or a shutdown in
//! between undoes what was made.

use crate::admission::{Commitment, Permit};
use crate::clearing;
use crate::error::Error;
use crate::greeting;
use crate::guest_channel::GuestChannel;
use crate::journal::{Role, Tenancy};
use crate::lifecycle::Phase;
use crate::node::Node;
use crate::random;
use crate::sandbox_task::{Command, QUEUE, SandboxTask, end_after};
use crate::source::Source;
use crate::stage::{Cause, Failure, Stages};
use crate::standby::{self, Readiness, Standby, StandbyPool};
use crate::view::{CreateRequest, Created, Tier};
use crate::vm::Vm;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Starts the making; the result arrives when the sandbox runs.
pub(crate) fn spawn(
    node: &Arc<Node>,
    request: CreateRequest,
    source: Source,
) -> oneshot::Receiver<Result<Created, Error>> {
    let (reply, result) = oneshot::channel();
    node.tasks.spawn(run(Arc::clone(node), request, source, reply));
    result
}

async fn run(
    node: Arc<Node>,
    request: CreateRequest,
    source: Source,
    reply: oneshot::Sender<Result<Created, Error>>,
) {
    let (sender, mut commands) = mpsc::channel(QUEUE);
    let late = sender.clone();
    let create = Create {
        node: &node,
        request: &request,
        source: &source,
        commands: sender,
        cancelled: node.stopping.child_token(),
    };
    let mut killers = Vec::new();
    let made = {
        let work = create.make();
        tokio::pin!(work);
        loop {
            tokio::select! {
                made = &mut work => break made,
                // Never ends: `create` holds a sender.
                Some(command) = commands.recv() => match command {
                    Command::Kill(reply) => {
                        create.cancelled.cancel();
                        killers.push(reply);
                    }
                    // Dropping the reply says that there is no such sandbox yet.
                    Command::SetTimeout(..)
                    | Command::Extend(..)
                    | Command::Pause(..)
                    | Command::Snapshot(..)
                    | Command::Resume(..)
                    | Command::Release(..)
                    | Command::GiveWay(..) => {}
                },
            }
        }
    };
    drop(create);
    match made {
        Ok(made) => {
            source.count_sandbox();
            // Kills that came after the last look at them: the sandbox exists now, and they are carried out on it.
            for killer in killers {
                if late.try_send(Command::Kill(killer)).is_err() {
                    tracing::warn!(sandbox = %made.vm.record.id, "more kills than a sandbox's queue holds");
                }
            }
            drop(late);
            let Made { vm, tenancy, deadline, tier, stages } = made;
            let task = SandboxTask::new(Arc::clone(&node), vm, tenancy, deadline, commands);
            let created = Created { sandbox: task.view(), tier, stages: stages.into_vec() };
            tracing::info!(sandbox = %created.sandbox.id, template = %source.name(), tier = tier.as_str(), "sandbox runs");
            // What maps its memory says so itself.
            drop(source);
            if reply.send(Ok(created)).is_err() {
                tracing::info!("the caller of a create went away; the sandbox stays until its time is over");
            }
            task.run().await;
        }
        Err(failure) => {
            let stopping = node.stopping.is_cancelled();
            tracing::warn!(template = %source.name(), error = %failure, "no sandbox made");
            let error = if stopping { Error::ShuttingDown } else { failure.into_error("making a sandbox") };
            for killer in killers {
                drop(killer.send(Ok(())));
            }
            drop(reply.send(Err(error)));
        }
    }
}

/// One create under way.
struct Create<'a> {
    node: &'a Arc<Node>,
    request: &'a CreateRequest,
    source: &'a Source,
    commands: mpsc::Sender<Command>,
    /// A kill or a shutdown: to be looked at between the steps.
    cancelled: CancellationToken,
}

/// A sandbox that runs.
struct Made {
    vm: Vm,
    tenancy: Tenancy,
    deadline: Instant,
    tier: Tier,
    stages: Stages,
}

impl Create<'_> {
    async fn make(&self) -> Result<Made, Failure> {
        self.node.admission.check_room(&self.node.dir)?;
        let mut stages = Stages::default();
        self.source.note_start(self.node);
        let Some(pool) = self.source.pool() else {
            let Permit { place: _place, memory } = self.turn(self.source.memory_bytes(), &mut stages).await?;
            return Ok(self.cold_start(memory, &mut stages).await?.with(stages));
        };
        let hot = pool.take(Readiness::Hot);
        let mut may_claim = hot.is_none();
        if let Some(hot) = hot
            && let Some(made) = self.claim_or_discard(pool, hot, &mut stages).await?
        {
            return Ok(made.with(stages));
        }
        if may_claim && let Some(warm) = pool.take(Readiness::Warm) {
            let place = match self.turn(0, &mut stages).await {
                Ok(permit) => permit.place,
                Err(failure) => {
                    self.give_back(warm).await;
                    return Err(failure);
                }
            };
            if let Some(made) = self.claim_or_discard(pool, warm, &mut stages).await? {
                return Ok(made.with(stages));
            }
            // Given back before memory is waited for: it may be wanted by somebody who has that.
            drop(place);
            may_claim = false;
        }
        let bytes = self.source.memory_bytes();
        let turn = self.turn(bytes, &mut stages);
        let Permit { place, memory } = tokio::select! {
            permit = turn => permit?,
            // Made meanwhile: there may be no memory for another one.
            hot = pool.next_hot(), if may_claim => {
                if let Some(made) = self.claim_or_discard(pool, hot, &mut stages).await? {
                    return Ok(made.with(stages));
                }
                may_claim = false;
                self.turn(bytes, &mut stages).await?
            }
        };
        // One may have come at the same moment.
        let standby = if may_claim { pool.take_best() } else { None };
        let made = match standby {
            Some(standby) => self.claim_or_discard(pool, standby, &mut stages).await?,
            None => None,
        };
        let made = match made {
            Some(made) => made,
            None => self.cold_start(memory, &mut stages).await?,
        };
        drop(place);
        Ok(made.with(stages))
    }

    /// Waits for the turn to start a VM, and for memory that is not counted yet.
    async fn turn(&self, bytes: u64, stages: &mut Stages) -> Result<Permit, Failure> {
        let asked = Instant::now();
        let permit = tokio::select! {
            permit = self.node.admission.for_caller(bytes) => permit?,
            () = self.cancelled.cancelled() => return Err(Failure::new("admission", Cause::Cancelled)),
        };
        stages.add("admission", asked.elapsed());
        Ok(permit)
    }

    /// A standby that was taken, and for which no turn came, is as good as before.
    async fn give_back(&self, standby: Standby) {
        match self.cancelled.is_cancelled() {
            false => standby::put(self.node, self.source, standby),
            true => clearing::discard(self.node, standby.vm).await,
        }
    }

    /// Makes a standby the sandbox. None when it was of no use and is gone; an error when the create is to end.
    async fn claim_or_discard(
        &self,
        pool: &StandbyPool,
        standby: Standby,
        stages: &mut Stages,
    ) -> Result<Option<Made>, Failure> {
        let Standby { mut vm, channel, readiness, .. } = standby;
        self.node.table.begin(&vm.record.id, self.commands.clone());
        let result = self.claim(&mut vm, &channel, readiness, stages).await;
        match self.keep_or_undo(vm, result, readiness.tier()).await {
            Ok(made) => {
                pool.served(readiness);
                Ok(Some(made))
            }
            Err(failure) if self.cancelled.is_cancelled() => Err(failure),
            Err(failure) => {
                pool.failed(readiness);
                tracing::warn!(source = %self.source.name(), ?readiness, error = %failure, "a standby failed when it was claimed; making a sandbox without one");
                Ok(None)
            }
        }
    }

    async fn claim(
        &self,
        vm: &mut Vm,
        channel: &GuestChannel,
        readiness: Readiness,
        stages: &mut Stages,
    ) -> Result<(Tenancy, Instant), Failure> {
        let tenancy = self.tenancy()?;
        vm.record.role = Role::Sandbox;
        vm.record.phase = Phase::Starting;
        vm.record.tenancy = Some(tenancy.clone());
        let limit = self.node.settings.deadlines.step;
        if !stages.run("claim", limit, self.node.journal.claim(&vm.record)).await? {
            let reason = "the journal knows no such standby".to_owned();
            return Err(Failure::new("claim", Cause::Unexpected(reason)));
        }
        match readiness {
            Readiness::Hot => {}
            Readiness::Warm => self.load(vm, stages).await?,
        }
        self.wake(vm, channel, tenancy, stages).await
    }

    async fn cold_start(
        &self,
        memory: Option<Arc<Commitment>>,
        stages: &mut Stages,
    ) -> Result<Made, Failure> {
        let tenancy = self.tenancy()?;
        let id = random::sandbox_id().map_err(|error| Failure::new("journal", error))?;
        let mut record = self.source.new_record(id);
        record.tenancy = Some(tenancy.clone());
        self.node.table.begin(&record.id, self.commands.clone());
        let mut vm = Vm::with_memory(record, memory);
        vm.snapshot = self.source.used();
        let result = self.start_cold(&mut vm, tenancy, stages).await;
        self.keep_or_undo(vm, result, Tier::Cold).await
    }

    async fn start_cold(
        &self,
        vm: &mut Vm,
        tenancy: Tenancy,
        stages: &mut Stages,
    ) -> Result<(Tenancy, Instant), Failure> {
        vm.make(self.node, &self.source.origin(), stages).await?;
        let channel = vm.channel()?;
        if self.source.boots() {
            return self.greet_booted(vm, &channel, tenancy, stages).await;
        }
        self.load(vm, stages).await?;
        self.wake(vm, &channel, tenancy, stages).await
    }

    async fn load(&self, vm: &Vm, stages: &mut Stages) -> Result<(), Failure> {
        self.go_on("load")?;
        vm.load(self.node, stages).await
    }

    /// Waits for the daemon of a guest that boots.
    async fn greet_booted(
        &self,
        vm: &mut Vm,
        channel: &GuestChannel,
        tenancy: Tenancy,
        stages: &mut Stages,
    ) -> Result<(Tenancy, Instant), Failure> {
        let limit = self.node.settings.deadlines.boot;
        self.deny_egress(vm, stages).await?;
        let answered = stages.run("guest", limit, channel.wait_until_healthy(limit));
        tokio::select! {
            answer = vm.while_alive("guest", answered) => answer?,
            () = self.cancelled.cancelled() => return Err(Failure::new("guest", Cause::Cancelled)),
        }
        self.greet(vm, channel, tenancy, stages).await
    }

    async fn deny_egress(&self, vm: &Vm, stages: &mut Stages) -> Result<(), Failure> {
        if !self.request.internet_access {
            let slot = &vm.slot("deny_egress")?.name;
            let limit = self.node.settings.deadlines.step;
            stages.run("deny_egress", limit, self.node.parts.slots.deny_egress(slot)).await?;
        }
        Ok(())
    }

    /// Turns a stopped VM without identity into a running sandbox.
    async fn wake(
        &self,
        vm: &mut Vm,
        channel: &GuestChannel,
        tenancy: Tenancy,
        stages: &mut Stages,
    ) -> Result<(Tenancy, Instant), Failure> {
        self.go_on("resume")?;
        self.deny_egress(vm, stages).await?;
        vm.resume(self.node, stages).await?;
        self.greet(vm, channel, tenancy, stages).await
    }

    /// Tells a guest that runs who it is from now on.
    async fn greet(
        &self,
        vm: &mut Vm,
        channel: &GuestChannel,
        mut tenancy: Tenancy,
        stages: &mut Stages,
    ) -> Result<(Tenancy, Instant), Failure> {
        let deadlines = &self.node.settings.deadlines;
        let init = greeting::of_sandbox(&vm.record.id, &vm.record.template_id, &tenancy)
            .map_err(|error| Failure::new("init", error))?;
        let answered = stages.run(
            "init",
            deadlines.init,
            channel.init_as(&init, self.source.access_token(), deadlines.init),
        );
        tokio::select! {
            answer = vm.while_alive("init", answered) => answer?,
            () = self.cancelled.cancelled() => return Err(Failure::new("init", Cause::Cancelled)),
        }
        self.go_on("journal")?;
        let (deadline, end_at) = end_after(self.request.timeout);
        (tenancy.started_at, tenancy.end_at) = (jiff::Timestamp::now(), end_at);
        vm.record.tenancy = Some(tenancy.clone());
        vm.started(self.node, stages).await?;
        // One that booted maps nothing of its memory.
        vm.let_snapshot_go();
        Ok((tenancy, deadline))
    }

    async fn keep_or_undo(
        &self,
        vm: Vm,
        result: Result<(Tenancy, Instant), Failure>,
        tier: Tier,
    ) -> Result<Made, Failure> {
        match result {
            Ok((tenancy, deadline)) => Ok(Made { vm, tenancy, deadline, tier, stages: Stages::default() }),
            Err(failure) => {
                self.node.table.remove(&vm.record.id);
                clearing::discard(self.node, vm).await;
                Err(failure)
            }
        }
    }

    fn go_on(&self, stage: &'static str) -> Result<(), Failure> {
        if self.cancelled.is_cancelled() { Err(Failure::new(stage, Cause::Cancelled)) } else { Ok(()) }
    }

    fn tenancy(&self) -> Result<Tenancy, Failure> {
        let access_token = match self.request.secure {
            true => Some(random::access_token().map_err(|error| Failure::new("claim", error))?),
            false => None,
        };
        Ok(Tenancy {
            started_at: jiff::Timestamp::now(),
            end_at: end_after(self.request.timeout).1,
            life_time: self.request.timeout,
            metadata: self.request.metadata.clone(),
            env_vars: self.request.env_vars.clone(),
            access_token,
            internet_access: self.request.internet_access,
            on_timeout: self.request.on_timeout,
            auto_resume: self.request.auto_resume,
        })
    }
}

impl Made {
    fn with(self, stages: Stages) -> Self {
        Self { stages, ..self }
    }
}
