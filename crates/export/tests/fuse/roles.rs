//! What the processes of these tests do: the holder, a daemon that is killed, a writer that must not notice.

use crate::memory::FileDisk;
use crate::stage::{DIRECTORY, PATIENCE, ROLE, export};
use aenv_export::fuse::FuseExporter;
use aenv_export::fuse::holder::{HolderOptions, run};
use aenv_export::{Content, Exporter as _};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the daemon's disk.
pub(crate) const DISK_BYTES: u64 = 4 << 20;

#[test]
#[ignore = "a process of the other tests, started by them"]
fn role() {
    let directory = PathBuf::from(std::env::var_os(DIRECTORY).expect("only other tests start this one"));
    end_with_parent();
    match std::env::var(ROLE).unwrap().as_str() {
        "holder" => hold(&directory),
        "daemon" => serve(&directory),
        "writer" => write_and_verify(&directory),
        "stuck" => write_once(&directory),
        "stranger" => be_refused(&directory),
        other => panic!("no such role: {other}"),
    }
}

/// A test that is killed leaves no process, and none that waits for another one.
fn end_with_parent() {
    let parent = rustix::process::getppid();
    std::thread::spawn(move || {
        while rustix::process::getppid() == parent {
            std::thread::sleep(Duration::from_millis(200));
        }
        std::process::exit(1);
    });
}

fn hold(directory: &Path) {
    let socket = directory.join("socket");
    run(&HolderOptions { socket, mount: directory.join("mount"), workers: 3 }).unwrap();
}

/// Serves one disk until it is killed; says so by a file.
fn serve(directory: &Path) {
    let exporter = FuseExporter::connect(&directory.join("socket"), PATIENCE).unwrap();
    let mut disk = FileDisk::new(&directory.join("content"), DISK_BYTES);
    disk.slow = Some((directory.join("slow"), Duration::from_millis(700)));
    let full = directory.join("full").exists();
    disk.full.store(full, std::sync::atomic::Ordering::SeqCst);
    let disk = Arc::new(disk);
    let content = Content::Disk(Arc::<FileDisk>::clone(&disk));
    if exporter.recover(&export(1, "disk-1"), content.clone()).is_err() {
        exporter.add(&export(1, "disk-1"), content).unwrap();
    }
    exporter.start().unwrap();
    std::fs::write(directory.join("serving"), "").unwrap();
    let started = Instant::now();
    while started.elapsed() < 10 * PATIENCE {
        disk.full.store(directory.join("full").exists(), std::sync::atomic::Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Random writes, each read back at once and all again at the end, until the file `enough` appears.
fn write_and_verify(directory: &Path) {
    let file = File::options().read(true).write(true).open(directory.join("mount/disk-1")).unwrap();
    let mut model = vec![0; DISK_BYTES as usize];
    file.read_exact_at(&mut model, 0).unwrap();
    let mut random = StdRng::seed_from_u64(u64::from(std::process::id()));
    let mut writes: u64 = 0;
    let started = Instant::now();
    while !directory.join("enough").exists() && started.elapsed() < 4 * PATIENCE {
        let length = random.random_range(1..200_000_usize);
        let offset = random.random_range(0..model.len() - length);
        let byte = random.random();
        model[offset..offset + length].fill(byte);
        file.write_all_at(&model[offset..offset + length], offset as u64).unwrap();
        let mut back = vec![0; length];
        file.read_exact_at(&mut back, offset as u64).unwrap();
        assert_eq!(back, model[offset..offset + length], "write {writes} at {offset}");
        if writes.is_multiple_of(16) {
            file.sync_all().unwrap();
        }
        writes += 1;
        std::fs::write(directory.join("progress"), writes.to_string()).unwrap();
    }
    let mut back = vec![0; model.len()];
    file.read_exact_at(&mut back, 0).unwrap();
    assert!(back == model, "the whole disk differs after {writes} writes");
    std::fs::write(directory.join("verified"), writes.to_string()).unwrap();
}

fn write_once(directory: &Path) {
    let file = File::options().write(true).open(directory.join("mount/disk-1")).unwrap();
    std::fs::write(directory.join("writing"), "").unwrap();
    file.write_all_at(&[5; 8192], 0).unwrap();
    std::fs::write(directory.join("written"), "").unwrap();
}

/// Runs as another user than root.
fn be_refused(directory: &Path) {
    let disk = directory.join("mount/disk-1");
    for opened in [File::open(&disk), File::options().write(true).open(&disk)] {
        assert_eq!(opened.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    }
    let listed = std::fs::read_dir(directory.join("mount"));
    assert_eq!(listed.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    let mut byte = [0];
    File::open(directory.join("mount/image-2")).unwrap().read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [crate::memory::pattern(0)]);
    let own = File::options().read(true).write(true).open(directory.join("mount/disk-3")).unwrap();
    own.write_all_at(&[1], 0).unwrap();
    let chmod = own.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    assert_eq!(chmod.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    let connection = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    );
    let address = rustix::net::SocketAddrUnix::new(directory.join("socket")).unwrap();
    assert_eq!(rustix::net::connect(connection.unwrap(), &address), Err(rustix::io::Errno::ACCESS));
}
