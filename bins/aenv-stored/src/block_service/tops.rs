//! Sealing, and what deleted disks leave for others. A top is called by its id, in hexadecimal: names of its files are used
//! again by other disks.

use super::table::{DiskEntry, DiskLife};
use super::{Service, no_room};
use crate::directories::{make_durable, remove_file, remove_tree};
use crate::failure::Failure;
use crate::locks::lock;
use crate::records::DiskRecord;
use aenv_storage::block_service::{DiskView, InvalidName, LayerRef, Name, Sealed};
use aenv_storage::layered_disk::{LayeredDisk, Rewound};
use aenv_storage::top::{BootId, SealedTop};
use aenv_storage::{EmptyImage, Image};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

impl Service {
    /// The disk that is to be used, with its record.
    fn live<'a>(&self, entry: &'a DiskEntry) -> Result<(Arc<LayeredDisk>, &'a DiskRecord), Failure> {
        let name = &entry.name;
        match (&*lock(&entry.life), &entry.record) {
            (DiskLife::Live { disk, .. }, Some(record)) => Ok((Arc::clone(disk), record)),
            (DiskLife::Failed { reason, .. }, _) => {
                Err(Failure::unavailable(format!("disk {name} cannot be used: {reason}")))
            }
            (DiskLife::Waiting { .. }, _) => Err(no_room(name)),
            _ => Err(Failure::not_found(format!("disk {name} was deleted"))),
        }
    }

    /// Seals the writable top `top` of a disk, or the present one. One that was sealed before is told again.
    pub(crate) fn seal_disk(&self, name: &Name, top: Option<Name>) -> Result<Sealed, Failure> {
        let entry = self.disk_entry(name)?;
        let _operation = lock(&entry.operation);
        let (disk, record) = self.live(&entry)?;
        let writable = name_of_id(disk.current_top_id())?;
        let sealed = match top {
            Some(top) if top != writable => top,
            _ => {
                disk.seal()?;
                writable
            }
        };
        let mut layers = record.layers.clone();
        for sealed_top in disk.sealed_tops() {
            let top = name_of(&sealed_top)?;
            let last = top == sealed;
            layers.push(LayerRef::Top { disk: name.clone(), top });
            if last {
                let writable_top = name_of_id(disk.current_top_id())?;
                let stored_bytes = Some(disk.usage().stored_bytes);
                return Ok(Sealed { sealed, layers, writable_top, stored_bytes });
            }
        }
        Err(Failure::not_found(format!("disk {name} has no top {sealed}")))
    }

    /// Drops what was written to a disk since its top `top` was sealed.
    pub(crate) fn rewind_disk(&self, name: &Name, top: &Name) -> Result<DiskView, Failure> {
        let entry = self.disk_entry(name)?;
        let _operation = lock(&entry.operation);
        // Nobody comes to stand on what is dropped: whoever does has entered the table before, or finds it gone and fails.
        let _alone = self.collecting.write().unwrap_or_else(PoisonError::into_inner);
        let (disk, _) = self.live(&entry)?;
        let tops = disk.sealed_tops();
        let missing = || Failure::not_found(format!("disk {name} has no sealed top {top}"));
        let position =
            tops.iter().position(|it| name_of(it).is_ok_and(|it| it == *top)).ok_or_else(missing)?;
        let used = lock(&self.table).tops_used_by_others(name);
        for later in &tops[position + 1..] {
            let later = name_of(later)?;
            if used.contains(&later) {
                let what = format!("others are made of what disk {name} sealed after {top}: {later}");
                return Err(Failure::conflict(what));
            }
        }
        let id = tops[position].id();
        drop(tops);
        match disk.rewind(&id)? {
            Rewound::Unknown => return Err(missing()),
            Rewound::Dropped { freed_bytes } => {
                tracing::info!(disk = %name, %top, freed_bytes, "dropped what was written since a seal");
            }
            Rewound::NothingToDo => {}
        }
        self.view_of_disk(&entry)
    }

    /// Makes durable what was written to a disk.
    pub(crate) fn flush_disk(&self, name: &Name) -> Result<(), Failure> {
        let entry = self.disk_entry(name)?;
        // As it is exported: the first flush has more to do.
        let device = match &*lock(&entry.life) {
            DiskLife::Live { device, .. } => Some(Arc::clone(device)),
            _ => None,
        };
        match device {
            Some(device) => Ok(device.flush()?),
            None => self.live(&entry).map(drop),
        }
    }

    /// Makes durable what was sealed of a disk, what that stands on, and that there are these disks.
    pub(crate) fn make_disk_durable(&self, name: &Name) -> Result<(), Failure> {
        let entry = self.disk_entry(name)?;
        let (disk, record) = self.live(&entry)?;
        disk.sealed_image().make_durable()?;
        self.make_records_durable(&record.layers)?;
        make_all_durable(&self.directories.traces_of_disk(name))
    }

    /// Makes durable that there are the disks whose tops these layers are: without their records nothing finds the tops.
    pub(super) fn make_records_durable(&self, layers: &[LayerRef]) -> Result<(), Failure> {
        let disks: BTreeSet<&Name> = layers
            .iter()
            .filter_map(|layer| match layer {
                LayerRef::Top { disk, .. } => Some(disk),
                LayerRef::File { .. } | LayerRef::Raw { .. } => None,
            })
            .collect();
        disks.into_iter().try_for_each(|disk| make_all_durable(&self.directories.traces_of_disk(disk)))
    }

    /// Forgets a disk of which nobody needs anything any more.
    pub(super) fn forget(&self, entry: &DiskEntry) -> Result<(), Failure> {
        remove_tree(&self.directories.disk(&entry.name))?;
        *lock(&entry.life) = DiskLife::Gone;
        lock(&self.table).disks.remove(&entry.name);
        Ok(())
    }

    /// Removes what deleted disks kept for others that are gone now. What cannot be removed is tried again next time. Nothing
    /// is removed while a record cannot be read. Disks whose tops are all needed, as most are, cost one look at all layers together.
    pub(crate) fn prune(&self) {
        let used = lock(&self.table).all_tops_used_by_others();
        self.prune_those(|entry, tops| {
            let used = used.get(&entry.name);
            let is_used = |top: &Arc<SealedTop>| {
                used.is_some_and(|used| name_of(top).is_ok_and(|top| used.contains(&top)))
            };
            tops.is_empty() || !tops.iter().all(is_used)
        });
    }

    /// As [`Self::prune`], and what a removal that was cut short left beside the tops of any disk.
    pub(crate) fn prune_all(&self) {
        self.prune_those(|_, _| true);
    }

    fn prune_those(&self, is_one: impl Fn(&DiskEntry, &[Arc<SealedTop>]) -> bool) {
        let entries: Vec<Arc<DiskEntry>> = lock(&self.table).disks.values().cloned().collect();
        // Others are not waited for: one that is being deleted now prunes at its end.
        let is_wanted = |entry: &Arc<DiskEntry>| match &*lock(&entry.life) {
            DiskLife::Kept { tops } => is_one(entry, tops),
            _ => false,
        };
        for entry in entries.into_iter().filter(is_wanted) {
            let _operation = lock(&entry.operation);
            if let Err(left) = self.prune_one(&entry) {
                tracing::error!(disk = %entry.name, %left, "what nobody needs cannot be removed");
            }
        }
    }

    fn prune_one(&self, entry: &DiskEntry) -> Result<(), Failure> {
        // Whoever comes to need one of its tops has entered the table before, or finds it gone and fails.
        let mut life = lock(&entry.life);
        let DiskLife::Kept { tops } = &mut *life else { return Ok(()) };
        let used = {
            let table = lock(&self.table);
            if table.has_unreadable() {
                return Ok(());
            }
            table.tops_used_by_others(&entry.name)
        };
        if !used.is_empty() {
            // Should it fail, all of them stay open.
            *tops = keep_only(&self.directories.tops(&entry.name), tops.clone(), &used)?;
            return Ok(());
        }
        tops.clear();
        drop(life);
        self.forget(entry)
    }
}

/// Returns when all of them survive a power cut.
pub(super) fn make_all_durable(paths: &[PathBuf]) -> Result<(), Failure> {
    paths.iter().try_for_each(|path| make_durable(path).map_err(Failure::io("make durable", path)))
}

/// Makes the tops of a new disk.
pub(super) fn create(
    directory: &Path,
    lower: Option<Arc<dyn Image>>,
    record: &DiskRecord,
) -> Result<Arc<LayeredDisk>, Failure> {
    let lower = lower.unwrap_or_else(|| Arc::new(EmptyImage::new(record.size)));
    Ok(Arc::new(LayeredDisk::create(directory, lower, record.size, record.quota, &boot()?)?))
}

/// Opens the tops of a disk.
pub(super) fn open(
    directory: &Path,
    lower: Option<Arc<dyn Image>>,
    record: &DiskRecord,
) -> Result<Arc<LayeredDisk>, Failure> {
    let lower = lower.unwrap_or_else(|| Arc::new(EmptyImage::new(record.size)));
    Ok(Arc::new(LayeredDisk::open(directory, lower, &boot()?)?))
}

fn boot() -> Result<BootId, Failure> {
    BootId::of_running_kernel()
        .map_err(|error| Failure::internal(format!("cannot read the boot id: {error}")))
}

/// The sealed top of this name.
pub(super) fn find(tops: &[Arc<SealedTop>], name: &Name) -> Option<Arc<SealedTop>> {
    tops.iter().find(|top| name_of(top).is_ok_and(|found| found == *name)).cloned()
}

/// What a top is called.
pub(crate) fn name_of(top: &SealedTop) -> Result<Name, Failure> {
    name_of_id(top.id())
}

/// What the top of this id is called.
pub(super) fn name_of_id(id: [u8; 16]) -> Result<Name, Failure> {
    hex::encode(id).parse().map_err(|error: InvalidName| Failure::internal(error.to_string()))
}

/// The sealed tops of a deleted disk. One that cannot be opened, the one that was written last among them, is left out; whoever
/// is made of it says so.
pub(crate) fn open_kept(directory: &Path) -> Vec<Arc<SealedTop>> {
    let opened = boot().and_then(|boot| {
        let entries = std::fs::read_dir(directory).map_err(Failure::io("list", directory))?;
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let logs = paths.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        Ok(logs.map(|path| SealedTop::open(&path, &boot)).collect::<Vec<_>>())
    });
    let results = opened.unwrap_or_else(|failure| {
        tracing::error!(%failure, "the tops that a deleted disk kept cannot be opened");
        Vec::new()
    });
    let told =
        |error: &aenv_storage::StorageError| tracing::info!(%error, "a top of a deleted disk is left out");
    results.into_iter().filter_map(|opened| opened.inspect_err(told).ok()).collect()
}

/// Removes all files of a deleted disk's tops but those of `used`.
pub(crate) fn keep_only(
    directory: &Path,
    tops: Vec<Arc<SealedTop>>,
    used: &BTreeSet<Name>,
) -> Result<Vec<Arc<SealedTop>>, Failure> {
    let kept: Vec<_> =
        tops.into_iter().filter(|top| name_of(top).is_ok_and(|name| used.contains(&name))).collect();
    if kept.len() < used.len() {
        // Which files the others are is not known, so none is removed.
        tracing::error!(directory = %directory.display(), "tops that others are made of are missing or damaged");
        return Ok(kept);
    }
    let stem = |path: &Path| path.file_stem().map(ToOwned::to_owned);
    let stems: BTreeSet<_> = kept.iter().filter_map(|top| stem(&top.path())).collect();
    for entry in std::fs::read_dir(directory).map_err(Failure::io("list", directory))? {
        let path = entry.map_err(Failure::io("list", directory))?.path();
        if stem(&path).is_none_or(|stem| !stems.contains(&stem)) {
            remove_file(&path)?;
        }
    }
    Ok(kept)
}
