//! Adoption that does not succeed at once: what does not answer is kept and asked again, what is gone is lost.

use crate::crash::{crash, runtime};
use crate::world::{SOON, World, eventually, request};
use aenv_orchestrator::{CreateRequest, Error, LossCause, Orchestrator, SandboxState};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Fault, Operation};
use aenv_vmm::ExitCause;
use std::time::Duration;

/// A running sandbox whose node was killed.
fn orphan(timeout: Duration) -> (World, SandboxId) {
    let node = runtime();
    let (world, id) = node.block_on(async {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(CreateRequest { timeout, ..request() }).await.unwrap().sandbox.id;
        (world, id)
    });
    crash(node);
    (world, id)
}

fn runs(node: &Orchestrator, id: &SandboxId) -> bool {
    node.get(id).is_ok_and(|view| view.state == SandboxState::Running)
}

fn count(world: &World, wanted: Operation) -> usize {
    world.host.log().into_iter().filter(|call| *call == wanted).count()
}

#[test]
fn a_vmm_that_cannot_be_reached_at_first_is_adopted_later() {
    let (world, id) = orphan(Duration::from_secs(300));
    for nth in [0, 1] {
        world.host.fail_call(Operation::Adopt, nth, Fault::Fail);
    }
    runtime().block_on(async {
        let node = world.start(0).await;
        assert_eq!(count(&world, Operation::Adopt), 1, "a start does not wait for the further attempts");
        assert!(runs(&node, &id) && node.route(&id).is_some());
        let lifecycle = node.route(&id).unwrap().lifecycle;
        eventually("it is adopted", || count(&world, Operation::Health) > 1).await;
        assert_eq!(count(&world, Operation::Adopt), 3);
        assert!(runs(&node, &id));
        assert_eq!(node.route(&id).unwrap().lifecycle, lifecycle, "its streams were not broken");
        world.only(1).await;
        world.host.end_vm(&World::vm_name(&id), ExitCause::OutOfMemory, "memory limit reached");
        eventually("its death is seen", || {
            matches!(node.get(&id), Err(Error::SandboxLost { cause: LossCause::OutOfMemory, .. }))
        })
        .await;
        world.only(0).await;
        node.shutdown().await;
    });
}

#[test]
fn a_network_that_cannot_be_adopted_at_first_is_adopted_later() {
    let (world, id) = orphan(Duration::from_secs(300));
    world.host.fail_call(Operation::AdoptSlot, 0, Fault::Fail);
    runtime().block_on(async {
        let node = world.start(0).await;
        assert!(runs(&node, &id));
        eventually("it can be reached", || node.route(&id).is_some()).await;
        node.route(&id).unwrap().dialer.dial(aenv_protocol::envd::ENVD_PORT).await.unwrap();
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    });
}

#[test]
fn a_guest_that_is_silent_for_longer_than_the_limit_is_kept_and_told_the_time_when_it_answers() {
    let (world, id) = orphan(Duration::from_secs(300));
    let name = World::vm_name(&id);
    world.host.set_running(&name, false);
    world.host.fail_call(Operation::Health, 0, Fault::HangBefore);
    runtime().block_on(async {
        let mut settings = world.settings(0);
        settings.deadlines.greeting = Duration::from_millis(300);
        let node = world.start_with(settings).await.unwrap();
        assert!(runs(&node, &id) && node.route(&id).is_some());
        assert_eq!(world.host.is_running(&name), Some(true));
        eventually("it is told the time", || world.host.inits(&name).len() == 2).await;
        assert_eq!(count(&world, Operation::Adopt), 1, "the VMM that answers is not adopted again");
        assert!(runs(&node, &id));
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    });
}

#[test]
fn a_sandbox_that_is_not_adopted_can_be_killed_and_its_time_ends() {
    for timeout in [Duration::from_secs(300), Duration::from_secs(2)] {
        let (world, id) = orphan(timeout);
        world.host.fail_always(Operation::Adopt, Fault::Fail);
        runtime().block_on(async {
            let node = world.start(0).await;
            if timeout > SOON {
                assert!(runs(&node, &id));
                node.kill(&id).await.unwrap();
            }
            world.only(0).await;
            assert!(matches!(node.get(&id), Err(Error::SandboxNotFound(_))));
            node.shutdown().await;
        });
    }
}

#[test]
fn a_process_that_ends_before_it_is_adopted_is_lost() {
    let (world, id) = orphan(Duration::from_secs(300));
    world.host.fail_always(Operation::Adopt, Fault::Fail);
    runtime().block_on(async {
        let node = world.start(0).await;
        assert!(runs(&node, &id));
        world.host.end_vm(&World::vm_name(&id), ExitCause::VmmKilled, "killed");
        world.host.heal();
        eventually("the loss is seen", || {
            matches!(node.get(&id), Err(Error::SandboxLost { cause: LossCause::VmmKilled, .. }))
        })
        .await;
        assert!(node.route(&id).is_none());
        world.only(0).await;
        node.shutdown().await;
    });
}

#[test]
fn a_node_that_is_killed_while_it_adopts_leaves_the_sandbox_to_the_next() {
    let (world, id) = orphan(Duration::from_secs(300));
    world.host.fail_always(Operation::Adopt, Fault::Fail);
    let node = runtime();
    node.block_on(async {
        let node = world.start(0).await;
        assert!(runs(&node, &id));
    });
    crash(node);
    world.host.heal();
    runtime().block_on(async {
        let node = world.start(0).await;
        assert!(runs(&node, &id));
        world.only(1).await;
        node.shutdown().await;
    });
}

#[test]
fn strays_that_cannot_be_removed_do_not_keep_the_node_from_starting_and_go_later() {
    for operation in [Operation::Reap, Operation::Sweep] {
        let (world, stray) = orphan(Duration::from_secs(300));
        for file in ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"] {
            // Whether the last two are there depends on how the journal was left.
            let _absent = std::fs::remove_file(world.path("data").join(file));
        }
        world.host.fail_always(operation, Fault::Fail);
        runtime().block_on(async {
            let node = world.start_warm(1, 1).await;
            assert!(matches!(node.get(&stray), Err(Error::SandboxNotFound(_))));
            let created = node.create(request()).await.unwrap().sandbox;
            assert!(world.sandbox_dirs().contains(&stray.to_string()));
            world.host.heal();
            eventually("the stray is gone", || {
                !world.host.vm_names().contains(&World::vm_name(&stray))
                    && !world.sandbox_dirs().contains(&stray.to_string())
            })
            .await;
            world.only(3).await;
            assert!(runs(&node, &created.id), "what the node made meanwhile is no stray");
            node.shutdown().await;
            world.only(1).await;
        });
    }
}
