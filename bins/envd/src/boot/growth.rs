//! The size of the root filesystem, which the node gives as `aenv.root_bytes` among the kernel's arguments.
//!
//! The disk may be far larger: what a filesystem never used is stored nowhere, so its size is what a sandbox may use.

use aenv_protocol::envd::ROOT_BYTES_ARGUMENT;
use anyhow::{Context as _, bail};
use rustix::mount::{MountFlags, mount_remount};
use std::fs::File;

/// Grows the root filesystem to what the node wants, if it says.
///
/// # Errors
/// When the wish is no number, or the kernel cannot grow the filesystem.
pub(crate) fn grow_root() -> anyhow::Result<()> {
    let arguments = std::fs::read_to_string("/proc/cmdline").context("cannot read the kernel's arguments")?;
    if let Some(bytes) = wished_bytes(&arguments)? {
        let root = File::open("/").context("cannot open the root directory")?;
        let block = rustix::fs::fstatvfs(&root).context("cannot ask for the root's block size")?.f_frsize;
        let blocks = bytes.checked_div(block).context("the root filesystem has blocks of no bytes")?;
        aenv_sys::guest::grow_ext4(&root, blocks)
            .with_context(|| format!("cannot grow the root filesystem to {bytes} bytes"))?;
    }
    // The kernel would fill the inode tables of new groups with zeros in the background, in every sandbox anew. They are
    // zeros: nothing was ever written there.
    mount_remount("/", MountFlags::NOATIME, c"noinit_itable")
        .context("cannot keep the kernel from writing empty inode tables")
}

fn wished_bytes(arguments: &str) -> anyhow::Result<Option<u64>> {
    let mut values = arguments.split_whitespace().filter_map(|word| {
        let (name, value) = word.split_once('=')?;
        (name == ROOT_BYTES_ARGUMENT).then_some(value)
    });
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        bail!("{ROOT_BYTES_ARGUMENT} is given twice");
    }
    value.parse().map(Some).with_context(|| format!("{ROOT_BYTES_ARGUMENT}={value}: no number of bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wish_is_found_among_other_arguments_and_nonsense_is_refused() {
        assert_eq!(wished_bytes("quiet pci=off\n").expect("is fine"), None);
        assert_eq!(wished_bytes("quiet aenv.root_bytes=4096 x=1\n").expect("is fine"), Some(4096));
        assert_eq!(wished_bytes("my.aenv.root_bytes=1 aenv.root_bytes_=2").expect("is fine"), None);
        for wrong in [
            "aenv.root_bytes=",
            "aenv.root_bytes=-1",
            "aenv.root_bytes=1G",
            "aenv.root_bytes=1 aenv.root_bytes=1",
        ] {
            let error = wished_bytes(wrong).expect_err("is wrong");
            assert!(error.to_string().contains("aenv.root_bytes"), "{error}");
        }
    }
}
