//! `purge`: no export, disk or image of this instance stays, and no process of it. Layer files do.

use crate::arguments::Instance;
use crate::directories::{Directories, remove_file, remove_tree};
use crate::holder::clear_mount_point;
use crate::output::say;
use aenv_export::fuse::holder;
use aenv_export::ublk::{Settings as UblkSettings, UblkExporter};
use anyhow::{Context as _, Result};
use std::io::ErrorKind;
use std::path::Path;

/// Ends and removes; says what there was, one line each.
pub(crate) fn purge(options: &Instance) -> Result<()> {
    let (data, run) = (&options.data_dir, options.run_dir());
    if !data.join("storage").exists() && !run.exists() {
        return Ok(());
    }
    let directories = Directories::open(data, &run)
        .with_context(|| format!("cannot open {} and {}", data.display(), run.display()))?;
    // Held to the end, so that no service starts in between.
    let _lock = directories.lock()?;
    if directories.holder_socket().exists() {
        holder::stop(&directories.holder_socket(), true)?;
        say("FUSE mount")?;
    }
    clear_mount_point(&directories.mount_point())?;
    if UblkExporter::probe().is_ok() {
        let ublk = UblkExporter::new(&UblkSettings::new(options.instance.as_str()))?;
        let numbers = ublk.leftovers()?;
        for number in &numbers {
            ublk.remove_leftover(*number)?;
        }
        if !numbers.is_empty() {
            say(&format!("block devices: {}", numbers.len()))?;
        }
    }
    for (what, directory) in [("disks", directories.disks()), ("images", directories.images())] {
        let entries =
            std::fs::read_dir(&directory).with_context(|| format!("cannot list {}", directory.display()))?;
        let number = entries.count();
        remove_tree(&directory)?;
        if number > 0 {
            say(&format!("{what}: {number}"))?;
        }
    }
    remove_empty(&directories.mount_point())?;
    let files =
        [directories.socket(), directories.holder_socket(), directories.holder_log(), directories.numbers()];
    for path in files.into_iter().chain([directories.holder_socket().with_extension("lock")]) {
        remove_file(&path)?;
    }
    remove_empty(directories.run())?;
    remove_empty(&directories.layers())
}

/// Removes a directory that has nothing of others in it.
fn remove_empty(directory: &Path) -> Result<()> {
    match std::fs::remove_dir(directory) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}
