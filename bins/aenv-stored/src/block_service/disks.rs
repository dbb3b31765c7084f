//! Making and removing disks. The order of the steps is that of `records.rs`.

use super::Service;
use super::named_layers::NamedLayers;
use super::table::{DiskEntry, DiskLife};
use super::tops;
use crate::durable::DurableDisk;
use crate::failure::Failure;
use crate::locks::lock;
use crate::records::{DiskRecord, Stage};
use aenv_export::{Content, Export};
use aenv_storage::block_service::{CreateDisk, DiskView, Name};
use aenv_storage::layered_disk::LayeredDisk;
use aenv_storage::{BLOCK_BYTES, BlockDevice};
use std::sync::{Arc, PoisonError};

impl Service {
    /// Makes a disk, or tells of it when it was made by the same request before.
    pub(crate) fn create_disk(&self, request: CreateDisk) -> Result<DiskView, Failure> {
        if request.size == 0 || !request.size.is_multiple_of(BLOCK_BYTES) {
            let size = request.size;
            return Err(Failure::invalid(format!(
                "{size} is no size of a disk: a multiple of {BLOCK_BYTES} is"
            )));
        }
        // Held until the record is in the table: from then on the record keeps the layers.
        let collecting = self.collecting.read().unwrap_or_else(PoisonError::into_inner);
        let NamedLayers { layers, held } = self.canonical(request.layers)?;
        let mut record = DiskRecord {
            version: DiskRecord::VERSION,
            stage: Stage::Making,
            number: 0,
            way: self.exports.disks_by(),
            layers,
            size: request.size,
            quota: request.quota.unwrap_or(request.size),
            owner: request.owner,
            name: request.name,
        };
        let mut table = lock(&self.table);
        if let Some(existing) = table.disks.get(&record.name).cloned() {
            drop((table, collecting));
            return self.made_before(&existing, &record);
        }
        record.number =
            self.numbers.take(|number| table.uses_number(number) || self.exports.is_on_host(number))?;
        let entry = DiskEntry::new(record.name.clone(), Some(record.clone()), DiskLife::Making);
        let operation = lock(&entry.operation);
        table.disks.insert(record.name.clone(), Arc::clone(&entry));
        drop((table, collecting));

        let made = self.make_disk(&record);
        drop(held);
        match made {
            Ok(live) => {
                *lock(&entry.life) = live;
                drop(operation);
                self.view_of_disk(&entry)
            }
            Err(failure) => {
                *lock(&entry.life) = DiskLife::Deleting;
                entry.release_layers();
                if let Err(left) = self.remove_all_of(&entry, &record) {
                    tracing::error!(disk = %record.name, %left, "a disk that could not be made is removed later");
                }
                drop(operation);
                self.prune();
                Err(failure)
            }
        }
    }

    fn made_before(&self, existing: &Arc<DiskEntry>, wished: &DiskRecord) -> Result<DiskView, Failure> {
        // If it is just being made, by a request whose caller went away, that is waited for.
        drop(lock(&existing.operation));
        let same = existing.record.as_ref().is_some_and(|record| record.is_same_disk(wished));
        match &*lock(&existing.life) {
            DiskLife::Live { .. } | DiskLife::Waiting { .. } | DiskLife::Failed { .. } if same => {}
            DiskLife::Live { .. } | DiskLife::Waiting { .. } | DiskLife::Failed { .. } => {
                return Err(Failure::conflict(format!("there is another disk {}", wished.name)));
            }
            DiskLife::Kept { .. } => {
                return Err(Failure::conflict(format!(
                    "disk {} was deleted, but others are made of it: choose another name",
                    wished.name
                )));
            }
            DiskLife::Making | DiskLife::Deleting | DiskLife::Gone => {
                return Err(Failure::conflict(format!(
                    "disk {} could not be made, or is being removed",
                    wished.name
                )));
            }
        }
        self.view_of_disk(existing)
    }

    fn make_disk(&self, record: &DiskRecord) -> Result<DiskLife, Failure> {
        let directory = self.directories.disk(&record.name);
        std::fs::create_dir(&directory).map_err(Failure::io("make", &directory))?;
        record.write(&self.directories)?;
        let lower = self.compose(&record.layers)?;
        if let Some(lower) = &lower
            && lower.size() > record.size
        {
            let (size, needed) = (record.size, lower.size());
            return Err(Failure::invalid(format!("the layers have {needed} bytes, the disk only {size}")));
        }
        let disk = tops::create(&self.directories.tops(&record.name), lower, record)?;
        let device = self.device(record, &disk);
        let path = self.exports.add(record.way, &export_of(record), Content::Disk(Arc::clone(&device)))?;
        DiskRecord { stage: Stage::Ready, ..record.clone() }.write(&self.directories)?;
        Ok(DiskLife::Live { path, disk, device })
    }

    /// What is exported of a disk.
    pub(super) fn device(&self, record: &DiskRecord, disk: &Arc<LayeredDisk>) -> Arc<dyn BlockDevice> {
        let disk: Arc<dyn BlockDevice> = Arc::clone(disk) as _;
        Arc::new(DurableDisk::new(disk, &self.directories, &record.name))
    }

    /// Removes a disk; what others are made of stays.
    pub(crate) fn delete_disk(&self, name: &Name) -> Result<(), Failure> {
        let Some(entry) = lock(&self.table).disks.get(name).cloned() else { return Ok(()) };
        let operation = lock(&entry.operation);
        if matches!(&*lock(&entry.life), DiskLife::Kept { .. } | DiskLife::Gone) {
            return Ok(());
        }
        match &entry.record {
            // Its export is not known. It was lost with the power of the host, or the host never had it.
            None => {
                if !lock(&self.table).tops_used_by_others(name).is_empty() {
                    return Err(Failure::conflict(format!(
                        "others are made of disk {name}, whose record cannot be read: mend it, or delete them first"
                    )));
                }
                self.forget(&entry)?;
            }
            Some(record) => {
                DiskRecord { stage: Stage::Deleting, ..record.clone() }.write(&self.directories)?;
                entry.release_layers();
                self.remove_all_of(&entry, record)?;
            }
        }
        drop(operation);
        self.prune();
        Ok(())
    }

    /// The rest of a removal, once the record says that it was begun.
    pub(super) fn remove_all_of(&self, entry: &DiskEntry, record: &DiskRecord) -> Result<(), Failure> {
        self.exports.remove(record.way, &export_of(record))?;
        let _compacting = lock(&entry.compacting);
        let sealed = {
            let mut life = lock(&entry.life);
            let sealed = match &*life {
                DiskLife::Live { disk, .. } => Some(disk.sealed_tops()),
                DiskLife::Kept { tops } => Some(tops.clone()),
                _ => None,
            };
            // Others go on to find what they are made of, whatever fails from here on.
            *life = sealed.clone().map_or(DiskLife::Deleting, |tops| DiskLife::Kept { tops });
            sealed
        };
        let (used, unknown) = {
            let table = lock(&self.table);
            (table.tops_used_by_others(&entry.name), table.has_unreadable())
        };
        if used.is_empty() && !unknown {
            // Its files are held by whoever has them open.
            drop(sealed);
            *lock(&entry.life) = DiskLife::Deleting;
            return self.forget(entry);
        }
        let directory = self.directories.tops(&entry.name);
        let sealed = sealed.unwrap_or_else(|| tops::open_kept(&directory));
        if used.is_empty() && sealed.is_empty() {
            return self.forget(entry);
        }
        // Should a step fail, the record says that it is being deleted: the next start does the rest.
        *lock(&entry.life) = DiskLife::Kept { tops: sealed.clone() };
        DiskRecord { stage: Stage::Kept, ..record.clone() }.write(&self.directories)?;
        // Before any of its files go: as a disk that is to be used it would be a broken one.
        tops::make_all_durable(&self.directories.traces_of_disk(&entry.name))?;
        // All of them, as long as nobody knows whether a record that cannot be read names one.
        let tops = if unknown { sealed } else { tops::keep_only(&directory, sealed, &used)? };
        *lock(&entry.life) = DiskLife::Kept { tops };
        Ok(())
    }
}

/// How a disk is exported.
pub(super) fn export_of(record: &DiskRecord) -> Export {
    Export { number: record.number, name: format!("disk-{}", record.name), owner: record.owner }
}
