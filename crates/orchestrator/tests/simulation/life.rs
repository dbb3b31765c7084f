//! The life of sandboxes on a healthy host: what callers see, and that nothing stays.

use crate::world::{NOTHING, World, eventually, request};
use aenv_orchestrator::{CreateRequest, Error, LossCause, Settings, Shortage, StartError, Tier};
use aenv_testkit::{Fault, Operation};
use aenv_vmm::ExitCause;
use std::collections::HashSet;
use std::io::Write as _;
use std::time::Duration;

#[tokio::test]
async fn a_sandbox_from_cold_to_kill() {
    let world = World::new();
    let node = world.start(0).await;
    world.only(0).await;
    let created = node.create(request()).await.unwrap();
    let sandbox = created.sandbox;
    assert_eq!(created.tier, Tier::Cold);
    let stages: Vec<_> = created.stages.iter().map(|stage| stage.name).collect();
    assert_eq!(stages, ["admission", "slot", "disk", "prepare", "load", "resume", "init", "journal"]);

    let inits = world.host.inits(&World::vm_name(&sandbox.id));
    assert_eq!(inits.len(), 1);
    assert_eq!(inits[0].env_vars, request().env_vars);
    assert_eq!(inits[0].access_token, sandbox.access_token);
    assert!(inits[0].timestamp.is_some());
    let identity = inits[0].identity.as_ref().unwrap();
    assert_eq!((identity.sandbox_id.as_str(), identity.machine_id.len()), (sandbox.id.as_str(), 32));

    assert_eq!(node.get(&sandbox.id).unwrap().metadata, request().metadata);
    assert_eq!(node.list().len(), 1);
    let route = node.route(&sandbox.id).unwrap();
    route.dialer.dial(aenv_protocol::envd::ENVD_PORT).await.unwrap();

    node.kill(&sandbox.id).await.unwrap();
    assert!(route.ended.is_cancelled());
    assert!(world.host.vm_names().is_empty());
    assert!(matches!(node.kill(&sandbox.id).await, Err(Error::SandboxNotFound(_))));
    assert!(matches!(node.get(&sandbox.id), Err(Error::SandboxNotFound(_))));
    assert!(node.route(&sandbox.id).is_none() && node.list().is_empty());
    world.only(0).await;
    assert_eq!(node.templates()[0].spawn_count, 1);
    node.shutdown().await;
}

#[tokio::test]
async fn a_hot_standby_serves_and_is_replaced() {
    let world = World::prepared().await;
    let node = world.start(2).await;
    let standbys: HashSet<_> = world.host.vm_names().into_iter().collect();
    for name in &standbys {
        assert_eq!(world.host.is_running(name), Some(false));
        assert!(world.host.inits(name).is_empty(), "a standby has no identity");
    }
    let created = node.create(request()).await.unwrap();
    assert_eq!(created.tier, Tier::Hot);
    let name = World::vm_name(&created.sandbox.id);
    assert!(standbys.contains(&name));
    assert_eq!((world.host.is_running(&name), world.host.inits(&name).len()), (Some(true), 1));
    world.only(3).await;
    node.shutdown().await;
    assert_eq!(world.host.vm_names(), [name], "standbys end with the node, sandboxes stay");
    assert!(matches!(node.create(request()).await, Err(Error::ShuttingDown)));
    assert!(matches!(node.get(&created.sandbox.id), Err(Error::ShuttingDown)));
}

#[tokio::test]
async fn a_hundred_creates_at_once_claim_each_standby_once() {
    let world = World::prepared().await;
    let node = world.start(5).await;
    let creates = (0..100).map(|_| node.create(request()));
    let created: Vec<_> =
        futures_util::future::join_all(creates).await.into_iter().collect::<Result<_, _>>().unwrap();
    let ids: HashSet<_> = created.iter().map(|created| created.sandbox.id.clone()).collect();
    assert_eq!(ids.len(), 100);
    for id in &ids {
        assert_eq!(world.host.inits(&World::vm_name(id)).len(), 1);
    }
    assert!(created.iter().filter(|created| created.tier == Tier::Hot).count() >= 5);
    let lifecycles: HashSet<_> = node.routes().iter().map(|route| route.lifecycle).collect();
    assert_eq!(lifecycles.len(), 100);
    world.only(105).await;
    let kills = futures_util::future::join_all(ids.iter().map(|id| node.kill(id))).await;
    assert!(kills.iter().all(Result::is_ok));
    world.only(5).await;
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn time_ends_a_sandbox_and_can_be_changed() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let short = CreateRequest { timeout: Duration::from_millis(1500), ..request() };
    let kept = node.create(short.clone()).await.unwrap().sandbox;
    let left = node.create(short).await.unwrap().sandbox;
    let extended = node.extend(&kept.id, Duration::from_secs(100)).await.unwrap();
    assert!(extended.end_at > kept.end_at);
    let unchanged = node.extend(&kept.id, Duration::from_secs(1)).await.unwrap();
    assert_eq!(unchanged.end_at, extended.end_at, "an extension never shortens");
    world.only(1).await;
    assert!(node.get(&left.id).is_err());
    node.set_timeout(&kept.id, Duration::from_secs(50)).await.unwrap();
    assert!(node.get(&kept.id).unwrap().end_at < extended.end_at);
    let error = node.set_timeout(&kept.id, Duration::MAX).await.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { field: "timeout", .. }));
    node.set_timeout(&kept.id, Duration::ZERO).await.unwrap();
    world.only(0).await;
    assert!(matches!(node.set_timeout(&kept.id, Duration::ZERO).await, Err(Error::SandboxNotFound(_))));
    node.shutdown().await;
}

#[tokio::test]
async fn a_vm_that_dies_is_lost_with_its_cause_until_its_time_is_over() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let other = node.create(request()).await.unwrap().sandbox;
    let sandbox =
        node.create(CreateRequest { timeout: Duration::from_secs(3), ..request() }).await.unwrap().sandbox;
    let route = node.route(&sandbox.id).unwrap();
    world.host.end_vm(&World::vm_name(&sandbox.id), ExitCause::GuestPanic, "Kernel panic - not syncing");
    route.ended.cancelled().await;
    eventually("the loss is seen", || {
        matches!(node.get(&sandbox.id), Err(Error::SandboxLost { cause: LossCause::GuestPanic, detail, .. })
            if detail.contains("not syncing"))
    })
    .await;
    assert_eq!(node.list().len(), 2);
    assert!(node.route(&sandbox.id).is_none());
    let error = node.set_timeout(&sandbox.id, Duration::from_secs(9)).await.unwrap_err();
    assert!(matches!(error, Error::SandboxLost { .. }));
    world.only(1).await;
    eventually("the lost sandbox is forgotten", || {
        matches!(node.get(&sandbox.id), Err(Error::SandboxNotFound(_)))
    })
    .await;
    assert!(node.get(&other.id).is_ok() && node.route(&other.id).is_some());

    world.host.end_vm(&World::vm_name(&other.id), ExitCause::VmmKilled, "killed");
    eventually("the loss is seen", || matches!(node.get(&other.id), Err(Error::SandboxLost { .. }))).await;
    node.kill(&other.id).await.unwrap();
    assert!(matches!(node.get(&other.id), Err(Error::SandboxNotFound(_))));
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn the_memory_limit_of_a_vm_is_told_as_its_cause() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    world.host.end_vm(&World::vm_name(&id), ExitCause::OutOfMemory, "memory limit of 512 MiB reached");
    eventually("the loss is seen", || {
        matches!(node.get(&id), Err(Error::SandboxLost { cause: LossCause::OutOfMemory, detail, .. })
            if detail.contains("512 MiB"))
    })
    .await;
    node.shutdown().await;
    // Known to the next process too.
    let node = world.start(0).await;
    assert!(matches!(node.get(&id), Err(Error::SandboxLost { cause: LossCause::OutOfMemory, .. })));
    node.shutdown().await;
    world.only(0).await;
}

#[tokio::test]
async fn a_lost_sandbox_whose_clearing_hangs_can_be_killed_at_once() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    world.host.fail_call(Operation::Release, 0, Fault::HangBefore);
    world.host.end_vm(&World::vm_name(&id), ExitCause::GuestPanic, "Kernel panic - not syncing");
    world.host.wait_for_hang(1).await;
    // Much less than the limit of the step that hangs.
    tokio::time::timeout(Duration::from_secs(10), node.kill(&id)).await.unwrap().unwrap();
    assert!(matches!(node.get(&id), Err(Error::SandboxNotFound(_))));
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn a_caller_that_goes_away_stops_nothing() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let creating = node.clone();
    let caller = tokio::spawn(async move { creating.create(request()).await });
    eventually("the create is under way", || !world.sandbox_dirs().is_empty()).await;
    caller.abort();
    eventually("the sandbox runs", || node.list().len() == 1).await;
    world.only(1).await;
    node.shutdown().await;
}

#[tokio::test]
async fn a_kill_during_a_create_undoes_it() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    world.host.fail_call(Operation::Init, 0, Fault::HangBefore);
    let creating = node.clone();
    let caller = tokio::spawn(async move { creating.create(request()).await });
    world.host.wait_for_hang(1).await;
    let id = world.sandbox_dirs()[0].parse().unwrap();
    assert!(matches!(node.get(&id), Err(Error::SandboxNotFound(_))), "not shown before it runs");
    node.kill(&id).await.unwrap();
    assert!(matches!(caller.await.unwrap(), Err(Error::Conflict(_))));
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn without_internet_access_egress_is_denied_before_the_guest_runs() {
    let world = World::prepared().await;
    for standbys in [0, 1] {
        let node = world.start(standbys).await;
        let created = node.create(CreateRequest { internet_access: false, ..request() }).await.unwrap();
        assert_eq!(world.host.egress_denied(&World::vm_name(&created.sandbox.id)), Some(true));
        let log = world.host.log();
        let denied = log.iter().rposition(|call| *call == Operation::DenyEgress).unwrap();
        let greeted = log.iter().rposition(|call| *call == Operation::Init).unwrap();
        assert!(log[denied..greeted].contains(&Operation::Resume), "{log:?}");
        node.kill(&created.sandbox.id).await.unwrap();
        node.shutdown().await;
    }
}

#[tokio::test]
async fn bad_requests_are_refused_with_their_reason() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    for template in ["nope", "base:other", "", "../base"] {
        let error =
            node.create(CreateRequest { template: template.to_owned(), ..request() }).await.unwrap_err();
        assert!(matches!(error, Error::TemplateNotFound(name) if name == template));
    }
    let error = node.create(CreateRequest { timeout: Duration::MAX, ..request() }).await.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { field: "timeout", .. }));
    let id = node.templates()[0].id.to_string();
    for template in ["base:default", &id] {
        let created =
            node.create(CreateRequest { template: template.to_owned(), ..request() }).await.unwrap();
        node.kill(&created.sandbox.id).await.unwrap();
    }
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn a_full_disk_and_a_full_queue_are_no_capacity() {
    let world = World::prepared().await;
    let full = Settings { min_free_bytes: u64::MAX, ..world.settings(0) };
    let node = world.start_with(full).await.unwrap();
    let error = node.create(request()).await.unwrap_err();
    assert!(
        matches!(&error, Error::NoCapacity(Shortage::Room(reason)) if reason.contains("data has")),
        "{error}"
    );
    node.shutdown().await;

    let mut narrow = Settings { max_starting: 1, ..world.settings(0) };
    narrow.deadlines.queue = Duration::from_millis(100);
    let node = world.start_with(narrow).await.unwrap();
    world.host.fail_call(Operation::Init, 0, Fault::HangBefore);
    let creating = node.clone();
    let stuck = tokio::spawn(async move { creating.create(request()).await });
    world.host.wait_for_hang(1).await;
    let error = node.create(request()).await.unwrap_err();
    assert!(matches!(&error, Error::NoCapacity(Shortage::Places { starting: 1, .. })), "{error}");
    assert!(error.to_string().contains("no turn came within 100ms"), "{error}");
    node.shutdown().await;
    assert!(matches!(stuck.await.unwrap(), Err(Error::ShuttingDown)), "a shutdown undoes what is half-made");
    assert_eq!(world.host.counts(), NOTHING);
}

#[tokio::test]
async fn a_host_without_room_for_the_journal_is_no_capacity_and_keeps_nothing() {
    let world = World::prepared_small(8 << 20).await;
    let node = world.start_with(Settings { min_free_bytes: 0, ..world.settings(0) }).await.unwrap();
    let filler = world.path("data/filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    // The write-ahead log may have pages left that it writes over.
    let refused = loop {
        match node.create(request()).await {
            Ok(created) => node.kill(&created.sandbox.id).await.unwrap(),
            Err(error) => break error,
        }
    };
    let Error::NoCapacity(shortage) = &refused else { panic!("{refused}") };
    let reason = shortage.to_string();
    assert!(reason.contains(world.path("data").to_str().unwrap()) && reason.contains("remove"), "{reason}");
    eventually("nothing is left", || world.host.counts() == NOTHING && world.sandbox_dirs().is_empty()).await;
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let created = node.create(request()).await.unwrap();
    node.kill(&created.sandbox.id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn bad_settings_and_a_second_node_are_refused() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let second = aenv_orchestrator::Orchestrator::start(world.settings(0), world.parts()).await;
    assert!(matches!(second, Err(StartError::InUse(_))));
    node.shutdown().await;
    let bad = Settings { instance: "Not/ok".to_owned(), ..world.settings(0) };
    assert!(matches!(world.open(bad).await, Err(StartError::Setting { name: "instance", .. })));
    let bad = Settings { max_starting: 0, ..world.settings(0) };
    assert!(matches!(world.open(bad).await, Err(StartError::Setting { name: "max_starting", .. })));
}
