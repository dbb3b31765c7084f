//! What is told of disks, images and the service. Changes nothing.

use super::Service;
use super::table::{DiskEntry, DiskLife, ImageEntry, ImageLife};
use super::tops::{name_of, name_of_id};
use crate::failure::Failure;
use crate::locks::lock;
use aenv_storage::block_service::{
    DiskList, DiskState, DiskView, ImageList, ImageView, Name, StalledView, Status, TopView,
};
use std::sync::Arc;

impl Service {
    pub(super) fn disk_entry(&self, name: &Name) -> Result<Arc<DiskEntry>, Failure> {
        let found = lock(&self.table).disks.get(name).cloned();
        found.ok_or_else(|| Failure::not_found(format!("there is no disk {name}")))
    }

    /// One disk.
    pub(crate) fn disk(&self, name: &Name) -> Result<DiskView, Failure> {
        self.view_of_disk(&*self.disk_entry(name)?)
    }

    /// All disks that can be told of: not those that are just being made or removed.
    pub(crate) fn disks(&self) -> DiskList {
        let entries: Vec<Arc<DiskEntry>> = lock(&self.table).disks.values().cloned().collect();
        DiskList { disks: entries.iter().filter_map(|entry| self.view_of_disk(entry).ok()).collect() }
    }

    pub(super) fn view_of_disk(&self, entry: &DiskEntry) -> Result<DiskView, Failure> {
        let record = entry.record.as_ref();
        let mut view = DiskView {
            name: entry.name.clone(),
            state: DiskState::Ready,
            failure: None,
            path: None,
            number: record.map_or(0, |record| record.number),
            size: record.map_or(0, |record| record.size),
            quota: record.map_or(0, |record| record.quota),
            stored_bytes: 0,
            owner: record.map_or(0, |record| record.owner),
            layers: record.map(|record| record.layers.clone()).unwrap_or_default(),
            tops: Vec::new(),
            writable_top: None,
            stalled: self.stalls().into_iter().find(|stall| stall.name == entry.name),
        };
        let sealed = match &*lock(&entry.life) {
            DiskLife::Live { path, disk, .. } => {
                view.path = Some(path.clone());
                view.stored_bytes = disk.usage().stored_bytes;
                view.writable_top = Some(name_of_id(disk.current_top_id())?);
                disk.sealed_tops()
            }
            DiskLife::Waiting { path, .. } => {
                view.path.clone_from(path);
                Vec::new()
            }
            DiskLife::Failed { path, reason } => {
                view.state = DiskState::Failed;
                view.failure = Some(reason.clone());
                view.path.clone_from(path);
                Vec::new()
            }
            DiskLife::Kept { tops } => {
                view.state = DiskState::Kept;
                view.stored_bytes = tops.iter().map(|top| top.stored_bytes()).sum();
                tops.clone()
            }
            DiskLife::Deleting => {
                view.state = DiskState::Failed;
                view.failure = Some("it is being removed".to_owned());
                Vec::new()
            }
            DiskLife::Making | DiskLife::Gone => {
                return Err(Failure::not_found(format!("there is no disk {} now", entry.name)));
            }
        };
        view.tops = sealed
            .iter()
            .map(|top| Ok(TopView { top: name_of(top)?, stored_bytes: top.stored_bytes() }))
            .collect::<Result<_, Failure>>()?;
        Ok(view)
    }

    /// One image.
    pub(crate) fn image(&self, name: &Name) -> Result<ImageView, Failure> {
        let found = lock(&self.table).images.get(name).cloned();
        let entry = found.ok_or_else(|| Failure::not_found(format!("there is no image {name}")))?;
        self.view_of_image(&entry)
    }

    /// All images that can be told of: not those that are just being made or removed.
    pub(crate) fn images(&self) -> ImageList {
        let entries: Vec<Arc<ImageEntry>> = lock(&self.table).images.values().cloned().collect();
        ImageList { images: entries.iter().filter_map(|entry| self.view_of_image(entry).ok()).collect() }
    }

    pub(super) fn view_of_image(&self, entry: &ImageEntry) -> Result<ImageView, Failure> {
        let record = entry.record.as_ref();
        let mut view = ImageView {
            name: entry.name.clone(),
            state: DiskState::Ready,
            failure: None,
            path: None,
            number: record.map_or(0, |record| record.number),
            size: record.map_or(0, |record| record.size),
            owner: record.map_or(0, |record| record.owner),
            layers: record.map(|record| record.layers.clone()).unwrap_or_default(),
        };
        match &*lock(&entry.life) {
            ImageLife::Live { path, image } => {
                view.path.clone_from(path);
                view.size = image.size();
            }
            ImageLife::Waiting { path, .. } => view.path.clone_from(path),
            ImageLife::Failed { path, reason } => {
                view.state = DiskState::Failed;
                view.failure = Some(reason.clone());
                view.path.clone_from(path);
            }
            ImageLife::Deleting => {
                view.state = DiskState::Failed;
                view.failure = Some("it is being removed".to_owned());
            }
            ImageLife::Making | ImageLife::Gone => {
                return Err(Failure::not_found(format!("there is no image {} now", entry.name)));
            }
        }
        Ok(view)
    }

    /// Disks whose requests wait for room on the host.
    fn stalls(&self) -> Vec<StalledView> {
        let stalls = self.exports.stalled();
        let table = lock(&self.table);
        let named = stalls.into_iter().filter_map(|stall| {
            let mut disks = table.disks.values();
            let disk = disks
                .find(|disk| disk.record.as_ref().is_some_and(|record| record.number == stall.number))?;
            Some(StalledView { name: disk.name.clone(), reason: stall.reason, for_millis: stall.for_millis })
        });
        named.collect()
    }

    /// The service itself.
    pub(crate) fn status(&self) -> Status {
        let (disks, images) = (self.disks().disks, self.images().images);
        let failed_disks = disks.iter().filter_map(|disk| Some((disk.name.clone(), disk.failure.clone()?)));
        let failed_images =
            images.iter().filter_map(|image| Some((image.name.clone(), image.failure.clone()?)));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            disks_by: self.exports.disks_view(),
            images_by: self.exports.images_view(),
            cache: self.layers.cache_view(),
            disks: disks.len(),
            images: images.len(),
            open_layers: self.layers.count(),
            failed: failed_disks.chain(failed_images).collect(),
            stalled: self.stalls(),
        }
    }

    /// Begins to answer requests of the kernel.
    pub(crate) fn start(&self) -> Result<(), Failure> {
        self.exports.start()?;
        self.exports.remove_leftovers(|number| lock(&self.table).is_nobodys(number));
        Ok(())
    }
}
