//! `purge`: no export and no process of this instance stays, and no disk that can be written. Layer files do, and snapshots:
//! images that are not exported, with the sealed tops that they are made of.
//!
//! ```text
//! exports end ─▶ which snapshots can be used ─▶ other images go ─▶ of each disk: nothing needed ─▶ removed
//!                                                                     a snapshot's tops ─▶ recorded as Kept ─▶ the rest removed
//! ```
//! A purge that was killed is finished by the next one, or by the service. Changes nothing while a service runs.

use crate::arguments::PurgeOptions;
use crate::block_service::garbage::remove_set_aside;
use crate::block_service::tops::{keep_only, name_of, open_kept};
use crate::directories::{Directories, make_durable, remove_file, remove_tree};
use crate::holder::clear_mount_point;
use crate::records::{DiskRecord, Found, ImageRecord, Stage, read_disks, read_images};
use aenv_daemon::say;
use aenv_export::fuse::holder;
use aenv_export::ublk::{Settings as UblkSettings, UblkExporter};
use aenv_storage::block_service::{LayerRef, Name};
use aenv_storage::top::SealedTop;
use anyhow::{Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

/// How many of what were removed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Gone {
    disks: usize,
    images: usize,
}

/// The tops of each disk that snapshots are made of.
type Needed = BTreeMap<Name, BTreeSet<Name>>;

/// Ends and removes; says what there was, one line each.
pub(crate) fn purge(options: &PurgeOptions) -> Result<()> {
    let instance = &options.instance;
    let (data, run) = (&instance.data_dir, instance.run_dir());
    if !data.join("storage").exists() && !run.exists() {
        return Ok(());
    }
    let directories = Directories::open(data, &run)
        .with_context(|| format!("cannot open {} and {}", data.display(), run.display()))?;
    // Held to the end, so that no service starts in between.
    let _lock = directories.lock()?;
    if directories.holder_socket().exists() {
        holder::stop(&directories.holder_socket(), true)?;
        say("FUSE mount")?;
    }
    clear_mount_point(&directories.mount_point())?;
    if UblkExporter::probe().is_ok() {
        let ublk = UblkExporter::new(&UblkSettings::new(instance.instance.as_str()))?;
        let numbers = ublk.leftovers()?;
        for number in &numbers {
            ublk.remove_leftover(*number)?;
        }
        if !numbers.is_empty() {
            say(&format!("block devices: {}", numbers.len()))?;
        }
    }
    remove_set_aside(&directories);
    let gone = if options.all { remove_all(&directories)? } else { keep_snapshots(&directories)? };
    for (what, number) in [("disks", gone.disks), ("images", gone.images)] {
        if number > 0 {
            say(&format!("{what}: {number}"))?;
        }
    }
    remove_empty(&directories.mount_point())?;
    let files =
        [directories.socket(), directories.holder_socket(), directories.holder_log(), directories.numbers()];
    for path in files.into_iter().chain([directories.holder_socket().with_extension("lock")]) {
        remove_file(&path)?;
    }
    for directory in
        [directories.run().to_owned(), directories.disks(), directories.images(), directories.layers()]
    {
        remove_empty(&directory)?;
    }
    Ok(())
}

/// Removes all disks and images, whatever is in their directories.
fn remove_all(directories: &Directories) -> Result<Gone> {
    let remove = |directory: &Path| {
        let entries =
            std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
        let number = entries.count();
        remove_tree(directory)?;
        anyhow::Ok(number)
    };
    Ok(Gone { disks: remove(&directories.disks())?, images: remove(&directories.images())? })
}

/// Removes all disks and images but the snapshots that can be used, and what they are made of.
fn keep_snapshots(directories: &Directories) -> Result<Gone> {
    let (disks, images) = (read_disks(directories)?, read_images(directories)?);
    let mut gone = Gone::default();
    let mut tops = tops_of_snapshots(directories, &disks, &images);
    let mut needed = Needed::new();
    for found in images {
        match found {
            Found::Record(image) if is_usable_snapshot(&image, &tops) => {
                for (disk, top) in tops_of(&image) {
                    needed.entry(disk.clone()).or_default().insert(top.clone());
                }
            }
            Found::Record(ImageRecord { name, .. }) | Found::Orphan(name) | Found::Unreadable(name, _) => {
                remove_file(&directories.image_record(&name))?;
                gone.images += 1;
            }
        }
    }
    for found in disks {
        let name = match &found {
            Found::Record(DiskRecord { name, .. }) | Found::Orphan(name) | Found::Unreadable(name, _) => name,
        };
        match (needed.get(name), tops.remove(name), &found) {
            (Some(needed), Some(sealed), Found::Record(record)) => {
                gone.disks += usize::from(record.stage != Stage::Kept);
                reduce(directories, record, sealed, needed)?;
            }
            _ => {
                remove_tree(&directories.disk(name))?;
                gone.disks += 1;
            }
        }
    }
    Ok(gone)
}

/// The sealed tops of all disks that snapshots name and that can be read.
fn tops_of_snapshots(
    directories: &Directories,
    disks: &[Found<DiskRecord>],
    images: &[Found<ImageRecord>],
) -> BTreeMap<Name, Vec<Arc<SealedTop>>> {
    let snapshots = images.iter().filter_map(|found| match found {
        Found::Record(image) if !image.exported => Some(image),
        _ => None,
    });
    let named: BTreeSet<&Name> = snapshots.flat_map(tops_of).map(|(disk, _)| disk).collect();
    let of_disk = |found: &Found<DiskRecord>| match found {
        Found::Record(disk) if disk.stage != Stage::Making && named.contains(&disk.name) => {
            Some((disk.name.clone(), open_kept(&directories.tops(&disk.name))))
        }
        _ => None,
    };
    disks.iter().filter_map(of_disk).collect()
}

/// Whether an image is one that nobody can have open and that a disk can be made of.
fn is_usable_snapshot(image: &ImageRecord, tops: &BTreeMap<Name, Vec<Arc<SealedTop>>>) -> bool {
    let is_there = |(disk, top): (&Name, &Name)| {
        tops.get(disk)
            .is_some_and(|sealed| sealed.iter().any(|one| name_of(one).is_ok_and(|name| name == *top)))
    };
    image.stage == Stage::Ready && !image.exported && tops_of(image).all(is_there)
}

fn tops_of(image: &ImageRecord) -> impl Iterator<Item = (&Name, &Name)> {
    image.layers.iter().filter_map(|layer| match layer {
        LayerRef::Top { disk, top } => Some((disk, top)),
        LayerRef::File { .. } | LayerRef::Raw { .. } => None,
    })
}

/// Removes all of a disk but the tops that snapshots are made of.
fn reduce(
    directories: &Directories,
    record: &DiskRecord,
    sealed: Vec<Arc<SealedTop>>,
    needed: &BTreeSet<Name>,
) -> Result<()> {
    if record.stage != Stage::Kept {
        DiskRecord { stage: Stage::Kept, ..record.clone() }.write(directories)?;
        // A disk that was to be used, without its writable top, would be a broken one.
        for path in directories.traces_of_disk(&record.name) {
            make_durable(&path).with_context(|| format!("cannot make {} durable", path.display()))?;
        }
    }
    keep_only(&directories.tops(&record.name), sealed, needed)?;
    Ok(())
}

/// Removes a directory that has nothing of others in it.
fn remove_empty(directory: &Path) -> Result<()> {
    match std::fs::remove_dir(directory) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}
