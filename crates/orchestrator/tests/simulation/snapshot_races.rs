//! What else is asked of a sandbox while a snapshot of it is taken or stored, and what ends in the middle of that.

use crate::pause::resume;
use crate::snapshots::{FULL, child, end, see, worlds, write};
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    Deadlines, Error, Orchestrator, PauseMode, PauseRequest, PausedAll, Settings, SnapshotRequest,
    SnapshotState, SnapshotTaken,
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
