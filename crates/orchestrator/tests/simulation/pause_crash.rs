//! Kills of the node at every step of pauses, resumes, releases and kills: the next node finds what was promised.

use crate::crash::{crash, runtime};
use crate::world::{HOUR, World, eventually, request};
use aenv_orchestrator::{
    CreateRequest, Durability, Error, LossCause, OnTimeout, Orchestrator, PauseMode, PauseRequest,
    ResumeRequest, SandboxState, Settings,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::Fault;
use aenv_vmm::ExitCause;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a user was told last.
#[derive(Debug, Clone, Default)]
struct Told {
    id: Option<SandboxId>,
    /// Value of page 1 that was written last, while it ran.
    value: u8,
    /// A state that the sandbox may be in.
    paused: bool,
    running: bool,
    gone: bool,
}

/// What a user does: everything that there is.
async fn use_node(world: &World, node: &Orchestrator, told: &Mutex<Told>) {
    let note = |change: fn(&mut Told)| change(&mut told.lock().unwrap());
    let wanted = CreateRequest { timeout: HOUR, on_timeout: OnTimeout::Pause(PauseMode::Full), ..request() };
    let id = node.create(wanted).await.unwrap().sandbox.id;
    told.lock().unwrap().id = Some(id.clone());
    note(|told| told.running = true);
    let name = World::vm_name(&id);
    let write = |value: u8| {
        world.host.write(&name, 1, value);
        told.lock().unwrap().value = value;
    };
    // Hot.
    write(1);
    note(|told| told.paused = true);
    node.pause(&id, PauseRequest::default()).await.unwrap();
    note(|told| told.running = false);
    note(|told| told.running = true);
    resume(node, &id).await;
    note(|told| told.paused = false);
    // Cold.
    write(2);
    note(|told| told.paused = true);
    node.pause(&id, PauseRequest { durability: Durability::Local, ..PauseRequest::default() }).await.unwrap();
    note(|told| told.running = false);
    node.release(&id).await.unwrap();
    note(|told| told.running = true);
    resume(node, &id).await;
    note(|told| told.paused = false);
    // By its time.
    write(3);
    note(|told| told.paused = true);
    node.set_timeout(&id, Duration::ZERO).await.unwrap();
    eventually("it is paused", || node.get(&id).unwrap().saved.is_some_and(|saved| saved.number == 3)).await;
    note(|told| told.running = false);
    note(|told| told.gone = true);
    node.kill(&id).await.unwrap();
    note(|told| told.paused = false);
}

async fn resume(node: &Orchestrator, id: &SandboxId) {
    node.resume(id, ResumeRequest { timeout: HOUR, reboot: false }).await.unwrap();
}

/// The work hangs at call `at`; then the node is killed. False when the work ended before that.
fn crash_at(keeps_log: bool, at: usize, fault: Fault) -> bool {
    let world = runtime().block_on(World::prepared_with(keeps_log));
    let told = Arc::new(Mutex::new(Told::default()));
    let node = runtime();
    world.host.fail_any(at, fault);
    let hung = node.block_on(async {
        let work = async {
            let node = world.start(0).await;
            use_node(&world, &node, &told).await;
            world.only(0).await;
        };
        tokio::select! {
            () = world.host.wait_for_hang(1) => true,
            () = work => false,
        }
    });
    crash(node);
    world.host.heal();
    let told = told.lock().unwrap().clone();
    check_recovery(&world, &told, &format!("at {at}, {fault:?}, log {keeps_log}, {told:?}"));
    hung
}

fn check_recovery(world: &World, told: &Told, what: &str) {
    runtime().block_on(async {
        let node = world.start(0).await;
        let listed = node.list();
        if let Some(id) = &told.id {
            let found = listed.iter().find(|view| view.id == *id);
            match found.map(|view| view.state.clone()) {
                Some(SandboxState::Running) => assert!(told.running, "{what}"),
                Some(SandboxState::Paused) => assert!(told.paused, "{what}"),
                None => assert!(told.gone, "{what}"),
                Some(other) => panic!("{other:?}: {what}"),
            }
            if found.is_some() {
                let name = World::vm_name(id);
                resume(&node, id).await;
                assert_eq!(world.host.is_running(&name), Some(true), "{what}");
                assert_eq!(world.host.read(&name, 1), (told.value, told.value), "{what}");
                node.route(id).unwrap().dialer.dial(aenv_protocol::envd::ENVD_PORT).await.unwrap();
                // It can be saved again, with all that was written before and after.
                world.host.write(&name, 2, 77);
                node.pause(id, PauseRequest { durability: Durability::Local, ..PauseRequest::default() })
                    .await
                    .unwrap();
                node.release(id).await.unwrap();
                resume(&node, id).await;
                let seen = (world.host.read(&name, 1), world.host.read(&name, 2));
                assert_eq!(seen, ((told.value, told.value), (77, 77)), "{what}");
                eventually("what nothing needs is removed", || world.saves(id).len() <= 2).await;
            }
        }
        for view in node.list() {
            node.kill(&view.id).await.unwrap();
        }
        world.only(0).await;
        node.shutdown().await;
    });
}

fn crash_everywhere(keeps_log: bool, fault: Fault) {
    let mut at = 0;
    while crash_at(keeps_log, at, fault) {
        at += 1;
    }
    assert!(at > 25, "only {at} steps were seen");
}

#[test]
fn a_node_killed_before_any_step_loses_and_leaks_nothing() {
    crash_everywhere(false, Fault::HangBefore);
}

#[test]
fn a_node_killed_after_any_step_loses_and_leaks_nothing() {
    crash_everywhere(false, Fault::LoseReply);
}

#[test]
fn a_node_killed_before_any_step_loses_and_leaks_nothing_with_a_log_of_writes() {
    crash_everywhere(true, Fault::HangBefore);
}

#[test]
fn a_node_killed_after_any_step_loses_and_leaks_nothing_with_a_log_of_writes() {
    crash_everywhere(true, Fault::LoseReply);
}

/// A sandbox that was paused so often, each time with its number written before; the node is killed after it.
fn paused_orphan(pauses: u8, durability: Durability) -> (World, SandboxId) {
    let node = runtime();
    let (world, id) = node.block_on(async {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        for number in 1..=pauses {
            world.host.write(&World::vm_name(&id), 1, number);
            if number == pauses && durability == Durability::Process {
                // Its memory cannot be stored.
                let path = format!("data/sandboxes/{id}/captures/{number}/memory/x");
                std::fs::create_dir_all(world.path(&path)).unwrap();
                node.pause(&id, PauseRequest::default()).await.unwrap();
            } else {
                let local = PauseRequest { durability: Durability::Local, ..PauseRequest::default() };
                node.pause(&id, local).await.unwrap();
            }
            if number < pauses {
                resume(&node, &id).await;
            }
        }
        (world, id)
    });
    crash(node);
    (world, id)
}

#[test]
fn a_vmm_that_stands_by_goes_on_doing_so_unless_it_ran() {
    for (ran, died) in [(false, false), (true, false), (false, true)] {
        let (world, id) = paused_orphan(1, Durability::Local);
        let name = World::vm_name(&id);
        if ran {
            world.host.set_running(&name, true);
            world.host.write(&name, 1, 99);
        }
        if died {
            world.host.end_vm(&name, ExitCause::VmmKilled, "killed");
        }
        runtime().block_on(async {
            let node = world.start(0).await;
            assert_eq!(world.host.counts().vms, usize::from(!ran && !died));
            assert_eq!(node.get(&id).unwrap().state, SandboxState::Paused);
            resume(&node, &id).await;
            assert_eq!(world.host.read(&name, 1), (1, 1), "ran {ran}, died {died}");
            node.kill(&id).await.unwrap();
            world.only(0).await;
            node.shutdown().await;
        });
    }
}

/// The calls of the walk above are those to the VMM, the network and the guest; this one hits the journal and the disks too.
#[test]
fn a_node_killed_at_any_moment_loses_and_leaks_nothing() {
    for moment in 0..40 {
        let world = runtime().block_on(World::prepared_with(moment % 2 == 1));
        let told = Arc::new(Mutex::new(Told::default()));
        let node = runtime();
        node.block_on(async {
            let work = async {
                let node = world.start(0).await;
                use_node(&world, &node, &told).await;
            };
            drop(tokio::time::timeout(Duration::from_micros(20_000 + moment * 2_500), work).await);
        });
        crash(node);
        let told = told.lock().unwrap().clone();
        check_recovery(&world, &told, &format!("moment {moment}, {told:?}"));
    }
}

#[test]
fn what_was_durable_is_there_after_a_host_restart() {
    for (pauses, durability) in [(1, Durability::Local), (2, Durability::Process), (1, Durability::Process)] {
        let (world, id) = paused_orphan(pauses, durability);
        world.host.restart();
        let obstacle = world.path(&format!("data/sandboxes/{id}/captures/{pauses}/memory"));
        if durability == Durability::Process {
            std::fs::remove_dir_all(obstacle).unwrap();
        }
        let rebooted = || Settings { host_boot_id: "next boot".to_owned(), ..world.settings(0) };
        runtime().block_on(async {
            let node = world.start_with(rebooted()).await.unwrap();
            match (pauses, durability) {
                (1, Durability::Process) => assert!(matches!(
                    node.get(&id),
                    Err(Error::SandboxLost { cause: LossCause::HostRestarted, .. })
                )),
                _ => {
                    let saved = node.get(&id).unwrap().saved.unwrap();
                    let fell_back = pauses == 2;
                    assert_eq!(saved.fallback, fell_back.then_some(LossCause::HostRestarted));
                    assert_eq!(saved.number, 1);
                    resume(&node, &id).await;
                    assert_eq!(world.host.read(&World::vm_name(&id), 1), (1, 1));
                    // It would keep a layered disk from going back to the one before.
                    let later = world.path(&format!("data/sandboxes/{id}/captures/2"));
                    assert!(!later.exists(), "what was saved later is still there");
                }
            }
            node.kill(&id).await.unwrap();
            world.only(0).await;
            node.shutdown().await;
        });
    }
}
