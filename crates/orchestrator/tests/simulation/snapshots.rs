//! Snapshots and forks on a healthy host: what is in them, whose they are, and that nothing stays.

use crate::pause::{pause, resume};
use crate::world::{HOUR, SOON, World, eventually, request};
use aenv_orchestrator::{
    ChildRequest, CreateRequest, Error, ForkRequest, Orchestrator, PauseMode, SandboxState, SnapshotRequest,
    SnapshotState, SnapshotTaken, Tier, hold_data_dir,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Fault, Operation};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const FULL: SnapshotRequest = SnapshotRequest { name: None, mode: PauseMode::Full };

async fn snapshot(node: &Orchestrator, id: &SandboxId) -> SnapshotTaken {
    node.snapshot(id, FULL).await.unwrap()
}

fn named(name: &str) -> SnapshotRequest {
    SnapshotRequest { name: Some((name.to_owned(), "default".to_owned())), mode: PauseMode::Full }
}

pub(crate) async fn child(node: &Orchestrator, template: &str) -> SandboxId {
    let wanted = CreateRequest { template: template.to_owned(), ..request() };
    node.create(wanted).await.unwrap().sandbox.id
}

pub(crate) fn see(world: &World, id: &SandboxId) -> (u8, u8) {
    world.host.read(&World::vm_name(id), 1)
}

pub(crate) fn write(world: &World, id: &SandboxId, value: u8) {
    world.host.write(&World::vm_name(id), 1, value);
}

/// Both kinds of disks, with both kinds of VMMs.
pub(crate) async fn worlds() -> [World; 4] {
    [
        World::prepared_with(false).await,
        World::prepared_with(true).await,
        World::with_store(false).await,
        World::with_store(true).await,
    ]
}

/// Everything is ended and deleted: nothing is left.
pub(crate) async fn end(world: &World, node: &Orchestrator) {
    for view in node.list() {
        node.kill(&view.id).await.unwrap();
    }
    for view in node.snapshots() {
        node.delete_snapshot(view.id.as_str()).await.unwrap();
    }
    world.only(0).await;
    eventually("nothing is stored", || {
        world.snapshot_dirs().is_empty() && world.stored_leftovers().is_empty()
    })
    .await;
    node.shutdown().await;
}

#[tokio::test]
async fn what_is_started_from_a_snapshot_has_what_was_there_then() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 1);
        let route = node.route(&id).unwrap();
        let taken = snapshot(&node, &id).await;
        assert_eq!((&taken.snapshot.source, taken.snapshot.state), (&id, SnapshotState::Ready));
        assert!(!route.ended.is_cancelled(), "no stream is broken");
        assert_eq!(node.route(&id).unwrap().lifecycle, route.lifecycle);
        let view = node.get(&id).unwrap();
        assert_eq!((view.state, view.saved.unwrap().number), (SandboxState::Running, 1));
        assert!(view.end_at > jiff::Timestamp::now(), "its time goes on");
        write(&world, &id, 2);
        let of = taken.snapshot.id.as_str();
        let (first, second) = (child(&node, of).await, child(&node, of).await);
        for child in [&first, &second] {
            assert_eq!(see(&world, child), (1, 1));
            let view = node.get(child).unwrap();
            assert_eq!((view.parent.as_ref(), view.template_id.as_str()), (Some(&id), of));
            let init = world.host.inits(&World::vm_name(child)).pop().unwrap();
            assert_eq!(init.identity.unwrap().sandbox_id, child.as_str());
        }
        assert_eq!(see(&world, &id), (2, 2));
        write(&world, &first, 3);
        assert_eq!((see(&world, &first), see(&world, &second), see(&world, &id)), ((3, 3), (1, 1), (2, 2)));
        // Neither its source nor what was started from it before is needed.
        for gone in [&id, &first, &second] {
            node.kill(gone).await.unwrap();
        }
        world.only(0).await;
        let third = child(&node, of).await;
        assert_eq!(see(&world, &third), (1, 1));
        // It has saves of its own.
        write(&world, &third, 4);
        pause(&node, &third).await;
        node.release(&third).await.unwrap();
        assert_eq!(resume(&node, &third).await.tier, Tier::Cold);
        assert_eq!(see(&world, &third), (4, 4));
        end(&world, &node).await;
    }
}

fn standbys(node: &Orchestrator) -> usize {
    node.snapshots().iter().map(|view| view.standbys).sum()
}

#[tokio::test]
async fn a_snapshot_that_is_often_started_from_has_standbys_until_it_is_deleted() {
    for world in worlds().await {
        let node = world.start(1).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 1);
        let of = snapshot(&node, &id).await.snapshot.id;
        child(&node, of.as_str()).await;
        // Once is not often.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(standbys(&node), 0);
        child(&node, of.as_str()).await;
        for round in 0..3 {
            eventually("there is a standby", || standbys(&node) == 1).await;
            let wanted = CreateRequest { template: of.to_string(), ..request() };
            let created = node.create(wanted).await.unwrap();
            let name = World::vm_name(&created.sandbox.id);
            assert_eq!(created.tier, Tier::Hot, "round {round}");
            assert_eq!((created.sandbox.parent.as_ref(), &created.sandbox.template_id), (Some(&id), &of));
            assert_eq!(see(&world, &created.sandbox.id), (1, 1));
            // What runs in it stands still until it is somebody's.
            let inits = world.host.inits(&name);
            assert_eq!(inits.len(), 1, "a standby of a snapshot is greeted once, as who it is");
            write(&world, &created.sandbox.id, 2);
        }
        eventually("there is a standby", || standbys(&node) == 1).await;
        node.delete_snapshot(of.as_str()).await.unwrap();
        assert!(node.snapshots().is_empty());
        for view in node.list() {
            node.kill(&view.id).await.unwrap();
        }
        // That of the template stays.
        world.only(1).await;
        eventually("nothing of it is stored", || world.snapshot_dirs().is_empty()).await;
        node.shutdown().await;
        world.only(0).await;
        assert!(world.stored_leftovers().is_empty());
    }
}

#[tokio::test]
async fn standbys_of_snapshots_do_not_outlive_their_node() {
    let world = World::with_store(true).await;
    let node = world.start(1).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    let of = snapshot(&node, &id).await.snapshot.id;
    let children = [child(&node, of.as_str()).await, child(&node, of.as_str()).await];
    eventually("there is a standby", || standbys(&node) == 1).await;
    node.shutdown().await;
    let node = world.start(0).await;
    assert_eq!(standbys(&node), 0);
    world.only(1 + children.len()).await;
    // Started from as before.
    child(&node, of.as_str()).await;
    end(&world, &node).await;
}

#[tokio::test]
async fn many_snapshots_of_one_sandbox_keep_what_each_of_them_saw() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        let mut taken = Vec::new();
        for value in 1..=12 {
            write(&world, &id, value);
            taken.push((snapshot(&node, &id).await.snapshot.id, value));
            if value % 4 == 0 {
                pause(&node, &id).await;
                node.release(&id).await.unwrap();
                resume(&node, &id).await;
            }
        }
        // Every other one goes, and the rest lies on what they had stored.
        for (of, _) in taken.iter().step_by(2) {
            node.delete_snapshot(of.as_str()).await.unwrap();
        }
        eventually("the deleted ones are gone", || world.snapshot_dirs().len() == 6).await;
        for (of, value) in taken.iter().skip(1).step_by(2) {
            let child = child(&node, of.as_str()).await;
            assert_eq!(see(&world, &child), (*value, *value));
            node.kill(&child).await.unwrap();
        }
        assert_eq!(see(&world, &id), (12, 12));
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn a_paused_sandbox_stays_paused_and_without_memory_it_boots() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 5);
        let disk_alone = SnapshotRequest { name: None, mode: PauseMode::Filesystem };
        let of_running = node.snapshot(&id, disk_alone.clone()).await.unwrap();
        assert_eq!(world.host.is_running(&World::vm_name(&id)), Some(true));
        pause(&node, &id).await;
        let full = snapshot(&node, &id).await;
        assert_eq!((full.snapshot.mode, full.stopped), (PauseMode::Full, Duration::ZERO));
        node.release(&id).await.unwrap();
        let of_cold = node.snapshot(&id, disk_alone).await.unwrap();
        assert_eq!(node.get(&id).unwrap().state, SandboxState::Paused);
        assert_eq!(see(&world, &child(&node, full.snapshot.id.as_str()).await), (5, 5));
        for of in [of_running, of_cold] {
            assert_eq!(of.snapshot.mode, PauseMode::Filesystem);
            assert_eq!(see(&world, &child(&node, of.snapshot.id.as_str()).await), (0, 5), "it booted");
            let views = node.snapshots();
            let users = views.iter().find(|view| view.id == of.snapshot.id).map(|view| view.users);
            assert_eq!(users, Some(0), "nothing maps its memory");
        }
        resume(&node, &id).await;
        assert_eq!(see(&world, &id), (5, 5));
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn a_name_is_taken_over_and_those_of_templates_are_refused() {
    let world = World::with_store(false).await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    write(&world, &id, 1);
    let first = node.snapshot(&id, named("setup")).await.unwrap().snapshot;
    write(&world, &id, 2);
    let second = node.snapshot(&id, named("setup")).await.unwrap().snapshot;
    let names = |id: &str| {
        let views = node.snapshots();
        views.into_iter().find(|view| view.id.as_str() == id).unwrap().name.map(|name| name.0)
    };
    assert_eq!((names(first.id.as_str()), names(second.id.as_str())), (None, Some("setup".to_owned())));
    assert_eq!(see(&world, &child(&node, "setup").await), (2, 2));
    assert_eq!(see(&world, &child(&node, first.id.as_str()).await), (1, 1));
    for name in ["base", first.id.as_str()] {
        let refused = node.snapshot(&id, named(name)).await.unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument { field: "name", .. }));
    }
    assert_eq!(see(&world, &child(&node, "Setup").await), (2, 2));
    assert!(matches!(node.delete_snapshot("base").await, Err(Error::Conflict(_))));
    assert!(matches!(node.delete_snapshot("nobody").await, Err(Error::TemplateNotFound(_))));
    node.delete_snapshot("setup").await.unwrap();
    assert!(matches!(node.delete_snapshot("setup").await, Err(Error::TemplateNotFound(_))));
    let wanted = CreateRequest { template: "setup".to_owned(), ..request() };
    assert!(matches!(node.create(wanted).await, Err(Error::TemplateNotFound(_))));
    end(&world, &node).await;
}

#[tokio::test]
async fn a_deleted_snapshot_stays_until_nobody_maps_it() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 1);
        let of = snapshot(&node, &id).await.snapshot.id;
        let (child, killed) = (child(&node, of.as_str()).await, child(&node, of.as_str()).await);
        node.kill(&id).await.unwrap();
        node.delete_snapshot(of.as_str()).await.unwrap();
        assert!(node.snapshots().is_empty());
        node.kill(&killed).await.unwrap();
        world.only(1).await;
        assert_eq!(world.snapshot_dirs(), [of.to_string()]);
        // Nor after a restart of the node.
        node.shutdown().await;
        let node = world.start(0).await;
        assert_eq!((world.snapshot_dirs(), see(&world, &child)), (vec![of.to_string()], (1, 1)));
        pause(&node, &child).await;
        node.release(&child).await.unwrap();
        eventually("it is gone", || world.snapshot_dirs().is_empty()).await;
        resume(&node, &child).await;
        assert_eq!(see(&world, &child), (1, 1), "what was saved since stands by itself");
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn snapshots_are_there_after_a_restart() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 1);
        let of = node.snapshot(&id, named("kept")).await.unwrap().snapshot.id;
        node.shutdown().await;
        let node = world.start(0).await;
        assert_eq!(node.snapshots().len(), 1);
        node.collect_garbage()
            .await
            .map(drop)
            .or_else(|error| match error {
                Error::Conflict(_) if world.store.is_none() => Ok(()),
                error => Err(error),
            })
            .unwrap();
        for asked in [of.as_str(), "kept"] {
            assert_eq!(see(&world, &child(&node, asked).await), (1, 1));
        }
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn snapshots_are_there_after_all_sandboxes_were_purged() {
    let world = World::with_store(false).await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    write(&world, &id, 1);
    // One of a disk alone has no directory here.
    let disk_alone = SnapshotRequest { name: None, mode: PauseMode::Filesystem };
    let of_disk = node.snapshot(&id, disk_alone).await.unwrap().snapshot.id;
    let purge = async |node: Orchestrator| {
        node.shutdown().await;
        world.host.restart();
        assert_eq!(hold_data_dir(&world.path("data")).unwrap().forget_sandboxes().unwrap(), 1);
        let node = world.start(0).await;
        assert!(node.list().is_empty());
        node
    };
    let node = purge(node).await;
    let id = child(&node, of_disk.as_str()).await;
    assert_eq!(see(&world, &id), (0, 1));
    world.host.write(&World::vm_name(&id), 2, 2);
    let of = snapshot(&node, &id).await.snapshot.id;
    let node = purge(node).await;
    for of in [&of, &of_disk] {
        assert_eq!(see(&world, &child(&node, of.as_str()).await).1, 1);
    }
    assert_eq!(world.host.read(&World::vm_name(&child(&node, of.as_str()).await), 2), (2, 2));
    end(&world, &node).await;
}

fn fork(children: usize) -> ForkRequest {
    ForkRequest { timeout: HOUR, children: vec![ChildRequest::default(); children] }
}

#[tokio::test]
async fn children_of_a_fork_go_on_from_the_same_state() {
    for world in worlds().await {
        let node = world.start(0).await;
        let id = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &id, 1);
        let labels = BTreeMap::from([("arm".to_owned(), "b".to_owned())]);
        let mut wanted = fork(3);
        wanted.children[1] = ChildRequest {
            metadata: Some(labels.clone()),
            timeout: Some(Duration::from_secs(60)),
            env_vars: BTreeMap::from([("EXTRA".to_owned(), "1".to_owned())]),
        };
        let forked = node.fork(&id, wanted).await.unwrap();
        let children: Vec<_> = forked.children.into_iter().map(|child| child.unwrap().sandbox).collect();
        assert_eq!(children.len(), 3);
        let parent = node.get(&id).unwrap();
        assert_eq!(parent.state, SandboxState::Running);
        let mut ids = BTreeSet::new();
        for (number, child) in children.iter().enumerate() {
            assert!(ids.insert(child.id.clone()) && child.id != id);
            assert_eq!(see(&world, &child.id), (1, 1));
            assert_eq!((&child.template_id, child.parent.as_ref()), (&parent.template_id, Some(&id)));
            assert_eq!(child.metadata, if number == 1 { labels.clone() } else { request().metadata });
            assert_eq!(child.life_time, if number == 1 { Duration::from_secs(60) } else { HOUR });
            assert!(child.access_token.is_some() && child.access_token != parent.access_token);
            let init = world.host.inits(&World::vm_name(&child.id)).pop().unwrap();
            assert_eq!(init.env_vars.get("A").map(String::as_str), Some("b"));
            assert_eq!(init.env_vars.contains_key("EXTRA"), number == 1);
            write(&world, &child.id, 10 + number as u8);
        }
        assert_eq!(see(&world, &id), (1, 1));
        assert!(node.snapshots().is_empty(), "nobody sees what the children were made of");
        for (number, child) in children.iter().enumerate() {
            assert_eq!(see(&world, &child.id), (10 + number as u8, 10 + number as u8));
        }
        end(&world, &node).await;
    }
}

/// Three levels, three children each.
#[tokio::test]
async fn forks_of_forks_of_forks() {
    for world in worlds().await {
        let node = world.start(0).await;
        let root = node.create(request()).await.unwrap().sandbox.id;
        write(&world, &root, 0);
        let mut level = vec![(root, 0)];
        for _ in 0..3 {
            let mut next = Vec::new();
            for (id, value) in &level {
                let forked = node.fork(id, fork(3)).await.unwrap();
                for (number, child) in forked.children.into_iter().enumerate() {
                    let (child, new) = (child.unwrap().sandbox.id, value * 4 + number as u8 + 1);
                    assert_eq!(see(&world, &child), (*value, *value));
                    write(&world, &child, new);
                    next.push((child, new));
                }
                // Parents need not live on.
                node.kill(id).await.unwrap();
            }
            level = next;
        }
        assert_eq!(level.len(), 27);
        for (id, value) in &level {
            pause(&node, id).await;
            node.release(id).await.unwrap();
            resume(&node, id).await;
            assert_eq!(see(&world, id), (*value, *value));
        }
        end(&world, &node).await;
    }
}

#[tokio::test]
async fn a_child_that_fails_does_not_keep_the_others() {
    let world = World::with_store(false).await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    world.host.fail_call(Operation::Load, 1, Fault::Fail);
    let forked = node.fork(&id, fork(3)).await.unwrap();
    let failed = forked.children.iter().filter(|child| child.is_err()).count();
    assert_eq!((failed, forked.children.len()), (1, 3));
    for count in [0, 101] {
        let error = node.fork(&id, fork(count)).await.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { field: "count", .. }), "{error}");
    }
    end(&world, &node).await;
}

#[tokio::test]
async fn what_cannot_be_stored_is_no_snapshot_and_the_sandbox_goes_on() {
    let world = World::with_store(false).await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    write(&world, &id, 1);
    for (operation, fault) in [(Operation::Capture, Fault::Fail), (Operation::Stop, Fault::Fail)] {
        world.host.fail_call(operation, 0, fault);
        let begin = std::time::Instant::now();
        // It may still be looked after since the last one.
        while let Error::Transitioning(_) = node.snapshot(&id, FULL).await.unwrap_err() {
            assert!(begin.elapsed() < SOON);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        eventually("it goes on", || world.host.is_running(&World::vm_name(&id)) == Some(true)).await;
        assert!(node.snapshots().is_empty());
    }
    let begin = std::time::Instant::now();
    while let Err(error) = node.snapshot(&id, FULL).await {
        assert!(matches!(error, Error::Transitioning(_)) && begin.elapsed() < SOON, "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(see(&world, &id), (1, 1));
    end(&world, &node).await;
}

/// Its source ends while nothing of it is stored yet.
#[tokio::test]
async fn a_snapshot_outlives_its_source_from_the_moment_it_was_taken() {
    let world = World::with_store(true).await;
    let node = world.start(0).await;
    let id = node.create(request()).await.unwrap().sandbox.id;
    write(&world, &id, 1);
    world.host.fail_call(Operation::CreateImage, 0, Fault::HangBefore);
    let (asking, asked) = (node.clone(), id.clone());
    let caller = tokio::spawn(async move { asking.snapshot(&asked, FULL).await.map(drop) });
    world.host.wait_for_hang(1).await;
    assert_eq!(node.snapshots()[0].state, SnapshotState::Storing);
    let wanted = CreateRequest { template: node.snapshots()[0].id.to_string(), ..request() };
    assert!(matches!(node.create(wanted).await, Err(Error::TemplateNotReady { .. })));
    node.kill(&id).await.unwrap();
    world.host.heal();
    caller.await.unwrap().unwrap();
    assert_eq!(node.snapshots()[0].state, SnapshotState::Ready);
    world.only(0).await;
    let child = child(&node, node.snapshots()[0].id.as_str()).await;
    assert_eq!(see(&world, &child), (1, 1));
    end(&world, &node).await;
}
