//! Requests reach storage as they are meant, and their data is right.

use crate::roles::Actor;
use crate::stage::{Aligned, MIB, Stage, open_direct, pattern, run};
use aenv_export::{Content, Exporter};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::Ordering;

/// Unmounted when dropped.
struct Mounted<'a>(&'a str);

impl<'a> Mounted<'a> {
    fn new(device: &str, place: &'a str) -> Self {
        run("mount", &[device, place]);
        Self(place)
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        run("umount", &[self.0]);
    }
}

#[test]
fn a_disk_holds_a_file_system() {
    let Some(mut stage) = Stage::new("filesystem") else { return };
    let (_, backing, device) = stage.disk(101, "filesystem", 256 * MIB);
    let (device, place) = (device.display().to_string(), stage.file("mounted"));
    std::fs::create_dir(&place).unwrap();
    let place = place.display().to_string();
    run("mkfs.ext4", &["-q", "-F", &device]);
    let mounted = Mounted::new(&device, &place);
    let mut content = vec![0; 4 << 20];
    for seed in 0..8_u64 {
        pattern(&mut content, seed);
        std::fs::write(format!("{place}/{seed}"), &content).unwrap();
    }
    let before = backing.flushes.load(Ordering::SeqCst);
    File::open(format!("{place}/0")).unwrap().sync_all().unwrap();
    assert!(backing.flushes.load(Ordering::SeqCst) > before, "fsync did not become a flush");
    drop(mounted);
    let mounted = Mounted::new(&device, &place);
    for seed in 0..8_u64 {
        pattern(&mut content, seed);
        assert!(std::fs::read(format!("{place}/{seed}")).unwrap() == content, "file {seed}");
    }
    (1..8).for_each(|seed| std::fs::remove_file(format!("{place}/{seed}")).unwrap());
    run("sync", &[]);
    let (stored, discarded) =
        (backing.file().metadata().unwrap().blocks(), backing.discarded_bytes.load(Ordering::SeqCst));
    run("fstrim", &[&place]);
    drop(mounted);
    assert!(backing.discarded_bytes.load(Ordering::SeqCst) > discarded + 28 * MIB);
    let freed = stored.saturating_sub(backing.file().metadata().unwrap().blocks()) * 512;
    assert!(freed > 20 * MIB, "only {freed} bytes were freed");
    run("e2fsck", &["-f", "-n", &device]);
}

#[test]
fn two_processes_read_what_they_wrote() {
    let Some(mut stage) = Stage::new("random") else { return };
    let (_, _, device) = stage.disk(102, "random", 8 * MIB);
    let end = stage.file("end");
    let mut writers: Vec<_> =
        (0..2).map(|half| Actor::writer(&device, half * 4 * MIB, 4 * MIB, half, &end)).collect();
    writers.iter_mut().for_each(|writer| drop(writer.hear("BEGUN")));
    std::thread::sleep(std::time::Duration::from_secs(2));
    std::fs::write(&end, "").unwrap();
    for writer in &mut writers {
        println!("random direct I/O: {}", writer.hear("DONE"));
        assert!(writer.finish());
    }
}

#[test]
fn discards_and_zeroes_reach_storage() {
    let Some(mut stage) = Stage::new("discard") else { return };
    let (_, backing, device) = stage.disk(103, "discard", 8 * MIB);
    let mut block = Aligned::new(1 << 20);
    pattern(block.bytes(), 1);
    let file = open_direct(&device, true);
    for at in 0..8 {
        file.write_all_at(block.bytes(), at * MIB).unwrap();
    }
    let name = device.display().to_string();
    run("blkdiscard", &["--offset", "1048576", "--length", "2097152", &name]);
    assert_eq!(backing.discarded_bytes.load(Ordering::SeqCst), 2 * MIB);
    run("blkdiscard", &["--zeroout", "--offset", "5242880", "--length", "512", &name]);
    let mut read = Aligned::new(1 << 20);
    for at in 0..8 {
        file.read_exact_at(read.bytes(), at * MIB).unwrap();
        let zeros = match at {
            1 | 2 => 1 << 20,
            5 => 512,
            _ => 0,
        };
        assert!(read.bytes()[..zeros].iter().all(|byte| *byte == 0), "MiB {at}");
        assert!(read.bytes()[zeros..] == block.bytes()[zeros..], "MiB {at}");
    }
}

#[test]
fn an_image_is_read_and_never_written() {
    let Some(mut stage) = Stage::new("image") else { return };
    let backing = stage.backing("image", 4 * MIB);
    let mut content = vec![0; 4 << 20];
    pattern(&mut content, 7);
    backing.file().write_all_at(&content, 0).unwrap();
    let export = stage.export(104, "image");
    let device = stage.exporter().add(&export, Content::Image(backing)).unwrap();
    assert!(std::fs::read(&device).unwrap() == content);
    assert_eq!(std::fs::metadata(&device).unwrap().mode() & 0o777, 0o400);
    let opened = OpenOptions::new().write(true).open(&device);
    let written = opened.and_then(|mut file| file.write_all(&[1; 4096]).and_then(|()| file.sync_all()));
    assert!(written.is_err(), "an image was written");
}

#[test]
fn the_owner_gets_the_device_and_nobody_else() {
    let Some(mut stage) = Stage::new("owner") else { return };
    let mut export = stage.export(105, "owner");
    export.owner = 700_123;
    let backing = stage.backing("owner", 4 * MIB);
    let device = stage.exporter().add(&export, Content::Disk(backing)).unwrap();
    let data = std::fs::metadata(&device).unwrap();
    assert_eq!((data.uid(), data.gid(), data.permissions().mode() & 0o777), (700_123, 700_123, 0o600));
}

#[test]
fn no_partitions_are_looked_for() {
    let Some(mut stage) = Stage::new("partitions") else { return };
    let backing = stage.backing("partitions", 8 * MIB);
    // A table with one Linux partition, from sector 2048 on.
    let mut table = [0; 512];
    table[446..462].copy_from_slice(&[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]);
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    backing.file().write_all_at(&table, 0).unwrap();
    let export = stage.export(106, "partitions");
    let device = stage.exporter().add(&export, Content::Disk(backing)).unwrap();
    assert_eq!(std::fs::read(&device).unwrap()[510..512], [0x55, 0xaa]);
    let block = std::path::Path::new("/sys/block/ublkb106");
    assert!(block.exists() && !block.join("ublkb106p1").exists(), "the kernel read a partition table");
}
