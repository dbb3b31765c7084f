//! Pause and resume when something of the host fails, is killed, or is slow: nothing that was there before is gone.

use crate::pause::{pause, resume};
use crate::world::{HOUR, World, eventually, request};
use aenv_orchestrator::{
    Durability, Error, LossCause, Orchestrator, PauseRequest, ResumeRequest, SandboxState, SaveTrouble,
    Settings, Tier,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Fault, Operation};
use std::time::Duration;

const RESUME: ResumeRequest = ResumeRequest { timeout: HOUR, reboot: false };

/// Steps that hang end soon.
fn impatient(world: &World) -> Settings {
    let mut settings = world.settings(0);
    settings.deadlines.step = Duration::from_millis(400);
    settings.deadlines.memory = Duration::from_millis(400);
    settings.deadlines.init = Duration::from_millis(400);
    settings.deadlines.sync = Duration::from_millis(400);
    settings.deadlines.greeting = Duration::from_millis(400);
    settings
}

fn state(node: &Orchestrator, id: &SandboxId) -> Option<SandboxState> {
    node.list().into_iter().find(|view| view.id == *id).map(|view| view.state)
}

#[tokio::test]
async fn a_pause_that_fails_lets_the_guest_go_on_and_the_next_one_saves_everything() {
    for keeps_log in [false, true] {
        for operation in [Operation::Stop, Operation::Capture] {
            for fault in [Fault::Fail, Fault::LoseReply, Fault::HangBefore] {
                let world = World::prepared_with(keeps_log).await;
                let node = world.start_with(impatient(&world)).await.unwrap();
                let id = node.create(request()).await.unwrap().sandbox.id;
                let name = World::vm_name(&id);
                world.host.write(&name, 1, 1);
                pause(&node, &id).await;
                resume(&node, &id).await;
                world.host.write(&name, 2, 2);
                world.host.fail_call(operation, 0, fault);
                let error = node.pause(&id, PauseRequest::default()).await.unwrap_err();
                let what = format!("{operation:?} {fault:?} {keeps_log}: {error}");
                assert!(matches!(error, Error::Internal { .. }), "{what}");
                assert_eq!(state(&node, &id), Some(SandboxState::Running), "{what}");
                eventually("it goes on", || world.host.is_running(&name) == Some(true)).await;
                eventually("it is told the time", || world.host.inits(&name).len() == 3).await;
                let route = node.route(&id).unwrap();
                assert!(!route.ended.is_cancelled(), "{what}");
                world.host.write(&name, 3, 3);
                pause(&node, &id).await;
                node.release(&id).await.unwrap();
                resume(&node, &id).await;
                for page in 1..=3 {
                    assert_eq!(world.host.read(&name, page.into()), (page, page), "{what}");
                }
                node.kill(&id).await.unwrap();
                world.only(0).await;
                node.shutdown().await;
            }
        }
    }
}

#[tokio::test]
async fn a_vmm_that_dies_during_a_pause_leaves_the_state_before_or_is_lost_with_its_cause() {
    for operation in [Operation::Stop, Operation::Capture] {
        for saved_before in [false, true] {
            let world = World::prepared().await;
            let node = world.start(0).await;
            let id = node.create(request()).await.unwrap().sandbox.id;
            let name = World::vm_name(&id);
            if saved_before {
                world.host.write(&name, 1, 1);
                pause(&node, &id).await;
                resume(&node, &id).await;
                world.host.write(&name, 1, 2);
            }
            world.host.fail_call(operation, 0, Fault::Die);
            let paused = node.pause(&id, PauseRequest::default()).await;
            if paused.is_ok() {
                // All was captured, and the VMM died only then.
                assert_eq!(operation, Operation::Capture);
                resume(&node, &id).await;
                let now = if saved_before { (2, 2) } else { (0, 0) };
                assert_eq!(world.host.read(&name, 1), now);
            } else if saved_before {
                eventually("it is as it was saved", || state(&node, &id) == Some(SandboxState::Paused)).await;
                let saved = node.get(&id).unwrap().saved.unwrap();
                assert_eq!((saved.number, saved.fallback), (1, Some(LossCause::VmmCrashed)));
                resume(&node, &id).await;
                assert_eq!(world.host.read(&name, 1), (1, 1), "the disk is as the memory is");
            } else {
                eventually("the loss is seen", || {
                    matches!(node.get(&id), Err(Error::SandboxLost { cause: LossCause::VmmCrashed, .. }))
                })
                .await;
            }
            drop(node.kill(&id).await);
            world.only(0).await;
            node.shutdown().await;
        }
    }
}

#[tokio::test]
async fn a_resume_whose_vmm_fails_is_served_cold_or_leaves_it_paused() {
    let operations =
        [Operation::Acquire, Operation::Restore, Operation::Load, Operation::Resume, Operation::Init];
    for hot in [true, false] {
        for operation in operations {
            for fault in [Fault::Fail, Fault::LoseReply, Fault::HangBefore, Fault::Die] {
                let unused = matches!(operation, Operation::Acquire | Operation::Restore | Operation::Load);
                if (hot && unused) || (operation, fault) == (Operation::Init, Fault::Die) {
                    // The last: the guest answers, then dies, and that is a sandbox that is lost.
                    continue;
                }
                let world = World::prepared().await;
                let node = world.start_with(impatient(&world)).await.unwrap();
                let id = node.create(request()).await.unwrap().sandbox.id;
                let name = World::vm_name(&id);
                world.host.write(&name, 1, 1);
                pause(&node, &id).await;
                if !hot {
                    node.release(&id).await.unwrap();
                }
                world.settled(&node, &id).await;
                world.host.fail_call(operation, 0, fault);
                let resumed = node.resume(&id, RESUME).await;
                let what = format!("{operation:?} {fault:?} hot {hot}: {resumed:?}");
                if hot {
                    assert_eq!(resumed.unwrap().tier, Tier::Cold, "{what}");
                } else if resumed.is_err() {
                    assert_eq!(state(&node, &id), Some(SandboxState::Paused), "{what}");
                    assert_eq!(world.host.counts().vms, 0, "{what}");
                    assert_eq!(resume(&node, &id).await.tier, Tier::Cold, "{what}");
                } else {
                    // A slot knows no death.
                    assert_eq!(fault, Fault::Die, "{what}");
                }
                assert_eq!(world.host.read(&name, 1), (1, 1), "{what}");
                node.kill(&id).await.unwrap();
                if (operation, fault) != (Operation::Acquire, Fault::LoseReply) {
                    world.only(0).await;
                }
                node.shutdown().await;
            }
        }
    }
}

#[tokio::test]
async fn a_kill_during_a_pause_or_a_resume_does_not_wait_for_what_hangs() {
    let pauses = [Operation::Sync, Operation::Stop, Operation::Capture];
    let resumes = [Operation::Resume, Operation::Init];
    for operation in pauses.into_iter().chain(resumes) {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let (working, of) = (node.clone(), id.clone());
        let pausing = pauses.contains(&operation);
        if !pausing {
            pause(&node, &id).await;
        }
        world.host.fail_call(operation, 0, Fault::HangBefore);
        let work = tokio::spawn(async move {
            if pausing {
                working.pause(&of, PauseRequest::default()).await.map(drop)
            } else {
                working.resume(&of, RESUME).await.map(drop)
            }
        });
        world.host.wait_for_hang(1).await;
        let again = node.pause(&id, PauseRequest::default()).await;
        assert!(matches!(again, Err(Error::Transitioning(_))), "{operation:?}: {again:?}");
        assert!(matches!(node.extend(&id, HOUR).await, Err(Error::Transitioning(_))), "{operation:?}");
        // Much less than the limit of the step that hangs.
        tokio::time::timeout(Duration::from_secs(10), node.kill(&id)).await.unwrap().unwrap();
        assert!(work.await.unwrap().is_err(), "{operation:?}");
        assert!(matches!(node.get(&id), Err(Error::SandboxNotFound(_))));
        world.only(0).await;
        node.shutdown().await;
    }
}

/// What is in the way of a file of the store: a directory of its name.
struct Obstacle(std::path::PathBuf);

impl Obstacle {
    fn at(path: std::path::PathBuf) -> Self {
        std::fs::create_dir_all(path.join("x")).unwrap();
        Self(path)
    }

    /// It may have gone with all else of a save.
    fn remove(self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

#[tokio::test]
async fn a_store_that_fails_during_a_pause_lets_the_guest_go_on() {
    for file in ["disk.ext4", "changes", "state"] {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        world.host.write(&name, 1, 1);
        let obstacle = Obstacle::at(world.path(&format!("data/sandboxes/{id}/captures/1/{file}")));
        assert!(node.pause(&id, PauseRequest::default()).await.is_err(), "{file}");
        obstacle.remove();
        assert_eq!(state(&node, &id), Some(SandboxState::Running), "{file}");
        pause(&node, &id).await;
        node.release(&id).await.unwrap();
        resume(&node, &id).await;
        assert_eq!(world.host.read(&name, 1), (1, 1), "{file}");
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_store_that_fails_afterwards_is_shown_and_tried_again_and_nothing_is_lost() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let name = World::vm_name(&id);
    world.host.write(&name, 1, 1);
    let obstacle = Obstacle::at(world.path(&format!("data/sandboxes/{id}/captures/1/memory")));
    let local = PauseRequest { durability: Durability::Local, ..PauseRequest::default() };
    let error = node.pause(&id, local).await.unwrap_err();
    assert!(error.to_string().contains("is paused, but"), "{error}");
    let saved = node.get(&id).unwrap().saved.unwrap();
    assert_eq!(saved.durability, Durability::Process);
    assert!(saved.pending.unwrap().contains("it failed"));
    // The VMM that stands by does not need it.
    assert_eq!(resume(&node, &id).await.tier, Tier::Hot);
    obstacle.remove();
    pause(&node, &id).await;
    world.settled(&node, &id).await;
    let third = world.path(&format!("data/sandboxes/{id}/captures/3/memory"));
    assert_eq!(world.saves(&id), [2], "what nothing needs is removed");
    resume(&node, &id).await;
    let obstacle = Obstacle::at(third);
    world.host.write(&name, 2, 2);
    pause(&node, &id).await;
    node.release(&id).await.unwrap();
    let error = node.resume(&id, RESUME).await.unwrap_err();
    assert!(matches!(error, Error::Internal { .. }), "{error}");
    assert_eq!(state(&node, &id), Some(SandboxState::Paused));
    assert!(world.saves(&id).contains(&2), "the last durable one stays");
    obstacle.remove();
    assert_eq!(resume(&node, &id).await.tier, Tier::Cold);
    assert_eq!((world.host.read(&name, 1), world.host.read(&name, 2)), ((1, 1), (2, 2)));
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

/// Files of changes of a sandbox, by the numbers of their saves.
fn changes(world: &World, id: &SandboxId) -> Vec<u64> {
    let path = |number| world.path(&format!("data/sandboxes/{id}/captures/{number}/changes"));
    (1..100).filter(|number| path(*number).exists()).collect()
}

#[tokio::test]
async fn while_nothing_can_be_stored_pauses_go_on_what_they_leave_is_bounded_and_that_is_told() {
    for keeps_log in [false, true] {
        let world = World::prepared_with(keeps_log).await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        let obstacle =
            |number| Obstacle::at(world.path(&format!("data/sandboxes/{id}/captures/{number}/memory")));
        let obstacles: Vec<_> = (1..=60).map(obstacle).collect();
        for round in 1..=60_u8 {
            world.host.write(&name, u64::from(round % 7), round);
            pause(&node, &id).await;
            eventually("it is told that nothing is stored", || {
                node.get(&id).unwrap().saved.unwrap().trouble == Some(SaveTrouble::Internal)
            })
            .await;
            let saved = node.get(&id).unwrap().saved.unwrap();
            assert_eq!(saved.durability, Durability::Process, "round {round}");
            assert!(saved.unstored_bytes > 0 && saved.pending.is_some(), "round {round}");
            assert_eq!(resume(&node, &id).await.tier, Tier::Hot);
        }
        // Those that wait, and the one whose removal may be under way.
        eventually("what nothing needs is removed", || changes(&world, &id).len() <= 17).await;
        assert!(changes(&world, &id).contains(&60));
        for obstacle in obstacles {
            obstacle.remove();
        }
        pause(&node, &id).await;
        world.settled(&node, &id).await;
        let saved = node.get(&id).unwrap().saved.unwrap();
        assert_eq!((saved.trouble, saved.unstored_bytes), (None, 0));
        assert!(changes(&world, &id).is_empty(), "keeps_log {keeps_log}");
        node.release(&id).await.unwrap();
        resume(&node, &id).await;
        for page in 0..7 {
            let last = (1..=60).rev().find(|round| round % 7 == page).unwrap();
            assert_eq!(world.host.read(&name, page.into()), (last, last), "keeps_log {keeps_log}");
        }
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_disk_that_cannot_be_made_anew_leaves_it_paused() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    pause(&node, &id).await;
    node.release(&id).await.unwrap();
    let disk = world.path(&format!("data/sandboxes/{id}/disk.ext4"));
    std::fs::remove_file(&disk).unwrap();
    let obstacle = Obstacle::at(disk);
    assert!(node.resume(&id, RESUME).await.is_err());
    assert_eq!(state(&node, &id), Some(SandboxState::Paused));
    eventually("its network is released", || world.host.counts().slots == 0).await;
    obstacle.remove();
    resume(&node, &id).await;
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

/// As many cycles as the variable says; few enough for every run without it.
#[tokio::test]
async fn many_cycles_leave_everything_where_it_was() {
    let cycles: u32 =
        std::env::var("AENV_PAUSE_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
    for keeps_log in [false, true] {
        let world = World::prepared_with(keeps_log).await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        for cycle in 0..cycles {
            let value = u8::try_from(cycle % 251).unwrap();
            world.host.write(&name, u64::from(cycle) % 16, value);
            pause(&node, &id).await;
            if cycle % 50 == 49 {
                node.release(&id).await.unwrap();
            }
            resume(&node, &id).await;
            assert_eq!(world.host.read(&name, u64::from(cycle) % 16), (value, value));
        }
        world.settled(&node, &id).await;
        let saves = world.saves(&id);
        // The last, and the one that the VMM was started from.
        assert!(saves.len() <= 2, "{saves:?}");
        let directory = world.path(&format!("data/sandboxes/{id}"));
        let names: Vec<_> =
            std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "captures, disk, run: {names:?}");
        world.only(1).await;
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    }
}
