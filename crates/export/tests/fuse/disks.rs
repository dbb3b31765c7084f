//! Disks: reading, writing, discarding, flushing, and what is refused.

use crate::memory::FileDisk;
use crate::stage::{Stage, add_disk, export};
use aenv_export::{Content, Exporter as _};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use std::fs::{File, Permissions};
use std::io::{ErrorKind, IoSliceMut};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SIZE: u64 = 8 << 20;

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// A page-aligned part of a vector, as direct I/O wants it.
fn aligned(buffer: &mut Vec<u8>, length: usize) -> &mut [u8] {
    buffer.resize(length + 4096, 0);
    let skip = buffer.as_ptr().align_offset(4096);
    &mut buffer[skip..skip + length]
}

#[test]
fn threads_with_direct_io_agree_with_a_model() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    let threads: u64 = 3;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let path = &path;
            scope.spawn(move || {
                // Each thread has its part of the disk, and its model.
                let (part, start) = (SIZE / threads / 4096 * 4096, thread * (SIZE / threads / 4096 * 4096));
                let file = File::options()
                    .read(true)
                    .write(true)
                    .custom_flags(OFlags::DIRECT.bits().cast_signed())
                    .open(path)
                    .unwrap();
                let mut model = vec![0; usize::try_from(part).unwrap()];
                let mut random = StdRng::seed_from_u64(thread);
                let mut buffer = Vec::new();
                for _ in 0..400 {
                    let most = if random.random_bool(0.1) { 300 } else { 4_usize };
                    let blocks = random.random_range(1..=most);
                    let at = random.random_range(0..model.len() / 4096 - blocks) * 4096;
                    let data = aligned(&mut buffer, blocks * 4096);
                    let range = at..at + data.len();
                    if random.random_bool(0.5) {
                        random.fill(data);
                        model[range].copy_from_slice(data);
                        file.write_all_at(data, start + at as u64).unwrap();
                    } else {
                        file.read_exact_at(data, start + at as u64).unwrap();
                        assert!(data == &model[range], "thread {thread} at {at}");
                    }
                }
            });
        }
    });
}

#[test]
fn unaligned_reads_and_writes_end_with_the_disk() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let file = open(&add_disk(&exporter, 1, &stage.disk("content", SIZE)));
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    file.write_all_at(b"begin", 4093).unwrap();
    assert_eq!(file.write_at(b"across the end", SIZE - 6).unwrap(), 6);
    let mut back = [1; 20];
    assert_eq!(file.read_at(&mut back, SIZE - 6).unwrap(), 6);
    assert_eq!(&back[..6], b"across");
    assert_eq!(file.read_at(&mut back, SIZE).unwrap(), 0);
    file.read_exact_at(&mut back[..7], 4092).unwrap();
    assert_eq!(&back[..7], b"\0begin\0");
    assert_eq!(file.write_at(b"x", SIZE).unwrap_err().kind(), ErrorKind::StorageFull);
    // Several buffers at once.
    let (mut first, mut second) = ([0; 3], [0; 4]);
    rustix::io::preadv(&file, &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)], 4093)
        .unwrap();
    assert_eq!((&first, &second[..2]), (b"beg", b"in".as_slice()));
    assert_eq!(file.metadata().unwrap().len(), SIZE);
}

#[test]
fn holes_read_as_zeros_to_the_byte_and_whole_blocks_are_discarded() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    let file = open(&add_disk(&exporter, 1, &disk));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let zero = FallocateFlags::ZERO_RANGE;
    let cases = [
        (punch, 4096, 8192, 8192),
        (punch, 100, 50, 0),
        (punch, 4000, 200, 0),
        (punch, 100, 12288, 8192),
        (punch, SIZE - 5000, 1 << 30, 4096),
        (zero, 4096, 4096, 0),
        (zero, 1, 9000, 0),
        (zero | FallocateFlags::KEEP_SIZE, SIZE - 10, 100, 0),
    ];
    for (mode, offset, length, discarded) in cases {
        file.write_all_at(&vec![7; usize::try_from(SIZE).unwrap()], 0).unwrap();
        disk.discarded.store(0, Ordering::SeqCst);
        rustix::fs::fallocate(&file, mode, offset, length).unwrap();
        assert_eq!(disk.discarded.load(Ordering::SeqCst), discarded, "{mode:?} {offset} {length}");
        let mut content = vec![0; usize::try_from(SIZE).unwrap()];
        file.read_exact_at(&mut content, 0).unwrap();
        let wrong = content.iter().zip(0..).find(|(byte, at)| {
            let hole = (offset..offset + length).contains(at);
            **byte != if hole { 0 } else { 7 }
        });
        assert_eq!(wrong, None, "{mode:?} {offset} {length}");
    }
    for mode in [FallocateFlags::empty(), FallocateFlags::KEEP_SIZE] {
        let refused = rustix::fs::fallocate(&file, mode, 0, 4096);
        assert_eq!(refused, Err(rustix::io::Errno::OPNOTSUPP), "{mode:?}");
    }
    assert!(rustix::fs::fallocate(&file, zero, SIZE - 10, 100).is_err());
}

#[test]
fn sync_is_a_flush_of_the_disk() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    let file = open(&add_disk(&exporter, 1, &disk));
    file.write_all_at(b"x", 0).unwrap();
    assert_eq!(disk.flushes.load(Ordering::SeqCst), 0);
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    assert_eq!(disk.flushes.load(Ordering::SeqCst), 2);
}

#[test]
fn failures_reach_the_writer_with_their_kind() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    let file = open(&add_disk(&exporter, 1, &disk));
    disk.over_quota.store(true, Ordering::SeqCst);
    assert_eq!(file.write_at(b"x", 0).unwrap_err().kind(), ErrorKind::StorageFull);
    disk.over_quota.store(false, Ordering::SeqCst);
    disk.broken.store(true, Ordering::SeqCst);
    let error = file.write_at(b"x", 0).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    disk.broken.store(false, Ordering::SeqCst);
    assert_eq!(file.write_at(b"x", 0).unwrap(), 1);
}

#[test]
fn files_are_not_truncated_removed_renamed_or_made() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    let file = open(&path);
    for size in [0, SIZE - 1, SIZE + 1] {
        assert_eq!(file.set_len(size).unwrap_err().kind(), ErrorKind::PermissionDenied, "{size}");
    }
    file.set_len(SIZE).unwrap();
    assert!(File::create(&path).is_err());
    assert!(std::fs::remove_file(&path).is_err());
    assert!(std::fs::rename(&path, stage.mount("other")).is_err());
    assert!(File::create(stage.mount("new")).is_err());
    assert!(std::fs::create_dir(stage.mount("new")).is_err());
    assert!(std::fs::hard_link(&path, stage.mount("new")).is_err());
    assert!(std::os::unix::fs::symlink("x", stage.mount("new")).is_err());
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    let names: Vec<_> =
        std::fs::read_dir(exporter.mount()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["disk-1"]);
}

#[test]
fn owner_and_permissions_are_changed_by_root() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let owned = aenv_export::Export { owner: 1234, ..export(1, "disk-1") };
    let path = exporter.add(&owned, Content::Disk(stage.disk("content", SIZE))).unwrap();
    let seen = std::fs::metadata(&path).unwrap();
    assert_eq!((seen.uid(), seen.gid(), seen.mode() & 0o7777), (1234, 1234, 0o600));
    std::os::unix::fs::chown(&path, Some(65534), Some(5)).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
    let seen = std::fs::metadata(&path).unwrap();
    assert_eq!((seen.uid(), seen.gid(), seen.mode() & 0o7777), (65534, 5, 0o640));
    assert!(rustix::fs::chmod(&path, Mode::from_raw_mode(0o4755)).is_err());
}

#[test]
fn other_users_get_what_is_theirs_and_images() {
    let stage = Stage::new();
    let exporter = stage.serve();
    add_disk(&exporter, 1, &stage.disk("content", SIZE));
    let image = crate::memory::PatternImage { size: 8192, holes: Vec::new() };
    exporter.add(&export(2, "image-2"), Content::Image(Arc::new(image))).unwrap();
    let owned = aenv_export::Export { owner: 65534, ..export(3, "disk-3") };
    exporter.add(&owned, Content::Disk(stage.disk("other", SIZE))).unwrap();
    // The program itself may lie where the stranger may not go.
    let program = stage.path("program");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    let done = std::os::unix::process::CommandExt::uid(&mut std::process::Command::new(&program), 65534)
        .args(["--ignored", "--exact", "roles::role", "--nocapture"])
        .env(crate::stage::ROLE, "stranger")
        .env(crate::stage::DIRECTORY, stage.directory.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&[done.stdout, done.stderr].concat()));
}

#[test]
fn qemu_reads_and_writes_a_disk() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    let run = |program: &str, args: &[&str]| {
        let done = match std::process::Command::new(program).args(args).arg(&path).output() {
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            done => done.unwrap(),
        };
        let text = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
        assert!(done.status.success(), "{text}");
        Some(text)
    };
    let Some(info) = run("qemu-img", &["info", "-f", "raw"]) else {
        println!("qemu-img is not installed: not tried");
        return;
    };
    assert!(info.contains("8 MiB"), "{info}");
    for io in ["threads", "native"] {
        let commands = [
            "write -P 7 4k 1M",
            "read -P 7 4k 1M",
            "discard 4k 64k",
            "read -P 0 4k 64k",
            "write -z -u 1M 8k",
            "flush",
        ];
        let mut args = vec!["-f", "raw", "-t", "none", "-i", io];
        for command in commands {
            args.extend(["-c", command]);
        }
        let Some(text) = run("qemu-io", &args) else { return };
        assert!(!text.contains("failed"), "{io}: {text}");
    }
    let mut back = [1; 8192];
    open(&path).read_exact_at(&mut back, 1 << 20).unwrap();
    assert_eq!(back, [0; 8192]);
}

#[test]
fn names_and_numbers_are_checked() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    let add = |number: u32, name: &str| {
        exporter.add(&export(number, name), Content::Disk(Arc::<FileDisk>::clone(&disk)))
    };
    add(1, "disk-1").unwrap();
    for (number, name, text) in [
        (1, "other", "number 1 is in use"),
        (2, "disk-1", "name disk-1 is in use"),
        (0, "zero", "its number is 0"),
        (3, "", "letters, digits"),
        (3, "../x", "letters, digits"),
        (3, &"x".repeat(256), "letters, digits"),
    ] {
        let error = add(number, name).unwrap_err().to_string();
        assert!(error.contains(text), "{number} {name}: {error}");
    }
    add(u32::MAX, &"x".repeat(255)).unwrap();
    assert_eq!(std::fs::metadata(stage.mount(&"x".repeat(255))).unwrap().ino(), 1 << 32);
}
