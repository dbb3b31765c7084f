//! What a snapshot is: everything that another node needs to start from it. Values only.
//!
//! ```text
//! Draft     the same, with local files in the place of stored blobs     ──publish──▶     Manifest
//! ```
//! Must not know how any of it is used. Fields are added only with a default; a change of meaning takes a new version of
//! all documents (`document.rs`).

use crate::layout::BlobKey;
use crate::name::Name;
use aenv_storage::digest::Digest;
use aenv_storage::remote::chunk_list::{CHUNK_BYTES, ChunkError, ChunkList};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A snapshot whose contents are given as `B`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot<B> {
    /// Names it. Never used for another one.
    pub id: Name,
    /// The name and tag it was published under. What they mean by now, aliases say.
    #[serde(default)]
    pub alias: Option<Alias>,
    /// When its guest was stopped.
    pub created_at: jiff::Timestamp,
    /// The sandbox whose state it is.
    pub source: Name,
    /// The snapshot or template that sandbox was started from.
    #[serde(default)]
    pub parent: Option<Name>,
    /// Its disk.
    pub disk: Disk<B>,
    /// Memory and devices; none when only the disk was kept.
    pub memory: Option<Memory<B>>,
    /// The virtual hardware.
    pub machine: Machine,
    /// What the guest was booted with.
    pub guest: Guest,
    /// What memory and devices can be restored with.
    pub compatibility: Compatibility,
    /// What the node adds. Left alone here.
    #[serde(default)]
    pub extension: serde_json::Map<String, serde_json::Value>,
}

/// A name and a tag.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Alias {
    /// The name.
    pub name: Name,
    /// The tag.
    pub tag: Name,
}

/// A disk: layers, and what may be written on them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk<B> {
    /// From the bottom to the top.
    pub layers: Vec<Layer<B>>,
    /// Virtual size in bytes.
    pub size: u64,
    /// So many bytes may be written; none means no limit.
    #[serde(default)]
    pub quota: Option<u64>,
}

/// The memory of a guest and the state of its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory<B> {
    /// From the bottom to the top.
    pub layers: Vec<Layer<B>>,
    /// In bytes.
    pub size: u64,
    /// State of devices and processors, in the VMM's own format.
    pub devices: B,
}

/// One layer of a chain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer<B> {
    /// What its bytes are.
    pub form: Form,
    /// Its bytes.
    pub blob: B,
}

/// How a layer is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// The flat content itself. At the bottom only.
    Raw,
    /// An overlaybd layer in any of its forms: LSMT, as it is, as a zfile, or in a tar.
    Layer,
}

/// Virtual hardware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Processors.
    pub vcpus: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// What a guest was booted with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// SHA-256 of the kernel image.
    pub kernel: Digest,
    /// SHA-256 of the initial RAM filesystem.
    pub initramfs: Digest,
}

/// A memory can be restored only where all of it is the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compatibility {
    /// `qemu` or `firecracker`.
    pub driver: String,
    /// Version of the VMM.
    pub version: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Named processor model, or template, that the guest sees.
    pub cpu_model: String,
}

/// Where the bytes of a draft come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A local file that nobody writes any more.
    File(PathBuf),
    /// They are in the repository, as the manifest of another snapshot says.
    Stored(Blob),
}

/// What is to be published.
pub type Draft = Snapshot<Content>;

/// What was published.
pub type Manifest = Snapshot<Blob>;

/// Stored bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// Where they are.
    #[serde(flatten)]
    pub object: Object,
    /// The digests of its chunks; none when it is one chunk of at most [`CHUNK_BYTES`].
    #[serde(default)]
    pub chunks: Option<Object>,
}

/// One immutable object of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// SHA-256 of all of it.
    pub digest: Digest,
    /// In bytes.
    pub size: u64,
    /// Which of the copies that there may be.
    pub copy: Name,
}

impl Object {
    /// Its key in the store, relative to the repository's location.
    #[must_use]
    pub fn key(&self) -> object_store::path::Path {
        self.blob_key().path()
    }

    pub(crate) fn blob_key(&self) -> BlobKey {
        BlobKey { digest: self.digest, publication: self.copy.clone() }
    }
}

impl Blob {
    /// All objects it consists of.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        std::iter::once(&self.object).chain(&self.chunks)
    }

    /// Reads the digests of its chunks from `list`, the bytes of [`Self::chunks`]; of no concern when there are none.
    ///
    /// # Errors
    /// When they are not that list, or the list of another blob.
    pub fn chunk_list(&self, list: &[u8]) -> Result<ChunkList, ChunkError> {
        let Some(chunks) = &self.chunks else {
            return ChunkList::of_one(self.object.digest, self.object.size, CHUNK_BYTES);
        };
        let damaged = |reason: String| ChunkError::Damaged { reason };
        if Digest::of(list) != chunks.digest {
            return Err(damaged(format!("its digest is {}, it must be {}", Digest::of(list), chunks.digest)));
        }
        let read = ChunkList::parse(list)?;
        if read.blob() != self.object.digest || read.blob_bytes() != self.object.size {
            return Err(damaged(format!("it is that of the blob {}", read.blob())));
        }
        Ok(read)
    }
}

impl<B> Snapshot<B> {
    /// All contents, each time they are named.
    pub fn contents(&self) -> impl Iterator<Item = &B> {
        let memory = self.memory.iter();
        let disk = self.disk.layers.iter().map(|layer| &layer.blob);
        disk.chain(memory.flat_map(|memory| {
            memory.layers.iter().map(|layer| &layer.blob).chain(std::iter::once(&memory.devices))
        }))
    }

    /// The same snapshot with other contents.
    ///
    /// # Errors
    /// The first of `other`.
    pub fn try_map<C, E>(&self, mut other: impl FnMut(&B) -> Result<C, E>) -> Result<Snapshot<C>, E> {
        let mut layers = |layers: &[Layer<B>]| {
            layers
                .iter()
                .map(|layer| Ok(Layer { form: layer.form, blob: other(&layer.blob)? }))
                .collect::<Result<Vec<_>, E>>()
        };
        let disk = Disk { layers: layers(&self.disk.layers)?, size: self.disk.size, quota: self.disk.quota };
        let memory_layers = self.memory.as_ref().map(|memory| layers(&memory.layers)).transpose()?;
        let memory = match (&self.memory, memory_layers) {
            (Some(memory), Some(layers)) => {
                Some(Memory { layers, size: memory.size, devices: other(&memory.devices)? })
            }
            _ => None,
        };
        Ok(Snapshot {
            id: self.id.clone(),
            alias: self.alias.clone(),
            created_at: self.created_at,
            source: self.source.clone(),
            parent: self.parent.clone(),
            disk,
            memory,
            machine: self.machine.clone(),
            guest: self.guest.clone(),
            compatibility: self.compatibility.clone(),
            extension: self.extension.clone(),
        })
    }
}

/// What stands at the key of a manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum Stored {
    /// The snapshot.
    Published {
        /// Which publication wrote it: nobody else writes the same bytes.
        publication: Name,
        /// What it is.
        snapshot: Box<Manifest>,
    },
    /// The publication was taken for dead: it never becomes a snapshot.
    Expired,
    /// It was deleted.
    Deleted,
}
