//! What there is, and who needs whose tops. Owns the entries; touches no file.

use crate::layers::file_of;
use crate::records::{DiskRecord, ImageRecord};
use crate::waiting::Waiting;
use aenv_storage::block_service::{LayerRef, Name};
use aenv_storage::layered_disk::LayeredDisk;
use aenv_storage::top::SealedTop;
use aenv_storage::{BlockDevice, Image};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// All disks and images.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) disks: BTreeMap<Name, Arc<DiskEntry>>,
    pub(crate) images: BTreeMap<Name, Arc<ImageEntry>>,
}

/// One disk.
#[derive(Debug)]
pub(crate) struct DiskEntry {
    pub(crate) name: Name,
    /// As it was made; its stage is what `life` says. None when it cannot be read.
    pub(crate) record: Option<DiskRecord>,
    /// Whether its layers are needed for it: not when it is being deleted, or was.
    needs_layers: AtomicBool,
    /// Held by whoever changes what there is of it.
    pub(crate) operation: Mutex<()>,
    /// Held by a compaction, and by whoever removes the files.
    pub(crate) compacting: Mutex<()>,
    pub(crate) life: Mutex<DiskLife>,
}

/// Where a disk stands.
#[derive(Debug)]
pub(crate) enum DiskLife {
    Making,
    Live {
        path: PathBuf,
        disk: Arc<LayeredDisk>,
        /// The same as it is exported.
        device: Arc<dyn BlockDevice>,
    },
    /// The host has no room to open it. Exported if it has a path; each access waits.
    Waiting {
        path: Option<PathBuf>,
        stand_in: Arc<Waiting<dyn BlockDevice>>,
    },
    /// Exported if it has a path; each access fails.
    Failed {
        path: Option<PathBuf>,
        reason: String,
    },
    /// Its record says so; what is to be removed is tried again with the next request to delete it.
    Deleting,
    /// Deleted, but others are made of these tops.
    Kept {
        tops: Vec<Arc<SealedTop>>,
    },
    /// Not in the table any more.
    Gone,
}

/// One image.
#[derive(Debug)]
pub(crate) struct ImageEntry {
    pub(crate) name: Name,
    /// As it was made. None when it cannot be read.
    pub(crate) record: Option<ImageRecord>,
    /// Whether its layers are needed for it: not when it is being deleted, or was.
    needs_layers: AtomicBool,
    /// Held by whoever changes what there is of it.
    pub(crate) operation: Mutex<()>,
    pub(crate) life: Mutex<ImageLife>,
}

/// Where an image stands.
#[derive(Debug)]
pub(crate) enum ImageLife {
    Making,
    Live {
        path: Option<PathBuf>,
        /// Keeps the tops it is made of open, so that no compaction takes them away.
        image: Arc<dyn Image>,
    },
    /// The host has no room to open a disk that it is made of. Exported if it has a path; each access waits.
    Waiting {
        path: Option<PathBuf>,
        stand_in: Arc<Waiting<dyn Image>>,
    },
    /// Exported if it has a path; each access fails.
    Failed {
        path: Option<PathBuf>,
        reason: String,
    },
    Deleting,
    Gone,
}

impl DiskEntry {
    pub(crate) fn new(name: Name, record: Option<DiskRecord>, life: DiskLife) -> Arc<Self> {
        Arc::new(Self {
            name,
            record,
            needs_layers: AtomicBool::new(true),
            operation: Mutex::new(()),
            compacting: Mutex::new(()),
            life: Mutex::new(life),
        })
    }

    /// From now on its layers are not kept for it.
    pub(crate) fn release_layers(&self) {
        self.needs_layers.store(false, Ordering::SeqCst);
    }

    fn layers(&self) -> &[LayerRef] {
        match &self.record {
            Some(record) if self.needs_layers.load(Ordering::SeqCst) => &record.layers,
            _ => &[],
        }
    }
}

impl ImageEntry {
    pub(crate) fn new(name: Name, record: Option<ImageRecord>, life: ImageLife) -> Arc<Self> {
        Arc::new(Self {
            name,
            record,
            needs_layers: AtomicBool::new(true),
            operation: Mutex::new(()),
            life: Mutex::new(life),
        })
    }

    /// From now on its layers are not kept for it.
    pub(crate) fn release_layers(&self) {
        self.needs_layers.store(false, Ordering::SeqCst);
    }

    fn layers(&self) -> &[LayerRef] {
        match &self.record {
            Some(record) if self.needs_layers.load(Ordering::SeqCst) => &record.layers,
            _ => &[],
        }
    }
}

impl Table {
    /// Whether an export has this number.
    pub(crate) fn uses_number(&self, number: u32) -> bool {
        self.disks.values().any(|disk| disk.record.as_ref().is_some_and(|record| record.number == number))
            || self
                .images
                .values()
                .any(|image| image.record.as_ref().is_some_and(|record| record.number == number))
    }

    /// Whether an export of this number is none of a disk or image. Of records that cannot be read it is not known.
    pub(crate) fn is_nobodys(&self, number: u32) -> bool {
        !self.has_unreadable() && !self.uses_number(number)
    }

    /// Whether a record cannot be read: what it needs is not known then, so nothing that it may need is removed.
    pub(crate) fn has_unreadable(&self) -> bool {
        self.disks.values().any(|disk| disk.record.is_none())
            || self.images.values().any(|image| image.record.is_none())
    }

    /// The tops of `disk` that other disks, or images, are made of.
    pub(crate) fn tops_used_by_others(&self, disk: &Name) -> BTreeSet<Name> {
        let others = self.disks.values().filter(|other| other.name != *disk).flat_map(|other| other.layers());
        let images = self.images.values().flat_map(|image| image.layers());
        let top_of = |layer: &LayerRef| match layer {
            LayerRef::Top { disk: of, top } if of == disk => Some(top.clone()),
            _ => None,
        };
        others.chain(images).filter_map(top_of).collect()
    }

    /// As [`Self::tops_used_by_others`], of all disks in one pass. One that nobody uses is not in it.
    pub(crate) fn all_tops_used_by_others(&self) -> BTreeMap<Name, BTreeSet<Name>> {
        let disks =
            self.disks.values().flat_map(|of| of.layers().iter().map(|layer| (Some(&of.name), layer)));
        let images = self.images.values().flat_map(|of| of.layers().iter().map(|layer| (None, layer)));
        let mut used: BTreeMap<Name, BTreeSet<Name>> = BTreeMap::new();
        for (user, layer) in disks.chain(images) {
            if let LayerRef::Top { disk, top } = layer
                && user != Some(disk)
            {
                used.entry(disk.clone()).or_default().insert(top.clone());
            }
        }
        used
    }

    /// The files that disks and images are made of.
    pub(crate) fn files_in_use(&self) -> BTreeSet<PathBuf> {
        self.files().map(ToOwned::to_owned).collect()
    }

    /// Whether a disk or an image is made of this file.
    pub(crate) fn uses_file(&self, path: &Path) -> bool {
        self.files().any(|file| file == path)
    }

    fn files(&self) -> impl Iterator<Item = &Path> {
        let disks = self.disks.values().flat_map(|disk| disk.layers());
        let layers = disks.chain(self.images.values().flat_map(|image| image.layers()));
        layers.filter_map(file_of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::{Stage, Way};
    use proptest::prelude::*;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn top(disk: &str, top: &str) -> LayerRef {
        LayerRef::Top { disk: name(disk), top: name(top) }
    }

    fn disk(of: &str, number: u32, layers: Vec<LayerRef>) -> Arc<DiskEntry> {
        let record = DiskRecord {
            version: DiskRecord::VERSION,
            name: name(of),
            stage: Stage::Ready,
            number,
            way: Way::Fuse,
            layers,
            size: 4096,
            quota: 4096,
            owner: 0,
        };
        DiskEntry::new(name(of), Some(record), DiskLife::Making)
    }

    fn table(disks: Vec<Arc<DiskEntry>>) -> Table {
        Table { disks: disks.into_iter().map(|disk| (disk.name.clone(), disk)).collect(), ..Table::default() }
    }

    #[test]
    fn a_disk_does_not_keep_itself_and_images_keep_disks() {
        let mut table = table(vec![disk("p", 1, vec![top("p", "t")]), disk("c", 2, vec![top("p", "u")])]);
        assert_eq!(table.tops_used_by_others(&name("p")), BTreeSet::from([name("u")]));
        let record = ImageRecord {
            version: ImageRecord::VERSION,
            name: name("i"),
            stage: Stage::Ready,
            number: 3,
            layers: vec![LayerRef::Raw { raw: "/r".into() }, top("p", "t")],
            size: 0,
            owner: 0,
            exported: false,
        };
        table.images.insert(name("i"), ImageEntry::new(name("i"), Some(record), ImageLife::Making));
        assert_eq!(table.tops_used_by_others(&name("p")), BTreeSet::from([name("t"), name("u")]));
        assert_eq!(table.files_in_use(), BTreeSet::from([PathBuf::from("/r")]));
        table.images.values().for_each(|image| image.release_layers());
        assert_eq!(table.tops_used_by_others(&name("p")), BTreeSet::from([name("u")]));
        assert!([1, 2, 3].into_iter().all(|number| table.uses_number(number)) && !table.uses_number(4));
    }

    #[test]
    fn an_export_is_nobodys_only_when_every_record_can_be_read() {
        let mut table = table(vec![disk("p", 1, Vec::new())]);
        assert!(table.is_nobodys(2) && !table.is_nobodys(1));
        let failed = DiskLife::Failed { path: None, reason: String::new() };
        table.disks.insert(name("u"), DiskEntry::new(name("u"), None, failed));
        assert!(!table.is_nobodys(2) && !table.is_nobodys(1));
    }

    proptest! {
        /// Against the definition, on random graphs.
        #[test]
        fn a_top_is_used_exactly_while_another_disk_names_it(
            edges in proptest::collection::vec((0_u8..5, 0_u8..5, 0_u8..3), 0..20), asked in 0_u8..5,
        ) {
            let layers = |of: u8| edges.iter().filter(move |edge| edge.0 == of).map(|edge| {
                top(&format!("d{}", edge.1), &format!("t{}", edge.2))
            });
            let table = table((0..5).map(|of| disk(&format!("d{of}"), 1, layers(of).collect())).collect());
            let expected: BTreeSet<Name> = edges
                .iter()
                .filter(|(from, to, _)| *to == asked && *from != asked)
                .map(|(_, _, top)| name(&format!("t{top}")))
                .collect();
            let asked = name(&format!("d{asked}"));
            prop_assert_eq!(&table.tops_used_by_others(&asked), &expected);
            prop_assert_eq!(table.all_tops_used_by_others().remove(&asked).unwrap_or_default(), expected);
        }
    }
}
