//! Tops that are merged, and who may see or hold them meanwhile.

use super::*;
use std::io::ErrorKind;
use std::sync::OnceLock;

const SIZE: u64 = 20 * BLOCK_BYTES;

fn lower() -> Arc<dyn Image> {
    Arc::new(Stripes { size: 12 * BLOCK_BYTES + 100 })
}

/// Seals so many tops, each with something of its own.
fn seal_tops(disk: &LayeredDisk, count: u64) {
    for number in 1..=count {
        disk.write_at(&[number as u8; 6000], number * 5000).unwrap();
        disk.seal().unwrap();
    }
}

/// Refuses manifests once told to, and lets something be done when the manifest with the merged top is written aside.
fn refuse_manifests(
    simulation: &Simulation,
    refuse: &Arc<AtomicBool>,
    aside: impl Fn() + Send + Sync + 'static,
) {
    let (refuse, written) = (Arc::clone(refuse), AtomicU64::new(0));
    simulation.let_fail(move |act, name| {
        let manifest = name == "disk.writing.json";
        // The first one only says that a merged top is being made.
        if (act, manifest) == (Act::Create, true) && written.fetch_add(1, Ordering::SeqCst) == 1 {
            refuse.store(true, Ordering::SeqCst);
            aside();
        }
        let publishes = manifest && matches!(act, Act::Exchange | Act::Rename);
        (publishes && refuse.load(Ordering::SeqCst)).then_some(ErrorKind::StorageFull)
    });
}

#[test]
fn a_merged_top_that_no_manifest_names_is_given_to_nobody() {
    let simulation = Simulation::default();
    let disk = LayeredDisk::create_in(simulation.directory(), lower(), SIZE, u64::MAX, &BOOT).unwrap();
    seal_tops(&disk, 4);
    let disk = Arc::new(disk);
    let expected = content(&*disk);
    let refuse = Arc::new(AtomicBool::new(false));
    // What a child gets to stand on that is made in just this moment.
    let child = Arc::new(OnceLock::new());
    let (parent, image) = (Arc::downgrade(&disk), Arc::clone(&child));
    refuse_manifests(&simulation, &refuse, move || {
        image.set(parent.upgrade().unwrap().sealed_image()).unwrap();
    });
    assert!(disk.compact(3).is_err() || disk.sealed_tops().len() == 4, "the manifest could not be replaced");
    let names = simulation.directory().names().unwrap();
    for top in child.get().unwrap().tops() {
        assert!(names.contains(&format!("{}.data", top.name())), "a child stands on {}", top.name());
    }
    let mut found = vec![0xEE; SIZE as usize];
    child.get().unwrap().read_at(&mut found, 0).unwrap();
    assert_same(&found, &expected, "the child");
    assert_same(&content(&*disk), &expected, "the disk");
}

#[test]
fn a_merge_whose_manifest_is_refused_changes_nothing_and_can_be_done_again() {
    let simulation = Simulation::default();
    let disk = LayeredDisk::create_in(simulation.directory(), lower(), SIZE, u64::MAX, &BOOT).unwrap();
    seal_tops(&disk, 4);
    let expected = content(&disk);
    let ids = |disk: &LayeredDisk| disk.sealed_tops().iter().map(|top| top.id()).collect::<Vec<_>>();
    let (before, used) = (ids(&disk), disk.usage().stored_bytes);
    let refuse = Arc::new(AtomicBool::new(false));
    refuse_manifests(&simulation, &refuse, || {});
    assert!(matches!(disk.compact(3), Err(StorageError::NoSpace { .. })));
    assert_eq!((ids(&disk), disk.usage().stored_bytes), (before.clone(), used));
    assert_same(&content(&disk), &expected, "after the refusal");
    // The next process finds the same.
    let died = simulation.after_death(simulation.recorded(), &mut rand::SeedableRng::seed_from_u64(1));
    let found = LayeredDisk::open_in(died.directory(), lower(), &BOOT).unwrap();
    assert_eq!(ids(&found), before);
    assert_same(&content(&found), &expected, "for the next process");
    simulation.let_fail(|_, _| None);
    assert!(matches!(disk.compact(3).unwrap(), Compaction::Merged { .. }));
    assert_eq!(disk.sealed_tops().len(), 2);
    assert_same(&content(&disk), &expected, "merged");
}

/// Files of tops in a directory of the host.
fn files_of_tops(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("top-"))
        .collect();
    names.sort();
    names
}

#[test]
fn tops_that_a_reader_held_while_they_were_merged_are_removed_later() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let disk = LayeredDisk::create(&path, lower(), SIZE, u64::MAX, &BOOT).unwrap();
    let merge_under_a_reader = || {
        seal_tops(&disk, 3);
        // What a read has from its beginning to its end.
        let reader = disk.state();
        assert!(matches!(disk.compact(usize::MAX).unwrap(), Compaction::Merged { .. }));
        reader
    };
    let reader = merge_under_a_reader();
    let merged = ["top-4.data", "top-4.log", "top-5.data", "top-5.log"];
    disk.remove_merged_tops().unwrap();
    assert_eq!(files_of_tops(&path).len(), 4 * 2 + 2, "the reader needs the old ones");
    drop(reader);
    disk.remove_merged_tops().unwrap();
    assert_eq!(files_of_tops(&path), merged);
    // The next compaction does it as well, even when there is nothing to merge.
    drop(merge_under_a_reader());
    assert_eq!(files_of_tops(&path).len(), 5 * 2 + 2);
    assert_eq!(disk.compact(usize::MAX).unwrap(), Compaction::NothingToDo);
    assert_eq!(files_of_tops(&path).len(), 2 * 2);
    let expected = content(&disk);
    drop(disk);
    let disk = LayeredDisk::open(&path, lower(), &BOOT).unwrap();
    assert_same(&content(&disk), &expected, "opened again");
    assert_eq!(files_of_tops(&path).len(), 2 * 2);
}

#[test]
fn tops_are_merged_for_room_when_that_frees_as_much_as_it_copies() {
    let simulation = Simulation::default();
    let disk = LayeredDisk::create_in(simulation.directory(), lower(), SIZE, u64::MAX, &BOOT).unwrap();
    let write = |first: u64| disk.write_at(&[7; 4 * BLOCK_BYTES as usize], first * BLOCK_BYTES).unwrap();
    assert_eq!(disk.compact_for_room(9).unwrap(), Compaction::NothingToDo);
    for first in [0, 3] {
        write(first);
        disk.seal().unwrap();
    }
    assert_eq!(disk.compact_for_room(2).unwrap(), Compaction::NothingToDo, "7 blocks are copied to free 1");
    for first in [2, 1, 10] {
        write(first);
        disk.seal().unwrap();
    }
    let expected = content(&disk);
    // 16 blocks, 7 of them different; the newest top is not asked about.
    assert_eq!(disk.compact_for_room(4).unwrap(), Compaction::Merged { freed_bytes: 9 * BLOCK_BYTES });
    assert_eq!(disk.sealed_tops().len(), 2);
    assert_same(&content(&disk), &expected, "merged");
}

#[test]
fn a_thousand_tops_are_read_and_merged_on_a_small_stack() {
    let simulation = Simulation::default();
    let disk = LayeredDisk::create_in(simulation.directory(), lower(), SIZE, u64::MAX, &BOOT).unwrap();
    for number in 0..1000_u64 {
        disk.write_at(&[number as u8; 100], number % 8 * BLOCK_BYTES + number).unwrap();
        disk.seal().unwrap();
        simulation.forget();
    }
    let small = |act: &(dyn Fn() -> Vec<u8> + Sync)| {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            thread.spawn_scoped(scope, act).unwrap().join().unwrap()
        })
    };
    let expected = small(&|| content(&disk));
    assert_eq!(expected[8 * 4096 - 4096 + 999..][..100], [999_u64 as u8; 100]);
    let merged = small(&|| {
        assert!(matches!(disk.compact(usize::MAX).unwrap(), Compaction::Merged { .. }));
        content(&disk)
    });
    assert_same(&merged, &expected, "merged");
}
