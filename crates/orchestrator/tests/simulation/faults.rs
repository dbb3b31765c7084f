//! Faults of the VMM, the network and the guest: typed errors, nothing left, other sandboxes unharmed.

use crate::world::{SOON, World, eventually, request};
use aenv_orchestrator::{CreateRequest, Error, Settings, TemplateState, Tier};
use aenv_testkit::{Fault, Operation};
use aenv_vmm::ExitCause;
use proptest::prelude::*;
use std::time::Duration;

/// The stage that a failing call is reported as.
const STEPS: [(Operation, &str); 5] = [
    (Operation::Acquire, "stage slot"),
    (Operation::Restore, "stage prepare"),
    (Operation::Load, "stage load"),
    (Operation::Resume, "stage resume"),
    (Operation::Init, "stage init"),
];

#[tokio::test]
async fn a_failing_step_is_named_and_undone() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let other = node.create(request()).await.unwrap().sandbox;
    for (operation, stage) in STEPS {
        world.host.fail_call(operation, 0, Fault::Fail);
        let error = node.create(request()).await.unwrap_err();
        assert!(
            matches!(&error, Error::Internal { context, .. } if context.contains(stage)),
            "{operation:?}: {error}"
        );
        world.only(1).await;
    }
    world.host.fail_call(Operation::DenyEgress, 0, Fault::Fail);
    let error = node.create(CreateRequest { internet_access: false, ..request() }).await.unwrap_err();
    assert!(error.to_string().contains("stage deny_egress"), "{error}");
    world.only(1).await;
    assert!(node.get(&other.id).is_ok());
    node.shutdown().await;
}

#[tokio::test]
async fn a_step_that_hangs_is_given_up_and_undone() {
    let world = World::prepared().await;
    let mut settings = world.settings(0);
    settings.deadlines.step = Duration::from_millis(500);
    settings.deadlines.init = Duration::from_millis(500);
    let node = world.start_with(settings).await.unwrap();
    for (operation, stage) in STEPS.into_iter().filter(|(operation, _)| *operation != Operation::Acquire) {
        for fault in [Fault::HangBefore, Fault::LoseReply] {
            world.host.fail_call(operation, 0, fault);
            let error = node.create(request()).await.unwrap_err();
            assert!(error.to_string().contains(stage), "{operation:?} {fault:?}: {error}");
            world.only(0).await;
        }
    }
    node.shutdown().await;
}

#[tokio::test]
async fn a_vm_that_dies_while_it_is_made_fails_the_create() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    for operation in [Operation::Restore, Operation::Load, Operation::Resume] {
        world.host.fail_call(operation, 0, Fault::Die);
        let begin = std::time::Instant::now();
        assert!(matches!(node.create(request()).await, Err(Error::Internal { .. })), "{operation:?}");
        assert!(begin.elapsed() < SOON / 2, "its death is seen, not waited out");
        world.only(0).await;
    }
    node.shutdown().await;
}

#[tokio::test]
async fn what_cannot_be_removed_is_tried_again_until_it_is_gone() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    for operation in [Operation::Kill, Operation::Release] {
        let sandbox = node.create(request()).await.unwrap().sandbox;
        world.host.fail_always(operation, Fault::Fail);
        let killed = node.kill(&sandbox.id).await;
        assert_eq!(killed.is_err(), operation == Operation::Kill);
        assert!(matches!(node.get(&sandbox.id), Err(Error::SandboxNotFound(_))));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(world.host.counts().slots, 1);
        world.host.heal();
        world.only(0).await;
    }
    // What a node could not remove, the next one does.
    let sandbox = node.create(request()).await.unwrap().sandbox;
    world.host.fail_always(Operation::Kill, Fault::Fail);
    assert!(node.kill(&sandbox.id).await.is_err());
    node.shutdown().await;
    world.host.heal();
    let node = world.start(0).await;
    world.only(0).await;
    assert!(node.list().is_empty());
    node.shutdown().await;
}

#[tokio::test]
async fn a_standby_that_fails_when_claimed_is_replaced_by_a_cold_start() {
    let world = World::prepared().await;
    let node = world.start(1).await;
    world.host.fail_call(Operation::Init, 0, Fault::Fail);
    let created = node.create(request()).await.unwrap();
    assert_eq!(created.tier, Tier::Cold);
    world.only(2).await;
    node.shutdown().await;
    world.only(1).await;
}

#[tokio::test]
async fn a_standby_that_dies_is_replaced_without_a_hot_loop() {
    let world = World::prepared().await;
    let node = world.start(1).await;
    let first = world.host.vm_names();
    world.host.end_vm(&first[0], ExitCause::VmmKilled, "killed");
    eventually("another standby is there", || {
        let now = world.host.vm_names();
        node.templates()[0].standbys == 1 && now.len() == 1 && now != first
    })
    .await;
    world.host.fail_always(Operation::Health, Fault::Fail);
    let mut settings = world.settings(1);
    settings.deadlines.greeting = Duration::from_millis(20);
    node.shutdown().await;
    let node = world.open(settings).await.unwrap();
    let before = world.host.log().len();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let restores = world.host.log()[before..].iter().filter(|call| **call == Operation::Restore).count();
    assert!((1..=4).contains(&restores), "{restores} restores in a second");
    assert_eq!(node.templates()[0].standbys, 0, "one that does not answer is never offered");
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn a_template_that_cannot_be_prepared_says_why_and_leaves_nothing() {
    for operation in
        [Operation::Boot, Operation::Stop, Operation::Capture, Operation::Kill, Operation::Health]
    {
        let world = World::new();
        let mut settings = world.settings(1);
        settings.deadlines.boot = Duration::from_millis(200);
        match operation {
            Operation::Health => world.host.fail_always(operation, Fault::Fail),
            _ => world.host.fail_call(operation, 0, Fault::Fail),
        }
        let node = world.open(settings).await.unwrap();
        eventually("the preparation has failed", || {
            matches!(node.templates()[0].state, TemplateState::Failed(_))
        })
        .await;
        let error = node.create(request()).await.unwrap_err();
        assert!(matches!(&error, Error::TemplateNotReady { .. }), "{error}");
        if operation == Operation::Health {
            assert!(error.to_string().contains("fake console"), "the guest's last words are told: {error}");
        }
        world.only(0).await;
        node.shutdown().await;
        world.host.heal();
        let node = world.start(1).await;
        assert_eq!(node.create(request()).await.unwrap().tier, Tier::Hot);
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_template_that_could_not_be_prepared_is_tried_again() {
    let world = World::new();
    world.host.fail_always(Operation::Boot, Fault::Fail);
    let node = world.open(world.settings(0)).await.unwrap();
    let state = || node.templates()[0].state.clone();
    eventually("the preparation has failed", || matches!(state(), TemplateState::Failed(_))).await;
    let boots = || world.host.log().into_iter().filter(|call| *call == Operation::Boot).count();
    eventually("another attempt was made", || boots() == 2).await;
    assert!(matches!(state(), TemplateState::Failed(_)), "it stays failed until it is ready");
    world.host.heal();
    eventually("it is ready", || state() == TemplateState::Ready).await;
    assert_eq!(node.create(request()).await.unwrap().tier, Tier::Cold);
    node.shutdown().await;
}

#[tokio::test]
async fn a_capture_of_another_vmm_version_is_made_again_and_the_old_one_goes() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let sandbox = node.create(request()).await.unwrap().sandbox;
    node.shutdown().await;
    let captures = || {
        let id = std::fs::read_dir(world.path("data/templates")).unwrap().next().unwrap().unwrap().path();
        std::fs::read_dir(id.join("captures")).unwrap().count()
    };
    let parts = || aenv_orchestrator::Parts {
        vmm: std::sync::Arc::new(aenv_testkit::FakeVmm::with_version(
            std::sync::Arc::clone(&world.host),
            "2",
        )),
        ..world.parts()
    };
    let start =
        || async { aenv_orchestrator::Orchestrator::start(world.settings(0), parts()).await.unwrap() };
    let node = start().await;
    eventually("ready again", || node.templates()[0].state == TemplateState::Ready).await;
    assert_eq!(captures(), 2, "a live sandbox may map the old one");
    node.kill(&sandbox.id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
    let node = start().await;
    assert_eq!(captures(), 1);
    node.shutdown().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Whatever fails at whatever moment: what callers are told is what exists, and after all kills nothing is left.
    #[test]
    fn random_faults_leak_nothing(seed in any::<u64>()) {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(async {
            let world = World::prepared().await;
            let mut settings = Settings { max_starting: 2, ..world.settings(2) };
            settings.deadlines.step = Duration::from_millis(300);
            settings.deadlines.init = Duration::from_millis(300);
            settings.deadlines.greeting = Duration::from_millis(300);
            let node = world.start_with(settings).await.unwrap();
            world.host.fail_randomly(seed, 12);
            let creates = futures_util::future::join_all((0..12).map(|_| node.create(request()))).await;
            let created: Vec<_> = creates.into_iter().flatten().map(|created| created.sandbox.id).collect();
            for id in created.iter().step_by(2) {
                // Under faults a kill may be told to be unfinished; it must still end.
                let _told = node.kill(id).await;
            }
            world.host.heal();
            for sandbox in node.list() {
                node.kill(&sandbox.id).await.unwrap();
            }
            node.shutdown().await;
            // Slots whose acquisition lost its reply are known to nobody: the next start sweeps them.
            let node = world.start(0).await;
            world.only(0).await;
            assert!(node.list().is_empty());
            node.shutdown().await;
        });
    }
}
