//! Pause and resume on a healthy host: what is there afterwards, what callers see, and that nothing stays.

use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    CreateRequest, Durability, Error, OnTimeout, Orchestrator, PauseMode, PauseRequest, ResumeRequest,
    Resumed, SandboxState, Settings, Tier,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Counts, Fault, Operation};
use aenv_vmm::ExitCause;
use std::time::{Duration, Instant};

/// Waits for a sandbox that is just going on after a pause that failed.
pub(crate) async fn pause(node: &Orchestrator, id: &SandboxId) {
    let begin = Instant::now();
    loop {
        match node.pause(id, PauseRequest::default()).await {
            Err(Error::Transitioning(_)) if begin.elapsed() < SOON => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            paused => return drop(paused.unwrap()),
        }
    }
}

pub(crate) async fn resume(node: &Orchestrator, id: &SandboxId) -> Resumed {
    node.resume(id, ResumeRequest { timeout: HOUR, reboot: false }).await.unwrap()
}

fn is_paused(node: &Orchestrator, id: &SandboxId) -> bool {
    node.get(id).is_ok_and(|view| view.state == SandboxState::Paused)
}

fn count(world: &World, wanted: Operation) -> usize {
    world.host.log().into_iter().filter(|call| *call == wanted).count()
}

#[tokio::test]
async fn everything_written_is_there_after_every_one_of_many_pauses() {
    for (keeps_log, cold) in [(false, false), (false, true), (true, false), (true, true)] {
        let world = World::prepared_with(keeps_log).await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        for round in 1..=7_u8 {
            world.host.write(&name, u64::from(round), round);
            world.host.write(&name, 0, round);
            let before = node.route(&id).unwrap();
            let paused = node.pause(&id, PauseRequest::default()).await.unwrap();
            assert_eq!((&paused.sandbox.id, paused.sandbox.state), (&id, SandboxState::Paused));
            assert!(before.ended.is_cancelled() && node.route(&id).is_none());
            let saved = paused.sandbox.saved.unwrap();
            assert_eq!((saved.number, saved.tier, saved.flushed), (round.into(), Tier::Hot, true));
            assert_eq!(world.host.is_running(&name), Some(false));
            if cold {
                node.release(&id).await.unwrap();
                assert!(world.host.vm_names().is_empty());
            }
            let resumed = resume(&node, &id).await;
            assert_eq!((&resumed.sandbox.id, resumed.was_running), (&id, false));
            assert_eq!(resumed.tier, if cold { Tier::Cold } else { Tier::Hot });
            assert_eq!(resumed.sandbox.metadata, request().metadata);
            assert_ne!(node.route(&id).unwrap().lifecycle, before.lifecycle);
            let init = world.host.inits(&name).pop().unwrap();
            assert!(init.timestamp.is_some() && init.identity.is_none(), "told the time, and nothing new");
            assert_eq!(world.host.read(&name, 0), (round, round));
            for earlier in 1..=round {
                let seen = world.host.read(&name, earlier.into());
                assert_eq!(seen, (earlier, earlier), "round {round}, log {keeps_log}, cold {cold}");
            }
        }
        world.settled(&node, &id).await;
        assert_eq!(world.saves(&id).len(), 1 + usize::from(cold && world.saves(&id).len() > 1));
        node.kill(&id).await.unwrap();
        world.only(0).await;
        node.shutdown().await;
    }
}

/// Neither pauses nor hot resumes wait for a connection to be opened; another VMM has another guest, though, and is not spoken to
/// over a connection to the one before it.
#[tokio::test]
async fn the_connection_to_a_guest_daemon_is_kept_as_long_as_its_vmm_lives() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let name = World::vm_name(&id);
    for _ in 0..3 {
        let before = world.host.connections();
        for _ in 0..5 {
            pause(&node, &id).await;
            resume(&node, &id).await;
        }
        assert_eq!(world.host.connections(), before, "hot");
        pause(&node, &id).await;
        node.release(&id).await.unwrap();
        resume(&node, &id).await;
        assert_eq!(world.host.connections(), before + 1, "cold");
        assert!(world.host.inits(&name).pop().unwrap().timestamp.is_some());
    }
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

/// What the first pause will ask of a guest, a standby has done once; one that cannot is claimed all the same.
#[tokio::test]
async fn a_standby_has_flushed_once_before_it_is_claimed() {
    for fails in [false, true] {
        let world = World::prepared().await;
        if fails {
            world.host.fail_always(Operation::Sync, Fault::Fail);
        }
        let node = world.start(1).await;
        assert_eq!(count(&world, Operation::Sync), 1);
        let created = node.create(request()).await.unwrap();
        assert_eq!(created.tier, Tier::Hot, "fails: {fails}");
        node.kill(&created.sandbox.id).await.unwrap();
        node.shutdown().await;
    }
}

#[tokio::test]
async fn what_a_paused_sandbox_refuses_and_allows() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    pause(&node, &id).await;
    let view = node.get(&id).unwrap();
    assert!(view.end_at <= jiff::Timestamp::now(), "its time ended when it was paused");
    assert!(node.list().iter().any(|listed| listed.id == id && listed.state == SandboxState::Paused));
    assert!(matches!(node.pause(&id, PauseRequest::default()).await, Err(Error::AlreadyPaused(_))));
    assert!(matches!(node.set_timeout(&id, HOUR).await, Err(Error::IsPaused(_))));
    assert!(matches!(node.extend(&id, HOUR).await, Err(Error::IsPaused(_))));
    assert!(is_paused(&node, &id));
    let resumed = resume(&node, &id).await;
    let again = node.resume(&id, ResumeRequest { timeout: 2 * HOUR, reboot: false }).await.unwrap();
    assert!(!resumed.was_running && again.was_running);
    assert!(again.sandbox.end_at > resumed.sandbox.end_at);
    let less = node.resume(&id, ResumeRequest { timeout: HOUR, reboot: false }).await.unwrap();
    assert_eq!(less.sandbox.end_at, again.sandbox.end_at, "never shortened");
    assert!(matches!(node.release(&id).await, Err(Error::Conflict(_))));
    let published = PauseRequest { durability: Durability::Published, ..PauseRequest::default() };
    let error = node.pause(&id, published).await.unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { field: "durability", .. }));
    node.shutdown().await;
}

#[tokio::test]
async fn a_paused_sandbox_can_be_killed_without_a_resume() {
    for release in [false, true] {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        pause(&node, &id).await;
        if release {
            node.release(&id).await.unwrap();
            assert_eq!(world.host.counts(), Counts { vms: 0, slots: 0 });
        }
        node.kill(&id).await.unwrap();
        assert!(matches!(node.get(&id), Err(Error::SandboxNotFound(_))));
        world.only(0).await;
        assert_eq!(count(&world, Operation::Resume), 1);
        node.shutdown().await;
    }
}

#[tokio::test]
async fn an_answer_can_wait_until_what_was_saved_is_durable() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let paused =
        node.pause(&id, PauseRequest { durability: Durability::Local, ..PauseRequest::default() }).await;
    let saved = paused.unwrap().sandbox.saved.unwrap();
    assert_eq!(saved.durability, Durability::Local);
    assert!(saved.memory_bytes.is_some());
    assert!(!world.path(&format!("data/sandboxes/{id}/captures/1/changes")).exists());
    node.shutdown().await;
}

#[tokio::test]
async fn a_pause_without_memory_boots_from_what_was_flushed() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let name = World::vm_name(&id);
    world.host.write(&name, 3, 7);
    let request = PauseRequest { mode: PauseMode::Filesystem, ..PauseRequest::default() };
    let lifecycle = node.route(&id).unwrap().lifecycle;
    world.host.fail_call(Operation::Sync, 0, Fault::Fail);
    let error = node.pause(&id, request).await.unwrap_err();
    assert!(matches!(error, Error::GuestUnresponsive { .. }), "{error}");
    assert_eq!(node.route(&id).unwrap().lifecycle, lifecycle, "its streams were not broken");
    node.pause(&id, request).await.unwrap();
    eventually("its VMM is gone", || world.host.counts() == Counts { vms: 0, slots: 0 }).await;
    world.settled(&node, &id).await;
    let resumed = resume(&node, &id).await;
    assert_eq!(resumed.tier, Tier::Cold);
    assert_eq!(world.host.read(&name, 3), (0, 7), "the disk is there, the memory is not");
    let init = world.host.inits(&name).pop().unwrap();
    assert_eq!(init.identity.unwrap().sandbox_id, id.as_str(), "a guest that booted is told who it is");
    // What it has now can be saved with its memory.
    world.host.write(&name, 4, 8);
    pause(&node, &id).await;
    node.release(&id).await.unwrap();
    resume(&node, &id).await;
    assert_eq!((world.host.read(&name, 3), world.host.read(&name, 4)), ((0, 7), (8, 8)));
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn a_guest_that_does_not_flush_is_paused_unless_that_is_forbidden() {
    let world = World::prepared().await;
    let mut settings = world.settings(0);
    settings.deadlines.sync = Duration::from_millis(200);
    let node = world.start_with(settings).await.unwrap();
    let id = node.create(request()).await.unwrap().sandbox.id;
    for fault in [Fault::Fail, Fault::LoseReply] {
        world.host.fail_always(Operation::Sync, fault);
        let strict = PauseRequest { require_healthy_guest: true, ..PauseRequest::default() };
        assert!(matches!(node.pause(&id, strict).await, Err(Error::GuestUnresponsive { .. })));
        assert_eq!(node.get(&id).unwrap().state, SandboxState::Running);
        pause(&node, &id).await;
        assert!(!node.get(&id).unwrap().saved.unwrap().flushed);
        resume(&node, &id).await;
        world.host.heal();
    }
    node.shutdown().await;
}

#[tokio::test]
async fn a_vmm_stands_by_for_a_while_only() {
    let world = World::prepared().await;
    let settings = Settings { hot_for: Duration::from_millis(300), ..world.settings(0) };
    let node = world.start_with(settings).await.unwrap();
    let id = node.create(request()).await.unwrap().sandbox.id;
    world.host.write(&World::vm_name(&id), 1, 9);
    pause(&node, &id).await;
    assert_eq!(world.host.counts().vms, 1);
    eventually("it is released", || world.host.counts() == Counts { vms: 0, slots: 0 }).await;
    eventually("that is shown", || node.get(&id).unwrap().saved.unwrap().tier == Tier::Cold).await;
    assert_eq!(resume(&node, &id).await.tier, Tier::Cold);
    assert_eq!(world.host.read(&World::vm_name(&id), 1), (9, 9));
    // One that runs again is not released.
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(world.host.counts().vms, 1);
    node.shutdown().await;
}

#[tokio::test]
async fn a_vmm_with_much_to_hand_over_does_not_stand_by() {
    for keeps_log in [false, true] {
        let world = World::prepared_with(keeps_log).await;
        let settings = Settings { fresh_after_bytes: 4096, ..world.settings(0) };
        let node = world.start_with(settings).await.unwrap();
        let id = node.create(request()).await.unwrap().sandbox.id;
        let name = World::vm_name(&id);
        world.host.write(&name, 1, 1);
        pause(&node, &id).await;
        assert_eq!(resume(&node, &id).await.tier, Tier::Hot);
        world.host.write(&name, 2, 2);
        pause(&node, &id).await;
        if keeps_log {
            assert_eq!(resume(&node, &id).await.tier, Tier::Hot, "it hands over what is new only");
        } else {
            eventually("it is released", || world.host.counts().vms == 0).await;
            assert_eq!(resume(&node, &id).await.tier, Tier::Cold);
        }
        assert_eq!((world.host.read(&name, 1), world.host.read(&name, 2)), ((1, 1), (2, 2)));
        node.shutdown().await;
    }
}

#[tokio::test]
async fn a_paused_sandbox_is_not_lost_with_the_vmm_that_stands_by() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    world.host.write(&World::vm_name(&id), 5, 5);
    pause(&node, &id).await;
    world.host.end_vm(&World::vm_name(&id), ExitCause::OutOfMemory, "killed");
    eventually("its network is released", || world.host.counts() == Counts { vms: 0, slots: 0 }).await;
    assert!(is_paused(&node, &id));
    assert_eq!(resume(&node, &id).await.tier, Tier::Cold);
    assert_eq!(world.host.read(&World::vm_name(&id), 5), (5, 5));
    node.shutdown().await;
}

#[tokio::test]
async fn resumes_at_once_are_served_by_one() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    for release in [false, true] {
        pause(&node, &id).await;
        if release {
            node.release(&id).await.unwrap();
        }
        let before = count(&world, Operation::Resume);
        let asked = (1..=10).map(|hours| ResumeRequest { timeout: hours * HOUR / 2, reboot: false });
        let resumes = asked.map(|request| node.resume(&id, request));
        let resumed = futures_util::future::join_all(resumes).await;
        assert!(resumed.iter().all(Result::is_ok), "{resumed:?}");
        assert_eq!(count(&world, Operation::Resume), before + 1);
        let left = node.get(&id).unwrap().end_at.duration_since(jiff::Timestamp::now());
        assert!(left.as_secs() > 5 * 3600 - 60, "the longest time asked for is given");
    }
    node.kill(&id).await.unwrap();
    let gone = node.resume(&id, ResumeRequest { timeout: HOUR, reboot: false }).await;
    assert!(matches!(gone, Err(Error::SandboxNotFound(_))));
    node.shutdown().await;
}

#[tokio::test]
async fn a_pause_followed_at_once_by_a_resume_is_never_stuck() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    for _ in 0..100 {
        let (pausing, resuming) = (node.clone(), node.clone());
        let (first, second) = (id.clone(), id.clone());
        let paused = tokio::spawn(async move { pausing.pause(&first, PauseRequest::default()).await });
        tokio::task::yield_now().await;
        let resumed = tokio::spawn(async move {
            resuming.resume(&second, ResumeRequest { timeout: HOUR, reboot: false }).await
        });
        let both = tokio::time::timeout(SOON, async { (paused.await, resumed.await) }).await.unwrap();
        both.0.unwrap().unwrap();
        both.1.unwrap().unwrap();
        if is_paused(&node, &id) {
            resume(&node, &id).await;
        }
        assert!(node.route(&id).is_some());
    }
    world.settled(&node, &id).await;
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn traffic_during_a_pause_wakes_what_the_pause_left_or_nothing() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let wanted = |auto_resume| CreateRequest { auto_resume, ..request() };
    let ids = [true, false].map(|auto_resume| (auto_resume, wanted(auto_resume)));
    for (auto_resume, wanted) in ids {
        let id = node.create(wanted).await.unwrap().sandbox.id;
        // What the pause before kept says nothing of what this one will keep.
        for (mode, lasts) in [(PauseMode::Full, !auto_resume), (PauseMode::Filesystem, true)] {
            for before in [PauseMode::Full, PauseMode::Filesystem] {
                node.pause(&id, PauseRequest { mode: before, ..PauseRequest::default() }).await.unwrap();
                resume(&node, &id).await;
                let boots = count(&world, Operation::Boot);
                // Asked in this order, so that the second one meets the first.
                let pausing = node.pause(&id, PauseRequest { mode, ..PauseRequest::default() });
                let (paused, woken) = tokio::join!(pausing, node.wake(&id, HOUR));
                let what = format!("{mode:?} after {before:?}, auto_resume {auto_resume}: {woken:?}");
                paused.unwrap();
                assert_eq!(is_paused(&node, &id), lasts, "{what}");
                assert_eq!(matches!(woken, Err(Error::IsPaused(_))), lasts, "{what}");
                assert_eq!(count(&world, Operation::Boot), boots, "{what}");
                assert!(!lasts || !node.get(&id).unwrap().woken_by_traffic, "{what}");
                // A caller is served whatever traffic may do.
                assert_eq!(resume(&node, &id).await.was_running, !lasts, "{what}");
            }
        }
        node.kill(&id).await.unwrap();
    }
    world.only(0).await;
    node.shutdown().await;
}

/// One resume serves all who wait: as a boot, if one of them asked for that, and for as long as the one who asked for most.
#[tokio::test]
async fn a_boot_that_is_asked_for_behind_other_resumes_is_made() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let boots = count(&world, Operation::Boot);
    let wish = |timeout, reboot| ResumeRequest { timeout, reboot };
    // Asked in this order, so that both meet the pause.
    let (paused, resumed, booted) = tokio::join!(
        node.pause(&id, PauseRequest::default()),
        node.resume(&id, wish(HOUR, false)),
        node.resume(&id, wish(HOUR / 60, true)),
    );
    paused.unwrap();
    assert!(!resumed.unwrap().was_running && !booted.unwrap().was_running);
    assert_eq!(count(&world, Operation::Boot), boots + 1);
    let left = node.get(&id).unwrap().end_at.duration_since(jiff::Timestamp::now());
    assert!(left.as_secs() > 3000, "{left:?}");
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}

#[tokio::test]
async fn while_it_is_being_paused_it_tells_whether_traffic_will_wake_it() {
    for (mode, wakes) in [(PauseMode::Full, true), (PauseMode::Filesystem, false)] {
        let world = World::prepared().await;
        let node = world.start(0).await;
        let id = node.create(CreateRequest { auto_resume: true, ..request() }).await.unwrap().sandbox.id;
        assert!(!node.get(&id).unwrap().woken_by_traffic, "it runs");
        world.host.fail_call(Operation::Stop, 0, Fault::HangBefore);
        let (pausing, of) = (node.clone(), id.clone());
        let request = PauseRequest { mode, ..PauseRequest::default() };
        let work = tokio::spawn(async move { pausing.pause(&of, request).await });
        world.host.wait_for_hang(1).await;
        let view = node.get(&id).unwrap();
        assert_eq!((view.state, view.woken_by_traffic), (SandboxState::Paused, wakes), "{mode:?}");
        node.kill(&id).await.unwrap();
        assert!(work.await.unwrap().is_err());
        node.shutdown().await;
    }
}

#[tokio::test]
async fn the_end_of_its_time_pauses_a_sandbox_that_is_to_be_kept() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let wanted = |mode| CreateRequest {
        timeout: Duration::from_millis(600),
        on_timeout: OnTimeout::Pause(mode),
        ..request()
    };
    let id = node.create(wanted(PauseMode::Full)).await.unwrap().sandbox.id;
    let name = World::vm_name(&id);
    world.host.write(&name, 2, 6);
    // The first attempt fails; it is made again.
    world.host.fail_call(Operation::Capture, 0, Fault::Fail);
    eventually("it is paused", || is_paused(&node, &id) && node.get(&id).unwrap().saved.is_some()).await;
    assert!(node.get(&id).unwrap().saved.unwrap().flushed);
    resume(&node, &id).await;
    assert_eq!(world.host.read(&name, 2), (6, 6));
    node.kill(&id).await.unwrap();

    // A guest that cannot flush its disk is kept with its memory in the end.
    world.host.fail_always(Operation::Sync, Fault::Fail);
    let id = node.create(wanted(PauseMode::Filesystem)).await.unwrap().sandbox.id;
    eventually("it is paused", || node.get(&id).unwrap().saved.is_some()).await;
    let saved = node.get(&id).unwrap().saved.unwrap();
    assert_eq!((saved.mode, saved.flushed), (PauseMode::Full, false));
    node.shutdown().await;
}

#[tokio::test]
async fn without_internet_access_egress_is_denied_in_the_new_network_too() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let wanted = CreateRequest { internet_access: false, ..request() };
    let id = node.create(wanted).await.unwrap().sandbox.id;
    for reboot in [false, true] {
        pause(&node, &id).await;
        node.release(&id).await.unwrap();
        let before = world.host.log().len();
        node.resume(&id, ResumeRequest { timeout: HOUR, reboot }).await.unwrap();
        assert_eq!(world.host.egress_denied(&World::vm_name(&id)), Some(true));
        let log = world.host.log().split_off(before);
        let at = |wanted| log.iter().position(|call| *call == wanted);
        let started = if reboot { Operation::Boot } else { Operation::Resume };
        assert!(at(Operation::DenyEgress) < at(started), "{log:?}");
    }
    node.shutdown().await;
}

#[tokio::test]
async fn memory_of_another_version_is_refused_with_the_reason_and_the_disk_can_be_booted() {
    let world = World::prepared().await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let name = World::vm_name(&id);
    world.host.write(&name, 1, 4);
    pause(&node, &id).await;
    node.release(&id).await.unwrap();
    node.shutdown().await;
    std::fs::write(world.path("kernel"), "another").unwrap();
    let node = world.start(0).await;
    assert!(is_paused(&node, &id));
    let ask = |reboot| ResumeRequest { timeout: HOUR, reboot };
    let error = node.resume(&id, ask(false)).await.unwrap_err();
    assert!(matches!(&error, Error::Incompatible { reason, .. } if reason.contains("kernel")), "{error}");
    assert!(is_paused(&node, &id));
    node.resume(&id, ask(true)).await.unwrap();
    assert_eq!(world.host.read(&name, 1), (0, 4));
    node.kill(&id).await.unwrap();
    world.only(0).await;
    node.shutdown().await;
}
