use super::*;
use crate::disks::{Base, SnapshotParts};
use crate::journal::MemoryBinding;
use crate::view::PauseMode;
use aenv_vmm::MachineSpec;
use std::time::Duration;

fn record(id: &str, name: Option<(&str, &str)>, second: i64, is_stored: bool) -> SnapshotRecord {
    let parts = SnapshotParts { disk: Base::File("disk".into()), memory: None };
    SnapshotRecord {
        id: id.parse().unwrap(),
        purpose: Purpose::Kept,
        name: name.map(|(name, tag)| (name.to_owned(), tag.to_owned())),
        source: "isource".parse().unwrap(),
        template_id: "t1".parse().unwrap(),
        template_name: "base".to_owned(),
        created_at: jiff::Timestamp::from_second(second).unwrap(),
        mode: PauseMode::Full,
        spec: MachineSpec { vcpus: 2, memory_mib: 512 },
        disk_mib: 1024,
        root_bytes: None,
        binding: MemoryBinding::of_tests(),
        access_token: None,
        parts: is_stored.then_some(parts),
        stored_bytes: 0,
        is_deleted: false,
    }
}

fn found(snapshots: &Snapshots, asked: &str) -> Option<String> {
    snapshots.find(asked).map(|snapshot| snapshot.read(|record| record.id.to_string()))
}

#[test]
fn one_is_found_by_its_id_and_by_its_name() {
    let named = Some(("setup", "v2"));
    let snapshots = Snapshots::new(vec![record("s1", named, 1, true), record("s2", None, 2, true)]);
    for asked in ["s1", "s1:default", "setup:v2", "S1", "Setup:V2"] {
        assert_eq!(found(&snapshots, asked).as_deref(), Some("s1"), "{asked}");
    }
    for asked in ["setup", "setup:default", "s1:v2", "s3", ""] {
        assert_eq!(found(&snapshots, asked), None, "{asked}");
    }
    // Those of forks are nobody's, and those that are to go too.
    snapshots.enter(SnapshotRecord { purpose: Purpose::Fork, ..record("s3", None, 3, true) });
    snapshots.enter(SnapshotRecord { is_deleted: true, ..record("s4", None, 3, true) });
    assert_eq!((found(&snapshots, "s3"), found(&snapshots, "s4")), (None, None));
    assert_eq!(snapshots.views().len(), 2);
}

#[test]
fn an_id_comes_before_a_name_of_the_same_letters() {
    let named = Some(("s1", DEFAULT_TAG));
    let snapshots = Snapshots::new(vec![record("s1", None, 1, true), record("s2", named, 2, true)]);
    assert_eq!(found(&snapshots, "s1").as_deref(), Some("s1"));
    snapshots.enter(SnapshotRecord { is_deleted: true, ..record("s1", None, 1, true) });
    assert_eq!(found(&snapshots, "s1").as_deref(), Some("s2"));
    let id = crate::random::snapshot_id().unwrap();
    assert!(is_like_id(id.as_str()) && is_like_id(crate::random::template_id().unwrap().as_str()));
    for name in ["setup", "s1", &id.as_str()[1..], &format!("{id}x"), &id.as_str().replace('s', "x")] {
        assert!(!is_like_id(name), "{name}");
    }
}

#[test]
fn a_name_means_the_newest_that_is_stored() {
    let named = Some(("setup", DEFAULT_TAG));
    let snapshots = Snapshots::new(vec![record("s1", named, 1, true), record("s2", named, 2, false)]);
    assert_eq!(found(&snapshots, "setup").as_deref(), Some("s1"));
    let name = ("setup".to_owned(), DEFAULT_TAG.to_owned());
    let before = snapshots.named(&name, &"s2".parse().unwrap()).unwrap();
    assert_eq!(before.read(|record| record.id.to_string()), "s1");
    snapshots.enter(record("s2", named, 2, true));
    assert_eq!(found(&snapshots, "setup").as_deref(), Some("s2"));
}

#[tokio::test]
async fn it_is_unused_when_the_last_vm_is_gone() {
    let snapshot = Snapshots::default().enter(record("s1", None, 1, true));
    snapshot.unused().await;
    let (first, second) = (snapshot.take(), snapshot.take());
    let shared = Arc::clone(&first);
    assert_eq!(snapshot.view().users, 2);
    let waiting = tokio::spawn({
        let snapshot = Arc::clone(&snapshot);
        async move { snapshot.unused().await }
    });
    drop((first, second));
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!waiting.is_finished());
    drop(shared);
    waiting.await.unwrap();
}
