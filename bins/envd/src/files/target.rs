//! A file that is being uploaded.
//!
//! ```text
//! new file      : open(create) ─▶ chown ─▶ write…        (followers of the directory see create, attributes, write)
//! existing file : chown ─▶ open(truncate) ─▶ write…
//! ```
//! A small body is written by one call. A file that this upload made and could not complete is removed again.

use super::metadata;
use crate::accounts::User;
use crate::filesystem::change::make_directories;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, chown, fchown};
use std::path::PathBuf;

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 256 * 1024;

/// An open file that takes an upload.
#[derive(Debug)]
pub(crate) struct Target {
    writer: BufWriter<File>,
    /// Set while the file must not outlive a failure.
    unfinished: Option<PathBuf>,
}

impl Target {
    /// Opens `path` for writing and makes its missing parents. Blocks.
    pub(crate) fn open(path: PathBuf, user: &User) -> io::Result<Self> {
        // A pipe without a reader must not block the upload for ever.
        let options = |create: bool| {
            let mut options = OpenOptions::new();
            options.write(true).create_new(create).truncate(!create).mode(0o644);
            options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
            options
        };
        let opened = match options(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if let Some(parent) = path.parent() {
                    make_directories(parent, user)?;
                }
                options(true).open(&path)
            }
            other => other,
        };
        let (file, unfinished) = match opened {
            Ok(file) => (file, Some(path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if path.is_dir() {
                    return Err(io::ErrorKind::IsADirectory.into());
                }
                match chown(&path, Some(user.uid), Some(user.gid)) {
                    // A link that points nowhere: opening it makes the file.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    other => other?,
                }
                (options(false).create(true).open(&path)?, None)
            }
            Err(error) => return Err(error),
        };
        let target = Self { writer: BufWriter::with_capacity(BUFFER_BYTES, file), unfinished };
        if target.unfinished.is_some() {
            fchown(target.writer.get_ref(), Some(user.uid), Some(user.gid))?;
        }
        Ok(target)
    }

    /// Takes some content. Blocks.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes)
    }

    /// Writes what is left and the metadata. Blocks.
    pub(crate) fn finish(mut self, metadata: &BTreeMap<String, String>) -> io::Result<()> {
        self.writer.flush()?;
        metadata::replace(self.writer.get_ref(), metadata)?;
        self.unfinished = None;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(path) = self.unfinished.take()
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove an incomplete upload");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn me() -> User {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        User { name: "me".into(), uid, gid, groups: vec![gid], home: "/".into() }
    }

    fn put(path: &Path, content: &[u8]) -> io::Result<()> {
        let mut target = Target::open(path.to_owned(), &me())?;
        target.write(content)?;
        target.finish(&BTreeMap::new())
    }

    #[test]
    fn files_are_made_with_parents_and_overwritten() {
        let directory = tempfile::tempdir().expect("makes");
        let path = directory.path().join("a/b/c");
        put(&path, b"longer content").expect("writes");
        put(&path, b"short").expect("writes");
        assert_eq!(std::fs::read(&path).expect("reads"), b"short");
        assert_eq!(
            put(directory.path(), b"").expect_err("is a directory").kind(),
            io::ErrorKind::IsADirectory
        );
        assert_eq!(put(&path.join("x"), b"").expect_err("file above").kind(), io::ErrorKind::NotADirectory);
        std::os::unix::fs::symlink("made", directory.path().join("link")).expect("links");
        put(&directory.path().join("link"), b"through").expect("writes");
        assert_eq!(std::fs::read(directory.path().join("made")).expect("reads"), b"through");
    }

    #[test]
    fn an_upload_that_is_given_up_removes_only_a_file_it_made() {
        let directory = tempfile::tempdir().expect("makes");
        let path = directory.path().join("f");
        let mut target = Target::open(path.clone(), &me()).expect("opens");
        target.write(b"half").expect("writes");
        drop(target);
        assert!(!path.exists());
        put(&path, b"whole").expect("writes");
        drop(Target::open(path.clone(), &me()).expect("opens"));
        assert!(path.exists());
    }
}
