//! Disks as block devices by ublk, with the kernel's real driver, as in the nested machine; elsewhere each test prints a line
//! and does nothing, unless AENV_MUST_TEST says that it must.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_export::ublk::{Settings, UblkExporter};
use aenv_export::{Content, Export, ExportError, Exporter as _};
use aenv_storage::block_service::{CreateImage, DiskState, DiskView};
use aenv_storage::{BLOCK_BYTES, BlockDevice, StorageError};
use daemon::{Direct, Stored, content, name};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::sync::Arc;

/// A service whose disks are block devices; nothing where there is no driver. Tests have an instance each: devices are the
/// whole host's.
async fn start(instance: &'static str) -> Option<Stored> {
    if let Err(error) = UblkExporter::probe() {
        // Written past the capture of the test runner, which hides what a passing test prints.
        let line = format!("SKIPPED, ublk is NOT tested: {error}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        return None;
    }
    Some(Stored::start_as(instance, "auto").await)
}

/// The export of a disk, as its service made it.
fn export_of(view: &DiskView) -> Export {
    Export { number: view.number, name: format!("disk-{}", view.name), owner: view.owner }
}

/// A disk of another program.
#[derive(Debug)]
struct Zeros;

impl BlockDevice for Zeros {
    fn size(&self) -> u64 {
        1 << 20
    }

    fn read_at(&self, buffer: &mut [u8], _offset: u64) -> Result<(), StorageError> {
        buffer.fill(0);
        Ok(())
    }

    fn write_at(&self, _data: &[u8], _offset: u64) -> Result<(), StorageError> {
        Ok(())
    }

    fn discard(&self, _offset: u64, _length: u64) -> Result<(), StorageError> {
        Ok(())
    }

    fn write_zeroes(&self, _offset: u64, _length: u64) -> Result<(), StorageError> {
        Ok(())
    }

    fn flush(&self) -> Result<(), StorageError> {
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_may_be_a_disks_stays_while_a_record_cannot_be_read() {
    let Some(stored) = start("unread").await else { return };
    let path = stored.disk("d", &[]).await.path.unwrap();
    let mut guest = Direct::open(&path);
    guest.write(1, &content(1, 1)).unwrap();
    let record = stored.disks().join("d/record.json");
    let whole = std::fs::read(&record).unwrap();
    stored.kill();
    std::fs::write(&record, "{").unwrap();
    stored.restart();
    assert_eq!(stored.client.disk(&name("d")).await.unwrap().state, DiskState::Failed);
    stored.kill();
    std::fs::write(&record, whole).unwrap();
    stored.restart();
    assert_eq!(stored.client.disk(&name("d")).await.unwrap().path.unwrap(), path);
    assert_eq!(guest.read(1).unwrap(), content(1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_whose_number_another_program_has_meanwhile_gets_another_one() {
    let Some(stored) = start("renumber").await else { return };
    let view = stored.disk("d", &[]).await;
    Direct::open(view.path.as_ref().unwrap()).write(1, &content(1, 1)).unwrap();
    stored.kill();
    // As after a restart of the host: the device is gone, and its number is another one's.
    UblkExporter::new(&Settings::new("renumber")).unwrap().remove(&export_of(&view)).unwrap();
    let other = UblkExporter::new(&Settings::new("another-program")).unwrap();
    let foreign = Export { number: view.number, name: "foreign".to_owned(), owner: 0 };
    let taken = loop {
        // The old device goes a moment later.
        match other.add(&foreign, Content::Disk(Arc::new(Zeros))) {
            Err(ExportError::Taken { .. }) => std::thread::sleep(std::time::Duration::from_millis(5)),
            added => break added.unwrap(),
        }
    };
    for _ in 0..2 {
        stored.restart();
        let again = stored.client.disk(&view.name).await.unwrap();
        assert_eq!((again.state, again.number == view.number), (DiskState::Ready, false), "{again:?}");
        assert_eq!(Direct::open(again.path.as_ref().unwrap()).read(1).unwrap(), content(1, 1));
        stored.kill();
    }
    assert_eq!(Direct::open(&taken).read(1).unwrap(), [0; BLOCK_BYTES as usize]);
    other.remove(&foreign).unwrap();
    stored.restart();
    stored.client.status().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_cannot_be_reached_ends_the_start_and_no_image() {
    let Some(stored) = start("unheld").await else { return };
    let layers = vec![stored.raw_layer("raw")];
    let create = CreateImage { name: name("memory"), layers, owner: 0, exported: true };
    let file = File::open(stored.client.create_image(&create).await.unwrap().path.unwrap()).unwrap();
    stored.kill();
    let (socket, aside) = (stored.run().join("holder.sock"), stored.run().join("holder.aside"));
    std::fs::rename(&socket, &aside).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    stored.restart();
    assert!(!stored.ended().success());
    drop(listener);
    std::fs::rename(&aside, &socket).unwrap();
    stored.restart();
    let mut block = [0; BLOCK_BYTES as usize];
    file.read_exact_at(&mut block, 4000 * BLOCK_BYTES).unwrap();
    assert_eq!(block, content(4000, 0));
}
