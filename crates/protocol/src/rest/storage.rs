//! What a node stores. Ours alone: E2B's API has nothing like it.

use serde::{Deserialize, Serialize};

/// Answer to `POST /storage/gc`: what was removed, because nothing is made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CollectedGarbage {
    /// Disks of captures that are gone.
    pub captures: u64,
    /// Layer files.
    pub layers: u64,
    /// Directories that belonged to no disk.
    pub directories: u64,
    /// What the file system stored for layer files and directories, in bytes.
    pub bytes: u64,
}
