//! A host without room, and files that are not what they were.

use super::*;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

/// A small filesystem of memory, gone with the value.
pub(super) struct SmallFilesystem(pub(super) tempfile::TempDir);

impl SmallFilesystem {
    pub(super) fn new(bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        mount("tmpfs", directory.path(), "tmpfs", MountFlags::empty(), &*options).unwrap();
        Self(directory)
    }
}

impl Drop for SmallFilesystem {
    fn drop(&mut self) {
        if let Err(error) = unmount(self.0.path(), UnmountFlags::DETACH) {
            assert!(std::thread::panicking(), "{error}");
        }
    }
}

#[test]
fn a_full_host_refuses_writes_and_takes_them_later() {
    let host = SmallFilesystem::new(4 << 20);
    let (path, size) = (host.0.path().join("disk"), 16 << 20);
    let lower = Arc::new(Stripes { size: 1 << 20 });
    let mut model = model_of(&lower, size);
    let disk = LayeredDisk::create(&path, lower.clone(), size, u64::MAX, &BOOT).unwrap();
    let ballast = host.0.path().join("ballast");
    std::fs::write(&ballast, vec![0; 2 << 20]).unwrap();
    let step = |number: u64| Step::Write { offset: number * 50_000, length: 49_000, byte: number as u8 | 1 };
    let mut number = 0;
    let refused = loop {
        match step(number).run(&disk) {
            Ok(()) => step(number).apply(&mut model),
            Err(error) => break error,
        }
        number += 1;
    };
    assert!(matches!(refused, StorageError::NoSpace { .. }), "{refused}");
    let Step::Write { offset, length, .. } = step(number) else { unreachable!() };
    let unharmed = |disk: &LayeredDisk| {
        let found = content(disk);
        assert_same(
            &found[..offset as usize],
            &model[..offset as usize],
            "before the write that was refused",
        );
        let end = (offset + length) as usize;
        assert_same(&found[end..], &model[end..], "behind the write that was refused");
        let usage = disk.usage();
        assert_eq!(usage.charged_bytes, quota::shown_bytes(disk), "what was refused is not charged");
        usage.stored_bytes
    };
    let stored = unharmed(&disk);
    assert!(stored <= 2 << 20);
    // What is there can be overwritten; nothing else can be made.
    step(0).run(&disk).unwrap();
    assert!(matches!(disk.seal(), Err(StorageError::NoSpace { .. })));
    drop(disk);
    // Within a boot nothing has to be written to open it: a service that was killed can go on.
    let disk = LayeredDisk::open(&path, lower, &BOOT).unwrap();
    assert_eq!(unharmed(&disk), stored);
    assert!(matches!(step(number).run(&disk), Err(StorageError::NoSpace { .. })));
    std::fs::remove_file(&ballast).unwrap();
    step(number).run(&disk).unwrap();
    step(number).apply(&mut model);
    disk.seal().unwrap();
    disk.flush().unwrap();
    assert_same(&content(&disk), &model, "with room again");
}

/// Whoever is told that there is no room tries again later; of anything else it would not recover.
#[test]
fn what_failed_first_is_told_though_cleaning_up_fails_as_well() {
    let size = 20 * BLOCK_BYTES;
    let refused = |act: Act, file: &'static str, operation: &dyn Fn(&LayeredDisk) -> StorageError| {
        let simulation = Simulation::default();
        let lower = Arc::new(Stripes { size: 0 });
        let disk = LayeredDisk::create_in(simulation.directory(), lower, size, u64::MAX, &BOOT).unwrap();
        disk.seal().unwrap();
        disk.write_at(&[1; 5000], 0).unwrap();
        disk.seal().unwrap();
        disk.write_at(&[2; 5000], 3000).unwrap();
        let expected = content(&disk);
        simulation.let_fail(move |is, name| match is {
            _ if (is, name) == (act, file) => Some(ErrorKind::StorageFull),
            Act::Remove if name.starts_with("top-") => Some(ErrorKind::Other),
            Act::SetLength if name == "top-3.log" => Some(ErrorKind::Other),
            _ => None,
        });
        let error = operation(&disk);
        assert!(matches!(error, StorageError::NoSpace { .. }), "{act:?} of {file}: {error}");
        simulation.let_fail(|_, _| None);
        assert_same(&content(&disk), &expected, "as it was");
        disk.seal().unwrap();
        disk.compact(usize::MAX).unwrap();
        assert_same(&content(&disk), &expected, "and it goes on");
    };
    let seal = |disk: &LayeredDisk| disk.seal().unwrap_err();
    let compact = |disk: &LayeredDisk| disk.compact(2).unwrap_err();
    let manifest = [Act::Create, Act::Write, Act::Exchange].map(|act| (act, "disk.writing.json"));
    for (act, file) in [(Act::Write, "top-4.log"), (Act::SetLength, "top-4.data")].into_iter().chain(manifest)
    {
        refused(act, file, &seal);
        refused(act, file, &compact);
    }
    refused(Act::Write, "top-3.log", &seal);
    refused(Act::Write, "top-4.data", &compact);
}

/// The files of a disk with a sealed top and one in use, and the content after each record of the second.
fn made(path: &Path) -> (Vec<Vec<u8>>, Vec<u64>) {
    let lower = Arc::new(Stripes { size: 20 * BLOCK_BYTES });
    let disk = LayeredDisk::create(path, lower, 20 * BLOCK_BYTES, u64::MAX, &BOOT).unwrap();
    disk.write_at(&[3; 5000], 3000).unwrap();
    disk.seal().unwrap();
    disk.flush().unwrap();
    let mut states = vec![content(&disk)];
    let mut ends = vec![disk.usage().log_bytes];
    for number in 0..9_u64 {
        match number % 3 {
            0 => disk.write_at(&[number as u8 + 10; 6000], number * 8000).unwrap(),
            1 => disk.discard((number - 1) * 8000, 10_000).unwrap(),
            _ => disk.flush().unwrap(),
        }
        states.push(content(&disk));
        ends.push(disk.usage().log_bytes);
    }
    (states, ends)
}

fn open(path: &Path) -> Result<LayeredDisk, StorageError> {
    LayeredDisk::open(path, Arc::new(Stripes { size: 20 * BLOCK_BYTES }), &BOOT)
}

/// Gives a file this content, in place: some filesystems flush a file that was cut to nothing and written again.
fn put(path: &Path, bytes: &[u8]) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

#[test]
fn a_log_that_is_cut_at_any_byte_is_a_shorter_log() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let (states, ends) = made(&path);
    let log_path = path.join("top-2.log");
    let log = std::fs::read(&log_path).unwrap();
    assert_eq!(log.len() as u64, *ends.last().unwrap());
    let names = |directory: &Path| {
        let mut names: Vec<_> =
            std::fs::read_dir(directory).unwrap().map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names(&path);
    for length in 0..log.len() as u64 {
        // Inside of the header every length is the same case.
        if length < 4000 && length % 97 != 0 {
            continue;
        }
        put(&log_path, &log[..length as usize]);
        match open(&path) {
            Err(error) => {
                assert!(matches!(error, StorageError::Damaged { .. }), "{error}");
                assert!(length < 4096, "{length}: {error}");
            }
            Ok(disk) => {
                // States of a discard whose hole is made show zeros in any case; so does the file, which is not cut.
                let last = ends.iter().take_while(|end| **end <= length).count();
                let found = content(&disk);
                let mapped = disk.usage();
                assert!(length >= 4096);
                if last == 0 {
                    assert_eq!(mapped.data_blocks, 0, "cut in the first session");
                    assert_same(&found, &states[0], "only what is sealed");
                } else {
                    check_prefix(&found, &states, last - 1);
                }
            }
        }
        assert_eq!(names(&path), before);
    }
}

/// Each block is what it was after step `last`, or as later steps left it in the data file.
fn check_prefix(found: &[u8], states: &[Vec<u8>], last: usize) {
    for block in 0..found.len() / 4096 {
        let range = block * 4096..(block + 1) * 4096;
        assert!(
            states[last..].iter().any(|state| state[range.clone()] == found[range.clone()]),
            "block {block}"
        );
    }
}

#[test]
fn a_flipped_bit_anywhere_is_an_error_or_a_shorter_log() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    let (states, _) = made(&path);
    for (name, sealed) in [("top-1.log", true), ("top-2.log", false)] {
        let log_path = path.join(name);
        let log = std::fs::read(&log_path).unwrap();
        for at in (0..60).chain(4096..log.len()) {
            let mut flipped = log.clone();
            flipped[at] ^= 1 << (at % 8);
            put(&log_path, &flipped);
            match open(&path) {
                Err(error) => assert!(matches!(error, StorageError::Damaged { .. }), "{error}"),
                Ok(disk) if sealed => {
                    // Only the commit behind the `sealed` record may be lost without notice.
                    assert!(at + 40 > log.len(), "{at} of {}", log.len());
                    assert_same(&content(&disk), &states[states.len() - 1], "the sealed top is whole");
                }
                Ok(disk) => check_prefix(&content(&disk), &states, 0),
            }
        }
        put(&log_path, &log);
    }
    for (name, text) in [("disk.json", ""), ("disk.json", "{\"version\":1}"), ("disk.json", "[[[[")] {
        let before = std::fs::read(path.join(name)).unwrap();
        std::fs::write(path.join(name), text).unwrap();
        assert!(matches!(open(&path), Err(StorageError::Damaged { .. })));
        std::fs::write(path.join(name), before).unwrap();
    }
    std::fs::rename(path.join("top-1.log"), path.join("kept")).unwrap();
    std::fs::copy(path.join("top-2.log"), path.join("top-1.log")).unwrap();
    assert!(matches!(open(&path), Err(StorageError::Damaged { .. })), "a top in the place of another");
    std::fs::remove_file(path.join("top-1.log")).unwrap();
    assert!(matches!(open(&path), Err(StorageError::Io { .. })), "a top that is gone");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Records with right checksums and wrong content are damage, whatever they say.
    #[test]
    fn hostile_records_are_refused(first in any::<u64>(), count in any::<u32>(), state in any::<u32>(), kind in 0_u32..8) {
        let simulation = Simulation::default();
        let directory = simulation.directory();
        let identity = Identity { id: [1; 16], parent: [0; 16], size: 64 * BLOCK_BYTES };
        let top = Top::create(&*directory, "top-1", identity, &BOOT).unwrap();
        let mut payload = first.to_le_bytes().to_vec();
        payload.extend(count.to_le_bytes());
        payload.extend(state.to_le_bytes());
        top.append_raw(kind, &payload);
        let opened = Top::open(&*directory, "top-1", crate::top::Access::Read, &BOOT);
        let valid = kind == 2 && count > 0 && state < 3 && first.saturating_add(count.into()) <= 64;
        prop_assert_eq!(opened.is_ok(), valid);
    }
}
