//! What travels between the block service and its clients, as JSON. Values only.
//!
//! | request | body | answer |
//! |---|---|---|
//! | `GET /v1/status` | | [`Status`] |
//! | `POST /v1/disks` | [`CreateDisk`] | [`DiskView`] |
//! | `GET /v1/disks`, `GET /v1/disks/{name}` | | [`DiskList`], [`DiskView`] |
//! | `POST /v1/disks/{name}/flush`, `…/durable` | | `{}` |
//! | `POST /v1/disks/{name}/seal` | [`SealDisk`] | [`Sealed`] |
//! | `POST /v1/disks/{name}/rewind` | [`RewindDisk`] | [`DiskView`] |
//! | `DELETE /v1/disks/{name}`, `DELETE /v1/images/{name}` | | `{}` |
//! | `POST /v1/images` | [`CreateImage`] | [`ImageView`] |
//! | `GET /v1/images`, `GET /v1/images/{name}` | | [`ImageList`], [`ImageView`] |
//! | `POST /v1/layers/release` | [`ReleaseLayer`] | [`Released`] |
//! | `POST /v1/gc` | [`CollectGarbage`] | [`Collected`] |
//!
//! Every request may be sent again when its answer was lost: it does nothing twice. Sizes are in bytes.

use super::Name;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// One layer of a disk or image. In JSON `{"file": PATH}`, `{"raw": PATH}` or `{"disk": NAME, "top": NAME}`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum LayerRef {
    /// A layer file: LSMT, as it is, compressed or in a tar.
    File {
        /// Inside of the service's data directory.
        file: PathBuf,
    },
    /// A flat file, whose holes are zeros. Only as the lowest layer, below of files and tops.
    Raw {
        /// Inside of the service's data directory.
        raw: PathBuf,
    },
    /// What a disk had written until one of its seals.
    Top {
        /// The disk.
        disk: Name,
        /// Its sealed top, as [`Sealed`] told it.
        top: Name,
    },
}

impl LayerRef {
    /// As it is written down in `directory`, which may be moved with all that lies in it.
    #[must_use]
    pub fn relative_to(&self, directory: &Path) -> Self {
        let relative = |path: &Path| path.strip_prefix(directory).unwrap_or(path).to_owned();
        match self {
            Self::File { file } => Self::File { file: relative(file) },
            Self::Raw { raw } => Self::Raw { raw: relative(raw) },
            top @ Self::Top { .. } => top.clone(),
        }
    }

    /// What [`LayerRef::relative_to`] wrote down, in the directory where that lies now. Absolute paths stay what they are.
    #[must_use]
    pub fn resolve(self, directory: &Path) -> Self {
        match self {
            Self::File { file } => Self::File { file: directory.join(file) },
            Self::Raw { raw } => Self::Raw { raw: directory.join(raw) },
            top @ Self::Top { .. } => top,
        }
    }
}

/// Makes a disk and exports it. Asked again with the same values, it is told as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateDisk {
    /// Of the disk; no other disk has it.
    pub name: Name,
    /// Bottom to top; none for an empty disk.
    #[serde(default)]
    pub layers: Vec<LayerRef>,
    /// Virtual size, a multiple of 4096; at least that of the layers.
    pub size: u64,
    /// How many bytes of data its own tops may show, each block counted once; the virtual size by default.
    #[serde(default)]
    pub quota: Option<u64>,
    /// User and group that the file or device belongs to.
    #[serde(default)]
    pub owner: u32,
}

/// How a disk or image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskState {
    /// It can be used.
    Ready,
    /// Its layers or tops cannot be read: every access fails.
    Failed,
    /// It was deleted; what others are made of is still stored.
    Kept,
}

/// A top of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopView {
    /// Its name.
    pub top: Name,
    /// What it stores.
    pub stored_bytes: u64,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskView {
    /// Of the disk.
    pub name: Name,
    /// How it is.
    pub state: DiskState,
    /// Why it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// File or device to be opened; none when it was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Number of its export.
    pub number: u32,
    /// Virtual size.
    pub size: u64,
    /// How many bytes of data its tops may show, each block counted once.
    pub quota: u64,
    /// What its tops store, a block as often as there are tops that have it.
    pub stored_bytes: u64,
    /// User and group of the file or device.
    pub owner: u32,
    /// What it was made of, bottom to top.
    pub layers: Vec<LayerRef>,
    /// Its sealed tops, bottom to top.
    pub tops: Vec<TopView>,
    /// The top that is being written, to be given to [`SealDisk`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writable_top: Option<Name>,
    /// Set while requests wait for room on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stalled: Option<StalledView>,
}

/// All disks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskList {
    /// By name.
    pub disks: Vec<DiskView>,
}

/// Makes what was written so far immutable; the disk goes on with a new top.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SealDisk {
    /// The top to be sealed, so that the same request sent twice seals once; the present one by default.
    #[serde(default)]
    pub top: Option<Name>,
}

/// A disk was sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sealed {
    /// The top that was sealed.
    pub sealed: Name,
    /// What a disk with this content is made of, bottom to top: the layers of the disk, then its sealed tops up to this
    /// one. Named all together they stay good when old tops are merged; the answer to who names them says what is kept.
    pub layers: Vec<LayerRef>,
    /// The top that is written from now on.
    pub writable_top: Name,
    /// What its tops store, as in [`DiskView::stored_bytes`]. None from a service of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
}

/// Drops what was written to a disk, which nobody uses, since one of its seals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewindDisk {
    /// The top that was sealed, as [`Sealed`] told it.
    pub top: Name,
}

/// Composes layers to an image that any number of processes may map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateImage {
    /// Of the image; no other image has it.
    pub name: Name,
    /// Bottom to top, at least one.
    pub layers: Vec<LayerRef>,
    /// User and group that the file belongs to.
    #[serde(default)]
    pub owner: u32,
    /// Whether it appears as a file. One that does not still keeps its layers stored: a snapshot of a disk.
    #[serde(default = "exported_by_default")]
    pub exported: bool,
}

fn exported_by_default() -> bool {
    true
}

/// An image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageView {
    /// Of the image.
    pub name: Name,
    /// How it is.
    pub state: DiskState,
    /// Why it cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// File to be mapped; none when it is not exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Number of its export.
    pub number: u32,
    /// Virtual size; 0 when it cannot be read.
    pub size: u64,
    /// User and group of the file.
    pub owner: u32,
    /// Bottom to top.
    pub layers: Vec<LayerRef>,
}

/// All images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageList {
    /// By name.
    pub images: Vec<ImageView>,
}

/// Removes one layer file, unless a disk or an image is made of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseLayer {
    /// In the service's layer directory.
    pub file: PathBuf,
}

/// Whether a layer file is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// False while something is made of it, or while that cannot be told since a record cannot be read.
    pub removed: bool,
}

/// Removes stored files that nothing is made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CollectGarbage {
    /// Files of the layer directory that the caller still needs, besides those of disks and images.
    pub keep_layers: Vec<PathBuf>,
}

/// What was removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    /// Files of the layer directory.
    pub layers: u64,
    /// Directories that belonged to no disk.
    pub directories: u64,
    /// What the file system stored for them.
    pub bytes: u64,
}

/// A way to export, and why it is taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportView {
    /// `ublk`, `FUSE`, or `none`.
    pub way: String,
    /// Why it was chosen, or why there is none.
    pub reason: String,
}

/// The block cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheView {
    /// Reads that were answered from it.
    pub hits: u64,
    /// Reads that were not.
    pub misses: u64,
    /// What it holds.
    pub bytes: u64,
    /// What it may hold.
    pub capacity: u64,
}

/// Requests of a disk that wait for room on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StalledView {
    /// The disk.
    pub name: Name,
    /// Why they wait.
    pub reason: String,
    /// For how long, in milliseconds.
    pub for_millis: u64,
}

/// The service itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Of the program.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// How disks are exported.
    pub disks_by: ExportView,
    /// How images are exported.
    pub images_by: ExportView,
    /// The block cache.
    pub cache: CacheView,
    /// Number of disks, those included that only exist for others.
    pub disks: usize,
    /// Number of images.
    pub images: usize,
    /// Number of layer files that are open.
    pub open_layers: usize,
    /// Names of disks and images that cannot be used, with the reasons.
    pub failed: Vec<(Name, String)>,
    /// Disks whose requests wait for room on the host.
    pub stalled: Vec<StalledView>,
}

/// Kinds of errors, as `code` in an answer that is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The request makes no sense.
    Invalid,
    /// There is no such disk, image, top or file.
    NotFound,
    /// It contradicts what there is.
    Conflict,
    /// The host has no room.
    NoSpace,
    /// This machine cannot do it now.
    Unavailable,
    /// The service failed.
    Internal,
}

/// The body of an answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Its kind.
    pub code: ErrorCode,
    /// What failed, on what, and what to do.
    pub message: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn layers_have_three_forms_and_no_other() {
        let parse = |value: serde_json::Value| serde_json::from_value::<LayerRef>(value);
        assert_eq!(parse(json!({"file": "/a"})).unwrap(), LayerRef::File { file: "/a".into() });
        assert_eq!(parse(json!({"raw": "/a"})).unwrap(), LayerRef::Raw { raw: "/a".into() });
        let top = LayerRef::Top { disk: "d".parse().unwrap(), top: "t-1".parse().unwrap() };
        assert_eq!(parse(json!({"disk": "d", "top": "t-1"})).unwrap(), top);
        for wrong in [
            json!({}),
            json!({"disk": "d"}),
            json!({"disk": "../d", "top": "t"}),
            json!("a"),
            json!({"file": 1}),
            json!({"file": "/a", "raw": "/b"}),
        ] {
            assert!(parse(wrong.clone()).is_err(), "{wrong}");
        }
        assert_eq!(serde_json::to_value(top).unwrap(), json!({"disk": "d", "top": "t-1"}));
    }

    #[test]
    fn layers_inside_of_a_directory_move_with_it() {
        let (old, new) = (Path::new("/old"), Path::new("/new"));
        let file = |path: &str| LayerRef::File { file: path.into() };
        let raw = |path: &str| LayerRef::Raw { raw: path.into() };
        let top = LayerRef::Top { disk: "d".parse().unwrap(), top: "t".parse().unwrap() };
        for (before, after) in [
            (file("/old/a/b"), file("/new/a/b")),
            (raw("/old/a"), raw("/new/a")),
            (raw("/older/a"), raw("/older/a")),
            (top.clone(), top),
        ] {
            assert_eq!(before.relative_to(old).resolve(new), after);
            assert_eq!(before.clone().resolve(new), before);
        }
    }

    #[test]
    fn what_is_left_out_has_a_default_and_what_is_unknown_is_refused() {
        let parse = |value: serde_json::Value| serde_json::from_value::<CreateDisk>(value);
        let disk = parse(json!({"name": "d", "size": 4096})).unwrap();
        assert_eq!((disk.layers.len(), disk.quota, disk.owner), (0, None, 0));
        assert!(parse(json!({"name": "d", "size": 4096, "qouta": 1})).is_err());
        assert!(parse(json!({"name": "d", "size": -1})).is_err());
        let image: CreateImage = serde_json::from_value(json!({"name": "i", "layers": []})).unwrap();
        assert!(image.exported);
    }
}
