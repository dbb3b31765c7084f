//! What the kernel holds of a disk's writes before the block service sees them. Owns nothing.

use crate::StorageError;
use crate::raw_file::failed;
use std::fs::File;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

/// Hands what was written to an exported disk, and is still in the kernel's cache, to the block service: to be called before a
/// seal, when the guest stands still. Block devices are cached, files of disks are not. Blocks as long as the service is away.
///
/// # Errors
/// When the disk is not there, or does not take what was written.
pub fn write_back(path: &Path) -> Result<(), StorageError> {
    let metadata = std::fs::metadata(path).map_err(|error| failed("look at", path, error))?;
    if !metadata.file_type().is_block_device() {
        return Ok(());
    }
    let device = File::open(path).map_err(|error| failed("open", path, error))?;
    aenv_sys::file::write_back(&device).map_err(|error| failed("write back", path, error))
}
