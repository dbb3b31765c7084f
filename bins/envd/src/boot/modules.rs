//! Kernel modules that the initramfs brings along.

use super::on;
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

/// Inserts the modules that `order` in `directory` names, one file name per line, in that order.
///
/// Returns how many were inserted; one that is there already or built in is fine.
///
/// # Errors
/// When a file cannot be read or the kernel refuses a module.
pub(crate) fn load(directory: &Path) -> anyhow::Result<usize> {
    let list = directory.join("order");
    let order = match std::fs::read_to_string(&list) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        other => on(other, "read", &list)?,
    };
    let mut inserted = 0;
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty() && !name.starts_with('#')) {
        let path = directory.join(name);
        let file = on(File::open(&path), "open", &path)?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) => inserted += 1,
            Err(Errno::EXIST) => {}
            Err(error) => on(Err(error), "insert", &path)?,
        }
    }
    Ok(inserted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_list_means_no_modules_and_a_missing_file_is_named() {
        let directory = tempfile::tempdir().expect("makes");
        assert_eq!(load(directory.path()).expect("is fine"), 0);
        std::fs::write(directory.path().join("order"), "\n# none\nmissing.ko\n").expect("writes");
        let error = load(directory.path()).expect_err("is missing");
        assert!(format!("{error:#}").contains("missing.ko"), "{error:#}");
    }
}
