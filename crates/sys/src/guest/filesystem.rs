//! What a mounted filesystem can be told beyond mount options.

use rustix::ioctl::{Setter, ioctl, opcode};
use std::io;
use std::os::fd::AsFd;

/// `EXT4_IOC_RESIZE_FS` of the kernel's `fs/ext4/ext4.h`: takes the wished number of blocks.
const EXT4_RESIZE: rustix::ioctl::Opcode = opcode::write::<u64>(b'f', 16);

/// Grows the mounted ext4 that `directory` lies on to this many of its own blocks. The kernel refuses to shrink one, and to
/// make it larger than its device; the size it has already is no change.
///
/// # Errors
/// The kernel's; the process needs `CAP_SYS_RESOURCE`.
pub fn grow_ext4(directory: impl AsFd, blocks: u64) -> io::Result<()> {
    // SAFETY: the request reads one u64 (`_IOW('f', 16, __u64)`) and writes nothing back.
    let request = unsafe { Setter::<EXT4_RESIZE, u64>::new(blocks) };
    // SAFETY: as above; a file of another filesystem answers that it knows no such request.
    Ok(unsafe { ioctl(directory, request) }?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn what_is_no_ext4_cannot_be_grown() {
        let error = grow_ext4(File::open("/proc").unwrap(), 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "{error}");
    }
}
