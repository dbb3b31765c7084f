//! Kills of the node at every step: its runtime is dropped in the middle of a call, as `kill -9` would do, and another
//! node starts on the same data directory and host.

use crate::world::{SOON, World, eventually, request};
use aenv_orchestrator::{CreateRequest, Error, LossCause, Orchestrator, SandboxState, Settings};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Fault, Operation};
use aenv_vmm::ExitCause;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Ends everything of a node at once, wherever it is.
pub(crate) fn crash(node: Runtime) {
    node.shutdown_timeout(SOON);
}

/// What a user does: create two, kill the first. Notes what was promised.
async fn use_node(node: Orchestrator, promised: Arc<Mutex<HashSet<SandboxId>>>) {
    let first = node.create(request()).await.unwrap().sandbox.id;
    promised.lock().unwrap().insert(first.clone());
    let second = node.create(request()).await.unwrap().sandbox.id;
    promised.lock().unwrap().insert(second);
    promised.lock().unwrap().remove(&first);
    node.kill(&first).await.unwrap();
}

/// The work of a node with hot and warm standbys hangs at call `at`; then the node is killed. False when the work ended before that.
fn crash_at(world: &World, (standbys, warm): (usize, usize), at: usize, fault: Fault) -> bool {
    let promised = Arc::new(Mutex::new(HashSet::new()));
    let node = runtime();
    world.host.fail_any(at, fault);
    let hung = {
        let promised = Arc::clone(&promised);
        node.block_on(async {
            let work = async {
                let node = world.start_warm(standbys, warm).await;
                use_node(node.clone(), promised).await;
                // The rest of the kill, and the refilled pool.
                eventually("settled", || {
                    let template = &node.templates()[0];
                    (template.standbys, template.warm) == (standbys, warm)
                        && world.host.counts().slots == 1 + standbys + warm
                })
                .await;
            };
            tokio::select! {
                () = world.host.wait_for_hang(1) => true,
                () = work => false,
            }
        })
    };
    crash(node);
    world.host.heal();
    check_recovery(world, &promised.lock().unwrap());
    hung
}

fn check_recovery(world: &World, promised: &HashSet<SandboxId>) {
    let next = runtime();
    next.block_on(async {
        let node = world.start(1).await;
        let there: HashSet<_> = node.list().into_iter().map(|sandbox| sandbox.id).collect();
        assert!(promised.is_subset(&there), "promised {promised:?}, there are {there:?}");
        for id in &there {
            assert_eq!(node.get(id).unwrap().state, SandboxState::Running);
            assert_eq!(world.host.is_running(&World::vm_name(id)), Some(true));
            node.route(id).unwrap().dialer.dial(aenv_protocol::envd::ENVD_PORT).await.unwrap();
        }
        world.only(there.len() + 1).await;
        for id in &there {
            node.kill(id).await.unwrap();
        }
        node.shutdown().await;
        world.only(0).await;
    });
}

fn crash_everywhere(standbys: (usize, usize), fault: Fault) {
    let mut at = 0;
    loop {
        let world = runtime().block_on(World::prepared());
        if !crash_at(&world, standbys, at, fault) {
            break;
        }
        at += 1;
    }
    assert!(at > 10, "only {at} steps were seen");
}

#[test]
fn a_node_killed_before_any_step_of_cold_creates_leaks_and_loses_nothing() {
    crash_everywhere((0, 0), Fault::HangBefore);
}

#[test]
fn a_node_killed_after_any_step_of_cold_creates_leaks_and_loses_nothing() {
    crash_everywhere((0, 0), Fault::LoseReply);
}

#[test]
fn a_node_killed_before_any_step_with_standbys_leaks_and_loses_nothing() {
    crash_everywhere((1, 0), Fault::HangBefore);
}

#[test]
fn a_node_killed_after_any_step_with_standbys_leaks_and_loses_nothing() {
    crash_everywhere((1, 0), Fault::LoseReply);
}

#[test]
fn a_node_killed_before_any_step_with_warm_standbys_leaks_and_loses_nothing() {
    crash_everywhere((0, 1), Fault::HangBefore);
    crash_everywhere((1, 1), Fault::HangBefore);
}

#[test]
fn a_node_killed_after_any_step_with_warm_standbys_leaks_and_loses_nothing() {
    crash_everywhere((0, 1), Fault::LoseReply);
    crash_everywhere((1, 1), Fault::LoseReply);
}

#[test]
fn a_node_killed_during_a_preparation_leaves_nothing_and_the_next_one_prepares() {
    for operation in
        [Operation::Boot, Operation::Health, Operation::Stop, Operation::Capture, Operation::Kill]
    {
        for fault in [Fault::HangBefore, Fault::LoseReply] {
            let world = World::new();
            world.host.fail_call(operation, 0, fault);
            let node = runtime();
            node.block_on(async {
                let _node = world.open(world.settings(0)).await.unwrap();
                world.host.wait_for_hang(1).await;
            });
            crash(node);
            world.host.heal();
            check_recovery(&world, &HashSet::new());
        }
    }
}

/// Five running sandboxes whose node was killed.
fn five_orphans(timeout: Duration) -> (World, Vec<SandboxId>) {
    let node = runtime();
    let (world, ids) = node.block_on(async {
        let world = World::prepared().await;
        let node = world.start(1).await;
        let mut ids = Vec::new();
        for _ in 0..5 {
            ids.push(node.create(CreateRequest { timeout, ..request() }).await.unwrap().sandbox.id);
        }
        (world, ids)
    });
    crash(node);
    (world, ids)
}

#[test]
fn orphans_are_adopted_with_what_was_known_of_them() {
    let (world, ids) = five_orphans(Duration::from_secs(300));
    let dead = World::vm_name(&ids[0]);
    world.host.end_vm(&dead, ExitCause::VmmKilled, "killed meanwhile");
    world.host.set_running(&World::vm_name(&ids[1]), false);
    runtime().block_on(async {
        let node = world.start(0).await;
        assert!(matches!(node.get(&ids[0]), Err(Error::SandboxLost { cause: LossCause::VmmKilled, .. })));
        for id in &ids[1..] {
            let view = node.get(id).unwrap();
            assert_eq!(view.metadata, request().metadata);
            assert!(view.access_token.is_some());
            assert!(node.route(id).is_some());
        }
        let stopped = World::vm_name(&ids[1]);
        assert_eq!(world.host.is_running(&stopped), Some(true), "one found stopped goes on");
        let inits = world.host.inits(&stopped);
        assert_eq!(inits.len(), 2, "and is told the time");
        assert_eq!((&inits[1].env_vars, &inits[1].identity), (&request().env_vars, &None));
        world.only(4).await;
        node.shutdown().await;
    });
}

#[test]
fn time_goes_on_while_no_node_runs() {
    let (world, _) = five_orphans(Duration::from_millis(1500));
    std::thread::sleep(Duration::from_millis(1500));
    runtime().block_on(async {
        let node = world.start(0).await;
        world.only(0).await;
        assert!(node.list().is_empty());
        node.shutdown().await;
    });
}

#[test]
fn after_a_host_restart_all_are_lost_and_nothing_is_left() {
    let (world, ids) = five_orphans(Duration::from_secs(300));
    world.host.restart();
    let rebooted = || Settings { host_boot_id: "next boot".to_owned(), ..world.settings(0) };
    runtime().block_on(async {
        // Twice: the loss itself survives the next restart of the node.
        for _ in 0..2 {
            let node = world.start_with(rebooted()).await.unwrap();
            for id in &ids {
                assert!(matches!(
                    node.get(id),
                    Err(Error::SandboxLost { cause: LossCause::HostRestarted, .. })
                ));
            }
            world.only(0).await;
            node.shutdown().await;
        }
    });
}
