//! A walk over every step of what a user does: at each of them the node, the block service or the VMMs are killed, and afterwards
//! everything is where it was promised to be.
//!
//! ```text
//! first run      no fault: counts the steps (commits of the journal; requests to the block service; calls to VMMs, networks, guests)
//! one run each   at step n ─┬─ the node is killed, before it or after it ──────────▶ the next node ─┐
//!                           ├─ the block service is killed, before it or after it ─▶ the same node ─┼─▶ the sandbox is looked at,
//!                           └─ all VMMs are killed ────────────────────────────────▶ the same node ─┘   used, ended; nothing is left
//! ```
//! The stories are written down; their steps are not.

use crate::crash::{crash, runtime};
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    ChildRequest, CreateRequest, Durability, Error, ForkRequest, OnTimeout, Orchestrator, PauseMode,
    PauseRequest, ResumeRequest, SandboxState, SandboxView, SnapshotRequest, SnapshotState,
};
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_testkit::{Fault, Operation};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Who is killed at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    NodeBefore,
    NodeAfter,
    StoreBefore,
    StoreAfter,
    Vmms,
}

/// What a user does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Story {
    /// Everything with its memory: pauses, hot and cold resumes, a release, a kill.
    Memory,
    /// From a standby; saved without its memory by a caller and by its time, booted, woken.
    DiskAlone,
    /// Its VMM dies in a pause: it is as an earlier save is, and used on.
    FallBack,
    /// Ended by its time; another one ended while it is paused.
    Endings,
    /// Snapshots while it runs and while it is paused, a fork, what is started from them, deletions.
    Copies,
}

/// What the user was told last, and may find therefore.
#[derive(Debug, Clone, Default)]
struct Told {
    id: Option<SandboxId>,
    /// What was written last.
    value: u8,
    /// What was written before each pause.
    saved: Vec<u8>,
    /// Whether what was written is in memory too.
    not_in_memory: bool,
    running: bool,
    paused: bool,
    gone: bool,
    /// Snapshots that were told to be there, and what is in them.
    snapshots: Vec<(TemplateId, u8)>,
    /// Those of them that were to be deleted.
    deleted: Vec<TemplateId>,
}

struct User<'a> {
    world: &'a World,
    node: &'a Orchestrator,
    told: &'a Mutex<Told>,
}

/// Why a story ended before its end: something was killed that it needs.
type Ended = Result<(), String>;

impl User<'_> {
    fn note(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock().unwrap());
    }

    fn id(&self) -> SandboxId {
        self.told.lock().unwrap().id.clone().unwrap()
    }

    async fn create(&self, on_timeout: OnTimeout) -> Ended {
        let wanted = CreateRequest { timeout: HOUR, on_timeout, internet_access: false, ..request() };
        let id = self.node.create(wanted).await.map_err(text)?.sandbox.id;
        self.note(|told| *told = Told { id: Some(id), running: true, ..Told::default() });
        Ok(())
    }

    fn write(&self, value: u8) -> Ended {
        if !self.world.host.try_write(&World::vm_name(&self.id()), 1, value) {
            return Err("its VM is gone".to_owned());
        }
        self.note(|told| told.value = value);
        Ok(())
    }

    fn pausing(&self, mode: PauseMode) {
        self.note(|told| {
            told.paused = true;
            told.saved.push(told.value);
            told.not_in_memory |= mode == PauseMode::Filesystem;
        });
    }

    async fn pause(&self, mode: PauseMode, durability: Durability) -> Ended {
        self.pausing(mode);
        let request = PauseRequest { mode, durability, ..PauseRequest::default() };
        self.node.pause(&self.id(), request).await.map_err(text)?;
        self.note(|told| told.running = false);
        Ok(())
    }

    /// By its time: whoever waits sees it paused, or learns that it is lost.
    async fn time_out(&self, mode: PauseMode, number: u64) -> Ended {
        self.pausing(mode);
        let id = self.id();
        self.node.set_timeout(&id, Duration::ZERO).await.map_err(text)?;
        let mut view = self.node.get(&id).map_err(text)?;
        eventually("it is paused", || match self.node.get(&id) {
            Ok(now) => {
                view = now;
                view.saved.as_ref().is_some_and(|saved| saved.number >= number || saved.fallback.is_some())
                    && view.state == SandboxState::Paused
            }
            Err(_) => true,
        })
        .await;
        self.node.get(&id).map_err(text)?;
        self.note(|told| told.running = false);
        Ok(())
    }

    async fn resume(&self, reboot: bool) -> Ended {
        self.note(|told| {
            told.running = true;
            told.not_in_memory |= reboot;
        });
        let request = ResumeRequest { timeout: HOUR, reboot };
        self.node.resume(&self.id(), request).await.map_err(text)?;
        self.note(|told| told.paused = false);
        Ok(())
    }

    async fn release(&self) -> Ended {
        self.node.release(&self.id()).await.map_err(text)
    }

    async fn kill(&self) -> Ended {
        self.note(|told| told.gone = true);
        self.node.kill(&self.id()).await.map_err(text)?;
        self.note(|told| (told.running, told.paused) = (false, false));
        Ok(())
    }

    async fn live(&self, story: Story) -> Ended {
        match story {
            Story::Memory => self.memory().await,
            Story::DiskAlone => self.disk_alone().await,
            Story::FallBack => self.fall_back().await,
            Story::Endings => self.endings().await,
            Story::Copies => self.copies().await,
        }
    }

    async fn memory(&self) -> Ended {
        self.create(OnTimeout::Pause(PauseMode::Full)).await?;
        self.write(1)?;
        self.pause(PauseMode::Full, Durability::Process).await?;
        self.resume(false).await?;
        self.write(2)?;
        self.pause(PauseMode::Full, Durability::Local).await?;
        self.release().await?;
        self.resume(false).await?;
        self.write(3)?;
        self.time_out(PauseMode::Full, 3).await?;
        self.kill().await
    }

    async fn disk_alone(&self) -> Ended {
        self.create(OnTimeout::Pause(PauseMode::Filesystem)).await?;
        self.write(1)?;
        self.pause(PauseMode::Filesystem, Durability::Process).await?;
        self.resume(false).await?;
        self.write(2)?;
        self.pause(PauseMode::Full, Durability::Process).await?;
        self.resume(true).await?;
        self.write(3)?;
        self.time_out(PauseMode::Filesystem, 3).await?;
        self.resume(false).await?;
        self.kill().await
    }

    async fn fall_back(&self) -> Ended {
        self.create(OnTimeout::Kill).await?;
        self.write(1)?;
        self.pause(PauseMode::Full, Durability::Local).await?;
        self.resume(false).await?;
        self.write(2)?;
        self.pausing(PauseMode::Full);
        self.world.host.fail_call(Operation::Stop, 0, Fault::Die);
        let paused = self.node.pause(&self.id(), PauseRequest::default()).await;
        if paused.is_ok() {
            return Err("the planned death was another's".to_owned());
        }
        let id = self.id();
        let state = || self.node.list().into_iter().find(|view| view.id == id).map(|view| view.state);
        eventually("it is as its save is", || state() != Some(SandboxState::Running)).await;
        self.note(|told| (told.running, told.value) = (true, 1));
        self.resume(false).await?;
        self.write(3)?;
        self.pause(PauseMode::Full, Durability::Process).await?;
        self.release().await?;
        self.resume(false).await?;
        self.kill().await
    }

    /// A VMM that dies in the middle leaves it as its last save is.
    fn copying(&self) {
        self.note(|told| {
            told.paused = true;
            told.saved.push(told.value);
        });
    }

    async fn snapshot(&self) -> Result<TemplateId, String> {
        self.copying();
        let wanted = SnapshotRequest { name: None, mode: PauseMode::Full };
        let id = self.node.snapshot(&self.id(), wanted).await.map_err(text)?.snapshot.id;
        self.note(|told| told.snapshots.push((id.clone(), told.value)));
        Ok(id)
    }

    async fn delete(&self, snapshot: &TemplateId) -> Ended {
        self.note(|told| told.deleted.push(snapshot.clone()));
        self.node.delete_snapshot(snapshot.as_str()).await.map_err(text)
    }

    async fn child(&self, of: &TemplateId) -> Ended {
        let wanted = CreateRequest { template: of.to_string(), timeout: HOUR, ..request() };
        let id = self.node.create(wanted).await.map_err(text)?.sandbox.id;
        self.node.kill(&id).await.map_err(text)
    }

    async fn fork(&self) -> Ended {
        self.copying();
        let wanted = ForkRequest { timeout: HOUR, children: vec![ChildRequest::default(); 2] };
        for child in self.node.fork(&self.id(), wanted).await.map_err(text)?.children {
            self.node.kill(&child.map_err(text)?.sandbox.id).await.map_err(text)?;
        }
        Ok(())
    }

    async fn copies(&self) -> Ended {
        self.create(OnTimeout::Kill).await?;
        self.write(1)?;
        let first = self.snapshot().await?;
        self.write(2)?;
        self.fork().await?;
        self.pause(PauseMode::Full, Durability::Process).await?;
        let second = self.snapshot().await?;
        self.delete(&first).await?;
        self.kill().await?;
        self.child(&second).await?;
        self.delete(&second).await
    }

    async fn endings(&self) -> Ended {
        self.create(OnTimeout::Kill).await?;
        self.note(|told| told.gone = true);
        self.node.set_timeout(&self.id(), Duration::ZERO).await.map_err(text)?;
        let id = self.id();
        eventually("it is gone", || self.node.get(&id).is_err()).await;
        self.create(OnTimeout::Kill).await?;
        self.write(1)?;
        self.pause(PauseMode::Full, Durability::Process).await?;
        self.kill().await
    }
}

#[expect(clippy::needless_pass_by_value, reason = "errors are mapped by it")]
fn text(error: Error) -> String {
    error.to_string()
}

/// What is the same in all runs of a walk.
#[derive(Debug, Clone, Copy)]
struct Walk {
    story: Story,
    standbys: usize,
}

impl Walk {
    async fn work(self, world: &World, told: &Mutex<Told>) -> (Orchestrator, Ended) {
        let node = world.start(self.standbys).await;
        let ended = User { world, node: &node, told }.live(self.story).await;
        if ended.is_ok() {
            // What is still to be removed is walked over too.
            world.only(self.standbys).await;
        }
        (node, ended)
    }

    /// Everything without a fault; how many steps there are, and how many of them are requests to the block service.
    fn count(self, keeps_log: bool) -> (usize, usize) {
        runtime().block_on(async {
            let world = World::with_store(keeps_log).await;
            let before = world.host.log().len();
            let told = Mutex::default();
            let (node, ended) = self.work(&world, &told).await;
            ended.unwrap();
            self.check(&world, &node, &told, "without a fault").await;
            let log = world.host.log().split_off(before);
            (log.len(), log.iter().filter(|operation| operation.is_of_store()).count())
        })
    }

    fn all(self, victim: Victim) {
        let mut hits = 0;
        let counts = [self.count(false), self.count(true)];
        let of_victim = |(all, of_store): (usize, usize)| match victim {
            Victim::StoreBefore | Victim::StoreAfter => of_store,
            _ => all,
        };
        let steps = counts.map(of_victim).into_iter().max().unwrap();
        for at in 0..steps {
            // Each step is seen with both kinds of VMMs: killed before a step is killed after the one before.
            let keeps_log = (at % 2 == 0) == matches!(victim, Victim::NodeBefore | Victim::StoreBefore);
            let what = format!("{victim:?} at {at} of {steps}, {self:?}, log {keeps_log}");
            hits += usize::from(match victim {
                Victim::NodeBefore => self.kill_node(keeps_log, at, Fault::HangBefore, &what),
                Victim::NodeAfter => self.kill_node(keeps_log, at, Fault::LoseReply, &what),
                _ => self.kill_beside_node(keeps_log, at, victim, &what),
            });
        }
        assert!(hits * 10 >= steps * 8, "of {steps} steps only {hits} were seen");
    }

    /// The node is killed at a step. False when its work ended before.
    fn kill_node(self, keeps_log: bool, at: usize, fault: Fault, what: &str) -> bool {
        let world = runtime().block_on(World::with_store(keeps_log));
        let told = Arc::new(Mutex::default());
        let node = runtime();
        world.host.fail_any(at, fault);
        let hung = node.block_on(async {
            tokio::select! {
                () = world.host.wait_for_hang(1) => true,
                _ = self.work(&world, &told) => false,
            }
        });
        crash(node);
        world.host.heal();
        runtime().block_on(async {
            let node = world.start(self.standbys).await;
            self.check(&world, &node, &told, what).await;
        });
        hung
    }

    /// Something else is killed at a step, and the node has to put up with it.
    fn kill_beside_node(self, keeps_log: bool, at: usize, victim: Victim, what: &str) -> bool {
        runtime().block_on(async {
            let world = World::with_store(keeps_log).await;
            let before = world.host.log().len();
            match victim {
                Victim::StoreBefore => world.host.fail_store(at, Fault::Fail),
                Victim::StoreAfter => world.host.fail_store(at, Fault::Die),
                _ => world.host.fail_any(at, Fault::EndVms),
            }
            let told = Mutex::default();
            let (node, ended) = self.work(&world, &told).await;
            if let Err(reason) = &ended {
                assert_eq!(
                    victim,
                    Victim::Vmms,
                    "nobody sees more of it than that it takes longer: {reason}; {what}"
                );
            }
            world.host.heal();
            self.check(&world, &node, &told, what).await;
            let log = world.host.log().split_off(before);
            let is_store = matches!(victim, Victim::StoreBefore | Victim::StoreAfter);
            log.iter().filter(|operation| !is_store || operation.is_of_store()).count() > at
        })
    }

    /// Each sandbox is where it may be, and of use; when it is ended nothing is left.
    async fn check(self, world: &World, node: &Orchestrator, told: &Mutex<Told>, what: &str) {
        let told = told.lock().unwrap().clone();
        let what = format!("{what}, {told:?}");
        if let Some(id) = &told.id {
            match at_rest(world, node, id, &what).await {
                None => assert!(told.gone, "it is gone: {what}"),
                // Typed, and known until somebody has seen it.
                Some(SandboxView { state: SandboxState::Lost { .. }, .. }) => {
                    assert!(told.running, "lost: {what}");
                }
                Some(view) => use_on(world, node, &view, &told, &what).await,
            }
        }
        check_snapshots(world, node, &told, &what).await;
        for view in node.list() {
            node.kill(&view.id).await.unwrap();
        }
        world.only(self.standbys).await;
        eventually("snapshots are removed", || world.snapshot_dirs().is_empty()).await;
        node.shutdown().await;
        world.only(0).await;
        assert_eq!(world.stored_leftovers(), Vec::<String>::new(), "left: {what}");
    }
}

/// Those that were told to be there are, and all that there are can be started from.
async fn check_snapshots(world: &World, node: &Orchestrator, told: &Told, what: &str) {
    let promised = told.snapshots.iter().filter(|(id, _)| !told.deleted.contains(id));
    for (id, _) in promised {
        assert!(node.snapshots().iter().any(|view| view.id == *id), "{id} is gone: {what}");
    }
    eventually("all are stored", || node.snapshots().iter().all(|view| view.state == SnapshotState::Ready))
        .await;
    for view in node.snapshots() {
        let wanted = CreateRequest { template: view.id.to_string(), timeout: HOUR, ..request() };
        let child = node.create(wanted).await.unwrap_or_else(|error| panic!("{error}: {what}")).sandbox.id;
        let (memory, disk) = world.host.read(&World::vm_name(&child), 1);
        let of_told = told.snapshots.iter().find(|(id, _)| *id == view.id);
        let is_right = of_told.map_or_else(|| told.saved.contains(&disk), |(_, value)| *value == disk);
        assert!(is_right && memory == disk, "{memory} is in memory, {disk} on the disk: {what}");
        node.delete_snapshot(view.id.as_str()).await.unwrap();
        node.kill(&child).await.unwrap();
    }
}

/// The sandbox as it is when nothing happens to it any more by itself.
async fn at_rest(world: &World, node: &Orchestrator, id: &SandboxId, what: &str) -> Option<SandboxView> {
    let begin = Instant::now();
    loop {
        let view = node.list().into_iter().find(|view| view.id == *id);
        let rests = match view.as_ref().map(|view| &view.state) {
            None | Some(SandboxState::Lost { .. } | SandboxState::Paused) => true,
            Some(SandboxState::Running) => world.host.is_running(&World::vm_name(id)) == Some(true),
            Some(_) => false,
        };
        if rests {
            return view;
        }
        assert!(begin.elapsed() < SOON, "it never comes to rest: {view:?}, {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// It has what was written, and can be paused and resumed.
async fn use_on(world: &World, node: &Orchestrator, view: &SandboxView, told: &Told, what: &str) {
    let (id, name) = (&view.id, World::vm_name(&view.id));
    let resume = || node.resume(id, ResumeRequest { timeout: HOUR, reboot: false });
    match view.state {
        SandboxState::Running => assert!(told.running, "it runs: {what}"),
        _ => assert!(told.paused, "it is paused: {what}"),
    }
    resume().await.unwrap_or_else(|error| panic!("{error}: {what}"));
    assert_eq!(world.host.is_running(&name), Some(true), "{what}");
    let (memory, disk) = world.host.read(&name, 1);
    let fell_back = view.saved.as_ref().is_some_and(|saved| saved.fallback.is_some());
    let earlier = fell_back && told.saved.contains(&disk);
    assert!(disk == told.value || earlier, "{disk} is on the disk: {what}");
    assert!(memory == disk || told.not_in_memory, "{memory} is in memory, {disk} on the disk: {what}");
    node.route(id).unwrap().dialer.dial(aenv_protocol::envd::ENVD_PORT).await.unwrap();
    world.host.write(&name, 2, 77);
    let begin = Instant::now();
    let local = PauseRequest { durability: Durability::Local, ..PauseRequest::default() };
    loop {
        match node.pause(id, local).await {
            // Its guest is just being looked after.
            Err(Error::Transitioning(_)) if begin.elapsed() < SOON => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            paused => break drop(paused.unwrap_or_else(|error| panic!("{error}: {what}"))),
        }
    }
    node.release(id).await.unwrap();
    resume().await.unwrap_or_else(|error| panic!("{error}: {what}"));
    let seen = (world.host.read(&name, 1), world.host.read(&name, 2));
    assert_eq!(seen, ((memory, disk), (77, 77)), "{what}");
}

const MEMORY: Walk = Walk { story: Story::Memory, standbys: 0 };
const DISK_ALONE: Walk = Walk { story: Story::DiskAlone, standbys: 1 };
const FALL_BACK: Walk = Walk { story: Story::FallBack, standbys: 0 };
const COPIES: Walk = Walk { story: Story::Copies, standbys: 0 };
const ENDINGS: Walk = Walk { story: Story::Endings, standbys: 0 };

macro_rules! walks {
    ($($name:ident: $walk:expr, $victim:expr;)*) => {
        $(#[test] fn $name() { $walk.all($victim); })*
    };
}

walks! {
    a_node_killed_before_any_step_with_memory: MEMORY, Victim::NodeBefore;
    a_node_killed_after_any_step_with_memory: MEMORY, Victim::NodeAfter;
    a_node_killed_before_any_step_of_disks_alone: DISK_ALONE, Victim::NodeBefore;
    a_node_killed_after_any_step_of_disks_alone: DISK_ALONE, Victim::NodeAfter;
    a_node_killed_before_any_step_of_a_fall_back: FALL_BACK, Victim::NodeBefore;
    a_node_killed_after_any_step_of_a_fall_back: FALL_BACK, Victim::NodeAfter;
    a_node_killed_before_any_step_of_endings: ENDINGS, Victim::NodeBefore;
    a_node_killed_after_any_step_of_endings: ENDINGS, Victim::NodeAfter;
    a_block_service_killed_before_any_request_with_memory: MEMORY, Victim::StoreBefore;
    a_block_service_killed_after_any_request_with_memory: MEMORY, Victim::StoreAfter;
    a_block_service_killed_before_any_request_of_disks_alone: DISK_ALONE, Victim::StoreBefore;
    a_block_service_killed_after_any_request_of_disks_alone: DISK_ALONE, Victim::StoreAfter;
    a_block_service_killed_before_any_request_of_a_fall_back: FALL_BACK, Victim::StoreBefore;
    a_block_service_killed_after_any_request_of_a_fall_back: FALL_BACK, Victim::StoreAfter;
    a_block_service_killed_after_any_request_of_endings: ENDINGS, Victim::StoreAfter;
    vmms_killed_at_any_step_with_memory: MEMORY, Victim::Vmms;
    vmms_killed_at_any_step_of_disks_alone: DISK_ALONE, Victim::Vmms;
    vmms_killed_at_any_step_of_a_fall_back: FALL_BACK, Victim::Vmms;
    vmms_killed_at_any_step_of_endings: ENDINGS, Victim::Vmms;
    a_node_killed_before_any_step_of_copies: COPIES, Victim::NodeBefore;
    a_node_killed_after_any_step_of_copies: COPIES, Victim::NodeAfter;
    a_block_service_killed_before_any_request_of_copies: COPIES, Victim::StoreBefore;
    a_block_service_killed_after_any_request_of_copies: COPIES, Victim::StoreAfter;
    vmms_killed_at_any_step_of_copies: COPIES, Victim::Vmms;
}
