//! Changing the file tree.

use crate::accounts::User;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, chown};
use std::path::Path;

/// Makes `path` and its missing parents; those that were missing belong to `user`.
///
/// # Errors
/// When something that is no directory is in the way, or the disk is full.
pub(crate) fn make_directories(path: &Path, user: &User) -> io::Result<()> {
    let mut missing = Vec::new();
    for ancestor in path.ancestors() {
        match std::fs::metadata(ancestor) {
            Ok(found) if found.is_dir() => break,
            Ok(_) => return Err(io::ErrorKind::NotADirectory.into()),
            Err(error) if is_missing(&error) => missing.push(ancestor),
            Err(error) => return Err(error),
        }
    }
    for directory in missing.into_iter().rev() {
        match std::fs::DirBuilder::new().mode(0o755).create(directory) {
            Ok(()) => chown(directory, Some(user.uid), Some(user.gid))?,
            // Somebody else was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Removes the entry at `path` with all that lies in it, links themselves and not what they point to.
/// A missing entry is fine.
///
/// # Errors
/// When something cannot be removed.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let removed = match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if is_missing(&error) => Ok(()),
        other => other,
    }
}

/// Whether nothing can be at that path.
#[must_use]
pub(crate) fn is_missing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> User {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        User { name: "me".into(), uid, gid, groups: vec![gid], home: "/".into() }
    }

    #[test]
    fn directories_are_made_with_parents_unless_a_file_is_in_the_way() {
        let directory = tempfile::tempdir().expect("makes");
        let deep = directory.path().join("a/b/c");
        make_directories(&deep, &me()).expect("makes");
        make_directories(&deep, &me()).expect("is there");
        std::fs::write(deep.join("f"), "").expect("writes");
        assert_eq!(
            make_directories(&deep.join("f"), &me()).expect_err("file").kind(),
            io::ErrorKind::NotADirectory
        );
        assert_eq!(
            make_directories(&deep.join("f/g"), &me()).expect_err("file").kind(),
            io::ErrorKind::NotADirectory
        );
    }

    #[test]
    fn removal_takes_trees_spares_what_links_point_to_and_allows_absence() {
        let directory = tempfile::tempdir().expect("makes");
        let root = directory.path();
        std::fs::create_dir_all(root.join("kept/x")).expect("makes");
        std::fs::create_dir_all(root.join("gone/y")).expect("makes");
        std::os::unix::fs::symlink(root.join("kept"), root.join("gone/link")).expect("links");
        remove(&root.join("gone")).expect("removes");
        remove(&root.join("gone")).expect("is gone");
        assert!(!root.join("gone").exists() && root.join("kept/x").exists());
    }
}
