//! Disks and images of a running service, through its control interface and the files it exports.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_storage::BLOCK_BYTES;
use aenv_storage::block_service::{
    CollectGarbage, CreateDisk, CreateImage, DiskState, LayerRef, Name, ReleaseLayer, ServiceError,
};
use daemon::{DISK_BYTES, Direct, Stored, content, name, request, stored_bytes};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A block that the layers of these tests do not have.
const HOLE: u64 = DISK_BYTES / BLOCK_BYTES - 1;

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_shows_its_layer_and_keeps_what_is_written() {
    let stored = Stored::start().await;
    for (disk, layer) in
        [("over-raw", stored.raw_layer("raw")), ("over-lsmt", stored.committed_layer("layer.lsmt"))]
    {
        let mut request = request(disk, &[layer]);
        request.owner = 4242;
        let view = stored.client.create_disk(&request).await.unwrap();
        assert_eq!((view.state, view.size, view.stored_bytes), (DiskState::Ready, DISK_BYTES, 0));
        let path = view.path.unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.len(), metadata.uid(), metadata.mode() & 0o777), (DISK_BYTES, 4242, 0o600));
        let mut file = Direct::open(&path);
        for block in [0, 1, 77, HOLE / 2] {
            assert_eq!(file.read(block).unwrap(), content(block, 0));
        }
        assert_eq!(file.read(HOLE).unwrap(), [0; BLOCK_BYTES as usize]);
        for block in [1, HOLE] {
            file.write(block, &content(block, 1)).unwrap();
        }
        file.flush().unwrap();
        assert_eq!(file.read(1).unwrap(), content(1, 1));
        assert_eq!(file.read(HOLE).unwrap(), content(HOLE, 1));
        assert_eq!(file.read(2).unwrap(), content(2, 0));
        stored.client.flush_disk(&name(disk)).await.unwrap();
        assert_eq!(stored.client.disk(&name(disk)).await.unwrap().stored_bytes, 2 * BLOCK_BYTES);
    }
    let status = stored.client.status().await.unwrap();
    assert_eq!((status.pid, status.disks, status.open_layers), (stored.pid(), 2, 2));
    assert_eq!(status.disks_by.way, "FUSE");
    assert_eq!((status.failed, status.stalled), (Vec::new(), Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn children_outlive_their_parent_and_the_last_one_frees_its_tops() {
    let stored = Stored::start().await;
    let empty = stored_bytes(&stored.disks());
    let base = stored.raw_layer("raw");
    let parent = stored.disk("parent", std::slice::from_ref(&base)).await;
    let mut file = Direct::open(parent.path.as_ref().unwrap());
    (0..256).for_each(|block| file.write(block, &content(block, 1)).unwrap());
    let first = stored.client.seal_disk(&name("parent"), parent.writable_top.clone()).await.unwrap();
    assert_eq!(Some(&first.sealed), parent.writable_top.as_ref());
    assert_eq!(stored.client.seal_disk(&name("parent"), parent.writable_top).await.unwrap(), first);
    file.write(0, &content(0, 2)).unwrap();
    let second = stored.client.seal_disk(&name("parent"), None).await.unwrap();
    assert_eq!(second.layers.len(), 3);
    stored.client.make_disk_durable(&name("parent")).await.unwrap();
    file.write(0, &content(0, 3)).unwrap();

    let (a, b) = (stored.disk("child-a", &first.layers).await, stored.disk("child-b", &second.layers).await);
    drop(file);
    stored.client.delete_disk(&name("parent")).await.unwrap();
    stored.client.delete_disk(&name("parent")).await.unwrap();
    let kept = stored.client.disk(&name("parent")).await.unwrap();
    assert_eq!((kept.state, kept.tops.len(), kept.path), (DiskState::Kept, 2, None));
    for (child, generation) in [(&a, 1), (&b, 2)] {
        let mut file = Direct::open(child.path.as_ref().unwrap());
        assert_eq!(file.read(0).unwrap(), content(0, generation));
        assert_eq!(file.read(1).unwrap(), content(1, 1));
        assert_eq!(file.read(300).unwrap(), content(300, 0));
        file.write(1, &content(1, 9)).unwrap();
    }
    let refused = stored.client.create_disk(&request("parent", &[])).await.unwrap_err();
    assert!(matches!(refused, ServiceError::Conflict(_)), "{refused}");
    stored.client.delete_disk(&name("child-b")).await.unwrap();
    assert_eq!(stored.client.disk(&name("parent")).await.unwrap().tops.len(), 1);
    let mut file = Direct::open(a.path.as_ref().unwrap());
    assert_eq!(file.read(0).unwrap(), content(0, 1));
    drop(file);
    stored.client.delete_disk(&name("child-a")).await.unwrap();
    let gone = stored.client.disk(&name("parent")).await.unwrap_err();
    assert!(matches!(gone, ServiceError::NotFound(_)), "{gone}");
    assert_eq!(stored_bytes(&stored.disks()), empty);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_disks_of_one_layer_store_their_own_writes_alone() {
    let stored = Stored::start().await;
    let base = stored.committed_layer("layer.lsmt");
    let empty = stored_bytes(&stored.disks());
    let mut disks = Vec::new();
    for number in 0..20 {
        let view = stored.disk(&format!("disk-{number}"), std::slice::from_ref(&base)).await;
        let mut file = Direct::open(view.path.as_ref().unwrap());
        for block in 0..64 {
            file.write(block * 50, &content(block, number)).unwrap();
        }
        file.flush().unwrap();
        disks.push(view);
    }
    for (number, view) in (0..).zip(&disks) {
        let mut file = Direct::open(view.path.as_ref().unwrap());
        assert_eq!(file.read(50).unwrap(), content(1, number));
        assert_eq!(file.read(51).unwrap(), content(51, 0));
    }
    let written = 20 * 64 * BLOCK_BYTES;
    let used = stored_bytes(&stored.disks()) - empty;
    // Logs, records and directories: less than 100 KiB for each disk.
    assert!((written..written + 20 * (100 << 10)).contains(&used), "{used} bytes are used for {written}");
    for view in &disks {
        stored.client.delete_disk(&view.name).await.unwrap();
    }
    assert_eq!(stored.client.disks().await.unwrap().disks, []);
    assert_eq!(stored_bytes(&stored.disks()), empty);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_stores_no_more_than_its_quota() {
    let stored = Stored::start().await;
    let quota = Some(16 * BLOCK_BYTES);
    let view = stored.client.create_disk(&CreateDisk { quota, ..request("small", &[]) }).await.unwrap();
    let mut file = Direct::open(view.path.as_ref().unwrap());
    (0..16).for_each(|block| file.write(block, &content(block, 0)).unwrap());
    let error = file.write(16, &content(16, 0)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
    file.write(3, &content(3, 1)).unwrap();
    assert_eq!(file.read(3).unwrap(), content(3, 1));
    assert_eq!(stored.client.disk(&view.name).await.unwrap().stored_bytes, 16 * BLOCK_BYTES);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_a_file_of_its_layers_and_a_snapshot_keeps_them() {
    let stored = Stored::start().await;
    let base = stored.raw_layer("raw");
    let disk = stored.disk("source", &[base]).await;
    Direct::open(disk.path.as_ref().unwrap()).write(5, &content(5, 1)).unwrap();
    let sealed = stored.client.seal_disk(&disk.name, None).await.unwrap();
    let image = |exported| CreateImage {
        name: name(if exported { "memory" } else { "snapshot" }),
        layers: sealed.layers.clone(),
        owner: 7,
        exported,
    };
    let exported = stored.client.create_image(&image(true)).await.unwrap();
    assert_eq!(stored.client.create_image(&image(true)).await.unwrap(), exported);
    let snapshot = stored.client.create_image(&image(false)).await.unwrap();
    assert_eq!((snapshot.path, snapshot.size), (None, DISK_BYTES));
    stored.client.delete_disk(&disk.name).await.unwrap();
    let file = File::open(exported.path.unwrap()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), DISK_BYTES);
    let mut block = [0; BLOCK_BYTES as usize];
    for (number, generation) in [(4, 0), (5, 1)] {
        file.read_exact_at(&mut block, number * BLOCK_BYTES).unwrap();
        assert_eq!(block, content(number, generation));
    }
    drop(file);
    stored.client.delete_image(&name("memory")).await.unwrap();
    // The snapshot alone keeps the top now.
    let child = stored.disk("child", &sealed.layers).await;
    let mut file = Direct::open(child.path.as_ref().unwrap());
    assert_eq!(file.read(5).unwrap(), content(5, 1));
    drop(file);
    stored.client.delete_disk(&child.name).await.unwrap();
    assert_eq!(stored.client.disk(&disk.name).await.unwrap().state, DiskState::Kept);
    stored.client.delete_image(&name("snapshot")).await.unwrap();
    assert!(stored.client.disk(&disk.name).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_come_twice_and_a_contradiction_is_refused() {
    let stored = Stored::start().await;
    let base = stored.raw_layer("raw");
    let first = stored.disk("d", std::slice::from_ref(&base)).await;
    assert_eq!(stored.disk("d", &[base]).await, first);
    let other = stored.client.create_disk(&request("d", &[])).await.unwrap_err();
    assert!(matches!(other, ServiceError::Conflict(_)), "{other}");
    stored.client.delete_disk(&name("never-there")).await.unwrap();
    stored.client.delete_image(&name("never-there")).await.unwrap();
    let none = stored.client.seal_disk(&name("d"), Some(name("no-such-top"))).await.unwrap_err();
    assert!(matches!(none, ServiceError::NotFound(_)), "{none}");
    // A number is not given again, whatever was deleted.
    stored.client.delete_disk(&name("d")).await.unwrap();
    assert!(stored.disk("e", &[]).await.number > first.number);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_and_leave_nothing() {
    let stored = Stored::start().await;
    let outside = stored.directory.path().join("outside");
    std::fs::write(&outside, vec![1; 8192]).unwrap();
    let garbage = stored.layers().join("garbage");
    std::fs::write(&garbage, vec![1; 8192]).unwrap();
    let raw = stored.raw_layer("raw");
    let before = stored_bytes(&stored.disks());
    let file = |path: &std::path::Path| LayerRef::File { file: path.to_owned() };
    let top = |disk: &str| LayerRef::Top { disk: name(disk), top: name("t") };
    let invalid = |error: &ServiceError| matches!(error, ServiceError::Invalid(_));
    let missing = |error: &ServiceError| matches!(error, ServiceError::NotFound(_));
    for (layers, expected) in [
        (vec![file(&outside)], invalid as fn(&ServiceError) -> bool),
        (vec![file(&garbage)], invalid),
        (vec![raw.clone(), file(&garbage)], invalid),
        (vec![file(&stored.layers().join("none"))], missing),
        (vec![raw.clone(), top("none")], missing),
    ] {
        let error = stored.client.create_disk(&request("bad", &layers)).await.unwrap_err();
        assert!(expected(&error), "{layers:?}: {error}");
    }
    for size in [0, 4095, BLOCK_BYTES] {
        let error = stored
            .client
            .create_disk(&CreateDisk { size, ..request("bad", std::slice::from_ref(&raw)) })
            .await;
        assert!(matches!(error, Err(ServiceError::Invalid(_))), "{size}: {error:?}");
    }
    let huge = CreateDisk { size: u64::MAX / BLOCK_BYTES * BLOCK_BYTES, ..request("bad", &[]) };
    assert!(stored.client.create_disk(&huge).await.is_err());
    assert_eq!(stored.client.disks().await.unwrap().disks, []);
    assert_eq!(stored_bytes(&stored.disks()), before);
    assert!(outside.exists());
    // The name is free again.
    stored.disk("bad", &[raw]).await;
}

/// What is answered to a request by hand: its status and its body.
fn answer(stored: &Stored, method: &str, path: &str, body: &[u8]) -> (String, serde_json::Value) {
    let mut socket = UnixStream::connect(stored.run().join("stored.sock")).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: s\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    // It may be refused before all of it was read; then the connection breaks after the answer.
    let _refused_early = socket.write_all(body);
    let mut bytes = Vec::new();
    let _broken = socket.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().to_owned();
    (status, serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {text}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_the_form_of_an_error() {
    let stored = Stored::start().await;
    let large = vec![b' '; (1 << 20) + 1];
    for (method, path, body, status, code) in [
        ("POST", "/v1/disks", &large[..], "413", "invalid"),
        ("POST", "/v1/images", &large, "413", "invalid"),
        ("POST", "/v1/disks/d/seal", &large, "413", "invalid"),
        ("POST", "/v1/gc", &large, "413", "invalid"),
        ("POST", "/v1/disks", b"{", "400", "invalid"),
        ("GET", "/v1/disks/%ff", b"", "400", "invalid"),
        ("GET", "/v1/disks/D", b"", "400", "invalid"),
        ("GET", "/v1/disks/none", b"", "404", "not_found"),
        ("GET", "/none", b"", "404", "not_found"),
        ("PUT", "/v1/disks", b"", "405", "invalid"),
    ] {
        let (found, error) = answer(&stored, method, path, body);
        assert_eq!((found.as_str(), &error["code"]), (status, &code.into()), "{method} {path}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_fails_half_way_leaves_others_what_they_are_made_of() {
    let stored = Stored::start().await;
    let parent = stored.disk("parent", &[]).await;
    Direct::open(&parent.path.unwrap()).write(1, &content(1, 1)).unwrap();
    let layers = stored.client.seal_disk(&parent.name, None).await.unwrap().layers;
    stored.disk("child", &layers).await;
    // Not a file, so it cannot be removed as one.
    let foreign = stored.disks().join("parent/tops/foreign");
    std::fs::create_dir(&foreign).unwrap();
    stored.client.delete_disk(&parent.name).await.unwrap_err();
    let made = stored.disk("made-afterwards", &layers).await;
    assert_eq!(Direct::open(&made.path.unwrap()).read(1).unwrap(), content(1, 1));
    let kept = stored.client.disk(&parent.name).await.unwrap();
    assert_eq!((kept.state, kept.tops.len()), (DiskState::Kept, 1));
    for again in [false, true] {
        if again {
            std::fs::remove_dir(&foreign).unwrap();
        }
        stored.kill();
        stored.restart();
        assert_eq!(stored.client.disk(&parent.name).await.unwrap().state, DiskState::Kept);
    }
    for disk in ["child", "made-afterwards"] {
        stored.client.delete_disk(&name(disk)).await.unwrap();
    }
    assert_eq!(stored.client.disks().await.unwrap().disks, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_is_what_nothing_needs() {
    let stored = Stored::start().await;
    let (used, kept) = (stored.raw_layer("used"), stored.layers().join("kept"));
    let (unused, writing) = (stored.layers().join("unused"), stored.layers().join(".layer-x"));
    for path in [&kept, &unused, &writing] {
        std::fs::write(path, vec![1; 64 << 10]).unwrap();
    }
    stored.disk("d", std::slice::from_ref(&used)).await;
    let orphan = stored.disks().join("orphan");
    std::fs::create_dir(&orphan).unwrap();
    let outside = CollectGarbage { keep_layers: vec!["/etc/passwd".into()] };
    assert!(matches!(stored.client.collect_garbage(&outside).await, Err(ServiceError::Invalid(_))));
    assert!(unused.exists());
    let collected =
        stored.client.collect_garbage(&CollectGarbage { keep_layers: vec![kept.clone()] }).await.unwrap();
    assert_eq!((collected.layers, collected.directories), (1, 1));
    assert!(collected.bytes >= 64 << 10);
    assert!(kept.exists() && writing.exists() && !unused.exists() && !orphan.exists());
    stored.client.delete_disk(&name("d")).await.unwrap();
    let collected =
        stored.client.collect_garbage(&CollectGarbage { keep_layers: vec![kept.clone()] }).await.unwrap();
    assert_eq!((collected.layers, collected.directories), (1, 0));
    let LayerRef::Raw { raw } = used else { unreachable!() };
    assert!(!raw.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_goes_with_the_last_that_is_made_of_it() {
    let stored = Stored::start().await;
    let layer = stored.raw_layer("shared");
    let LayerRef::Raw { raw: file } = layer.clone() else { unreachable!() };
    let release = ReleaseLayer { file: file.clone() };
    stored.disk("d", std::slice::from_ref(&layer)).await;
    let image = |name: Name| CreateImage { name, layers: vec![layer.clone()], owner: 0, exported: false };
    stored.client.create_image(&image(name("i"))).await.unwrap();
    for user in ["disk", "image"] {
        assert!(!stored.client.release_layer(&release).await.unwrap().removed, "{user}");
        assert!(file.exists());
        match user {
            "disk" => stored.client.delete_disk(&name("d")).await.unwrap(),
            _ => stored.client.delete_image(&name("i")).await.unwrap(),
        }
    }
    // Asked again, as after a lost answer.
    for _ in 0..2 {
        assert!(stored.client.release_layer(&release).await.unwrap().removed);
        assert!(!file.exists());
    }
    let elsewhere = stored.disks().join("file");
    std::fs::write(&elsewhere, "x").unwrap();
    for file in [elsewhere.clone(), "/etc/passwd".into(), "relative".into()] {
        let refused = stored.client.release_layer(&ReleaseLayer { file }).await;
        assert!(matches!(refused, Err(ServiceError::Invalid(_))), "{refused:?}");
    }
    assert!(elsewhere.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_that_goes_by_itself_meanwhile_is_no_error() {
    let stored = Stored::start().await;
    let (layers, ended) = (stored.layers(), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&ended);
    let writer = std::thread::spawn(move || {
        for round in 0_u64.. {
            let paths = (0..64).map(|number| layers.join(format!("layer-{}", round * 64 + number)));
            for path in paths.clone() {
                std::fs::write(path, "x").unwrap();
            }
            for path in paths {
                // A collection may have been faster.
                drop(std::fs::remove_file(path));
            }
            if told.load(Ordering::SeqCst) {
                return;
            }
        }
    });
    for _ in 0..200 {
        stored.client.collect_garbage(&CollectGarbage::default()).await.unwrap();
    }
    ended.store(true, Ordering::SeqCst);
    writer.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_collection_had_set_aside_goes_at_the_next_start() {
    let stored = Stored::start().await;
    stored.kill();
    let (layer, disk) = (stored.layers().join(".removed-0"), stored.disks().join(".removed-7"));
    std::fs::write(&layer, "x").unwrap();
    std::fs::create_dir_all(disk.join("tops")).unwrap();
    stored.restart();
    stored.client.status().await.unwrap();
    assert!(!layer.exists() && !disk.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_directory_has_one_service_and_its_socket_is_for_root() {
    let stored = Stored::start().await;
    let second = stored.command("serve").args(["--export", "fuse"]).output().unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && said.contains("another aenv-stored"), "{said}");
    let purge = stored.command("purge").output().unwrap();
    assert!(!purge.status.success());
    let mode = std::fs::metadata(stored.run().join("stored.sock")).unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);
    // The first one is none the worse.
    stored.disk("d", &[]).await;
}
