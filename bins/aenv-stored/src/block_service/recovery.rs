//! The start: every disk and image as it was, every export taken over, half-done work finished or undone.
//!
//! ```text
//! record        what is done
//! none, Making  undone: export and files removed
//! Ready         opened after the disks it is made of, its export taken over, or made anew when the kernel lost it
//! Deleting      its sealed tops are opened for the others, then finished
//! Kept          its tops are opened for the others
//! ```
//! Nothing of one disk keeps the others from being served: one that cannot be opened is exported as one that fails, or, for want
//! of room on the host, as one whose requests wait.

use super::Service;
use super::disks::export_of;
use super::garbage::remove_set_aside;
use super::images::export_of as image_export_of;
use super::reopening::{failed_disk, failed_image};
use super::table::{DiskEntry, DiskLife, ImageEntry, ImageLife, Table};
use super::tops;
use crate::directories::{Directories, remove_file, remove_tree};
use crate::exports::Exports;
use crate::failure::Failure;
use crate::layers::Layers;
use crate::locks::lock;
use crate::numbers::Numbers;
use crate::records::{DiskRecord, Found, ImageRecord, Stage, Way, read_disks, read_images};
use crate::waiting::Waiting;
use aenv_export::Content;
use aenv_storage::BlockDevice;
use aenv_storage::block_service::{ErrorCode, LayerRef, Name};
use aenv_storage::layered_disk::LayeredDisk;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};

impl Service {
    /// Takes over what the last process left. Afterwards the exports can be started.
    pub(crate) fn recover(
        directories: Directories,
        layers: Layers,
        exports: Exports,
        boot: &str,
        instance: &Name,
    ) -> Result<Self, Failure> {
        remove_set_aside(&directories);
        let (disks, images) = (read_disks(&directories)?, read_images(&directories)?);
        let used = disks.iter().filter_map(number_of_disk).chain(images.iter().filter_map(number_of_image));
        let numbers = Numbers::open(directories.numbers(), boot, instance.as_str(), used)?;
        let (table, collecting) = (Mutex::new(Table::default()), RwLock::new(()));
        let service = Self { directories, layers, exports, numbers, table, collecting };
        let half_done = service.enter_disks(disks);
        let half_removed = service.enter_images(images);
        service.open_disks();
        service.open_images();
        service.finish(&half_done, &half_removed);
        service.prune_all();
        Ok(service)
    }

    /// Fills the table; returns the disks whose making or removal was not finished.
    fn enter_disks(&self, found: Vec<Found<DiskRecord>>) -> Vec<Arc<DiskEntry>> {
        let mut half_done = Vec::new();
        for found in found {
            let entry = match found {
                Found::Orphan(name) => {
                    tracing::info!(disk = %name, "removing a directory without a record");
                    if let Err(left) = remove_tree(&self.directories.disk(&name)) {
                        tracing::error!(disk = %name, %left, "it stays until the next start or collection of garbage");
                    }
                    continue;
                }
                Found::Unreadable(name, reason) => {
                    tracing::error!(disk = %name, reason, "a disk is lost until its record is mended or it is deleted");
                    DiskEntry::new(name, None, DiskLife::Failed { path: None, reason })
                }
                Found::Record(record) => {
                    let stage = record.stage;
                    let entry = DiskEntry::new(record.name.clone(), Some(record), DiskLife::Making);
                    if stage == Stage::Making {
                        *lock(&entry.life) = DiskLife::Deleting;
                    }
                    if matches!(stage, Stage::Making | Stage::Deleting) {
                        half_done.push(Arc::clone(&entry));
                    }
                    if stage != Stage::Ready {
                        entry.release_layers();
                    }
                    entry
                }
            };
            lock(&self.table).disks.insert(entry.name.clone(), entry);
        }
        half_done
    }

    fn enter_images(&self, found: Vec<Found<ImageRecord>>) -> Vec<Arc<ImageEntry>> {
        let mut half_done = Vec::new();
        for found in found {
            let entry = match found {
                Found::Orphan(name) => {
                    if let Err(left) = remove_file(&self.directories.image_record(&name)) {
                        tracing::error!(image = %name, %left, "a file without a record stays until the next start");
                    }
                    continue;
                }
                Found::Unreadable(name, reason) => {
                    tracing::error!(image = %name, reason, "an image is lost until its record is mended or it is deleted");
                    ImageEntry::new(name, None, ImageLife::Failed { path: None, reason })
                }
                Found::Record(record) => {
                    let stage = record.stage;
                    let entry = ImageEntry::new(record.name.clone(), Some(record), ImageLife::Making);
                    if stage != Stage::Ready {
                        entry.release_layers();
                        *lock(&entry.life) = ImageLife::Deleting;
                        half_done.push(Arc::clone(&entry));
                    }
                    entry
                }
            };
            lock(&self.table).images.insert(entry.name.clone(), entry);
        }
        half_done
    }

    /// Opens disks in an order in which each comes after those it is made of.
    fn open_disks(&self) {
        let mut waiting: Vec<Arc<DiskEntry>> = {
            let table = lock(&self.table);
            let making = |entry: &&Arc<DiskEntry>| matches!(&*lock(&entry.life), DiskLife::Making);
            table.disks.values().filter(making).cloned().collect()
        };
        loop {
            let names: BTreeSet<Name> = waiting.iter().map(|entry| entry.name.clone()).collect();
            let (later, now): (Vec<_>, Vec<_>) =
                waiting.into_iter().partition(|entry| stands_on_one_of(entry, &names));
            if now.is_empty() {
                for record in later.iter().filter_map(|entry| entry.record.as_ref()) {
                    self.fail_disk(record, "it is made of itself".to_owned());
                }
                return;
            }
            for entry in &now {
                self.open_disk(entry);
            }
            waiting = later;
        }
    }

    fn open_disk(&self, entry: &DiskEntry) {
        let Some(record) = &entry.record else { return };
        if record.stage != Stage::Ready {
            let tops = tops::open_kept(&self.directories.tops(&entry.name));
            *lock(&entry.life) = DiskLife::Kept { tops };
            return;
        }
        let served = self.open_tops(record).and_then(|(disk, device)| {
            let (record, path) = self.take_over(record, Content::Disk(Arc::clone(&device)))?;
            let path =
                path.map_or_else(|| self.export_anew(&record, Content::Disk(Arc::clone(&device))), Ok)?;
            Ok((record, DiskLife::Live { path, disk, device }))
        });
        match served {
            Ok((record, life)) => self.enter(record, life),
            Err(failure) if failure.code == ErrorCode::NoSpace => self.let_disk_wait(record, &failure),
            Err(failure) => self.fail_disk(record, failure.message),
        }
    }

    /// What a disk is, and what is exported of it.
    pub(super) fn open_tops(
        &self,
        record: &DiskRecord,
    ) -> Result<(Arc<LayeredDisk>, Arc<dyn BlockDevice>), Failure> {
        let lower = self.compose(&record.layers)?;
        let disk = tops::open(&self.directories.tops(&record.name), lower, record)?;
        let device = self.device(record, &disk);
        Ok((disk, device))
    }

    fn enter(&self, record: DiskRecord, life: DiskLife) {
        let name = record.name.clone();
        lock(&self.table).disks.insert(name.clone(), DiskEntry::new(name, Some(record), life));
    }

    /// A number for an export that has none.
    fn free_number(&self) -> Result<u32, Failure> {
        let table = lock(&self.table);
        self.numbers.take(|number| table.uses_number(number) || self.exports.is_on_host(number))
    }

    /// Exports a disk as it was exported. Where that is gone there is no path, and the record says how it is to be exported
    /// anew.
    fn take_over(
        &self,
        record: &DiskRecord,
        content: Content,
    ) -> Result<(DiskRecord, Option<PathBuf>), Failure> {
        if let Some(path) = self.exports.recover(record.way, &export_of(record), content)? {
            return Ok((record.clone(), Some(path)));
        }
        let way = self.exports.disks_by();
        let number = match way {
            // The host has restarted, and another instance was faster.
            Way::Ublk if self.exports.is_on_host(record.number) => self.free_number()?,
            _ => record.number,
        };
        Ok((DiskRecord { way, number, ..record.clone() }, None))
    }

    /// Exports a disk that is not exported any more, as its record says.
    pub(super) fn export_anew(&self, record: &DiskRecord, content: Content) -> Result<PathBuf, Failure> {
        record.write(&self.directories)?;
        self.exports.add(record.way, &export_of(record), content)
    }

    /// A disk that the host has no room to open lets its guest wait until it has, see `reopening`.
    fn let_disk_wait(&self, record: &DiskRecord, failure: &Failure) {
        tracing::warn!(disk = %record.name, %failure, "a disk waits for room on the host");
        let stand_in = Waiting::new(record.size, self.directories.tops(&record.name));
        match self.take_over(record, Content::Disk(Arc::clone(&stand_in) as _)) {
            // One that is not exported has no guest that waits.
            Ok((record, path)) => self.enter(record, DiskLife::Waiting { path, stand_in }),
            Err(failure) => self.fail_disk(record, failure.message),
        }
    }

    /// A disk that cannot be opened answers, so that its guest fails and does not wait for ever.
    fn fail_disk(&self, record: &DiskRecord, reason: String) {
        tracing::error!(disk = %record.name, reason, "a disk cannot be used");
        let content = || Content::Disk(failed_disk(record, &reason));
        let exported = self.take_over(record, content()).and_then(|(record, path)| {
            let path = path.map_or_else(|| self.export_anew(&record, content()), Ok)?;
            Ok((record, path))
        });
        match exported {
            Ok((record, path)) => self.enter(record, DiskLife::Failed { path: Some(path), reason }),
            Err(error) => {
                tracing::error!(disk = %record.name, %error, "it is not even exported");
                self.enter(record.clone(), DiskLife::Failed { path: None, reason });
            }
        }
    }

    fn open_images(&self) {
        let entries: Vec<Arc<ImageEntry>> = lock(&self.table).images.values().cloned().collect();
        for entry in entries {
            let making = matches!(&*lock(&entry.life), ImageLife::Making);
            if let Some(record) = entry.record.as_ref().filter(|_| making) {
                let life =
                    self.open_image(record).unwrap_or_else(|failure| self.failed_image(record, failure));
                *lock(&entry.life) = life;
            }
        }
    }

    fn open_image(&self, record: &ImageRecord) -> Result<ImageLife, Failure> {
        match self.image_of(record) {
            Ok(image) => {
                let path = self.take_over_image(record, Content::Image(Arc::clone(&image)))?;
                Ok(ImageLife::Live { path, image })
            }
            Err(failure) if failure.code == ErrorCode::NoSpace => {
                tracing::warn!(image = %record.name, %failure, "an image waits for room on the host");
                let stand_in = Waiting::new(record.size, self.directories.image_record(&record.name));
                let path = self.take_over_image(record, Content::Image(Arc::clone(&stand_in) as _))?;
                Ok(ImageLife::Waiting { path, stand_in })
            }
            Err(failure) => Err(failure),
        }
    }

    /// Exports an image, if it is one that is exported.
    fn take_over_image(&self, record: &ImageRecord, content: Content) -> Result<Option<PathBuf>, Failure> {
        match record.exported {
            true => self.exports.take_over_image(&image_export_of(record), content).map(Some),
            false => Ok(None),
        }
    }

    fn failed_image(&self, record: &ImageRecord, failure: Failure) -> ImageLife {
        let reason = failure.message;
        tracing::error!(image = %record.name, reason, "an image cannot be used");
        let exported = self.take_over_image(record, Content::Image(failed_image(record, &reason)));
        let path = exported.unwrap_or_else(|error| {
            tracing::error!(image = %record.name, %error, "it is not even exported");
            None
        });
        ImageLife::Failed { path, reason }
    }

    /// Undoes what was being made, and removes what was being removed. What cannot be is tried again when it is deleted.
    fn finish(&self, disks: &[Arc<DiskEntry>], images: &[Arc<ImageEntry>]) {
        for entry in images {
            let Some(record) = &entry.record else { continue };
            if let Err(left) = self.remove_image(entry, record) {
                tracing::error!(image = %entry.name, %left, "an image cannot be removed");
            }
        }
        for entry in disks {
            let Some(record) = &entry.record else { continue };
            if let Err(left) = self.remove_all_of(entry, record) {
                tracing::error!(disk = %entry.name, %left, "a disk cannot be removed");
            }
        }
    }
}

fn stands_on_one_of(entry: &DiskEntry, names: &BTreeSet<Name>) -> bool {
    let layers = entry.record.iter().flat_map(|record| &record.layers);
    let mut tops = layers.filter_map(|layer| match layer {
        LayerRef::Top { disk, .. } => Some(disk),
        _ => None,
    });
    // What is left of a deleted disk needs nothing below it.
    let ready = entry.record.as_ref().is_some_and(|record| record.stage == Stage::Ready);
    ready && tops.any(|disk| names.contains(disk))
}

fn number_of_disk(found: &Found<DiskRecord>) -> Option<u32> {
    match found {
        Found::Record(record) => Some(record.number),
        _ => None,
    }
}

fn number_of_image(found: &Found<ImageRecord>) -> Option<u32> {
    match found {
        Found::Record(record) => Some(record.number),
        _ => None,
    }
}
