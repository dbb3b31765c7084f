//! What is remembered of disks and images on disk, so that a killed process leaves nothing that the next one cannot finish
//! or undo.
//!
//! ```text
//! create:  (none) ─▶ Making ─▶ tops made ─▶ exported ─▶ Ready            killed before Ready: undone
//! delete:  Ready ─▶ Deleting ─▶ export removed ─▶ nothing left: files, then record removed    killed: finished
//!                                              └▶ used by others: Kept ─▶ last user gone: removed
//! ```
//! Each arrow to a state is a replaced file, written before anything that depends on it. A disk's record is made durable with
//! the first flush of the disk, and with whatever of it is asked to be durable: until then nothing of it has to survive a power
//! cut. Kept is durable before files go. Files of layers are named relative to the data directory, which may be moved; in version 1
//! they were named absolutely, which is read as well.
//! Owns the format. Must not know what a layer is.

use crate::directories::{Directories, replace_file};
use crate::failure::Failure;
use aenv_storage::block_service::{LayerRef, Name};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

/// Version of both kinds of records that are written.
const VERSION: u32 = 2;
/// The oldest one that is read. Others are refused.
const OLDEST: u32 = 1;

/// Where a record stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Stage {
    Making,
    Ready,
    Deleting,
    Kept,
}

/// A way of exporting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    Ublk,
    Fuse,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskRecord {
    pub(crate) version: u32,
    pub(crate) name: Name,
    pub(crate) stage: Stage,
    pub(crate) number: u32,
    pub(crate) way: Way,
    pub(crate) layers: Vec<LayerRef>,
    pub(crate) size: u64,
    pub(crate) quota: u64,
    pub(crate) owner: u32,
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImageRecord {
    pub(crate) version: u32,
    pub(crate) name: Name,
    pub(crate) stage: Stage,
    pub(crate) number: u32,
    pub(crate) layers: Vec<LayerRef>,
    /// In bytes; 0 until it is known.
    pub(crate) size: u64,
    pub(crate) owner: u32,
    pub(crate) exported: bool,
}

impl DiskRecord {
    pub(crate) const VERSION: u32 = VERSION;

    /// Writes it as its disk's record.
    pub(crate) fn write(&self, directories: &Directories) -> Result<(), Failure> {
        let layers = relative(&self.layers, directories);
        write(&directories.disk_record(&self.name), &Self { layers, ..self.clone() })
    }

    /// Whether it has the same content as `other`, whatever its number and stage.
    pub(crate) fn is_same_disk(&self, other: &Self) -> bool {
        (&self.layers, self.size, self.quota, self.owner)
            == (&other.layers, other.size, other.quota, other.owner)
    }
}

impl ImageRecord {
    pub(crate) const VERSION: u32 = VERSION;

    /// Writes it as its image's record.
    pub(crate) fn write(&self, directories: &Directories) -> Result<(), Failure> {
        let layers = relative(&self.layers, directories);
        write(&directories.image_record(&self.name), &Self { layers, ..self.clone() })
    }

    /// Whether it has the same content as `other`, whatever its number and stage.
    pub(crate) fn is_same_image(&self, other: &Self) -> bool {
        (&self.layers, self.owner, self.exported) == (&other.layers, other.owner, other.exported)
    }
}

fn relative(layers: &[LayerRef], directories: &Directories) -> Vec<LayerRef> {
    layers.iter().map(|layer| layer.relative_to(directories.data())).collect()
}

/// What both kinds have.
trait Record {
    fn identity(&self) -> (u32, &Name);

    /// As it is worked with, after it was read.
    fn present(self, data: &Path) -> Self;
}

impl Record for DiskRecord {
    fn identity(&self) -> (u32, &Name) {
        (self.version, &self.name)
    }

    fn present(self, data: &Path) -> Self {
        let layers = self.layers.iter().map(|layer| layer.clone().resolve(data)).collect();
        Self { version: VERSION, layers, ..self }
    }
}

impl Record for ImageRecord {
    fn identity(&self) -> (u32, &Name) {
        (self.version, &self.name)
    }

    fn present(self, data: &Path) -> Self {
        let layers = self.layers.iter().map(|layer| layer.clone().resolve(data)).collect();
        Self { version: VERSION, layers, ..self }
    }
}

/// One entry of a directory of records.
#[derive(Debug)]
pub(crate) enum Found<R> {
    /// A record.
    Record(R),
    /// A file or directory of this name, without a record: made or removed by half.
    Orphan(Name),
    /// A record that cannot be read.
    Unreadable(Name, String),
}

/// All disks that have a directory.
pub(crate) fn read_disks(directories: &Directories) -> Result<Vec<Found<DiskRecord>>, Failure> {
    let read = |name: Name| match std::fs::read(directories.disk_record(&name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Orphan(name),
        content => understand::<DiskRecord>(content, name, directories.data()),
    };
    Ok(names(&directories.disks(), "")?.into_iter().map(read).collect())
}

/// All images that have a record. Temporary files that a killed process left are removed.
pub(crate) fn read_images(directories: &Directories) -> Result<Vec<Found<ImageRecord>>, Failure> {
    for name in names(&directories.images(), ".new")? {
        let path = directories.images().join(format!("{name}.new"));
        if let Err(left) = crate::directories::remove_file(&path) {
            tracing::error!(%left, "a temporary file stays");
        }
    }
    let read = |name: Name| {
        let content = std::fs::read(directories.image_record(&name));
        understand::<ImageRecord>(content, name, directories.data())
    };
    Ok(names(&directories.images(), ".json")?.into_iter().map(read).collect())
}

/// Names of the entries that end in `suffix`, in order. Others are not ours.
fn names(directory: &Path, suffix: &str) -> Result<Vec<Name>, Failure> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(Failure::io("list", directory))? {
        let entry = entry.map_err(Failure::io("list", directory))?;
        let file_name = entry.file_name();
        match file_name.to_str().and_then(|text| text.strip_suffix(suffix)).map(str::parse::<Name>) {
            Some(Ok(name)) => names.push(name),
            _ => tracing::debug!(path = %entry.path().display(), "left alone: not named like a record"),
        }
    }
    names.sort();
    Ok(names)
}

fn understand<R: Record + for<'a> Deserialize<'a>>(
    content: io::Result<Vec<u8>>,
    name: Name,
    data: &Path,
) -> Found<R> {
    let parsed = content.map_err(|error| error.to_string()).and_then(|content| {
        serde_json::from_slice::<R>(&content)
            .map_err(|error| format!("its record cannot be understood: {error}"))
    });
    match parsed {
        Err(reason) => Found::Unreadable(name, reason),
        Ok(record) => match record.identity() {
            (OLDEST..=VERSION, named) if *named == name => Found::Record(record.present(data)),
            (OLDEST..=VERSION, named) => {
                let reason = format!("its record is that of {named}");
                Found::Unreadable(name, reason)
            }
            (version, _) => {
                let reason = format!("its record has version {version}, not {OLDEST} to {VERSION}");
                Found::Unreadable(name, reason)
            }
        },
    }
}

fn write(path: &Path, record: &impl Serialize) -> Result<(), Failure> {
    let content = serde_json::to_vec_pretty(record).map_err(|error| Failure::internal(error.to_string()))?;
    replace_file(path, &content).map_err(Failure::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str) -> DiskRecord {
        DiskRecord {
            version: VERSION,
            name: name.parse().unwrap(),
            stage: Stage::Making,
            number: 7,
            way: Way::Fuse,
            layers: vec![LayerRef::Raw { raw: "/r".into() }],
            size: 8192,
            quota: 4096,
            owner: 1,
        }
    }

    #[test]
    fn records_come_back_as_they_were_and_bad_ones_are_told_apart() {
        let temporary = tempfile::tempdir().unwrap();
        let directories =
            Directories::open(&temporary.path().join("d"), &temporary.path().join("r")).unwrap();
        for name in ["a", "b", "c", "d", "e"] {
            std::fs::create_dir(directories.disk(&name.parse().unwrap())).unwrap();
        }
        disk("a").write(&directories).unwrap();
        std::fs::write(directories.disks().join("c/record.json"), "").unwrap();
        std::fs::copy(directories.disks().join("a/record.json"), directories.disks().join("d/record.json"))
            .unwrap();
        DiskRecord { version: 3, ..disk("e") }.write(&directories).unwrap();
        std::fs::create_dir(directories.disks().join("Not ours")).unwrap();
        let found = read_disks(&directories).unwrap();
        assert_eq!(found.len(), 5);
        assert!(matches!(&found[0], Found::Record(record) if *record == disk("a")));
        assert!(matches!(&found[1], Found::Orphan(name) if name.as_str() == "b"));
        for (found, text) in found[2..].iter().zip(["understood", "that of a", "version 3"]) {
            assert!(matches!(found, Found::Unreadable(_, reason) if reason.contains(text)), "{found:?}");
        }
    }

    #[test]
    fn temporary_files_of_images_do_not_stay() {
        let temporary = tempfile::tempdir().unwrap();
        let directories =
            Directories::open(&temporary.path().join("d"), &temporary.path().join("r")).unwrap();
        let image = ImageRecord {
            version: VERSION,
            name: "i".parse().unwrap(),
            stage: Stage::Ready,
            number: 1,
            layers: Vec::new(),
            size: 4096,
            owner: 0,
            exported: true,
        };
        image.write(&directories).unwrap();
        std::fs::write(directories.images().join("j.new"), "{").unwrap();
        let found = read_images(&directories).unwrap();
        assert!(matches!(&found[..], [Found::Record(record)] if *record == image));
        assert!(!directories.images().join("j.new").exists());
    }
}
