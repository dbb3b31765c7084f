//! Making and removing images. The order of the steps is that of `records.rs`.

use super::Service;
use super::named_layers::NamedLayers;
use super::table::{ImageEntry, ImageLife};
use super::tops::make_all_durable;
use crate::directories::remove_file;
use crate::failure::Failure;
use crate::locks::lock;
use crate::records::{ImageRecord, Stage};
use aenv_export::{Content, Export};
use aenv_storage::Image;
use aenv_storage::block_service::{CreateImage, ImageView, Name};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};

impl Service {
    /// Makes an image, or tells of it when it was made by the same request before.
    pub(crate) fn create_image(&self, request: CreateImage) -> Result<ImageView, Failure> {
        if request.layers.is_empty() {
            return Err(Failure::invalid(format!("image {} is made of no layers", request.name)));
        }
        // Held until the record is in the table: from then on the record keeps the layers.
        let collecting = self.collecting.read().unwrap_or_else(PoisonError::into_inner);
        let NamedLayers { layers, held } = self.canonical(request.layers)?;
        let mut record = ImageRecord {
            version: ImageRecord::VERSION,
            stage: Stage::Making,
            number: 0,
            layers,
            size: 0,
            owner: request.owner,
            exported: request.exported,
            name: request.name,
        };
        let mut table = lock(&self.table);
        if let Some(existing) = table.images.get(&record.name).cloned() {
            drop((table, collecting));
            return self.image_made_before(&existing, &record);
        }
        record.number =
            self.numbers.take(|number| table.uses_number(number) || self.exports.is_on_host(number))?;
        let entry = ImageEntry::new(record.name.clone(), Some(record.clone()), ImageLife::Making);
        let operation = lock(&entry.operation);
        table.images.insert(record.name.clone(), Arc::clone(&entry));
        drop((table, collecting));

        let made = self.make_image(&record);
        drop(held);
        match made {
            Ok((path, image)) => {
                *lock(&entry.life) = ImageLife::Live { path, image };
                drop(operation);
                self.view_of_image(&entry)
            }
            Err(failure) => {
                *lock(&entry.life) = ImageLife::Deleting;
                if let Err(left) = self.remove_image(&entry, &record) {
                    tracing::error!(image = %record.name, %left, "an image that could not be made is removed later");
                }
                drop(operation);
                self.prune();
                Err(failure)
            }
        }
    }

    fn image_made_before(
        &self,
        existing: &Arc<ImageEntry>,
        wished: &ImageRecord,
    ) -> Result<ImageView, Failure> {
        // If it is just being made, by a request whose caller went away, that is waited for.
        drop(lock(&existing.operation));
        let same = existing.record.as_ref().is_some_and(|record| record.is_same_image(wished));
        let there = matches!(
            &*lock(&existing.life),
            ImageLife::Live { .. } | ImageLife::Waiting { .. } | ImageLife::Failed { .. }
        );
        match (there, same) {
            (true, true) => self.view_of_image(existing),
            (true, false) => Err(Failure::conflict(format!("there is another image {}", wished.name))),
            (false, _) => Err(Failure::conflict(format!(
                "image {} could not be made, or is being removed",
                wished.name
            ))),
        }
    }

    /// What its layers make.
    pub(super) fn image_of(&self, record: &ImageRecord) -> Result<Arc<dyn Image>, Failure> {
        let image = self.compose(&record.layers)?;
        image.ok_or_else(|| Failure::invalid("an image is made of no layers"))
    }

    fn make_image(&self, record: &ImageRecord) -> Result<(Option<PathBuf>, Arc<dyn Image>), Failure> {
        record.write(&self.directories)?;
        let image = self.image_of(record)?;
        let size = image.size();
        let path = match record.exported {
            true => Some(self.exports.add_image(&export_of(record), Content::Image(Arc::clone(&image)))?),
            // The layers of a snapshot have to survive as it does; the file of an image is made again at need.
            false => {
                image.make_durable()?;
                self.make_records_durable(&record.layers)?;
                None
            }
        };
        ImageRecord { stage: Stage::Ready, size, ..record.clone() }.write(&self.directories)?;
        if !record.exported {
            make_all_durable(&self.directories.traces_of_image(&record.name))?;
        }
        Ok((path, image))
    }

    /// Removes an image, and what only it kept.
    pub(crate) fn delete_image(&self, name: &Name) -> Result<(), Failure> {
        let Some(entry) = lock(&self.table).images.get(name).cloned() else { return Ok(()) };
        let operation = lock(&entry.operation);
        if matches!(&*lock(&entry.life), ImageLife::Gone) {
            return Ok(());
        }
        if let Some(record) = &entry.record {
            ImageRecord { stage: Stage::Deleting, ..record.clone() }.write(&self.directories)?;
            self.remove_image(&entry, record)?;
        } else {
            remove_file(&self.directories.image_record(name))?;
            self.forget_image(&entry);
        }
        drop(operation);
        self.prune();
        Ok(())
    }

    /// The rest of a removal, once the record says that it was begun.
    pub(super) fn remove_image(&self, entry: &ImageEntry, record: &ImageRecord) -> Result<(), Failure> {
        entry.release_layers();
        *lock(&entry.life) = ImageLife::Deleting;
        if record.exported {
            self.exports.remove_image(&export_of(record))?;
        }
        remove_file(&self.directories.image_record(&entry.name))?;
        self.forget_image(entry);
        Ok(())
    }

    fn forget_image(&self, entry: &ImageEntry) {
        *lock(&entry.life) = ImageLife::Gone;
        lock(&self.table).images.remove(&entry.name);
    }
}

/// How an image is exported.
pub(super) fn export_of(record: &ImageRecord) -> Export {
    Export { number: record.number, name: format!("image-{}", record.name), owner: record.owner }
}
