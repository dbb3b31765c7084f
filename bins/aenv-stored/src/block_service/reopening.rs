//! Disks and images that could not be opened because the host had no room: opened as soon as it has.
//!
//! ```text
//! recovery ─ no room ─▶ Waiting ─ tried again and again ─▶ Live, or Failed for another reason
//!                          └── requests of guests wait meanwhile
//! ```
//! What is made of such a disk waits with it. Owns nothing.

use super::Service;
use super::table::{DiskEntry, DiskLife, ImageEntry, ImageLife};
use crate::durable::{FailedDisk, FailedImage};
use crate::failure::Failure;
use crate::locks::lock;
use crate::records::{DiskRecord, ImageRecord};
use aenv_export::Content;
use aenv_storage::block_service::ErrorCode;
use aenv_storage::{BlockDevice, Image};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Between two tries.
const PAUSE: Duration = Duration::from_millis(500);

/// Starts the thread that tries, if anything waits; it ends when nothing does, or with the service.
pub(crate) fn start(service: &Arc<Service>) -> std::io::Result<()> {
    if !service.has_waiting() {
        return Ok(());
    }
    let service = Arc::downgrade(service);
    std::thread::Builder::new().name("reopening".to_owned()).spawn(move || run(&service)).map(drop)
}

fn run(service: &Weak<Service>) {
    loop {
        std::thread::sleep(PAUSE);
        match service.upgrade() {
            Some(service) if service.has_waiting() => service.reopen(),
            _ => return,
        }
    }
}

impl Service {
    /// All disks and images, of which nobody's life is looked at under the lock of the table.
    fn entries(&self) -> (Vec<Arc<DiskEntry>>, Vec<Arc<ImageEntry>>) {
        let table = lock(&self.table);
        (table.disks.values().cloned().collect(), table.images.values().cloned().collect())
    }

    fn has_waiting(&self) -> bool {
        let (disks, images) = self.entries();
        disks.iter().any(|entry| matches!(&*lock(&entry.life), DiskLife::Waiting { .. }))
            || images.iter().any(|entry| matches!(&*lock(&entry.life), ImageLife::Waiting { .. }))
    }

    /// Tries each of them once. What comes before those it is made of is tried again the next time.
    fn reopen(&self) {
        let (disks, images) = self.entries();
        for entry in disks {
            let _operation = lock(&entry.operation);
            self.reopen_disk(&entry);
        }
        for entry in images {
            let _operation = lock(&entry.operation);
            self.reopen_image(&entry);
        }
    }

    fn reopen_disk(&self, entry: &DiskEntry) {
        let (path, stand_in) = match &*lock(&entry.life) {
            DiskLife::Waiting { path, stand_in } => (path.clone(), Arc::clone(stand_in)),
            _ => return,
        };
        let Some(record) = &entry.record else { return };
        let opened = self.open_tops(record).and_then(|(disk, device)| {
            let path = match path.clone() {
                Some(path) => path,
                None => self.export_anew(record, Content::Disk(Arc::clone(&device)))?,
            };
            Ok((path, disk, device))
        });
        let life = match opened {
            Err(failure) if failure.code == ErrorCode::NoSpace => return,
            Ok((path, disk, device)) => {
                tracing::info!(disk = %entry.name, "there is room: the disk goes on");
                stand_in.open(Arc::clone(&device));
                DiskLife::Live { path, disk, device }
            }
            Err(failure) => {
                let reason = failure.message;
                tracing::error!(disk = %entry.name, reason, "a disk cannot be used");
                stand_in.open(failed_disk(record, &reason));
                DiskLife::Failed { path, reason }
            }
        };
        *lock(&entry.life) = life;
    }

    fn reopen_image(&self, entry: &ImageEntry) {
        let (path, stand_in) = match &*lock(&entry.life) {
            ImageLife::Waiting { path, stand_in } => (path.clone(), Arc::clone(stand_in)),
            _ => return,
        };
        let Some(record) = &entry.record else { return };
        let life = match self.image_of(record) {
            Err(failure) if failure.code == ErrorCode::NoSpace => return,
            Ok(image) => {
                stand_in.open(Arc::clone(&image));
                ImageLife::Live { path, image }
            }
            Err(Failure { message: reason, .. }) => {
                tracing::error!(image = %entry.name, reason, "an image cannot be used");
                stand_in.open(failed_image(record, &reason));
                ImageLife::Failed { path, reason }
            }
        };
        *lock(&entry.life) = life;
    }
}

/// A disk that answers, so that its guest fails and does not wait for ever.
pub(super) fn failed_disk(record: &DiskRecord, reason: &str) -> Arc<dyn BlockDevice> {
    let name = format!("disk {}", record.name);
    Arc::new(FailedDisk { size: record.size, name, reason: reason.to_owned() })
}

/// The same for an image.
pub(super) fn failed_image(record: &ImageRecord, reason: &str) -> Arc<dyn Image> {
    let name = format!("image {}", record.name);
    Arc::new(FailedImage { size: record.size, name, reason: reason.to_owned() })
}
