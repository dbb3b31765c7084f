//! The layer format of overlaybd, "LSMT": which bytes of a virtual disk a file has, and where.
//!
//! ```text
//! sealed       [header 4096][data ...][index: 16 bytes an entry, sorted, disjoint][trailer 4096]
//! log pair     NAME.data: [header 4096][data in the order of writes ...]
//!              NAME.index: [header 4096][entries in the order of writes, later ones win ...]
//! sparse       [header 4096][the disk itself, absent where the file has a hole]
//! ```
//! Numbers are little-endian. Entries count in sectors of 512 bytes. The format has no checksum of its own: compressed
//! files (zfile) and registries have. So everything here is checked for consistency before it is used, and nothing more
//! can be.
//!
//! Owns the encoding. Must not know how layers are stacked.

pub(crate) mod entry;
pub(crate) mod header;
pub(crate) mod log;
pub(crate) mod sealed;
pub(crate) mod sparse;
pub(crate) mod writer;

pub use entry::{MAXIMUM_LENGTH, Mapping, SECTOR_LIMIT, STORED_LIMIT};

/// Unit of offsets and lengths in the index: bytes.
pub const SECTOR_BYTES: u64 = 512;

/// Entries a sealed layer may have: overlaybd refuses more.
pub const MAXIMUM_ENTRIES: u64 = 1_000_000;
