//! The service is killed and started again: guests wait, and nothing is lost or left.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::BLOCK_BYTES;
use aenv_storage::block_service::{CollectGarbage, CreateImage, DiskState, DiskView, LayerRef, ServiceError};
use daemon::{Direct, PATIENCE, Stored, content, name, request, stored_bytes};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Blocks that a guest uses.
const BLOCKS: u64 = 512;

/// Stands for a guest: writes, reads back and flushes, and never sees an error.
struct Guest {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<Vec<u64>>,
}

impl Guest {
    fn start(path: PathBuf, seed: u64) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, count) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            let (mut random, mut file) = (StdRng::seed_from_u64(seed), Direct::open(&path));
            // Generation 0 is what the layer has.
            let mut generations = vec![0; BLOCKS as usize];
            for generation in 1.. {
                let (written, read) = (random.random_range(0..BLOCKS), random.random_range(0..BLOCKS));
                file.write(written, &content(written, generation)).unwrap();
                generations[written as usize] = generation;
                assert_eq!(
                    file.read(read).unwrap(),
                    content(read, generations[read as usize]),
                    "block {read}"
                );
                if generation % 16 == 0 {
                    file.flush().unwrap();
                }
                count.fetch_add(1, Ordering::SeqCst);
                if told.load(Ordering::SeqCst) {
                    break;
                }
            }
            generations
        });
        Self { stop, done, thread }
    }

    /// Waits until it has done `more` rounds from now on.
    fn goes_on(&self, more: u64) {
        let (goal, deadline) = (self.done.load(Ordering::SeqCst) + more, Instant::now() + PATIENCE);
        while self.done.load(Ordering::SeqCst) < goal {
            assert!(!self.thread.is_finished(), "the guest saw an error");
            assert!(Instant::now() < deadline, "the guest waits for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Which generation each block has.
    fn end(self) -> Vec<u64> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

fn verify(path: &Path, generations: &[u64]) {
    let mut file = Direct::open(path);
    for (block, generation) in (0..).zip(generations) {
        assert_eq!(file.read(block).unwrap(), content(block, *generation), "block {block}");
    }
}

async fn path_of(stored: &Stored, disk: &str) -> PathBuf {
    stored.client.disk(&name(disk)).await.unwrap().path.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_wait_while_the_service_is_killed_and_started_again() {
    let stored = Stored::start().await;
    let base = stored.committed_layer("layer.lsmt");
    let disks = ["one", "two"];
    let mut guests = Vec::new();
    for (seed, disk) in (1..).zip(disks) {
        let path = stored.disk(disk, std::slice::from_ref(&base)).await.path.unwrap();
        guests.push(Guest::start(path, seed));
    }
    for round in 0..6 {
        guests.iter().for_each(|guest| guest.goes_on(20));
        // The last way is the orderly one.
        if round == 5 {
            stored.terminate();
        } else {
            stored.kill();
        }
        std::thread::sleep(Duration::from_millis(20 * round));
        stored.restart();
        guests.iter().for_each(|guest| guest.goes_on(20));
        if round % 2 == 0 {
            stored.client.seal_disk(&name("one"), None).await.unwrap();
        }
    }
    let ended: Vec<Vec<u64>> = guests.into_iter().map(Guest::end).collect();
    for _ in 0..2 {
        for (disk, generations) in disks.into_iter().zip(&ended) {
            verify(&path_of(&stored, disk).await, generations);
        }
        stored.kill();
        stored.restart();
    }
    let view = stored.client.disk(&name("one")).await.unwrap();
    assert_eq!((view.state, view.tops.len()), (DiskState::Ready, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_the_service_ends_whatever_its_guests_do() {
    let stored = Stored::start().await;
    let base = stored.committed_layer("layer.lsmt");
    let mut guests = Vec::new();
    for (seed, disk) in (1..).zip(["one", "two", "three"]) {
        let path = stored.disk(disk, std::slice::from_ref(&base)).await.path.unwrap();
        guests.push(Guest::start(path, seed));
    }
    for round in 0..50 {
        guests.iter().for_each(|guest| guest.goes_on(5));
        // With and without somebody who is connected.
        if round % 2 == 0 {
            stored.client.status().await.unwrap();
        }
        stored.terminate();
        stored.restart();
    }
    guests.into_iter().for_each(|guest| drop(guest.end()));
}

/// Whether a thread of a process waits for storage.
fn waits_for_storage(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut states = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")));
    // Behind the name, which stands in parentheses.
    states.any(|state| state.is_ok_and(|state| state.contains(") D ")))
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_the_service_does_not_wait_for_a_read_that_takes_for_ever() {
    // A layer on storage that stops to answer: the export of another service, which is killed.
    let storage = Stored::start_as("storage", "fuse").await;
    let layers = vec![storage.raw_layer("raw")];
    let create = CreateImage { name: name("layer"), layers, owner: 0, exported: true };
    let layer = storage.client.create_image(&create).await.unwrap().path.unwrap();
    let data = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(data.path().join("storage/layers")).unwrap();
    let raw = data.path().join("storage/layers/raw");
    let _mount = MountPoint::bind(&layer, &raw);
    let stored = Stored::start_on(data.path()).await;
    let path = stored.disk("d", &[LayerRef::Raw { raw }]).await.path.unwrap();

    // One that nobody is connected to.
    stored.kill();
    stored.restart();
    let deadline = Instant::now() + PATIENCE;
    while stored.log().matches("serving").count() < 2 {
        assert!(Instant::now() < deadline, "it does not serve");
        std::thread::sleep(Duration::from_millis(5));
    }
    storage.kill();
    let guest = std::thread::spawn(move || Direct::open(&path).read(4000).unwrap().to_vec());
    while !waits_for_storage(stored.pid()) {
        assert!(Instant::now() < deadline, "nothing waits");
        std::thread::sleep(Duration::from_millis(5));
    }
    stored.terminate();
    assert!(!stored.log().contains("left behind"), "it has waited: {}", stored.log());
    storage.restart();
    storage.client.status().await.unwrap();
    stored.restart();
    assert_eq!(guest.join().unwrap(), content(4000, 0));
}

/// One life of everything there is; each step is asked again until it is answered.
async fn life(stored: &Stored, number: u64) -> Result<(), ServiceError> {
    let (client, disk) = (&stored.client, name(&format!("disk-{number}")));
    let (child, image) = (name(&format!("child-{number}")), name(&format!("image-{number}")));
    let base = LayerRef::Raw { raw: stored.layers().join("raw") };
    let view: DiskView = client.create_disk(&request(disk.as_str(), &[base])).await?;
    let path = view.path.unwrap();
    let written = tokio::task::spawn_blocking(move || Direct::open(&path).write(3, &content(3, number)));
    written.await.unwrap().unwrap();
    let sealed = client.seal_disk(&disk, None).await?;
    let create = CreateImage { name: image.clone(), layers: sealed.layers.clone(), owner: 0, exported: true };
    client.create_image(&create).await?;
    let view = client.create_disk(&request(child.as_str(), &sealed.layers)).await?;
    client.delete_disk(&disk).await?;
    client.delete_image(&image).await?;
    let path = view.path.unwrap();
    let read = tokio::task::spawn_blocking(move || Direct::open(&path).read(3).map(<[u8]>::to_vec));
    assert_eq!(read.await.unwrap().unwrap(), content(3, number));
    client.delete_disk(&child).await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_time_while_disks_come_and_go_it_leaves_nothing() {
    let stored = Stored::start().await;
    stored.raw_layer("raw");
    let empty = stored_bytes(&stored.disks());
    let mut random = StdRng::seed_from_u64(7);
    let stored = Arc::new(stored);
    for round in 0..60 {
        let begin = |number| {
            let stored = Arc::clone(&stored);
            tokio::spawn(async move { life(&stored, number).await })
        };
        let lives = [begin(2 * round), begin(2 * round + 1)];
        tokio::time::sleep(Duration::from_micros(random.random_range(0..40_000))).await;
        stored.kill();
        stored.restart();
        for life in lives {
            life.await.unwrap().unwrap();
        }
    }
    assert_eq!(stored.client.disks().await.unwrap().disks, []);
    assert_eq!(stored.client.images().await.unwrap().images, []);
    assert_eq!(std::fs::read_dir(stored.run().join("exports")).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(stored.data().join("storage/images")).unwrap().count(), 0);
    assert_eq!(stored_bytes(&stored.disks()), empty);
}

/// A directory that something is mounted on, so that it cannot be removed; unmounted when dropped.
struct MountPoint(PathBuf);

impl MountPoint {
    fn new(path: &Path) -> Self {
        Self::mount(&["-t", "tmpfs", "tmpfs"], path)
    }

    /// The same file at another place.
    fn bind(file: &Path, path: &Path) -> Self {
        File::create(path).unwrap();
        Self::mount(&["--bind", file.to_str().unwrap()], path)
    }

    fn mount(arguments: &[&str], path: &Path) -> Self {
        let mounted = Command::new("mount").args(arguments).arg(path).status().unwrap();
        assert!(mounted.success());
        Self(path.to_owned())
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).status().unwrap();
        assert!(unmounted.success() || std::thread::panicking());
    }
}

/// Rewrites a record as if the service had been killed at another stage.
fn set_stage(record: &Path, stage: &str) {
    let mut value: serde_json::Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    value["stage"] = stage.into();
    std::fs::write(record, value.to_string()).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_half_made_is_undone_and_what_was_half_removed_is_finished() {
    let stored = Stored::start().await;
    for disk in ["made-by-half", "removed-by-half", "whole"] {
        stored.disk(disk, &[]).await;
    }
    let sealed = stored.client.seal_disk(&name("whole"), None).await.unwrap();
    let image = |image: &str| CreateImage {
        name: name(image),
        layers: sealed.layers.clone(),
        owner: 0,
        exported: true,
    };
    for image_name in ["image-by-half", "image"] {
        stored.client.create_image(&image(image_name)).await.unwrap();
    }
    stored.kill();
    set_stage(&stored.disks().join("made-by-half/record.json"), "making");
    set_stage(&stored.disks().join("removed-by-half/record.json"), "deleting");
    set_stage(&stored.data().join("storage/images/image-by-half.json"), "making");
    std::fs::create_dir(stored.disks().join("begun")).unwrap();
    std::fs::write(stored.disks().join("whole/record.new"), "{").unwrap();
    stored.restart();
    let disks = stored.client.disks().await.unwrap().disks;
    assert_eq!(disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>(), ["whole"]);
    let images = stored.client.images().await.unwrap().images;
    assert_eq!(images.iter().map(|image| image.name.as_str()).collect::<Vec<_>>(), ["image"]);
    assert_eq!(std::fs::read_dir(stored.disks()).unwrap().count(), 1);
    let exported = std::fs::read_dir(stored.run().join("exports")).unwrap();
    assert_eq!(exported.count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_start_cannot_remove_keeps_nobody_from_being_served() {
    let stored = Stored::start().await;
    let path = stored.disk("d", &[]).await.path.unwrap();
    Direct::open(&path).write(1, &content(1, 1)).unwrap();
    stored.kill();
    let (orphan, temporary) = (stored.disks().join("orphan"), stored.data().join("storage/images/i.new"));
    for directory in [orphan.join("busy"), temporary.clone()] {
        std::fs::create_dir_all(&directory).unwrap();
    }
    let mount = MountPoint::new(&orphan.join("busy"));
    stored.restart();
    assert_eq!(path_of(&stored, "d").await, path);
    assert_eq!(Direct::open(&path).read(1).unwrap(), content(1, 1));
    assert!(orphan.exists());
    stored.kill();
    drop(mount);
    stored.restart();
    assert_eq!(stored.client.disks().await.unwrap().disks.len(), 1);
    assert!(!orphan.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_layer_fails_its_disks_alone() {
    let stored = Stored::start().await;
    let (good, bad) = (stored.committed_layer("good.lsmt"), stored.committed_layer("bad.lsmt"));
    stored.disk("good", &[good]).await;
    stored.disk("bad", std::slice::from_ref(&bad)).await;
    std::fs::create_dir(stored.disks().join("unreadable")).unwrap();
    stored.kill();
    let LayerRef::File { file } = bad else { unreachable!() };
    File::options().write(true).open(file).unwrap().set_len(10_000).unwrap();
    std::fs::write(stored.disks().join("unreadable/record.json"), "").unwrap();
    stored.restart();
    let failed = stored.client.status().await.unwrap().failed;
    assert_eq!(failed.iter().map(|(disk, _)| disk.as_str()).collect::<Vec<_>>(), ["bad", "unreadable"]);
    let view = stored.client.disk(&name("bad")).await.unwrap();
    assert_eq!(view.state, DiskState::Failed);
    let mut file = Direct::open(&view.path.unwrap());
    let error = file.read(0).unwrap_err();
    assert_eq!(rustix::io::Errno::from_io_error(&error), Some(rustix::io::Errno::IO));
    drop(file);
    let mut file = Direct::open(&path_of(&stored, "good").await);
    assert_eq!(file.read(7).unwrap(), content(7, 0));
    file.write(7, &content(7, 1)).unwrap();
    drop(file);
    let refused = stored.client.seal_disk(&name("bad"), Some(name("t"))).await.unwrap_err();
    assert!(matches!(refused, ServiceError::Unavailable { .. }), "{refused}");
    for disk in ["bad", "unreadable"] {
        stored.client.delete_disk(&name(disk)).await.unwrap();
    }
    assert_eq!(stored.client.status().await.unwrap().failed, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mount_whose_holder_was_killed_is_made_anew() {
    let stored = Stored::start().await;
    let path = stored.disk("d", &[]).await.path.unwrap();
    Direct::open(&path).write(1, &content(1, 1)).unwrap();
    let socket = stored.run().join("holder.sock").display().to_string();
    let holders = aenv_sys::process::find(|args| args.contains(&socket)).unwrap();
    assert_eq!(holders.len(), 1, "{holders:?}");
    stored.kill();
    let holder = rustix::process::Pid::from_raw(i32::try_from(holders[0].pid).unwrap()).unwrap();
    rustix::process::kill_process(holder, rustix::process::Signal::KILL).unwrap();
    stored.restart();
    assert_eq!(path_of(&stored, "d").await, path);
    let mut file = Direct::open(&path);
    assert_eq!(file.read(1).unwrap(), content(1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mapped_image_is_there_again_after_a_kill() {
    let stored = Stored::start().await;
    let layers = vec![stored.raw_layer("raw")];
    let create = CreateImage { name: name("memory"), layers, owner: 0, exported: true };
    let path = stored.client.create_image(&create).await.unwrap().path.unwrap();
    let file = File::open(&path).unwrap();
    let mut block = [0; BLOCK_BYTES as usize];
    file.read_exact_at(&mut block, 0).unwrap();
    stored.kill();
    stored.restart();
    // Not in the page cache yet.
    file.read_exact_at(&mut block, 4000 * BLOCK_BYTES).unwrap();
    assert_eq!(block, content(4000, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_unreadable_record_may_need_stays_until_it_is_deleted() {
    let stored = Stored::start().await;
    let base = stored.raw_layer("raw");
    let LayerRef::Raw { raw } = base.clone() else { unreachable!() };
    let image = |image: &str, layers: &[LayerRef]| CreateImage {
        name: name(image),
        layers: layers.to_vec(),
        owner: 0,
        exported: false,
    };
    for disk in ["before", "after"] {
        let path = stored.disk(disk, std::slice::from_ref(&base)).await.path.unwrap();
        Direct::open(&path).write(1, &content(1, 1)).unwrap();
        let sealed = stored.client.seal_disk(&name(disk), None).await.unwrap();
        stored.client.create_image(&image(disk, &sealed.layers)).await.unwrap();
    }
    stored.client.delete_disk(&name("before")).await.unwrap();
    stored.kill();
    let record = |image: &str| stored.data().join(format!("storage/images/{image}.json"));
    let whole = ["before", "after"].map(|image| std::fs::read(record(image)).unwrap());
    for image in ["before", "after"] {
        std::fs::write(record(image), "").unwrap();
    }
    stored.restart();
    // One was kept before its user became unreadable, the other one is deleted now.
    stored.client.delete_disk(&name("after")).await.unwrap();
    let refused = stored.client.collect_garbage(&CollectGarbage::default()).await.unwrap_err();
    assert!(matches!(&refused, ServiceError::Conflict(reason) if reason.contains("record")), "{refused}");
    stored.kill();
    stored.restart();
    for disk in ["before", "after"] {
        let kept = stored.client.disk(&name(disk)).await.unwrap();
        assert_eq!((kept.state, kept.tops.len()), (DiskState::Kept, 1), "{disk}");
    }
    assert!(raw.exists());

    // Mended, one can be used as if nothing had been; deleted, the other one frees what only it may have needed.
    stored.kill();
    std::fs::write(record("before"), &whole[0]).unwrap();
    stored.restart();
    stored.client.delete_image(&name("after")).await.unwrap();
    assert!(matches!(stored.client.disk(&name("after")).await, Err(ServiceError::NotFound(_))));
    let layers = stored.client.image(&name("before")).await.unwrap().layers;
    let path = stored.disk("child", &layers).await.path.unwrap();
    assert_eq!(Direct::open(&path).read(1).unwrap(), content(1, 1));
    stored.client.delete_disk(&name("child")).await.unwrap();
    stored.client.delete_image(&name("before")).await.unwrap();
    assert_eq!(stored.client.collect_garbage(&CollectGarbage::default()).await.unwrap().layers, 1);
    assert!(!raw.exists());
    assert_eq!(std::fs::read_dir(stored.disks()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_disk_that_others_are_made_of_is_not_deleted() {
    let stored = Stored::start().await;
    stored.disk("parent", &[]).await;
    let sealed = stored.client.seal_disk(&name("parent"), None).await.unwrap();
    stored.disk("child", &sealed.layers).await;
    stored.kill();
    std::fs::write(stored.disks().join("parent/record.json"), "{").unwrap();
    stored.restart();
    let refused = stored.client.delete_disk(&name("parent")).await.unwrap_err();
    assert!(matches!(refused, ServiceError::Conflict(_)), "{refused}");
    stored.client.delete_disk(&name("child")).await.unwrap();
    stored.client.delete_disk(&name("parent")).await.unwrap();
    assert_eq!(stored.client.disks().await.unwrap().disks, []);
}
