//! The image of a template: its root filesystem, stored as a compressed layer, which disks of the block service are made of.
//! Blocking. Owns the files `<sha256>.layer` and `<sha256>.raw`, which are called by what they show, and never changed.
//!
//! ```text
//! import ─▶ <sha256>.layer ─┬─ block service ─▶ bottom of every disk
//!                           └─ disks that share blocks ─▶ <sha256>.raw, made at the node's start
//! ```
//! A flat file that an earlier version imported serves both.

use super::file::TemplateFile;
use crate::data_dir::DataDir;
use crate::disks::Base;
use aenv_storage::block_service::LayerRef;
use aenv_storage::cache::BlockCache;
use aenv_storage::chain::LayerChain;
use aenv_storage::commit::{LayerOptions, Source, write_compressed_layer_file};
use aenv_storage::layer::Layer;
use aenv_storage::raw_image::write_raw;
use aenv_storage::zfile::ZFileOptions;
use aenv_storage::{RawImage, StorageError};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// What disks can be made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageForm {
    /// Layers, or a flat file.
    Layers,
    /// A flat file only.
    Flat,
}

/// The image of a template as it was found.
#[derive(Debug)]
pub(crate) struct TemplateImage {
    /// What disks are made of.
    pub(crate) base: Base,
    /// Its virtual size.
    pub(crate) bytes: u64,
    /// What the filesystem stores for it.
    pub(crate) stored_bytes: u64,
}

/// Stores a root filesystem with this SHA-256 as a layer, durably, unless it is there already. Disks of running sandboxes may
/// be made of what is there, so it is never replaced.
pub(super) fn store_image(dir: &DataDir, sha256: &str, rootfs: &Path) -> Result<(), StorageError> {
    let target = dir.image_layer(sha256);
    for path in [&target, &dir.image(sha256)] {
        if path.try_exists().map_err(|error| unreadable(path, error))? {
            return Ok(());
        }
    }
    let image = RawImage::open(rootfs)?;
    let options = LayerOptions::default();
    write_compressed_layer_file(Source::Image(&image), &options, ZFileOptions::lz4(), &target)?;
    Ok(())
}

/// The image of a template, made flat where that is needed. One of an earlier version's layout is put where images are now.
pub(crate) fn find_image(dir: &DataDir, file: &TemplateFile, form: ImageForm) -> io::Result<TemplateImage> {
    let (flat, earlier) = (dir.image(&file.rootfs_sha256), dir.template(&file.id).join("rootfs.ext4"));
    let layer = dir.image_layer(&file.rootfs_sha256);
    if !flat.try_exists()? && earlier.try_exists()? {
        std::fs::rename(&earlier, &flat)?;
        File::open(dir.layers())?.sync_all()?;
    }
    if layer.try_exists()? && (form == ImageForm::Layers || !flat.try_exists()?) {
        let opened = open(&layer).map_err(io::Error::other)?;
        if form == ImageForm::Layers {
            let stored_bytes = std::fs::metadata(&layer)?.blocks().saturating_mul(512);
            let base = Base::Layers(vec![LayerRef::File { file: layer }]);
            return Ok(TemplateImage { base, bytes: opened.virtual_size(), stored_bytes });
        }
        flatten(opened, &flat).map_err(io::Error::other)?;
        File::open(dir.layers())?.sync_all()?;
    }
    let metadata = std::fs::metadata(&flat)?;
    let stored_bytes = metadata.blocks().saturating_mul(512);
    Ok(TemplateImage { base: Base::File(flat), bytes: metadata.len(), stored_bytes })
}

fn open(layer: &Path) -> Result<Arc<Layer>, StorageError> {
    // Nothing is read twice.
    Layer::open(layer, &Arc::new(BlockCache::new(0)))
}

/// Makes the flat file, which is complete and durable when it gets its name.
fn flatten(layer: Arc<Layer>, path: &Path) -> Result<(), StorageError> {
    let incoming = path.with_extension("new");
    let at = |action| {
        let path = incoming.clone();
        move |source| StorageError::Io { action, path, source }
    };
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&incoming);
    let file = file.map_err(at("make"))?;
    write_raw(&LayerChain::new(vec![layer])?, &file, &incoming)?;
    file.sync_all().map_err(at("sync"))?;
    std::fs::rename(&incoming, path).map_err(at("rename"))
}

fn unreadable(path: &Path, source: io::Error) -> StorageError {
    StorageError::Io { action: "look for", path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::file::sha256;
    use std::os::unix::fs::FileExt;

    fn template(sha256: &str) -> TemplateFile {
        TemplateFile {
            id: "t1".parse().unwrap(),
            name: "base".to_owned(),
            vcpus: 2,
            memory_mib: 512,
            rootfs_sha256: sha256.to_owned(),
            disk_mib: None,
            created_at: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    /// A sparse file of 64 MiB with a little in it.
    fn rootfs(path: &Path) {
        let file = File::create(path).unwrap();
        file.set_len(64 << 20).unwrap();
        for (number, offset) in [0_u64, 4096, 20 << 20, (64 << 20) - 4096].into_iter().enumerate() {
            file.write_all_at(&[number as u8 + 1; 4096], offset).unwrap();
        }
    }

    #[test]
    fn an_image_is_stored_once_as_a_layer_and_made_flat_where_that_is_needed() {
        let temporary = tempfile::tempdir().unwrap();
        let source = temporary.path().join("rootfs");
        rootfs(&source);
        let dir = DataDir::open(&temporary.path().join("data")).unwrap();
        let file = template(&sha256(&source).unwrap());
        store_image(&dir, &file.rootfs_sha256, &source).unwrap();
        let layer = dir.image_layer(&file.rootfs_sha256);
        let first = std::fs::metadata(&layer).unwrap();
        assert!(first.len() < 64 << 10, "four blocks are in it");
        store_image(&dir, &file.rootfs_sha256, &source).unwrap();
        assert_eq!(std::fs::metadata(&layer).unwrap().ino(), first.ino(), "it was made again");

        let layers = find_image(&dir, &file, ImageForm::Layers).unwrap();
        assert_eq!(layers.base, Base::Layers(vec![LayerRef::File { file: layer }]));
        assert_eq!((layers.bytes, layers.stored_bytes), (64 << 20, first.blocks() * 512));
        assert!(!dir.image(&file.rootfs_sha256).exists());

        let flat = find_image(&dir, &file, ImageForm::Flat).unwrap();
        assert_eq!(flat.base, Base::File(dir.image(&file.rootfs_sha256)));
        assert_eq!(flat.bytes, 64 << 20);
        assert!(flat.stored_bytes < 1 << 20);
        assert!(std::fs::read(dir.image(&file.rootfs_sha256)).unwrap() == std::fs::read(&source).unwrap());
        assert_eq!(find_image(&dir, &file, ImageForm::Layers).unwrap().base, layers.base);
    }

    #[test]
    fn a_flat_image_of_an_earlier_version_serves_both() {
        let temporary = tempfile::tempdir().unwrap();
        let source = temporary.path().join("rootfs");
        rootfs(&source);
        let dir = DataDir::open(&temporary.path().join("data")).unwrap();
        let file = template(&sha256(&source).unwrap());
        let earlier = dir.template(&file.id).join("rootfs.ext4");
        std::fs::create_dir_all(dir.template(&file.id)).unwrap();
        std::fs::rename(&source, &earlier).unwrap();
        for form in [ImageForm::Layers, ImageForm::Flat] {
            let found = find_image(&dir, &file, form).unwrap();
            assert_eq!(found.base, Base::File(dir.image(&file.rootfs_sha256)));
            assert_eq!(found.bytes, 64 << 20);
        }
        store_image(&dir, &file.rootfs_sha256, &dir.image(&file.rootfs_sha256)).unwrap();
        assert!(!dir.image_layer(&file.rootfs_sha256).exists(), "it is there already");
    }

    #[test]
    fn a_damaged_layer_and_a_missing_image_are_told() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = DataDir::open(temporary.path()).unwrap();
        let file = template("5a");
        assert!(find_image(&dir, &file, ImageForm::Layers).is_err());
        std::fs::write(dir.image_layer("5a"), vec![7; 10_000]).unwrap();
        for form in [ImageForm::Layers, ImageForm::Flat] {
            let error = find_image(&dir, &file, form).unwrap_err().to_string();
            assert!(error.contains("5a.layer"), "{error}");
        }
        assert!(!dir.image("5a").exists());
    }
}
