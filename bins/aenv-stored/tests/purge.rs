//! A purge ends all that a service serves; snapshots stay, and the next service can make disks of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::block_service::{CreateImage, DiskState, LayerRef, ServiceError};
use daemon::{Direct, Stored, content, name, stored_bytes};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

/// Blocks that are written before the seal, and again after it.
const BLOCKS: u64 = 64;

/// Makes a disk, a snapshot of it and what else a purge must end; returns what disks of the snapshot are made of.
async fn fill(stored: &Stored) -> Vec<LayerRef> {
    let base = stored.raw_layer("raw");
    let captured = stored.disk("captured", std::slice::from_ref(&base)).await;
    let mut file = Direct::open(captured.path.as_ref().unwrap());
    (0..BLOCKS).for_each(|block| file.write(block, &content(block, 1)).unwrap());
    let sealed = stored.client.seal_disk(&captured.name, None).await.unwrap();
    for (image, exported) in [("snapshot", false), ("memory", true)] {
        let layers = sealed.layers.clone();
        let image = CreateImage { name: name(image), layers, owner: 0, exported };
        stored.client.create_image(&image).await.unwrap();
    }
    (0..BLOCKS).for_each(|block| file.write(block, &content(block, 2)).unwrap());
    stored.client.seal_disk(&captured.name, None).await.unwrap();
    for (disk, layers) in [("vm-a", vec![base]), ("vm-b", sealed.layers.clone())] {
        let view = stored.disk(disk, &layers).await;
        Direct::open(view.path.as_ref().unwrap()).write(0, &content(0, 3)).unwrap();
    }
    sealed.layers
}

fn purge(stored: &Stored, arguments: &[&str]) -> String {
    let output = stored.command("purge").args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!stored.run().exists());
    String::from_utf8(output.stdout).unwrap()
}

fn entries(directory: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_keeps_snapshots_and_what_they_are_made_of() {
    let stored = Stored::start().await;
    let layers = fill(&stored).await;
    // In one round the disk is one that a VM uses, in the next one it was deleted before.
    for round in 0..2 {
        stored.kill();
        let said = purge(&stored, &[]);
        assert!(said.contains("FUSE mount"), "{said}");
        if round == 0 {
            assert!(said.contains("disks: 3\nimages: 1\n"), "{said}");
            let left = stored_bytes(&stored.disks().join("captured/tops"));
            let written = BLOCKS * 4096;
            assert!((written..2 * written).contains(&left), "{left} bytes are left of {written}");
        }
        assert_eq!(entries(&stored.disks()), BTreeSet::from(["captured".to_owned()]));
        assert_eq!(
            entries(&stored.data().join("storage/images")),
            BTreeSet::from(["snapshot.json".to_owned()])
        );
        assert_eq!(purge(&stored, &[]), "", "a second purge finds nothing");

        stored.restart();
        let status = stored.client.status().await.unwrap();
        assert_eq!(status.failed, []);
        assert_eq!(stored.client.disk(&name("captured")).await.unwrap().state, DiskState::Kept);
        assert_eq!(stored.client.image(&name("snapshot")).await.unwrap().state, DiskState::Ready);
        let view = stored.disk(&format!("child-{round}"), &layers).await;
        let mut file = Direct::open(view.path.as_ref().unwrap());
        for (block, generation) in [(0, 1), (BLOCKS - 1, 1), (BLOCKS, 0)] {
            assert_eq!(file.read(block).unwrap(), content(block, generation));
        }
        file.write(0, &content(0, 9)).unwrap();
        assert_eq!(file.read(0).unwrap(), content(0, 9));
    }
    stored.client.delete_disk(&name("child-1")).await.unwrap();
    stored.client.delete_image(&name("snapshot")).await.unwrap();
    let gone = stored.client.disk(&name("captured")).await.unwrap_err();
    assert!(matches!(gone, ServiceError::NotFound(_)), "{gone}");
    assert_eq!(entries(&stored.disks()), BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_of_all_leaves_layer_files_alone() {
    let stored = Stored::start().await;
    fill(&stored).await;
    stored.terminate();
    let said = purge(&stored, &["--all"]);
    assert!(said.contains("disks: 3\nimages: 2\n"), "{said}");
    assert_eq!(entries(&stored.layers()), BTreeSet::from(["raw".to_owned()]));
    assert_eq!(
        entries(&stored.data().join("storage")),
        BTreeSet::from(["layers".to_owned(), "lock".to_owned()])
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_cannot_be_used_goes_with_its_disk() {
    let stored = Stored::start().await;
    fill(&stored).await;
    stored.kill();
    for log in entries(&stored.disks().join("captured/tops")).iter().filter(|name| name.ends_with(".log")) {
        let log = stored.disks().join("captured/tops").join(log);
        File::options().write(true).open(log).unwrap().set_len(10).unwrap();
    }
    let said = purge(&stored, &[]);
    assert!(said.contains("disks: 3\nimages: 2\n"), "{said}");
    assert!(!stored.disks().exists() && !stored.data().join("storage/images").exists());
}
