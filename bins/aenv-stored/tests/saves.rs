//! What the saves of a guest need of the service: memory of a flat file and layers, and disks that go back to a seal.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod daemon;

use aenv_storage::BLOCK_BYTES;
use aenv_storage::block_service::{CreateImage, DiskView, LayerRef, Name, ServiceError};
use aenv_storage::cache::BlockCache;
use aenv_storage::memory_chain::{self, MemoryFiles, NewLayer, Over};
use aenv_sys::memory;
use daemon::{DISK_BYTES, Direct, PATIENCE, Stored, content, name};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A flat file in which these blocks have these generations.
fn changes(path: &Path, blocks: &[(u64, u64)]) {
    let file = File::create(path).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    for (block, generation) in blocks {
        file.write_all_at(&content(*block, *generation), block * BLOCK_BYTES).unwrap();
    }
}

fn has(path: &Path, block: u64, generation: u64) {
    let mut found = [0; BLOCK_BYTES as usize];
    File::open(path).unwrap().read_exact_at(&mut found, block * BLOCK_BYTES).unwrap();
    assert!(found == content(block, generation), "block {block} is not of generation {generation}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_of_a_flat_file_and_layers_is_one_file_also_after_a_kill() {
    let stored = Stored::start().await;
    let LayerRef::Raw { raw } = stored.raw_layer("flat") else { unreachable!() };
    let start = MemoryFiles { image: Some(raw.clone()), layers: Vec::new() };
    let file = stored.data().join("changes");
    let mut below = start.clone();
    for (number, written) in [vec![(3, 1), (9, 1)], vec![(3, 2), (12_000, 2)]].into_iter().enumerate() {
        changes(&file, &written);
        let new =
            NewLayer { below: &below, start: &start, changes: &file, over: Over::Below, bytes: DISK_BYTES };
        let path = stored.layers().join(format!("memory-{number}"));
        below = memory_chain::write(&new, &path, &Arc::new(BlockCache::new(0))).unwrap().files;
    }
    let layers: Vec<LayerRef> = [LayerRef::Raw { raw }]
        .into_iter()
        .chain(below.layers.iter().map(|file| LayerRef::File { file: file.clone() }))
        .collect();
    let image = |name: Name, exported| CreateImage { name, layers: layers.clone(), owner: 0, exported };
    let view = stored.client.create_image(&image(name("m-i-1"), true)).await.unwrap();
    assert_eq!(view.size, DISK_BYTES);
    stored.client.create_image(&image(name("k-i-1"), false)).await.unwrap();
    let path = view.path.unwrap();
    let check = || {
        for (block, generation) in [(0, 0), (3, 2), (4, 0), (9, 1), (12_000, 2)] {
            has(&path, block, generation);
        }
    };
    check();
    stored.kill();
    stored.restart();
    stored.client.status().await.unwrap();
    check();
    // A disk may stand on the same, and files are what is needed for either.
    let disk = stored.disk("d", &layers).await;
    let mut direct = Direct::open(disk.path.as_ref().unwrap());
    assert_eq!(direct.read(3).unwrap(), content(3, 2));
    let above = [layers[1].clone(), layers[0].clone()];
    let wrong = stored.client.create_disk(&daemon::request("wrong", &above)).await.unwrap_err();
    assert!(matches!(wrong, ServiceError::Invalid(_)), "{wrong}");
    let collected = stored.client.collect_garbage(&Default::default()).await.unwrap();
    assert_eq!(collected.layers, 0);
    drop(direct);
}

/// Maps a file privately, writes page 5, reads page 7, and waits for its input to end.
const WRITER: &str = "import mmap, sys
file = open(sys.argv[1], 'rb')
memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
memory[5 * 4096 + 1] = 77
memory[7 * 4096]
print('written', flush=True)
sys.stdin.read()
";

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_to_a_private_mapping_of_an_image_is_told_from_the_image() {
    let stored = Stored::start().await;
    let layers = vec![stored.raw_layer("flat")];
    let image = CreateImage { name: name("m-i-1"), layers, owner: 0, exported: true };
    let path = stored.client.create_image(&image).await.unwrap().path.unwrap();
    let mut writer = Command::new("python3")
        .args(["-c", WRITER])
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "written\n");
    // As after an adoption: nothing is known but the process, and another service serves the image.
    stored.kill();
    stored.restart();
    stored.client.status().await.unwrap();
    let mappings = memory::file_mappings(writer.id()).unwrap();
    let mapping = mappings.iter().find(|mapping| mapping.path == path).unwrap();
    assert!(mapping.private && mapping.writable);
    assert_eq!(mapping.addresses.end - mapping.addresses.start, DISK_BYTES);
    let base = mapping.addresses.start;
    let changed = memory::changed_ranges(writer.id(), mapping.addresses.clone()).unwrap();
    let page = base + 5 * 4096..base + 6 * 4096;
    assert_eq!(changed, std::slice::from_ref(&page));
    let mut found = vec![0; 4096];
    memory::read(writer.id(), &[page], &mut found).unwrap();
    let mut expected = content(5, 0);
    expected[1] = 77;
    assert!(found == expected);
    // The image itself can be read and is not written.
    let behind = memory::open_mapped_file(writer.id(), mapping).unwrap();
    assert!(!aenv_sys::file::data_extents(&behind).unwrap().is_empty());
    has(&path, 5, 0);
    assert!(
        File::options().read(true).write(true).open(&path).is_err(),
        "its pages are shared by all who map it"
    );
    drop((behind, writer.stdin.take()));
    assert!(writer.wait().unwrap().success());
}

async fn sealed(stored: &Stored, disk: &DiskView) -> (Name, Vec<LayerRef>) {
    let sealed = stored.client.seal_disk(&disk.name, None).await.unwrap();
    (sealed.sealed, sealed.layers)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_goes_back_to_a_seal_under_the_same_name_also_after_a_kill() {
    let stored = Stored::start().await;
    let disk = stored.disk("d", &[stored.raw_layer("raw")]).await;
    let path = disk.path.clone().unwrap();
    let write = |block, generation| Direct::open(&path).write(block, &content(block, generation)).unwrap();
    write(5, 1);
    let (first, layers) = sealed(&stored, &disk).await;
    let again = stored.client.seal_disk(&disk.name, Some(first.clone())).await.unwrap();
    assert_eq!(again.stored_bytes, Some(BLOCK_BYTES), "what the disk was made of is not counted");
    write(5, 2);
    write(6, 2);
    let (second, _) = sealed(&stored, &disk).await;
    write(5, 3);

    let back = stored.client.rewind_disk(&disk.name, &second).await.unwrap();
    assert_eq!((&back.path, back.number), (&disk.path, disk.number));
    has(&path, 5, 2);
    // What somebody is made of is not dropped.
    let child_layers = stored.client.seal_disk(&disk.name, None).await.unwrap().layers;
    let image = CreateImage { name: name("s-d-2"), layers: child_layers, owner: 0, exported: false };
    stored.client.create_image(&image).await.unwrap();
    let refused = stored.client.rewind_disk(&disk.name, &first).await.unwrap_err();
    assert!(matches!(refused, ServiceError::Conflict(_)), "{refused}");
    stored.client.delete_image(&image.name).await.unwrap();

    let hold = CreateImage { name: name("s-d-1"), layers: layers.clone(), owner: 0, exported: false };
    stored.client.create_image(&hold).await.unwrap();
    write(5, 4);
    stored.kill();
    stored.restart();
    let back = stored.client.rewind_disk(&disk.name, &first).await.unwrap();
    assert_eq!((back.tops.len(), back.stored_bytes), (1, BLOCK_BYTES));
    stored.kill();
    stored.restart();
    stored.client.status().await.unwrap();
    has(&path, 5, 1);
    has(&path, 6, 0);
    // Nothing more to drop, and it can be used.
    let again = stored.client.rewind_disk(&disk.name, &first).await.unwrap();
    assert_eq!(again.tops, back.tops);
    write(6, 5);
    has(&path, 6, 5);
    let child = stored.disk("child", &layers).await;
    has(child.path.as_ref().unwrap(), 5, 1);
    has(child.path.as_ref().unwrap(), 6, 0);
    let unknown = stored.client.rewind_disk(&disk.name, &second).await.unwrap_err();
    assert!(matches!(unknown, ServiceError::NotFound(_)), "{unknown}");
    let missing = stored.client.rewind_disk(&name("none"), &first).await.unwrap_err();
    assert!(matches!(missing, ServiceError::NotFound(_)), "{missing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_sealed_and_held_again_and_again_has_few_tops_and_goes_back_to_the_last() {
    let stored = Stored::start().await;
    let disk = stored.disk("d", &[stored.raw_layer("raw")]).await;
    let path = disk.path.clone().unwrap();
    let write = |block, generation| Direct::open(&path).write(block, &content(block, generation)).unwrap();
    let mut last = None;
    for number in 1..=40 {
        write(number, number);
        let (top, layers) = sealed(&stored, &disk).await;
        let layers = vec![layers.last().unwrap().clone()];
        let hold = CreateImage { name: name(&format!("s-d-{number}")), layers, owner: 0, exported: false };
        stored.client.create_image(&hold).await.unwrap();
        stored.client.delete_image(&name(&format!("s-d-{}", number - 1))).await.unwrap();
        last = Some(top);
    }
    let last = last.unwrap();
    let started = Instant::now();
    loop {
        let tops = stored.client.disk(&disk.name).await.unwrap().tops;
        assert!(tops.iter().any(|top| top.top == last), "what is held stays");
        if tops.len() <= 16 {
            break;
        }
        assert!(started.elapsed() < PATIENCE, "{} tops are not merged", tops.len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    write(7, 99);
    stored.client.rewind_disk(&disk.name, &last).await.unwrap();
    for number in 1..=40 {
        has(&path, number, number);
    }
}
