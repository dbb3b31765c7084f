//! What the service does without being asked: it merges long chains of sealed tops, and lets guests wait while the host has no
//! room.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::BLOCK_BYTES;
use aenv_storage::block_service::{CreateImage, DiskState, DiskView, Name, Sealed, ServiceError};
use daemon::{Direct, PATIENCE, Stored, content, name};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// More seals than are left alone.
const SEALS: u64 = 24;
/// So many tops are left alone.
const LONG: u64 = 16;
/// Blocks that each round writes: some of its own, some that all rounds write.
const OWN: u64 = 8;
const SHARED: u64 = 4096;

/// Writes and seals again and again; returns the last seal.
async fn seal_often(stored: &Stored, view: &DiskView) -> Sealed {
    let mut file = Direct::open(view.path.as_ref().unwrap());
    let mut sealed = None;
    for round in 1..=SEALS {
        for block in (round * OWN..(round + 1) * OWN).chain(SHARED..SHARED + OWN) {
            file.write(block, &content(block, round)).unwrap();
        }
        sealed = Some(stored.client.seal_disk(&view.name, None).await.unwrap());
    }
    sealed.unwrap()
}

/// Checks that a disk has what [`seal_often`] wrote, and zeros around it.
fn verify(path: &Path) {
    let mut file = Direct::open(path);
    for round in 1..=SEALS {
        for block in round * OWN..(round + 1) * OWN {
            assert_eq!(file.read(block).unwrap(), content(block, round), "block {block}");
        }
    }
    for block in SHARED..SHARED + OWN {
        assert_eq!(file.read(block).unwrap(), content(block, SEALS), "block {block}");
    }
    for block in [0, OWN - 1, (SEALS + 1) * OWN, SHARED - 1, SHARED + OWN] {
        assert_eq!(file.read(block).unwrap(), [0; BLOCK_BYTES as usize], "block {block}");
    }
}

async fn tops(stored: &Stored, disk: &Name) -> u64 {
    stored.client.disk(disk).await.unwrap().tops.len() as u64
}

/// Waits for what must happen.
async fn eventually(what: &str, mut happened: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !happened().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn long_chains_are_merged_unless_others_are_made_of_them() {
    let stored = Stored::start().await;
    // Looked at in the order of their names: when `long` was merged, `held` was looked at.
    let (held, long) = (stored.disk("held", &[]).await, stored.disk("long", &[]).await);
    let first = stored.client.seal_disk(&held.name, None).await.unwrap();
    let child = stored.disk("child", &first.layers).await;
    seal_often(&stored, &held).await;
    seal_often(&stored, &long).await;
    eventually("the chain is merged", async || tops(&stored, &long.name).await <= LONG).await;
    assert_eq!(tops(&stored, &held.name).await, SEALS + 1);
    // What all rounds wrote is stored as often as there are tops, not as often as it was written.
    let stored_blocks = async || stored.client.disk(&long.name).await.unwrap().stored_bytes / BLOCK_BYTES;
    eventually("what was hidden is free", async || stored_blocks().await <= (SEALS + LONG) * OWN).await;

    // A chain that was merged can be sealed, and a child be made of it, as any other.
    let path = long.path.clone().unwrap();
    verify(&path);
    let sealed = stored.client.seal_disk(&long.name, None).await.unwrap();
    let copy = stored.disk("copy", &sealed.layers).await;
    Direct::open(&path).write(SHARED, &content(SHARED, 99)).unwrap();
    verify(copy.path.as_ref().unwrap());
    verify(held.path.as_ref().unwrap());
    assert_eq!(Direct::open(child.path.as_ref().unwrap()).read(OWN).unwrap(), [0; BLOCK_BYTES as usize]);

    stored.kill();
    stored.restart();
    verify(&stored.client.disk(&copy.name).await.unwrap().path.unwrap());
    assert_eq!(Direct::open(&path).read(SHARED).unwrap(), content(SHARED, 99));
    // With nobody else it is merged again.
    stored.client.delete_disk(&copy.name).await.unwrap();
    stored.client.delete_disk(&child.name).await.unwrap();
    eventually("the other chain is merged", async || tops(&stored, &held.name).await <= LONG).await;
    verify(&held.path.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn tops_that_store_the_same_blocks_again_are_merged_before_the_chain_is_long() {
    const ROUNDS: u64 = 6;
    let stored = Stored::start().await;
    // Looked at in the order of their names, as above.
    let (different, same) = (stored.disk("different", &[]).await, stored.disk("same", &[]).await);
    let mut held = None;
    for (disk, step) in [(&different, OWN), (&same, 0)] {
        let mut file = Direct::open(disk.path.as_ref().unwrap());
        for round in 1..=ROUNDS {
            for block in 0..OWN {
                file.write(round * step + block, &content(block, round)).unwrap();
            }
            held = Some(stored.client.seal_disk(&disk.name, None).await.unwrap());
        }
    }
    // As a save holds it: the top alone, whatever is below of it.
    let held = held.unwrap();
    let layers = vec![held.layers.last().unwrap().clone()];
    let hold = CreateImage { name: name("hold"), layers, owner: 0, exported: false };
    stored.client.create_image(&hold).await.unwrap();
    let stored_blocks = async || stored.client.disk(&same.name).await.unwrap().stored_bytes / BLOCK_BYTES;
    eventually("what was hidden is free", async || stored_blocks().await <= 2 * OWN).await;
    assert_eq!(tops(&stored, &same.name).await, 2);
    assert_eq!(tops(&stored, &different.name).await, ROUNDS, "nothing is stored twice there");
    let mut file = Direct::open(same.path.as_ref().unwrap());
    file.write(0, &content(0, 99)).unwrap();
    stored.client.rewind_disk(&same.name, &held.sealed).await.unwrap();
    for block in 0..OWN {
        assert_eq!(file.read(block).unwrap(), content(block, ROUNDS));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_seal_told_can_be_used_when_old_tops_were_merged_meanwhile() {
    let stored = Stored::start().await;
    let disk = stored.disk("long", &[stored.raw_layer("raw")]).await;
    let sealed = seal_often(&stored, &disk).await;
    eventually("the chain is merged", async || tops(&stored, &disk.name).await <= LONG).await;
    let image = |exported| CreateImage {
        name: name(if exported { "mapped" } else { "kept" }),
        layers: sealed.layers.clone(),
        owner: 0,
        exported,
    };
    // Also what was written since is nothing that was sealed then.
    let mut file = Direct::open(disk.path.as_ref().unwrap());
    file.write(SHARED, &content(SHARED, 99)).unwrap();
    let first = stored.client.create_image(&image(false)).await.unwrap();
    assert!(first.layers.len() < sealed.layers.len(), "{:?}", first.layers);
    assert_eq!(first.layers.last(), sealed.layers.last());
    let child = stored.disk("child", &sealed.layers).await;
    assert_eq!(child.layers, first.layers);

    // The same requests again are answered as before, by the next service as well, and what they were told is kept.
    stored.kill();
    stored.restart();
    assert_eq!(stored.client.create_image(&image(false)).await.unwrap().layers, first.layers);
    assert_eq!(stored.disk("child", &sealed.layers).await.number, child.number);
    let mapped = stored.client.create_image(&image(true)).await.unwrap();
    assert_eq!(mapped.layers, first.layers);
    let mut buffer = [0; BLOCK_BYTES as usize];
    for block in [OWN, SEALS * OWN, SHARED] {
        File::open(mapped.path.as_ref().unwrap())
            .unwrap()
            .read_exact_at(&mut buffer, block * BLOCK_BYTES)
            .unwrap();
        let round = if block == SHARED { SEALS } else { block / OWN };
        assert!(buffer == content(block, round), "block {block}");
        assert_eq!(Direct::open(child.path.as_ref().unwrap()).read(block).unwrap(), buffer);
    }
    // With its last top a seal is gone, and so is one of which something is missing.
    stored.client.delete_disk(&child.name).await.unwrap();
    for name in ["kept", "mapped"].map(name) {
        stored.client.delete_image(&name).await.unwrap();
    }
    let without = CreateImage { layers: sealed.layers[1..].to_vec(), ..image(false) };
    let refused = stored.client.create_image(&without).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NotFound(_)), "{refused}");
    seal_often(&stored, &disk).await;
    eventually("the top is merged", async || tops(&stored, &disk.name).await <= LONG).await;
    let refused = stored.client.create_image(&image(false)).await.unwrap_err();
    assert!(matches!(refused, ServiceError::NotFound(_)), "{refused}");
}

/// A file system of few bytes, unmounted when dropped.
struct SmallFileSystem(tempfile::TempDir);

impl SmallFileSystem {
    fn mount(bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let size = format!("size={bytes}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(directory.path());
        assert!(mount.status().unwrap().success());
        Self(directory)
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0.path()).status().unwrap();
        assert!(unmounted.success() || std::thread::panicking());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_waits_while_the_host_has_no_room_and_goes_on() {
    const ROOM: u64 = 16 << 20;
    const BLOCKS: u64 = 3072;
    let host = SmallFileSystem::mount(ROOM);
    let filler = host.0.path().join("filler");
    std::fs::write(&filler, vec![1; 10 << 20]).unwrap();
    let stored = Stored::start_on(host.0.path()).await;
    let path = stored.disk("d", &[]).await.path.unwrap();
    let other = stored.disk("other", &[]).await;
    assert_eq!(stored.client.disk(&name("d")).await.unwrap().stalled, None);

    let written = Arc::new(AtomicU64::new(0));
    let (count, guest_path) = (Arc::clone(&written), path.clone());
    let guest = std::thread::spawn(move || {
        let mut file = Direct::open(&guest_path);
        for block in 0..BLOCKS {
            file.write(block, &content(block, 1)).unwrap();
            count.fetch_add(1, Ordering::SeqCst);
        }
        file.flush().unwrap();
    });
    let stalled = async || stored.client.disk(&name("d")).await.unwrap().stalled;
    eventually("the disk is told to wait", async || stalled().await.is_some()).await;
    let stall = stalled().await.unwrap();
    assert_eq!(stall.name, name("d"));
    assert!(!stall.reason.is_empty());
    let status = stored.client.status().await.unwrap();
    assert_eq!(status.stalled.iter().map(|stall| stall.name.as_str()).collect::<Vec<_>>(), ["d"]);
    assert_eq!(stored.client.disk(&other.name).await.unwrap().stalled, None);
    // It waits: it neither fails nor goes on. What it has can be read.
    let done = written.load(Ordering::SeqCst);
    assert!(!guest.is_finished() && done < BLOCKS, "{done}");
    assert_eq!(Direct::open(&path).read(0).unwrap(), content(0, 1));
    // Also a killed service leaves it waiting.
    stored.kill();
    stored.restart();
    eventually("it waits for the next service, too", async || stalled().await.is_some()).await;
    assert!(!guest.is_finished());
    assert_eq!(written.load(Ordering::SeqCst), done);

    std::fs::remove_file(&filler).unwrap();
    eventually("the guest goes on", async || guest.is_finished()).await;
    guest.join().unwrap();
    assert_eq!(stalled().await, None);
    let mut file = Direct::open(&path);
    for block in (0..BLOCKS).step_by(61) {
        assert_eq!(file.read(block).unwrap(), content(block, 1));
    }
}

/// Fills a file system to its last page.
fn fill(path: &Path) {
    let mut file = File::options().create(true).append(true).open(path).unwrap();
    loop {
        match file.write_all(&[1; BLOCK_BYTES as usize]) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Reads a block on a thread of its own, which may have to wait.
fn reader(path: &Path, block: u64) -> std::thread::JoinHandle<Vec<u8>> {
    let path = path.to_owned();
    std::thread::spawn(move || {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        File::open(path).unwrap().read_exact_at(&mut bytes, block * BLOCK_BYTES).unwrap();
        bytes
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_opened_for_want_of_room_waits_for_it_and_fails_nothing() {
    let host = SmallFileSystem::mount(16 << 20);
    let stored = Stored::start_on(host.0.path()).await;
    let disk = stored.disk("parent", &[]).await;
    let path = disk.path.unwrap();
    let other = stored.disk("other", &[]).await.path.unwrap();
    Direct::open(&other).write(1, &content(1, 9)).unwrap();
    Direct::open(&path).write(1, &content(1, 1)).unwrap();
    let layers = stored.client.seal_disk(&disk.name, None).await.unwrap().layers;
    let child = stored.disk("child", &layers).await.path.unwrap();
    let image = CreateImage { name: name("image"), layers, owner: 0, exported: true };
    let image = stored.client.create_image(&image).await.unwrap().path.unwrap();
    Direct::open(&path).write(2, &content(2, 2)).unwrap();

    // Killed in the middle of a seal: whoever opens the disk makes its next top.
    let tops = stored.disks().join("parent/tops");
    let manifest = std::fs::read(tops.join("disk.pending.json")).unwrap();
    stored.client.seal_disk(&disk.name, None).await.unwrap();
    stored.kill();
    std::fs::write(tops.join("disk.pending.json"), manifest).unwrap();
    for file in ["top-3.data", "top-3.log"] {
        std::fs::remove_file(tops.join(file)).unwrap();
    }
    let filler = host.0.path().join("filler");
    fill(&filler);

    for _ in 0..2 {
        stored.restart();
        assert_eq!(stored.client.status().await.unwrap().failed, []);
        stored.kill();
    }
    let readers = [reader(&path, 1), reader(&path, 2), reader(&child, 1), reader(&image, 1)];
    stored.restart();
    assert_eq!(Direct::open(&other).read(1).unwrap(), content(1, 9));
    for waiting in ["parent", "child"] {
        let stalled = async || stored.client.disk(&name(waiting)).await.unwrap().stalled;
        eventually("the disk is told to wait", async || stalled().await.is_some()).await;
        assert_eq!(stored.client.disk(&name(waiting)).await.unwrap().state, DiskState::Ready);
    }
    assert!(readers.iter().all(|reader| !reader.is_finished()));

    std::fs::remove_file(&filler).unwrap();
    let expected = [content(1, 1), content(2, 2), content(1, 1), content(1, 1)];
    for (reader, expected) in readers.into_iter().zip(expected) {
        eventually("the reader goes on", async || reader.is_finished()).await;
        assert_eq!(reader.join().unwrap(), expected);
    }
    Direct::open(&path).write(3, &content(3, 3)).unwrap();
    stored.client.seal_disk(&disk.name, None).await.unwrap();
    stored.kill();
    stored.restart();
    assert_eq!(stored.client.disk(&disk.name).await.unwrap().tops.len(), 3);
    for (block, generation) in [(1, 1), (2, 2), (3, 3)] {
        assert_eq!(Direct::open(&path).read(block).unwrap(), content(block, generation));
    }
    assert_eq!(Direct::open(&child).read(1).unwrap(), content(1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_host_has_room_again_when_its_disks_and_images_are_removed() {
    let host = SmallFileSystem::mount(16 << 20);
    let stored = Stored::start_on(host.0.path()).await;
    let disk = stored.disk("disk", &[]).await;
    let mut guest = Direct::open(&disk.path.unwrap());
    for block in 0..256 {
        guest.write(block, &content(block, 1)).unwrap();
    }
    drop(guest);
    let layers = stored.client.seal_disk(&disk.name, None).await.unwrap().layers;
    let image = CreateImage { name: name("image"), layers, owner: 0, exported: false };
    stored.client.create_image(&image).await.unwrap();
    fill(&host.0.path().join("filler"));

    let free = || rustix::fs::statvfs(host.0.path()).unwrap().f_bfree;
    let before = free();
    stored.client.delete_disk(&disk.name).await.unwrap();
    stored.client.delete_image(&image.name).await.unwrap();
    assert!(free() >= before + 256, "{before} blocks, then {}", free());
    // What was written in place is read by the next.
    stored.kill();
    stored.restart();
    let status = stored.client.status().await.unwrap();
    assert_eq!(status.failed, []);
    assert!(stored.client.disks().await.unwrap().disks.is_empty());
}
