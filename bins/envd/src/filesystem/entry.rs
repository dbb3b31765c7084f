//! Describing entries of the file tree.

use crate::accounts::Accounts;
use crate::paths::name_of;
use aenv_protocol::envd::filesystem::{EntryInfo, FileType};
use std::fs::{FileType as Kind, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

/// Namespace of metadata among the extended attributes of a file. Source: E2B's daemon.
pub(crate) const METADATA_PREFIX: &str = "user.e2b.";

/// Describes the entry at `path`.
///
/// # Errors
/// When it is not there or cannot be looked at.
pub(crate) fn describe(path: &Path, accounts: &Accounts) -> io::Result<EntryInfo> {
    let own = std::fs::symlink_metadata(path)?;
    let (target, pointed_at) = if own.is_symlink() {
        match std::fs::canonicalize(path).and_then(|target| Ok((target.clone(), std::fs::metadata(target)?)))
        {
            Ok((target, metadata)) => (Some(target), Some(metadata)),
            Err(_) => (Some(path.to_owned()), None),
        }
    } else {
        (None, Some(own.clone()))
    };
    Ok(EntryInfo {
        name: name_of(path),
        r#type: pointed_at.as_ref().map_or(FileType::FILE_TYPE_UNSPECIFIED, file_type).into(),
        path: path.to_string_lossy().into_owned(),
        size: own.size().cast_signed(),
        mode: pointed_at.as_ref().map_or(0, |metadata| metadata.mode() & 0o777),
        permissions: permissions(own.file_type(), own.mode()),
        owner: accounts.user_name(own.uid()),
        group: accounts.group_name(own.gid()),
        modified_time: timestamp(&own).into(),
        symlink_target: target.map(|target| target.to_string_lossy().into_owned()),
        metadata: metadata(path)?.into_iter().collect(),
        ..Default::default()
    })
}

fn file_type(metadata: &Metadata) -> FileType {
    if metadata.is_file() {
        FileType::FILE_TYPE_FILE
    } else if metadata.is_dir() {
        FileType::FILE_TYPE_DIRECTORY
    } else {
        FileType::FILE_TYPE_UNSPECIFIED
    }
}

fn timestamp(metadata: &Metadata) -> buffa_types::google::protobuf::Timestamp {
    buffa_types::google::protobuf::Timestamp {
        seconds: metadata.mtime(),
        // Always below 10^9.
        nanos: i32::try_from(metadata.mtime_nsec()).unwrap_or_default(),
        ..Default::default()
    }
}

/// Kind and mode in the notation of Go's `FileMode`: letters of all special properties, or `-`, then nine for access.
#[must_use]
pub(crate) fn permissions(kind: Kind, mode: u32) -> String {
    let special = [
        (kind.is_dir(), 'd'),
        (kind.is_symlink(), 'L'),
        (kind.is_block_device() || kind.is_char_device(), 'D'),
        (kind.is_fifo(), 'p'),
        (kind.is_socket(), 'S'),
        (mode & 0o4000 != 0, 'u'),
        (mode & 0o2000 != 0, 'g'),
        (kind.is_char_device(), 'c'),
        (mode & 0o1000 != 0, 't'),
    ];
    let mut text: String = special.into_iter().filter_map(|(set, letter)| set.then_some(letter)).collect();
    if text.is_empty() {
        text.push('-');
    }
    for (index, letter) in "rwxrwxrwx".chars().enumerate() {
        text.push(if mode & (0o400 >> index) == 0 { '-' } else { letter });
    }
    text
}

/// Metadata stored with the file at `path`, by key without the prefix; none where the filesystem has no attributes.
///
/// # Errors
/// When the attributes exist and cannot be read.
pub(crate) fn metadata(path: &Path) -> io::Result<Vec<(String, String)>> {
    let names = match xattr::list(path) {
        Ok(names) => names,
        Err(error) if lacks_attributes(&error) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for name in names {
        let Some(key) = name.to_str().and_then(|name| name.strip_prefix(METADATA_PREFIX)) else { continue };
        if let Some(value) = xattr::get(path, &name)? {
            found.push((key.to_owned(), String::from_utf8_lossy(&value).into_owned()));
        }
    }
    Ok(found)
}

/// Whether the filesystem, or an entry such as a link or a pipe that leads nowhere, cannot have attributes.
#[must_use]
pub(crate) fn lacks_attributes(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        errno,
        Some(Errno::NOTSUP | Errno::PERM | Errno::ACCESS | Errno::NOENT | Errno::LOOP | Errno::NXIO)
    )
}

/// Describes what lies in the directory `root`, `depth` levels deep, in lexical order, each directory before what lies
/// in it. Links in it are not followed. Entries that vanish meanwhile are left out.
///
/// # Errors
/// When `root` cannot be read.
pub(crate) fn list(root: &Path, depth: u32, accounts: &Accounts) -> io::Result<Vec<EntryInfo>> {
    let mut entries = Vec::new();
    list_into(&mut entries, root, depth.max(1), accounts)?;
    Ok(entries)
}

fn list_into(entries: &mut Vec<EntryInfo>, root: &Path, depth: u32, accounts: &Accounts) -> io::Result<()> {
    let mut children = std::fs::read_dir(root)?.collect::<io::Result<Vec<_>>>()?;
    children.sort_by_key(std::fs::DirEntry::file_name);
    for child in children {
        let path = child.path();
        match describe(&path, accounts) {
            Ok(entry) => entries.push(entry),
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        }
        let is_directory = child.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory && depth > 1 {
            match list_into(entries, &path, depth - 1, accounts) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    fn shown(path: &Path) -> String {
        let metadata = std::fs::symlink_metadata(path).expect("exists");
        permissions(metadata.file_type(), metadata.mode())
    }

    #[test]
    fn permissions_are_written_as_go_does() {
        let directory = tempfile::tempdir().expect("makes");
        let file = directory.path().join("f");
        std::fs::write(&file, "x").expect("writes");
        for (mode, text) in
            [(0o644, "-rw-r--r--"), (0o4755, "urwxr-xr-x"), (0o2070, "g---rwx---"), (0, "----------")]
        {
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("sets");
            assert_eq!(shown(&file), text);
        }
        let link = directory.path().join("l");
        symlink("f", &link).expect("links");
        assert_eq!(shown(&link), "Lrwxrwxrwx");
        assert_eq!(shown(Path::new("/tmp")), "dtrwxrwxrwx");
        assert_eq!(shown(Path::new("/dev/null")), "Dcrw-rw-rw-");
    }

    #[test]
    fn links_show_their_target() {
        let directory = tempfile::tempdir().expect("makes");
        let root = std::fs::canonicalize(directory.path()).expect("exists");
        std::fs::create_dir(root.join("d")).expect("makes");
        symlink("d", root.join("good")).expect("links");
        symlink("good", root.join("twice")).expect("links");
        symlink("nowhere", root.join("dangling")).expect("links");
        symlink("loop", root.join("loop")).expect("links");
        let accounts = Accounts::default();
        let entry = |name: &str| describe(&root.join(name), &accounts).expect("is there");
        assert_eq!(entry("twice").r#type, FileType::FILE_TYPE_DIRECTORY);
        assert_eq!(entry("twice").symlink_target, Some(root.join("d").to_string_lossy().into_owned()));
        assert!(!entry("twice").is_symlink);
        for name in ["dangling", "loop"] {
            assert_eq!(entry(name).r#type, FileType::FILE_TYPE_UNSPECIFIED);
            assert_eq!(entry(name).symlink_target, Some(root.join(name).to_string_lossy().into_owned()));
            assert_eq!(entry(name).mode, 0);
        }
    }

    #[test]
    fn listing_is_lexical_and_stops_at_its_depth_and_at_links() {
        let directory = tempfile::tempdir().expect("makes");
        let root = directory.path();
        std::fs::create_dir_all(root.join("b/c/d")).expect("makes");
        std::fs::write(root.join("b.txt"), "").expect("writes");
        std::fs::write(root.join("a"), "").expect("writes");
        symlink("b", root.join("z")).expect("links");
        let names = |depth| {
            let entries = list(root, depth, &Accounts::default()).expect("lists");
            entries.into_iter().map(|entry| entry.name).collect::<Vec<_>>()
        };
        assert_eq!(names(0), ["a", "b", "b.txt", "z"]);
        assert_eq!(names(1), names(0));
        assert_eq!(names(2), ["a", "b", "c", "b.txt", "z"]);
        assert_eq!(names(9), ["a", "b", "c", "d", "b.txt", "z"]);
    }
}
