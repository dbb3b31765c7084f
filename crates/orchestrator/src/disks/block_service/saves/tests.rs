//! What is asked of the block service for saves.

use super::super::tests::service;
use super::*;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const BYTES: u64 = 8 * 4096;

fn save(number: u64) -> SaveName {
    SaveName { vm: "ivm".parse().unwrap(), number }
}

fn image(name: &str, layers: &str) -> String {
    format!(
        r#"{{"name":"{name}","state":"ready","path":"/run/exports/image-{name}","number":1,"size":{BYTES},"owner":0,"layers":{layers}}}"#
    )
}

const DISK: &str = r#"{"name":"ivm","state":"ready","path":"/dev/null","number":1,"size":4096,"quota":4096,"stored_bytes":0,"owner":0,"layers":[],"tops":[],"writable_top":"t2"}"#;
const SEALED: &str = r#"{"sealed":"t2","layers":[{"raw":"/data/raw"},{"disk":"ivm","top":"t2"}],"writable_top":"t3","stored_bytes":8192}"#;

fn sealed() -> Base {
    let top = LayerRef::Top { disk: "ivm".parse().unwrap(), top: "t2".parse().unwrap() };
    Base::Layers(vec![LayerRef::Raw { raw: "/data/raw".into() }, top])
}

/// A flat, sparse file of memory.
fn memory(path: &Path, pages: &[(u64, u8)]) {
    let file = File::create(path).unwrap();
    file.set_len(BYTES).unwrap();
    for (page, byte) in pages {
        file.write_all_at(&[*byte; 4096], page * 4096).unwrap();
    }
}

#[test]
fn images_of_saves_are_told_from_others() {
    let vm = |text: &str| vm_of(&text.parse().unwrap()).map(str::to_owned);
    for kind in [super::DISK, MEMORY, MAPPED] {
        assert_eq!(vm(&format!("{kind}ivm-7")).as_deref(), Some("ivm"));
    }
    for other in ["c-t1-7", "memory", "s-ivm", "s-ivm-x", "m-"] {
        assert_eq!(vm(other), None, "{other}");
    }
    // The longest there are.
    let long = SaveName { vm: format!("i{}", "0".repeat(20)).parse().unwrap(), number: u64::MAX };
    assert!(image_name(MEMORY, &long).is_ok());
}

#[tokio::test]
async fn a_disk_is_sealed_held_and_made_what_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let (disks, asked) = service(directory.path(), |what, _| match what {
        "GET /v1/disks/ivm" | "POST /v1/disks/ivm/rewind" => DISK.to_owned(),
        "POST /v1/disks/ivm/seal" => SEALED.to_owned(),
        "POST /v1/images" => image("s-ivm-3", "[]"),
        _ => "{}".to_owned(),
    });
    let SealedDisk { base, stored_bytes } = disks.seal(&save(3)).await.unwrap();
    assert_eq!((&base, stored_bytes), (&sealed(), Some(8192)));
    disks.hold(&save(3), &base).await.unwrap();
    let path = disks.make_anew(&save(3).vm, &base, 4096).await.unwrap();
    assert_eq!(path, Path::new("/dev/null"));
    let asked = asked.lock().unwrap();
    assert_eq!(
        asked.iter().map(|asked| asked.split(" null").next().unwrap()).collect::<Vec<_>>(),
        [
            "GET /v1/disks/ivm ",
            r#"POST /v1/disks/ivm/seal {"top":"t2"}"#,
            "POST /v1/disks/ivm/flush",
            r#"POST /v1/images {"name":"s-ivm-3","layers":[{"disk":"ivm","top":"t2"}],"owner":0,"exported":false}"#,
            r#"POST /v1/disks/ivm/rewind {"top":"t2"}"#,
        ]
    );
}

#[tokio::test]
async fn a_disk_of_another_base_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let (disks, asked) = service(directory.path(), |what, _| match what {
        "POST /v1/disks" => DISK.to_owned(),
        _ => "{}".to_owned(),
    });
    let top = LayerRef::Top { disk: "other".parse().unwrap(), top: "t".parse().unwrap() };
    disks.make_anew(&save(1).vm, &Base::Layers(vec![top]), 4096).await.unwrap();
    let asked = asked.lock().unwrap();
    assert_eq!(asked[0], "DELETE /v1/disks/ivm ");
    assert!(asked[1].starts_with(r#"POST /v1/disks {"name":"ivm","layers":[{"disk":"other","top":"t"}]"#));
}

#[tokio::test]
async fn memory_is_a_layer_that_an_image_keeps_and_is_stored_once() {
    let directory = tempfile::tempdir().unwrap();
    let layers = directory.path().join("layers");
    std::fs::create_dir(&layers).unwrap();
    let (flat, changes) = (directory.path().join("flat"), directory.path().join("changes"));
    memory(&flat, &[(0, 1), (1, 2)]);
    memory(&changes, &[(1, 2), (2, 3)]);
    let layer = layers.join("memory-ivm-1");
    let record = format!(r#"[{{"raw":"{}"}},{{"file":"{}"}}]"#, flat.display(), layer.display());
    let kept = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (known, answered) = (std::sync::Arc::clone(&kept), record.clone());
    let (disks, asked) = service(directory.path(), move |what, body| match what {
        "GET /v1/images/k-ivm-1" if known.load(std::sync::atomic::Ordering::SeqCst) => {
            image("k-ivm-1", &answered)
        }
        "GET /v1/images/k-ivm-1" => "404".to_owned(),
        "POST /v1/images" if body.contains("k-ivm-1") => {
            known.store(true, std::sync::atomic::Ordering::SeqCst);
            image("k-ivm-1", &answered)
        }
        "POST /v1/images" => image("m-ivm-1", &answered),
        _ => "{}".to_owned(),
    });
    let start = MemoryChain { image: Some(flat.clone()), layers: Vec::new() };
    let base = CaptureBase::Start;
    let parts = MemoryParts { below: start.clone(), start: start.clone(), changes, base, bytes: BYTES };
    let stored = disks.store_memory(&save(1), &parts).await.unwrap();
    assert_eq!(stored.chain, MemoryChain { image: Some(flat.clone()), layers: vec![layer.clone()] });
    assert_eq!(stored.stored_bytes, std::fs::metadata(&layer).unwrap().len());
    assert!(kept.load(std::sync::atomic::Ordering::SeqCst));
    // Asked again, nothing is written: the changes may be gone.
    let gone = MemoryParts { changes: "/none".into(), ..parts };
    assert_eq!(disks.store_memory(&save(1), &gone).await.unwrap(), stored);

    // A flat memory is its file; layers need an image.
    assert_eq!(disks.memory_image(&save(1), &start, BYTES).await.unwrap(), flat);
    let path = disks.memory_image(&save(1), &stored.chain, BYTES).await.unwrap();
    assert_eq!(path, Path::new("/run/exports/image-m-ivm-1"));
    assert!(disks.memory_image(&save(1), &stored.chain, 2 * BYTES).await.is_err());

    asked.lock().unwrap().clear();
    disks.forget_save(&save(1)).await.unwrap();
    let expected = ["m", "k", "s"].map(|kind| format!("DELETE /v1/images/{kind}-ivm-1 "));
    assert_eq!(*asked.lock().unwrap(), expected, "what others have is not asked for");
}

#[tokio::test]
async fn a_layer_goes_when_nobody_of_its_vm_lies_on_it_and_the_service_agrees() {
    let directory = tempfile::tempdir().unwrap();
    let layers = directory.path().join("layers");
    let (disks, asked) = service(directory.path(), |_, _| r#"{"removed":true}"#.to_owned());
    let used = |number: u64| BTreeSet::from([layers.join(format!("memory-ivm-{number}"))]);
    assert!(!disks.forget_layer(&save(1), &used(1)).await.unwrap());
    assert_eq!(asked.lock().unwrap().len(), 0, "nobody is asked who else has what");
    assert!(disks.forget_layer(&save(1), &used(12)).await.unwrap());
    let file = layers.join("memory-ivm-1").display().to_string();
    assert_eq!(*asked.lock().unwrap(), [format!(r#"POST /v1/layers/release {{"file":"{file}"}}"#)]);
    // What others put there is theirs.
    for foreign in ["0123.layer", "memory", "dir/../x"] {
        disks.release_layer(&layers.join(foreign)).await.unwrap();
    }
    assert_eq!(asked.lock().unwrap().len(), 1);
}
