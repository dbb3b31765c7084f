//! Warm standbys: what serves a create, how hot ones come of them, and what becomes of those that fail.

use crate::world::{World, eventually, request};
use aenv_orchestrator::{Settings, Tier};
use aenv_testkit::{Fault, Operation};
use aenv_vmm::ExitCause;
use std::collections::HashSet;
use std::time::Duration;

fn count(world: &World, wanted: Operation) -> usize {
    world.host.log().into_iter().filter(|call| *call == wanted).count()
}

#[tokio::test]
async fn a_warm_standby_has_no_guest_until_a_create_loads_it() {
    let world = World::prepared().await;
    let node = world.start_warm(0, 2).await;
    let warm: HashSet<_> = world.host.vm_names().into_iter().collect();
    assert_eq!(warm.len(), 2);
    assert!(warm.iter().all(|name| world.host.has_guest(name) == Some(false)));
    assert_eq!(count(&world, Operation::Load), 0);

    let created = node.create(request()).await.unwrap();
    assert_eq!(created.tier, Tier::Warm);
    let stages: Vec<_> = created.stages.iter().map(|stage| stage.name).collect();
    assert_eq!(stages, ["admission", "claim", "load", "resume", "init", "journal"]);
    let name = World::vm_name(&created.sandbox.id);
    assert!(warm.contains(&name));
    assert_eq!((world.host.is_running(&name), world.host.inits(&name).len()), (Some(true), 1));
    // The one that was taken is replaced.
    world.only(3).await;
    node.shutdown().await;
    assert_eq!(world.host.vm_names(), [name], "standbys end with the node, sandboxes stay");
}

#[tokio::test]
async fn a_hot_standby_is_made_from_a_warm_one_and_both_are_replaced() {
    let world = World::prepared().await;
    let node = world.start_warm(1, 1).await;
    let is_warm = |name: &String| world.host.has_guest(name) == Some(false);
    let warm = world.host.vm_names().into_iter().find(is_warm).unwrap();
    let first = node.create(request()).await.unwrap();
    assert_eq!(first.tier, Tier::Hot, "what saves the caller most is taken first");
    eventually("both are there again", || {
        let template = &node.templates()[0];
        (template.standbys, template.warm) == (1, 1)
    })
    .await;
    assert_eq!(world.host.has_guest(&warm), Some(true), "the warm one became the hot one");
    assert_eq!(count(&world, Operation::Restore), 3, "no process was started in vain");
    world.only(3).await;
    node.kill(&first.sandbox.id).await.unwrap();
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn a_warm_standby_that_fails_when_it_is_claimed_is_replaced_by_a_cold_start() {
    for operation in [Operation::Load, Operation::Resume, Operation::Init] {
        for fault in [Fault::Fail, Fault::LoseReply, Fault::Die] {
            if (operation, fault) == (Operation::Init, Fault::Die) {
                // The guest answers, then dies: that is a sandbox that is lost.
                continue;
            }
            let world = World::prepared().await;
            let mut settings = Settings { warm: 1, ..world.settings(0) };
            settings.deadlines.step = Duration::from_millis(500);
            settings.deadlines.init = Duration::from_millis(500);
            let node = world.start_with(settings).await.unwrap();
            world.host.fail_call(operation, 0, fault);
            let created = node.create(request()).await.unwrap();
            assert_eq!(created.tier, Tier::Cold, "{operation:?} {fault:?}");
            world.only(2).await;
            node.shutdown().await;
            world.only(1).await;
        }
    }
}

#[tokio::test]
async fn a_warm_standby_that_dies_or_cannot_be_made_is_replaced_without_a_hot_loop() {
    let world = World::prepared().await;
    let node = world.start_warm(0, 1).await;
    let first = world.host.vm_names();
    world.host.end_vm(&first[0], ExitCause::VmmKilled, "killed");
    eventually("another is there", || {
        let now = world.host.vm_names();
        node.templates()[0].warm == 1 && now.len() == 1 && now != first
    })
    .await;
    node.shutdown().await;
    world.host.fail_always(Operation::Restore, Fault::Fail);
    let node = world.open(Settings { warm: 1, ..world.settings(0) }).await.unwrap();
    let before = count(&world, Operation::Restore);
    tokio::time::sleep(Duration::from_secs(1)).await;
    let attempts = count(&world, Operation::Restore) - before;
    assert!((1..=4).contains(&attempts), "{attempts} attempts in a second");
    world.host.heal();
    eventually("one is there", || node.templates()[0].warm == 1).await;
    world.only(1).await;
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn guests_that_do_not_answer_do_not_keep_the_warm_shelf_empty() {
    let world = World::prepared().await;
    world.host.fail_always(Operation::Health, Fault::Fail);
    let mut settings = Settings { warm: 1, ..world.settings(1) };
    settings.deadlines.greeting = Duration::from_millis(20);
    let node = world.open(settings).await.unwrap();
    eventually("a warm one is there", || node.templates()[0].warm == 1).await;
    assert_eq!(node.templates()[0].standbys, 0);
    world.host.heal();
    eventually("a hot one is there", || node.templates()[0].standbys == 1).await;
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn creates_at_once_claim_each_standby_of_either_kind_once() {
    let world = World::prepared().await;
    let node = world.start_warm(3, 3).await;
    let creates = (0..40).map(|_| node.create(request()));
    let created: Vec<_> =
        futures_util::future::join_all(creates).await.into_iter().collect::<Result<_, _>>().unwrap();
    let ids: HashSet<_> = created.iter().map(|created| created.sandbox.id.clone()).collect();
    assert_eq!(ids.len(), 40);
    for id in &ids {
        assert_eq!(world.host.inits(&World::vm_name(id)).len(), 1);
    }
    let of = |tier| created.iter().filter(|created| created.tier == tier).count();
    assert!(of(Tier::Hot) >= 3, "{} were hot", of(Tier::Hot));
    assert!(of(Tier::Warm) >= 1, "{} were warm", of(Tier::Warm));
    world.only(46).await;
    node.shutdown().await;
    world.only(40).await;
}
