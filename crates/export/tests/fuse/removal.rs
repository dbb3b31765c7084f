//! The end of an export, and of the mount.

use crate::memory::FileDisk;
use crate::stage::{Stage, add_disk, export, wait_until};
use aenv_export::fuse::{FuseExporter, holder};
use aenv_export::{Content, ExportError, Exporter as _};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SIZE: u64 = 1 << 20;

#[test]
fn a_removed_export_fails_for_who_has_it_open_and_its_number_stays_taken() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    let path = add_disk(&exporter, 1, &disk);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    file.write_all_at(b"x", 0).unwrap();
    exporter.remove(&export(1, "disk-1")).unwrap();
    // Nobody uses the content any more.
    assert_eq!(Arc::strong_count(&disk), 1);
    exporter.remove(&export(1, "disk-1")).unwrap();
    let stale = Some(rustix::io::Errno::STALE.raw_os_error());
    assert_eq!(file.write_at(b"y", 0).unwrap_err().raw_os_error(), stale);
    assert_eq!(file.read_at(&mut [0], 0).unwrap_err().raw_os_error(), stale);
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), stale);
    assert_eq!(File::open(&path).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    // The name may be used at once, the number when the kernel has forgotten the file.
    let again =
        |number: u32| exporter.add(&export(number, "disk-1"), Content::Disk(Arc::<FileDisk>::clone(&disk)));
    assert!(matches!(again(1), Err(ExportError::Taken { what: "number", .. })));
    again(2).unwrap();
    let new = File::open(&path).unwrap();
    new.read_exact_at(&mut [0], 0).unwrap();
    assert_eq!(file.read_at(&mut [0], 0).unwrap_err().raw_os_error(), stale);
    drop(file);
    exporter.remove(&export(2, "disk-1")).unwrap();
    wait_until("the kernel has forgotten the file", || again(1).is_ok());
}

#[test]
fn removing_waits_for_what_is_being_done_and_fails_what_waits() {
    let stage = Stage::new();
    let exporter = stage.serve();
    let disk = stage.disk("content", SIZE);
    disk.full.store(true, Ordering::SeqCst);
    let path = add_disk(&exporter, 1, &disk);
    let writer =
        std::thread::spawn(move || File::options().write(true).open(path).unwrap().write_at(b"x", 0));
    wait_until("the write waits", || !exporter.stalled().is_empty());
    exporter.remove(&export(1, "disk-1")).unwrap();
    let error = writer.join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::STALE.raw_os_error()));
    wait_until("nothing waits", || exporter.stalled().is_empty());
}

#[test]
fn only_one_daemon_serves_and_a_new_mount_has_nothing_to_recover() {
    let stage = Stage::new();
    let exporter = stage.connect();
    let disk = Content::Disk(stage.disk("content", SIZE));
    let lost = exporter.recover(&export(1, "disk-1"), disk.clone()).unwrap_err();
    assert!(matches!(&lost, ExportError::Lost { name, .. } if name == "disk-1"), "{lost}");
    let busy = FuseExporter::connect(&stage.path("socket"), Duration::from_millis(30)).unwrap_err();
    assert!(busy.to_string().contains(&std::process::id().to_string()), "{busy}");
    drop(exporter);
    let exporter = stage.connect();
    exporter.recover(&export(1, "disk-1"), disk).unwrap();
    exporter.start().unwrap();
    assert!(exporter.start().unwrap_err().to_string().contains("started already"));
    File::open(stage.mount("disk-1")).unwrap().read_exact_at(&mut [0], 0).unwrap();
}

#[test]
fn the_holder_refuses_to_unmount_what_is_used_unless_forced() {
    let stage = Stage::new();
    let socket = stage.path("socket");
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    let file = File::open(&path).unwrap();
    let refused = holder::stop(&socket, false).unwrap_err().to_string();
    assert!(refused.contains("unmount"), "{refused}");
    assert!(stage.mounted());
    file.read_exact_at(&mut [0], 0).unwrap();
    holder::stop(&socket, true).unwrap();
    assert!(!stage.mounted());
    assert!(file.read_exact_at(&mut [0], 0).is_err());
    wait_until("the socket is gone", || !socket.exists());
    // That there is none is no error.
    holder::stop(&socket, true).unwrap();
    let error = FuseExporter::connect(&socket, Duration::ZERO).unwrap_err().to_string();
    assert!(error.contains("no holder listens"), "{error}");
}

#[test]
fn a_holder_that_died_is_replaced_at_the_same_place() {
    let mut stage = Stage::new();
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    assert!(exporter.is_held());
    stage.holder.0.kill().unwrap();
    stage.holder.0.wait().unwrap();
    // The daemon goes on, and knows.
    assert!(!exporter.is_held());
    File::open(&path).unwrap().read_exact_at(&mut [0], 0).unwrap();
    drop(exporter);
    assert!(File::open(&path).is_err());
    // Its socket and its dead mount are still there.
    assert!(stage.path("socket").exists());
    stage.holder = crate::stage::start("holder", stage.directory.path());
    let exporter = stage.serve();
    let path = add_disk(&exporter, 1, &stage.disk("content", SIZE));
    File::open(path).unwrap().read_exact_at(&mut [0], 0).unwrap();
}
