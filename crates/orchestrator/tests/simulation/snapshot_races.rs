//! What else is asked of a sandbox while a snapshot of it is taken or stored, and what ends in the middle of that.

use crate::pause::resume;
use crate::snapshots::{FULL, child, end, see, worlds, write};
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    CreateRequest, Deadlines, Error, OnTimeout, Orchestrator, PauseMode, PauseRequest, PausedAll, Settings,
    SnapshotRequest, SnapshotState, SnapshotTaken,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Fault, Operation};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How long a guest of these nodes may take to answer its greeting.
const GREETING: Duration = Duration::from_millis(700);

/// A node that does not wait long for a greeting.
async fn start(world: &World) -> Orchestrator {
    world.start_with(settings(world)).await.unwrap()
}

fn settings(world: &World) -> Settings {
    let settings = world.settings(0);
    Settings { deadlines: Deadlines { init: GREETING, ..settings.deadlines.clone() }, ..settings }
}

/// Asks for a snapshot, and returns when the `operation` of it hangs.
async fn hanging(
    world: &World,
    node: &Orchestrator,
    id: &SandboxId,
    (operation, mode): (Operation, PauseMode),
) -> JoinHandle<Result<SnapshotTaken, Error>> {
    world.host.fail_call(operation, 0, Fault::HangBefore);
    let (asking, asked) = (node.clone(), id.clone());
    let request = SnapshotRequest { mode, ..FULL };
    let caller = tokio::spawn(async move { asking.snapshot(&asked, request).await });
    world.host.wait_for_hang(1).await;
    caller
}

/// Pauses, as soon as the sandbox may be.
async fn pause_soon(node: &Orchestrator, id: &SandboxId) {
    let begin = Instant::now();
    while let Err(error) = node.pause(id, PauseRequest::default()).await {
        assert!(matches!(error, Error::Transitioning(_)) && begin.elapsed() < SOON, "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The guest goes on, but the snapshot is still at it: a pause would count over pages that it does not have.
#[tokio::test]
async fn a_pause_does_not_drop_a_snapshot_in_the_middle() {
    for world in worlds().await {
        let node = start(&world).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        write(&world, &id, 1);
        pause_soon(&node, &id).await;
        resume(&node, &id).await;
        node.snapshot(&id, FULL).await.unwrap();
        world.host.write(&name, 2, 7);
        let caller = hanging(&world, &node, &id, (Operation::Init, PauseMode::Full)).await;
        let refused = node.pause(&id, PauseRequest::default()).await;
        assert!(matches!(refused, Err(Error::Transitioning(_))), "{refused:?}");
        let taken = caller.await.unwrap().unwrap();
        pause_soon(&node, &id).await;
        node.release(&id).await.unwrap();
        resume(&node, &id).await;
        assert_eq!((see(&world, &id), world.host.read(&name, 2)), ((1, 1), (7, 7)));
        let child = child(&node, taken.snapshot.id.as_str()).await;
        assert_eq!(world.host.read(&World::vm_name(&child), 2), (7, 7));
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn the_end_of_a_node_waits_for_a_snapshot_and_pauses_then() {
    let world = World::with_store(true).await;
    let node = start(&world).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let caller = hanging(&world, &node, &id, (Operation::Init, PauseMode::Full)).await;
    assert_eq!(node.pause_all(SOON).await, PausedAll { paused: 1, left: 0 });
    caller.await.unwrap().unwrap();
    end(&world, &node).await;
}

#[tokio::test]
async fn a_time_that_is_set_during_a_snapshot_counts() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    for extends in [false, true] {
        let id = node.create(request()).await.unwrap().sandbox.id;
        let caller = hanging(&world, &node, &id, (Operation::Init, PauseMode::Full)).await;
        match extends {
            false => node.set_timeout(&id, HOUR).await.unwrap(),
            true => drop(node.extend(&id, HOUR).await.unwrap()),
        }
        caller.await.unwrap().unwrap();
        let ends_late = |node: &Orchestrator| {
            let left = node.get(&id).unwrap().end_at.duration_since(jiff::Timestamp::now());
            left.as_secs() > 3000
        };
        assert!(ends_late(&node));
        node.kill(&id).await.unwrap();
    }
    end(&world, &node).await;
}

/// The record that is cleared is not the one that the task of the lost sandbox has.
#[tokio::test]
async fn a_lost_sandbox_hands_over_once() {
    for mode in [PauseMode::Full, PauseMode::Filesystem] {
        for world in worlds().await {
            let node = start(&world).await;
            let id = node.create(request()).await.unwrap().sandbox.id;
            write(&world, &id, 1);
            let caller = hanging(&world, &node, &id, (Operation::Init, mode)).await;
            node.shutdown().await;
            assert!(matches!(caller.await.unwrap(), Err(Error::ShuttingDown)));
            world.host.restart();
            let node = start(&world).await;
            eventually("it was handed over", || node.snapshots()[0].state == SnapshotState::Ready).await;
            assert!(matches!(node.get(&id), Err(Error::SandboxLost { .. })));
            node.kill(&id).await.unwrap();
            world.only(0).await;
            let child = child(&node, node.snapshots()[0].id.as_str()).await;
            assert_eq!(see(&world, &child).1, 1);
            end(&world, &node).await;
            assert_eq!(world.rows(), 0);
        }
    }
}

#[tokio::test]
async fn a_kill_on_a_full_host_frees_everything_and_tells_who_waits() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let caller = hanging(&world, &node, &id, (Operation::CreateImage, PauseMode::Full)).await;
    world.store.as_ref().unwrap().set_full(true);
    node.kill(&id).await.unwrap();
    world.only(0).await;
    let told = tokio::time::timeout(SOON, caller).await.unwrap().unwrap();
    assert!(matches!(told, Err(Error::NoCapacity(_))), "{told:?}");
    assert!(node.snapshots().is_empty());
    end(&world, &node).await;
    assert_eq!(world.rows(), 0);
}

/// Nothing of it can be stored now, but nobody wants it any more.
#[tokio::test]
async fn a_deleted_snapshot_holds_nothing_up() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let caller = hanging(&world, &node, &id, (Operation::CreateImage, PauseMode::Full)).await;
    let of = node.snapshots()[0].id.clone();
    node.delete_snapshot(of.as_str()).await.unwrap();
    world.host.fail_always(Operation::CreateImage, Fault::HangBefore);
    node.kill(&id).await.unwrap();
    world.only(0).await;
    assert!(matches!(caller.await.unwrap(), Err(Error::TemplateNotFound(_))));
    world.host.heal();
    end(&world, &node).await;
    assert_eq!(world.rows(), 0);
}

/// Nothing holds the guest's programs still when the node is gone, wherever the snapshot was.
#[tokio::test]
async fn a_guest_is_greeted_when_its_node_ends_during_a_snapshot() {
    for operation in [Operation::Sync, Operation::Capture] {
        let world = World::with_store(false).await;
        let node = start(&world).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        world.host.fail_call(operation, 0, Fault::LoseReply);
        let (asking, asked) = (node.clone(), id.clone());
        let caller = tokio::spawn(async move { asking.snapshot(&asked, FULL).await });
        world.host.wait_for_hang(1).await;
        let greeted = world.host.inits(&name).len();
        node.shutdown().await;
        assert!(matches!(caller.await.unwrap(), Err(Error::ShuttingDown)));
        assert_eq!(world.host.is_running(&name), Some(true));
        assert!(world.host.inits(&name).len() > greeted, "{operation:?}");
        // Whatever the last process came to: its programs may stand still.
        let greeted = world.host.inits(&name).len();
        let node = start(&world).await;
        eventually("it is greeted", || world.host.inits(&name).len() > greeted).await;
        end(&world, &node).await;
    }
}

/// What it would be handed was never synced, and nobody was told that it is there.
#[tokio::test]
async fn a_power_cut_takes_a_snapshot_that_was_not_handed_over() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let caller = hanging(&world, &node, &id, (Operation::CreateImage, PauseMode::Full)).await;
    node.shutdown().await;
    assert!(matches!(caller.await.unwrap(), Err(Error::ShuttingDown)));
    world.host.restart();
    let settings = Settings { host_boot_id: "another boot".to_owned(), ..settings(&world) };
    let node = world.start_with(settings).await.unwrap();
    assert!(node.snapshots().is_empty());
    assert!(matches!(node.get(&id), Err(Error::SandboxLost { .. })));
    node.kill(&id).await.unwrap();
    end(&world, &node).await;
    assert_eq!(world.rows(), 0);
}

/// Its disk alone lacks what the guest had not written when it was paused.
#[tokio::test]
async fn the_disk_of_a_paused_guest_that_did_not_flush_is_no_snapshot() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    write(&world, &id, 1);
    world.host.fail_call(Operation::Sync, 0, Fault::Fail);
    pause_soon(&node, &id).await;
    let disk_alone = SnapshotRequest { mode: PauseMode::Filesystem, ..FULL };
    let refused = node.snapshot(&id, disk_alone.clone()).await;
    assert!(matches!(refused, Err(Error::GuestUnresponsive { .. })), "{refused:?}");
    let of = node.snapshot(&id, FULL).await.unwrap().snapshot.id;
    assert_eq!(see(&world, &child(&node, of.as_str()).await), (1, 1));
    resume(&node, &id).await;
    pause_soon(&node, &id).await;
    node.snapshot(&id, disk_alone).await.unwrap();
    end(&world, &node).await;
}

/// Several that are to have one name at once, and what had it before is deleted at that moment.
#[tokio::test]
async fn a_name_is_one_snapshots_whoever_comes_first() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(node.create(request()).await.unwrap().sandbox.id);
    }
    let named = SnapshotRequest { name: Some(("setup".to_owned(), "default".to_owned())), ..FULL };
    let mut before = node.snapshot(&ids[0], named.clone()).await.unwrap().snapshot.id;
    for _ in 0..10 {
        let taken = futures_util::future::join_all(ids.iter().map(|id| node.snapshot(id, named.clone())));
        let (taken, deleted) = tokio::join!(taken, node.delete_snapshot(before.as_str()));
        deleted.unwrap();
        for taken in taken {
            taken.unwrap();
        }
        let views = node.snapshots();
        assert!(views.iter().all(|view| view.id != before), "what was deleted stays so");
        let with_name: Vec<_> = views.iter().filter(|view| view.name.is_some()).collect();
        assert_eq!(with_name.len(), 1);
        before = with_name[0].id.clone();
        for view in views.iter().filter(|view| view.id != before) {
            node.delete_snapshot(view.id.as_str()).await.unwrap();
        }
    }
    node.shutdown().await;
    let node = start(&world).await;
    assert_eq!(node.snapshots().iter().map(|view| view.id.clone()).collect::<Vec<_>>(), [before]);
    end(&world, &node).await;
}

/// The snapshot keeps what the disk would have to give up to go back to an older save.
#[tokio::test]
async fn after_a_power_cut_a_sandbox_goes_back_to_its_last_snapshot() {
    let world = World::with_store(false).await;
    let node = start(&world).await;
    let wanted = CreateRequest { on_timeout: OnTimeout::Pause(PauseMode::Full), ..request() };
    let id = node.create(wanted).await.unwrap().sandbox.id;
    pause_soon(&node, &id).await;
    world.settled(&node, &id).await;
    resume(&node, &id).await;
    write(&world, &id, 2);
    node.snapshot(&id, FULL).await.unwrap();
    world.host.fail_always(Operation::CreateImage, Fault::HangBefore);
    write(&world, &id, 3);
    pause_soon(&node, &id).await;
    node.shutdown().await;
    world.host.heal();
    world.host.restart();
    let settings = Settings { host_boot_id: "another boot".to_owned(), ..settings(&world) };
    let node = world.start_with(settings).await.unwrap();
    resume(&node, &id).await;
    assert_eq!(see(&world, &id), (2, 2));
    end(&world, &node).await;
}
