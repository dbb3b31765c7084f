//! Who is let in when memory or places are short, who gives way, and that what an earlier process left is counted.

use crate::crash::{crash, runtime};
use crate::pause::{pause, resume};
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    Capacity, ChildRequest, Durability, Error, ForkRequest, Orchestrator, ResumeRequest, SandboxState,
    Settings, Shortage, Tier,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Counts, Fault, Operation};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Memory of the guests of `base`.
const GUEST: u64 = 512 << 20;

/// Room for so many guests; who waits in vain does so shortly.
fn room_for(world: &World, guests: u64, standbys: usize) -> Settings {
    let mut settings = Settings { memory_limit_bytes: guests * GUEST, ..world.settings(standbys) };
    settings.deadlines.queue = Duration::from_millis(500);
    settings
}

async fn create(node: &Orchestrator) -> SandboxId {
    node.create(request()).await.unwrap().sandbox.id
}

fn committed(node: &Orchestrator) -> u64 {
    node.capacity().committed_bytes / GUEST
}

fn is_hot(node: &Orchestrator, id: &SandboxId) -> bool {
    let view = node.get(id).unwrap();
    view.state == SandboxState::Paused && view.saved.is_some_and(|saved| saved.tier == Tier::Hot)
}

/// A create that must be refused because this many guests are there and no more may be.
async fn refused(node: &Orchestrator, guests: u64) {
    let error = node.create(request()).await.unwrap_err();
    let Error::NoCapacity(Shortage::Memory { needed_bytes, committed_bytes, limit_bytes, .. }) = &error
    else {
        panic!("{error}");
    };
    assert_eq!((*needed_bytes, *committed_bytes, *limit_bytes), (GUEST, guests * GUEST, guests * GUEST));
}

#[tokio::test]
async fn a_full_node_refuses_and_takes_the_next_one_as_soon_as_one_is_gone() {
    let world = World::prepared().await;
    let node = world.start_with(room_for(&world, 3, 0)).await.unwrap();
    let ids = [create(&node).await, create(&node).await, create(&node).await];
    refused(&node, 3).await;
    let full = Capacity {
        memory_limit_bytes: Some(3 * GUEST),
        committed_bytes: 3 * GUEST,
        available_bytes: Some(u64::MAX),
        max_starting: 3,
        running: 3,
        ..Capacity::default()
    };
    assert_eq!(node.capacity(), full);
    for id in &ids {
        node.kill(id).await.unwrap();
        // Nobody who was told that it is gone has to wait.
        create(&node).await;
    }
    world.only(3).await;
    node.shutdown().await;
}

#[tokio::test]
async fn one_who_waits_is_served_when_another_ends() {
    let world = World::prepared().await;
    let mut settings = room_for(&world, 1, 0);
    settings.deadlines.queue = SOON;
    let node = world.start_with(settings).await.unwrap();
    let first = create(&node).await;
    let waiting = {
        let node = node.clone();
        tokio::spawn(async move { node.create(request()).await })
    };
    eventually("it waits", || node.capacity().waiting == 1).await;
    node.kill(&first).await.unwrap();
    waiting.await.unwrap().unwrap();
    assert_eq!((committed(&node), node.capacity().waiting), (1, 0));
    node.shutdown().await;
}

#[tokio::test]
async fn paused_sandboxes_give_way_oldest_first_and_running_ones_never() {
    let world = World::prepared().await;
    let node = world.start_with(room_for(&world, 3, 0)).await.unwrap();
    let (old, new, runs) = (create(&node).await, create(&node).await, create(&node).await);
    world.host.write(&World::vm_name(&old), 1, 7);
    for id in [&old, &new] {
        pause(&node, id).await;
        world.settled(&node, id).await;
    }
    assert_eq!((committed(&node), node.capacity().hot), (3, 2));
    let first = create(&node).await;
    assert_eq!((is_hot(&node, &old), is_hot(&node, &new)), (false, true));
    let second = create(&node).await;
    assert!(!is_hot(&node, &new));
    refused(&node, 3).await;
    assert_eq!(world.host.counts(), Counts { vms: 3, slots: 3 });

    // What is cold needs room again, and says so; it stays as it is.
    let error = node.resume(&old, ResumeRequest { timeout: HOUR, reboot: false }).await.unwrap_err();
    assert!(matches!(error, Error::NoCapacity(Shortage::Memory { .. })), "{error}");
    assert_eq!(node.get(&old).unwrap().state, SandboxState::Paused);
    pause(&node, &first).await;
    assert_eq!(resume(&node, &old).await.tier, Tier::Cold, "the paused one gave way to it");
    assert_eq!(world.host.read(&World::vm_name(&old), 1), (7, 7));
    for id in [&runs, &second] {
        assert_eq!(node.get(id).unwrap().state, SandboxState::Running);
    }
    // A hot resume needs nothing.
    pause(&node, &second).await;
    assert_eq!(resume(&node, &second).await.tier, Tier::Hot);
    assert_eq!(committed(&node), 3);
    node.shutdown().await;
}

#[tokio::test]
async fn what_is_not_durable_yet_is_made_so_before_it_gives_way() {
    let world = World::prepared().await;
    let mut settings = room_for(&world, 1, 0);
    settings.deadlines.queue = SOON;
    let node = world.start_with(settings).await.unwrap();
    let mut last = create(&node).await;
    for round in 0..10_u8 {
        world.host.write(&World::vm_name(&last), 2, round);
        pause(&node, &last).await;
        let next = create(&node).await;
        let saved = node.get(&last).unwrap().saved.unwrap();
        assert_eq!((saved.durability, saved.tier), (Durability::Local, Tier::Cold));
        last = next;
    }
    assert_eq!(committed(&node), 1);
    node.shutdown().await;
}

#[tokio::test]
async fn of_a_vmm_that_cannot_be_ended_nothing_is_gained_and_nothing_is_lost() {
    let world = World::prepared().await;
    let node = world.start_with(room_for(&world, 2, 0)).await.unwrap();
    let (hot, runs) = (create(&node).await, create(&node).await);
    pause(&node, &hot).await;
    world.settled(&node, &hot).await;
    world.host.fail_always(Operation::Kill, Fault::Fail);
    refused(&node, 2).await;
    assert!(is_hot(&node, &hot));
    assert_eq!(node.get(&runs).unwrap().state, SandboxState::Running);
    world.host.heal();
    create(&node).await;
    assert!(!is_hot(&node, &hot));
    node.shutdown().await;
}

#[tokio::test]
async fn standbys_are_counted_give_way_and_come_back() {
    let world = World::prepared().await;
    let node = world.start_with(Settings { warm: 1, ..room_for(&world, 3, 1) }).await.unwrap();
    assert_eq!((committed(&node), node.capacity().standbys), (2, 2));
    // Each is served by what is there; in the end there is room for nothing but sandboxes.
    let ids = [create(&node).await, create(&node).await, create(&node).await];
    refused(&node, 3).await;
    assert_eq!((committed(&node), node.capacity().standbys, node.capacity().running), (3, 0, 3));
    // Standbys never make a paused sandbox give way.
    pause(&node, &ids[0]).await;
    world.settled(&node, &ids[0]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(is_hot(&node, &ids[0]) && node.capacity().standbys == 0);
    node.kill(&ids[1]).await.unwrap();
    eventually("a standby takes the room", || node.capacity().standbys == 1).await;
    // And a cold resume takes it back.
    node.release(&ids[0]).await.unwrap();
    eventually("another one takes the room", || node.capacity().standbys == 2).await;
    assert_eq!(resume(&node, &ids[0]).await.tier, Tier::Cold);
    assert!(committed(&node) <= 3);
    node.shutdown().await;
}

#[test]
fn what_an_earlier_process_left_is_counted_again() {
    let first = runtime();
    let (world, runs, hot) = first.block_on(async {
        let world = World::prepared().await;
        let node = world.start_with(room_for(&world, 2, 0)).await.unwrap();
        let (runs, hot) = (create(&node).await, create(&node).await);
        pause(&node, &hot).await;
        world.settled(&node, &hot).await;
        (world, runs, hot)
    });
    crash(first);
    let second = runtime();
    second.block_on(async {
        let node = world.start_with(room_for(&world, 2, 0)).await.unwrap();
        assert_eq!((committed(&node), node.capacity().running, node.capacity().hot), (2, 1, 1));
        // Hot as it was found, it gives way to the next one.
        let created = create(&node).await;
        assert!(!is_hot(&node, &hot));
        refused(&node, 2).await;
        node.kill(&created).await.unwrap();
        assert_eq!(resume(&node, &hot).await.tier, Tier::Cold);
        pause(&node, &hot).await;
        world.settled(&node, &hot).await;
    });
    crash(second);
    runtime().block_on(async {
        // Less than what is there: whoever waits gives way, whoever runs is kept.
        let node = world.open(room_for(&world, 1, 0)).await.unwrap();
        eventually("the paused one gave way", || !is_hot(&node, &hot)).await;
        assert_eq!(node.get(&runs).unwrap().state, SandboxState::Running);
        assert_eq!(committed(&node), 1);
        refused(&node, 1).await;
        node.kill(&runs).await.unwrap();
        resume(&node, &hot).await;
        node.shutdown().await;
    });
}

#[tokio::test]
async fn those_who_wait_for_somebody_give_way_to_a_host_without_memory() {
    let world = World::prepared().await;
    let settings = Settings { low_memory_bytes: 1000, warm: 1, ..world.settings(1) };
    let node = world.start_with(settings).await.unwrap();
    let (runs, hot) = (create(&node).await, create(&node).await);
    pause(&node, &hot).await;
    eventually("the standbys are there again", || node.capacity().standbys == 2).await;
    world.host.set_available_memory(999);
    eventually("nothing is left that only waits", || node.capacity().standbys == 0 && !is_hot(&node, &hot))
        .await;
    let saved = node.get(&hot).unwrap().saved.unwrap();
    assert_eq!(saved.durability, Durability::Local);
    assert_eq!(node.get(&runs).unwrap().state, SandboxState::Running);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(node.capacity().standbys, 0, "none is made while there is no memory");
    world.host.set_available_memory(5000);
    eventually("they come back", || node.capacity().standbys == 2).await;
    assert_eq!(resume(&node, &hot).await.tier, Tier::Cold);
    node.shutdown().await;
}

/// Creates, pauses, resumes and kills at once, with standbys: never more VMs than there is memory for, and everybody is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn there_are_never_more_guests_than_memory() {
    let world = Arc::new(World::prepared().await);
    let mut settings = Settings { warm: 1, memory_limit_bytes: 5 * GUEST, ..world.settings(1) };
    settings.deadlines.queue = Duration::from_secs(60);
    let node = world.start_with(settings).await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let watching = {
        let (world, node, over) = (Arc::clone(&world), node.clone(), Arc::clone(&over));
        tokio::spawn(async move {
            loop {
                if world.host.counts().vms > 5 || committed(&node) > 5 {
                    over.store(true, Ordering::Relaxed);
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    let lives = (0..12).map(|number| {
        let node = node.clone();
        tokio::spawn(async move {
            for _ in 0..3 {
                let id = create(&node).await;
                if number % 2 == 0 {
                    pause(&node, &id).await;
                    resume(&node, &id).await;
                }
                node.kill(&id).await.unwrap();
            }
        })
    });
    for life in futures_util::future::join_all(lives).await {
        life.unwrap();
    }
    watching.abort();
    assert!(!over.load(Ordering::Relaxed), "more VMs than there is memory for");
    eventually("only standbys are left", || {
        let capacity = node.capacity();
        (committed(&node), capacity.standbys, capacity.starting) == (2, 2, 0)
    })
    .await;
    node.shutdown().await;
    world.only(0).await;
}

fn fork(children: usize) -> ForkRequest {
    ForkRequest { timeout: HOUR, children: vec![ChildRequest::default(); children] }
}

#[tokio::test]
async fn a_parent_is_not_stopped_for_children_that_have_no_room() {
    let world = World::prepared().await;
    let node = world.start_with(room_for(&world, 1, 0)).await.unwrap();
    let id = create(&node).await;
    let before = world.host.log().len();
    let error = node.fork(&id, fork(2)).await.unwrap_err();
    assert!(matches!(error, Error::NoCapacity(Shortage::Memory { .. })), "{error}");
    assert!(!world.host.log()[before..].iter().any(|call| matches!(call, Operation::Sync | Operation::Stop)));
    // Of two, the one for which there is room.
    node.shutdown().await;
    let node = world.start_with(room_for(&world, 2, 0)).await.unwrap();
    let children = node.fork(&id, fork(2)).await.unwrap().children;
    assert_eq!(children.iter().filter(|child| child.is_ok()).count(), 1);
    node.shutdown().await;
}

#[tokio::test]
async fn others_need_not_wait_behind_all_children_of_a_fork() {
    let world = World::prepared().await;
    let mut settings = world.settings(0);
    settings.max_starting = 1;
    settings.deadlines.step = Duration::from_secs(3);
    let node = world.start_with(settings).await.unwrap();
    let id = create(&node).await;
    world.host.fail_call(Operation::Load, 0, Fault::HangBefore);
    let (forking, parent) = (node.clone(), id.clone());
    let forked = tokio::spawn(async move { forking.fork(&parent, fork(5)).await });
    world.host.wait_for_hang(1).await;
    assert_eq!((node.capacity().starting, node.capacity().waiting), (1, 0));
    let children = forked.await.unwrap().unwrap().children;
    assert_eq!(children.iter().filter(|child| child.is_ok()).count(), 4, "all but the one that hung");
    node.shutdown().await;
}
