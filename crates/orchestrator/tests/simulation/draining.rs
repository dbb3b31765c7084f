//! The end of a node whose sandboxes are to be paused: what is refused meanwhile, what makes it, and what does not.

use crate::pause::resume;
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{Durability, Error, PauseRequest, PausedAll, ResumeRequest, SandboxState, Tier};
use aenv_testkit::{Fault, Operation};
use std::time::Duration;

const RESUME: ResumeRequest = ResumeRequest { timeout: HOUR, reboot: false };

#[tokio::test]
async fn all_sandboxes_are_paused_durably_and_nothing_new_is_begun() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let mut ids = Vec::new();
    for value in 1..=4 {
        let id = node.create(request()).await.unwrap().sandbox.id;
        world.host.write(&World::vm_name(&id), 1, value);
        ids.push(id);
    }
    crate::pause::pause(&node, &ids[0]).await;
    assert_eq!(node.pause_all(SOON).await, PausedAll { paused: 4, left: 0 });
    assert!(matches!(node.create(request()).await, Err(Error::ShuttingDown)));
    let asked = node.resume(&ids[1], ResumeRequest { timeout: HOUR, reboot: false }).await;
    assert!(matches!(asked, Err(Error::ShuttingDown)));
    for id in &ids {
        let view = node.get(id).unwrap();
        assert_eq!(view.state, SandboxState::Paused);
        assert_eq!(view.saved.unwrap().durability, Durability::Local);
    }
    node.kill(&ids[3]).await.unwrap();
    node.shutdown().await;

    // The host was switched off.
    world.host.restart();
    let mut settings = world.settings(0);
    settings.host_boot_id = "another boot".to_owned();
    let node = world.start_with(settings).await.unwrap();
    for (id, value) in ids[..3].iter().zip(1..) {
        assert_eq!(resume(&node, id).await.tier, Tier::Cold);
        assert_eq!(world.host.read(&World::vm_name(id), 1), (value, value));
    }
    node.shutdown().await;
}

#[tokio::test]
async fn what_is_not_paused_in_time_runs_on_and_is_adopted() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let slow = node.create(request()).await.unwrap().sandbox.id;
    let quick = node.create(request()).await.unwrap().sandbox.id;
    world.host.fail_call(Operation::Capture, 0, Fault::HangBefore);
    let pausing = {
        let (node, slow) = (node.clone(), slow.clone());
        tokio::spawn(async move { node.pause(&slow, aenv_orchestrator::PauseRequest::default()).await })
    };
    world.host.wait_for_hang(1).await;
    assert_eq!(node.pause_all(Duration::from_secs(1)).await, PausedAll { paused: 1, left: 1 });
    node.shutdown().await;
    assert!(pausing.await.unwrap().is_err());
    assert_eq!(world.host.is_running(&World::vm_name(&slow)), Some(true));
    let node = world.start(0).await;
    eventually("it is adopted", || node.route(&slow).is_some()).await;
    assert_eq!(node.get(&quick).unwrap().state, SandboxState::Paused);
    node.kill(&slow).await.unwrap();
    node.kill(&quick).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn one_that_cannot_be_paused_runs_on_and_holds_up_nobody() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let broken = node.create(request()).await.unwrap().sandbox.id;
    world.host.fail_call(Operation::Stop, 0, Fault::Fail);
    assert_eq!(node.pause_all(SOON).await, PausedAll { paused: 0, left: 1 });
    assert!(node.get(&broken).is_ok_and(|view| view.state == SandboxState::Running));
    node.shutdown().await;
    assert_eq!(world.host.is_running(&World::vm_name(&broken)), Some(true));
}

/// What it was saved as before is not what it is now, or will be.
#[tokio::test]
async fn one_that_is_just_being_paused_or_resumed_does_not_count_as_paused() {
    for resumed in [false, true] {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        crate::pause::pause(&node, &id).await;
        eventually("it is durable", || {
            node.get(&id).unwrap().saved.is_some_and(|saved| saved.durability == Durability::Local)
        })
        .await;
        let under_way = if resumed {
            node.release(&id).await.unwrap();
            world.host.fail_call(Operation::Init, 0, Fault::HangBefore);
            let (node, id) = (node.clone(), id.clone());
            tokio::spawn(async move { node.resume(&id, RESUME).await.map(drop) })
        } else {
            resume(&node, &id).await;
            world.host.fail_call(Operation::Capture, 0, Fault::HangBefore);
            let (node, id) = (node.clone(), id.clone());
            tokio::spawn(async move { node.pause(&id, PauseRequest::default()).await.map(drop) })
        };
        world.host.wait_for_hang(1).await;
        let view = node.get(&id).unwrap();
        assert_eq!((view.state, view.is_changing), (SandboxState::Paused, true));
        assert_eq!(view.saved.is_some(), resumed, "what is just being captured is not known yet");
        assert_eq!(node.pause_all(Duration::from_secs(1)).await, PausedAll { paused: 0, left: 1 });
        node.shutdown().await;
        assert!(under_way.await.unwrap().is_err());
        let node = world.start(0).await;
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    }
}
