//! What a repository does when nothing goes wrong, or others use it at the same time. Each test runs in both kinds of place.

use crate::place::{Kind, Place};
use crate::sample::{
    Files, SMALL, all_dead, at_once, check_whole, collect_all, content, expected_keys, name, named, options,
    publish, small_draft,
};
use aenv_snapshot::{Alias, Content, Draft, Manifest, Progress, PublishOptions, RepositoryError};
use object_store::{ObjectStoreExt as _, PutPayload};
use std::collections::BTreeSet;
use std::num::NonZeroU64;
use tokio::sync::watch;

macro_rules! in_both_places {
    ($($test:ident),* $(,)?) => {
        mod directory {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Place::new(super::Kind::Directory).await).await;
            })*
        }
        mod bucket {
            $(#[tokio::test]
            async fn $test() {
                super::$test(super::Place::new(super::Kind::Bucket).await).await;
            })*
        }
    };
}

in_both_places! {
    what_is_published_is_found_by_another_node,
    contents_are_stored_once,
    snapshots_are_listed_in_pages,
    a_deleted_snapshot_goes_with_what_nobody_else_needs,
    an_alias_moves_by_compare_and_swap,
    an_alias_is_won_by_one_of_many,
    an_old_owner_is_fenced,
    publishers_of_the_same_content_do_not_disturb_one_another,
    publishers_and_collectors_at_the_same_time_lose_nothing,
    a_file_that_changes_is_refused,
    what_others_stored_is_taken_over,
    a_newer_version_is_refused_and_stops_collections,
    a_held_snapshot_outlives_its_deletion,
    progress_is_told,
}

fn alias(text: &str) -> Alias {
    let (name_of, tag) = text.split_once(':').unwrap();
    Alias { name: name(name_of), tag: name(tag) }
}

async fn what_is_published_is_found_by_another_node(place: Place) {
    let files = Files::new();
    let draft = named(files.draft("s1", 1), "ready:v1");
    let manifest = publish(&place.repository(), &draft).await.unwrap();

    let other = place.repository();
    for reference in ["s1", "ready:v1"] {
        let found = other.resolve(reference).await.unwrap();
        assert_eq!(found, manifest, "{reference}");
    }
    check_whole(&other, &manifest).await;
    assert_eq!(manifest.extension, draft.extension);
    assert_eq!((manifest.disk.layers.len(), manifest.parent.clone()), (2, Some(name("base"))));
    for missing in ["s2", "ready", "ready:v2", "other:v1"] {
        let error = other.resolve(missing).await.unwrap_err();
        assert!(matches!(error, RepositoryError::NotFound { .. }), "{missing}: {error}");
    }
    assert!(matches!(other.resolve("a/b").await, Err(RepositoryError::Invalid { .. })));

    // Published again it is the same, and nothing is left over.
    assert_eq!(publish(&other, &draft).await.unwrap(), manifest);
    collect_all(&other).await;
    let keys = place.keys().await;
    let blobs: BTreeSet<_> = keys.iter().filter(|key| key.starts_with("blobs/")).cloned().collect();
    assert_eq!(blobs, expected_keys(&[&manifest]));
    assert!(keys.iter().all(|key| {
        ["blobs/", "manifests/s1/", "aliases/ready/v1/"].iter().any(|kind| key.starts_with(kind))
    }));
    check_whole(&other, &manifest).await;
}

async fn contents_are_stored_once(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let first = publish(&repository, &files.draft("s1", 1)).await.unwrap();
    let before = place.keys().await.len();
    let second = publish(&repository, &files.draft("s2", 1)).await.unwrap();
    // Only its manifest.
    assert_eq!(place.keys().await.len(), before + 1);
    assert_eq!(first.disk, second.disk);
}

async fn snapshots_are_listed_in_pages(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let file = files.write("file", 1, SMALL);
    let ids = ["a", "b", "c", "d", "e"];
    for id in ids {
        publish(&repository, &small_draft(id, Content::File(file.clone()))).await.unwrap();
    }
    assert!(repository.delete(&name("c")).await.unwrap());
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let page = repository.list(after.as_ref(), 2).await.unwrap();
        assert!(page.snapshots.len() <= 2 && page.unreadable.is_empty());
        seen.extend(page.snapshots.iter().map(|snapshot| snapshot.id.to_string()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen, ["a", "b", "d", "e"]);

    // One that cannot be read hides no others.
    let damaged = object_store::path::Path::from("manifests/bb/x.json");
    repository.store().objects().put(&damaged, PutPayload::from_static(b"{\"version\":1}")).await.unwrap();
    let page = repository.list(None, 10).await.unwrap();
    assert_eq!((page.snapshots.len(), page.unreadable.len(), page.next), (4, 1, None));
    assert!(matches!(page.unreadable[0], RepositoryError::Damaged { .. }));
    let error = repository.collect(&at_once()).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Damaged { .. }), "{error}");
    assert!(repository.delete(&name("bb")).await.unwrap());
    repository.collect(&at_once()).await.unwrap();
}

async fn a_deleted_snapshot_goes_with_what_nobody_else_needs(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    publish(&repository, &named(files.draft("s1", 1), "ready:v1")).await.unwrap();
    let shared = files.draft("s2", 1);
    let own = files.write("own", 100, SMALL);
    let mut second = Draft { alias: None, ..shared };
    second.disk.layers[1].blob = Content::File(own);
    let second = publish(&repository, &second).await.unwrap();

    assert!(repository.delete(&name("s1")).await.unwrap());
    assert!(!repository.delete(&name("s1")).await.unwrap());
    assert!(matches!(repository.get(&name("s1")).await, Err(RepositoryError::NotFound { .. })));
    assert_eq!(repository.alias(&alias("ready:v1")).await.unwrap(), None);
    collect_all(&repository).await;
    check_whole(&repository, &second).await;
    let blobs: BTreeSet<_> =
        place.keys().await.into_iter().filter(|key| !key.starts_with("aliases/")).collect();
    let mut expected = expected_keys(&[&second]);
    expected.extend(blobs.iter().find(|key| key.starts_with("manifests/s2/")).cloned());
    assert_eq!(blobs, expected);

    assert!(repository.delete(&name("s2")).await.unwrap());
    collect_all(&repository).await;
    let left: Vec<_> = place.keys().await.into_iter().filter(|key| !key.starts_with("aliases/")).collect();
    assert!(left.is_empty(), "{left:?}");
}

async fn an_alias_moves_by_compare_and_swap(place: Place) {
    let repository = place.repository();
    let moving = alias("main:default");
    let (a, b) = (name("a"), name("b"));
    repository.move_alias(&moving, None, Some(&a)).await.unwrap();
    // The same once more: the first answer may have been lost.
    repository.move_alias(&moving, None, Some(&a)).await.unwrap();
    let error = repository.move_alias(&moving, None, Some(&b)).await.unwrap_err();
    assert!(matches!(error, RepositoryError::Conflict { .. }), "{error}");
    repository.move_alias(&moving, Some(&a), Some(&b)).await.unwrap();
    assert_eq!(repository.alias(&moving).await.unwrap(), Some(b.clone()));
    repository.move_alias(&moving, Some(&b), None).await.unwrap();
    assert_eq!(repository.alias(&moving).await.unwrap(), None);
    for _ in 0..5 {
        repository.move_alias(&moving, None, Some(&a)).await.unwrap();
        repository.move_alias(&moving, Some(&a), None).await.unwrap();
    }
    assert_eq!(place.keys().await.len(), 2);
}

async fn an_alias_is_won_by_one_of_many(place: Place) {
    let moving = alias("main:default");
    let mut from = None;
    for round in 0..5 {
        let contenders: Vec<_> = (0..8)
            .map(|contender| {
                let (repository, moving, from) = (place.repository(), moving.clone(), from.clone());
                let to = name(&format!("s-{round}-{contender}"));
                tokio::spawn(async move {
                    repository.move_alias(&moving, from.as_ref(), Some(&to)).await.map(|()| to)
                })
            })
            .collect();
        let mut winners = Vec::new();
        for contender in contenders {
            match contender.await.unwrap() {
                Ok(winner) => winners.push(winner),
                Err(error) => assert!(matches!(error, RepositoryError::Conflict { .. }), "{error}"),
            }
        }
        assert_eq!(winners.len(), 1, "{winners:?}");
        from = place.repository().alias(&moving).await.unwrap();
        assert_eq!(from.as_ref(), winners.first());
    }
}

async fn an_old_owner_is_fenced(place: Place) {
    let (a, b) = (place.repository(), place.repository());
    let sandbox = name("i1");
    assert_eq!(a.head(&sandbox).await.unwrap(), None);
    let error = a.advance(&sandbox, 1, &name("s0")).await.unwrap_err();
    assert!(matches!(error, RepositoryError::NotFound { .. }), "{error}");
    let first = a.claim(&sandbox, &name("node-a")).await.unwrap();
    a.advance(&sandbox, first.generation, &name("s1")).await.unwrap();
    a.advance(&sandbox, first.generation, &name("s2")).await.unwrap();

    let second = b.claim(&sandbox, &name("node-b")).await.unwrap();
    assert!(second.generation > first.generation);
    assert_eq!(second.snapshot, Some(name("s2")));
    match a.advance(&sandbox, first.generation, &name("s3")).await.unwrap_err() {
        RepositoryError::Fenced { newer, owner, .. } => {
            assert_eq!((newer, owner.as_str()), (second.generation, "node-b"));
        }
        error => panic!("{error}"),
    }
    assert!(matches!(a.remove_head(&sandbox, first.generation).await, Err(RepositoryError::Fenced { .. })));
    b.advance(&sandbox, second.generation, &name("s4")).await.unwrap();
    assert_eq!(a.head(&sandbox).await.unwrap().unwrap().snapshot, Some(name("s4")));

    // A claim of the same owner fences its earlier self; a removed head comes back with a greater generation.
    let third = b.claim(&sandbox, &name("node-b")).await.unwrap();
    assert!(matches!(
        b.advance(&sandbox, second.generation, &name("s5")).await,
        Err(RepositoryError::Fenced { .. })
    ));
    b.remove_head(&sandbox, third.generation).await.unwrap();
    b.remove_head(&sandbox, third.generation).await.unwrap();
    assert_eq!(a.head(&sandbox).await.unwrap(), None);
    let fourth = a.claim(&sandbox, &name("node-a")).await.unwrap();
    assert!(fourth.generation > third.generation && fourth.snapshot.is_none());
}

async fn publishers_of_the_same_content_do_not_disturb_one_another(place: Place) {
    let files = Files::new();
    let drafts: Vec<_> =
        (0..3).map(|number| named(files.draft(&format!("s{number}"), 1), "ready:v1")).collect();
    let same = files.draft("same", 1);
    let publishing: Vec<_> = drafts
        .into_iter()
        .chain([same.clone(), same])
        .map(|draft| {
            let repository = place.repository();
            tokio::spawn(async move { publish(&repository, &draft).await })
        })
        .collect();
    let mut published = Vec::new();
    for one in publishing {
        published.push(one.await.unwrap().unwrap());
    }
    let repository = place.repository();
    collect_all(&repository).await;
    let mut kept = Vec::new();
    for manifest in &published {
        let found = repository.get(&manifest.id).await.unwrap();
        check_whole(&repository, &found).await;
        kept.push(found);
    }
    let meant = repository.resolve("ready:v1").await.unwrap();
    assert!(meant.id.as_str().starts_with('s'));
}

async fn publishers_and_collectors_at_the_same_time_lose_nothing(place: Place) {
    let files = Files::new();
    let tops: Vec<_> = (0..3).map(|top| files.write(&format!("top-{top}"), top, SMALL)).collect();
    let collecting = {
        let repository = place.repository();
        tokio::spawn(async move {
            for _ in 0..40 {
                repository.collect(&at_once()).await.unwrap();
            }
        })
    };
    let publishing: Vec<_> = (0..3)
        .map(|publisher: usize| {
            let (repository, tops) = (place.repository(), tops.clone());
            tokio::spawn(async move {
                for round in 0..10 {
                    let id = format!("s-{publisher}-{round}");
                    let draft = small_draft(&id, Content::File(tops[(publisher + round) % 3].clone()));
                    let manifest = publish(&repository, &draft).await.unwrap();
                    check_whole(&repository, &manifest).await;
                    if round % 3 > 0 {
                        assert!(repository.delete(&manifest.id).await.unwrap());
                    }
                }
            })
        })
        .collect();
    for publisher in publishing {
        publisher.await.unwrap();
    }
    collecting.await.unwrap();
    let repository = place.repository();
    collect_all(&repository).await;
    let page = repository.list(None, 100).await.unwrap();
    assert_eq!((page.snapshots.len(), page.unreadable.len()), (12, 0));
    for manifest in &page.snapshots {
        check_whole(&repository, manifest).await;
    }
    let all: Vec<&Manifest> = page.snapshots.iter().collect();
    let blobs: BTreeSet<_> = place.keys().await.into_iter().filter(|key| key.starts_with("blobs/")).collect();
    assert_eq!(blobs, expected_keys(&all));
}

async fn a_file_that_changes_is_refused(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let draft = files.draft("s1", 1);
    let slow = PublishOptions { bytes_per_second: NonZeroU64::new(20 << 20), parallel: 1, ..options() };
    let progress = watch::Sender::new(Progress::default());
    let mut told = progress.subscribe();
    let publishing = repository.publish(&draft, &slow, &progress);
    let changing = async {
        // After it was digested, before its last part was read: the bandwidth keeps that from coming sooner.
        told.wait_for(|progress| progress.uploaded_bytes > 0 || progress.total_bytes > 0).await.unwrap();
        let path = files.path("base-1");
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
    };
    let (published, ()) = tokio::join!(publishing, changing);
    let error = published.unwrap_err();
    assert!(matches!(&error, RepositoryError::Changed { path } if path.ends_with("base-1")), "{error}");
    assert!(matches!(repository.get(&name("s1")).await, Err(RepositoryError::NotFound { .. })));
    // Published as it is now, nothing is left of what it was.
    let manifest = publish(&repository, &draft).await.unwrap();
    check_whole(&repository, &manifest).await;
    collect_all(&repository).await;
    let blobs: BTreeSet<_> = place.keys().await.into_iter().filter(|key| key.starts_with("blobs/")).collect();
    assert_eq!(blobs, expected_keys(&[&manifest]));
}

async fn what_others_stored_is_taken_over(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let parent = publish(&repository, &files.draft("parent", 1)).await.unwrap();
    let mut child = small_draft("child", Content::File(files.write("own", 50, SMALL)));
    child.disk.layers.insert(
        0,
        aenv_snapshot::Layer {
            form: aenv_snapshot::Form::Layer,
            blob: Content::Stored(parent.disk.layers[0].blob.clone()),
        },
    );
    // The parent is deleted, and its blobs condemned, but not removed: they are copied.
    assert!(repository.delete(&parent.id).await.unwrap());
    assert!(repository.collect(&at_once()).await.unwrap().condemned > 0);
    let published = publish(&repository, &child).await.unwrap();
    collect_all(&repository).await;
    check_whole(&repository, &published).await;
    assert_ne!(published.disk.layers[0].blob.object.copy, parent.disk.layers[0].blob.object.copy);

    // What is gone altogether cannot be named.
    let gone = small_draft("late", Content::Stored(parent.memory.unwrap().devices));
    let error = publish(&repository, &gone).await.unwrap_err();
    assert!(matches!(error, RepositoryError::NotFound { .. }), "{error}");
}

async fn a_newer_version_is_refused_and_stops_collections(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let kept = publish(&repository, &files.draft("s1", 1)).await.unwrap();
    let newer = object_store::path::Path::from("publications/later.json");
    repository.store().objects().put(&newer, PutPayload::from_static(b"{\"version\":2}")).await.unwrap();
    assert!(repository.delete(&kept.id).await.unwrap());
    let before = place.keys().await;
    let error = repository.collect(&all_dead()).await.unwrap_err();
    assert!(matches!(error, RepositoryError::UnknownVersion { version: 2, known: 1, .. }), "{error}");
    assert_eq!(place.keys().await, before);
    repository.store().objects().delete(&newer).await.unwrap();
    collect_all(&repository).await;
    assert!(place.keys().await.is_empty());
}

async fn a_held_snapshot_outlives_its_deletion(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let manifest = publish(&repository, &files.draft("s1", 1)).await.unwrap();
    let hold = repository.hold(&manifest).await.unwrap();
    assert!(repository.delete(&manifest.id).await.unwrap());
    for _ in 0..3 {
        repository.collect(&at_once()).await.unwrap();
    }
    check_whole(&repository, &manifest).await;
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
    for _ in 0..3 {
        repository.collect(&at_once()).await.unwrap();
    }
    assert!(place.keys().await.is_empty());
    let error = repository.hold(&manifest).await.unwrap_err();
    assert!(matches!(error, RepositoryError::NotFound { .. }), "{error}");
}

async fn progress_is_told(place: Place) {
    let files = Files::new();
    let repository = place.repository();
    let draft = files.draft("s1", 1);
    let progress = watch::Sender::new(Progress::default());
    repository.publish(&draft, &options(), &progress).await.unwrap();
    let first = progress.borrow().clone();
    assert_eq!((first.done_bytes, first.uploaded_bytes), (first.total_bytes, first.total_bytes));
    assert!(first.total_bytes > content(1, crate::sample::LARGE).len() as u64);
    let again = Draft { id: name("s2"), ..draft };
    repository.publish(&again, &options(), &progress).await.unwrap();
    let second = progress.borrow().clone();
    assert_eq!((second.done_bytes, second.uploaded_bytes), (second.total_bytes, 0));
}
