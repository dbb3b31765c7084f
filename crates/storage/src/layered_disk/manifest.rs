//! Which tops make up a disk: the file formats of its directory.
//!
//! ```text
//! disk.json           the manifest that survives the loss of power; everything it names does as well
//! disk.pending.json   a newer one, true as long as the kernel runs that wrote it; becomes disk.json at the next flush
//! disk.writing.json   one that is being written, or the pending one before
//! top-N.data, .log    tops: the sealed ones from bottom to top, then the current one; N grows
//! lock                held by whoever has the disk open
//! ```
//! Two files, because sealing must not wait for the disk: were disk.json replaced by a file that is not on the disk yet,
//! a power cut could lose both.
//!
//! Owns nothing. Must not open tops.

use crate::top::{BootId, Directory, StoredFile, TopId, remove_if_there, size_is_valid};
use crate::{StorageError, raw_file::failed};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::{Arc, Once};

pub(super) const DURABLE: &str = "disk.json";
pub(super) const PENDING: &str = "disk.pending.json";
pub(super) const WRITING: &str = "disk.writing.json";
pub(super) const LOCK: &str = "lock";

const VERSION: u32 = 1;
/// More is damage: 4096 tops would make 1 MiB.
const MAXIMUM_BYTES: u64 = 1 << 20;
/// Sealed tops of one disk, at most: every one is asked for blocks that none has. Compaction comes long before.
pub(super) const MAXIMUM_TOPS: usize = 4096;

/// What a disk consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    version: u32,
    /// Boot of the host in which it was written.
    boot: String,
    /// Virtual size in bytes.
    pub(super) size: u64,
    /// Size in bytes of what the lowest top stands on.
    pub(super) lower_size: u64,
    /// Bytes of data that all tops together may show.
    pub(super) quota: u64,
    /// From bottom to top.
    pub(super) sealed: Vec<TopName>,
    pub(super) current: TopName,
    /// Tops that are being made or are not needed any more: whoever opens the disk removes them.
    pub(super) removable: Vec<String>,
}

/// A top, by the name of its files and its id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopName {
    pub(super) name: String,
    id: String,
}

impl TopName {
    pub(super) fn new(name: &str, id: &TopId) -> Self {
        Self { name: name.to_owned(), id: hex::encode(id) }
    }

    pub(super) fn is(&self, id: &TopId) -> bool {
        self.id == hex::encode(id)
    }
}

impl Manifest {
    pub(super) fn new(boot: &BootId, size: u64, lower_size: u64, quota: u64, current: TopName) -> Self {
        let (sealed, removable) = (Vec::new(), Vec::new());
        Self { version: VERSION, boot: boot.to_string(), size, lower_size, quota, sealed, current, removable }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.sealed.iter().chain([&self.current]).map(|top| top.name.as_str())
    }

    pub(super) fn written_in(&self, boot: &BootId) -> bool {
        self.boot == boot.to_string()
    }

    pub(super) fn set_boot(&mut self, boot: &BootId) {
        self.boot = boot.to_string();
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.version != VERSION {
            return Err("it is of another version");
        }
        if !size_is_valid(self.size) || self.lower_size > self.size {
            return Err("its sizes are impossible");
        }
        if self.sealed.len() > MAXIMUM_TOPS || self.removable.len() > MAXIMUM_TOPS {
            return Err("it names too many tops");
        }
        let mut names: Vec<&str> = self.names().collect();
        if names
            .iter()
            .copied()
            .chain(self.removable.iter().map(String::as_str))
            .any(|it| number_of(it).is_none())
        {
            return Err("it names a top as none is called");
        }
        names.sort_unstable();
        if names.windows(2).any(|pair| pair[0] == pair[1])
            || self.removable.iter().any(|it| names.contains(&&**it))
        {
            return Err("it names a top twice");
        }
        Ok(())
    }
}

/// The name of the files of top `number`.
pub(super) fn top_name(number: u64) -> String {
    format!("top-{number}")
}

/// The number in a name that [`top_name`] makes.
pub(super) fn number_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("top-")?;
    digits.parse().ok().filter(|number| top_name(*number) == name)
}

/// Writes a manifest beside the others.
pub(super) fn write(directory: &dyn Directory, manifest: &Manifest) -> Result<(), StorageError> {
    let path = directory.path().join(WRITING);
    let written = (|| {
        remove_if_there(directory, WRITING)?;
        directory.create(WRITING)?.write_all_at(&serde_json::to_vec_pretty(manifest)?, 0)
    })();
    written.map_err(|error| failed("write", &path, error))
}

/// Puts what [`write`] wrote last in the place of the pending manifest. An older one is swapped for it rather than
/// replaced: some filesystems write a file out before it may replace another, and a seal must not wait for that.
///
/// Where names cannot be swapped it is replaced all the same, which takes longer and is as safe: the death of the process
/// finds one of the two either way, and after a power cut the pending one does not count.
pub(super) fn publish(directory: &dyn Directory) -> Result<(), StorageError> {
    let path = directory.path().join(PENDING);
    let published = match directory.exchange(WRITING, PENDING) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => directory.rename(WRITING, PENDING),
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            say_that_names_cannot_be_swapped(directory, &error);
            directory.rename(WRITING, PENDING)
        }
        exchanged => exchanged,
    };
    published.map_err(|error| failed("replace", &path, error))
}

/// Once in the life of the process: it is so for every disk of the filesystem, with every seal.
fn say_that_names_cannot_be_swapped(directory: &dyn Directory, error: &io::Error) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let path = directory.path().display();
        tracing::warn!(%path, %error, "the filesystem cannot swap files: sealing a disk may wait for the disk");
    });
}

/// A manifest as it was found.
#[derive(Debug)]
pub(super) enum Found {
    None,
    Valid(Manifest),
    /// With the reason.
    Damaged(String),
}

pub(super) fn read(directory: &dyn Directory, name: &str) -> Result<Found, StorageError> {
    let path = directory.path().join(name);
    let file: Arc<dyn StoredFile> = match directory.open(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::None),
        opened => opened.map_err(|error| failed("open", &path, error))?,
    };
    let length = file.length().map_err(|error| failed("read", &path, error))?;
    if length > MAXIMUM_BYTES {
        return Ok(Found::Damaged(format!("it has {length} bytes")));
    }
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|error| failed("read", &path, error))?;
    Ok(match serde_json::from_slice::<Manifest>(&bytes) {
        Err(error) => Found::Damaged(error.to_string()),
        Ok(manifest) => match manifest.check() {
            Err(reason) => Found::Damaged(reason.to_owned()),
            Ok(()) => Found::Valid(manifest),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_tops_are_taken() {
        assert_eq!(number_of(&top_name(7)), Some(7));
        for name in ["top-", "top-07", "top-+7", "top-1/../x", "../top-1", "top-99999999999999999999"] {
            assert_eq!(number_of(name), None, "{name}");
        }
        let boot = BootId::new([1; 16]);
        let mut manifest = Manifest::new(&boot, 8192, 0, 8192, TopName::new("top-1", &[0; 16]));
        assert_eq!(manifest.check(), Ok(()));
        manifest.removable.push("top-1".into());
        assert!(manifest.check().is_err());
        manifest.removable = vec!["/etc/passwd".into()];
        assert!(manifest.check().is_err());
        manifest.removable.clear();
        manifest.size = 4095;
        assert!(manifest.check().is_err());
    }
}
