//! How a path of a request becomes an absolute path. Pure.
//!
//! | given | becomes |
//! |---|---|
//! | nothing | the default directory, else the user's home |
//! | `~`, `~/x` | the user's home |
//! | `/x` | itself |
//! | `x` | below the user's home (not below the default directory) |
//!
//! `.`, `..` and doubled slashes are removed by text alone, without looking at the disk.

use crate::accounts::User;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

/// Why a text is not a path.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum PathError {
    /// The kernel ends paths at a zero byte.
    #[error("path contains a zero byte")]
    ZeroByte,
}

/// The absolute, clean path that `given` means for `user`.
///
/// # Errors
/// When `given` can never be a path.
pub(crate) fn resolve(
    given: &OsStr,
    user: &User,
    default_directory: Option<&Path>,
) -> Result<PathBuf, PathError> {
    let bytes = given.as_bytes();
    if bytes.contains(&0) {
        return Err(PathError::ZeroByte);
    }
    let path = match bytes {
        b"" => default_directory.unwrap_or(&user.home).to_owned(),
        b"~" => user.home.clone(),
        [b'~', b'/', rest @ ..] => user.home.join(relative(rest)),
        [b'/', ..] => PathBuf::from(given),
        _ => user.home.join(given),
    };
    Ok(clean(&path))
}

/// Drops leading slashes: joining an absolute path would replace the home.
fn relative(bytes: &[u8]) -> &Path {
    let start = bytes.iter().position(|byte| *byte != b'/').unwrap_or(bytes.len());
    Path::new(OsStr::from_bytes(&bytes[start..]))
}

/// `path` as an absolute one without `.`, `..` and doubled slashes.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => {
                cleaned.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

/// The last part of `path` as text; `/` for the root.
#[must_use]
pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| "/".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User { name: "user".into(), uid: 1, gid: 1, groups: vec![1], home: "/home/user".into() }
    }

    #[test]
    fn paths_follow_the_table() {
        for (given, expected) in [
            ("", "/work"),
            ("~", "/home/user"),
            ("~/", "/home/user"),
            ("~/a", "/home/user/a"),
            ("~//etc/passwd", "/home/user/etc/passwd"),
            ("a/b", "/home/user/a/b"),
            ("./a//b/", "/home/user/a/b"),
            ("~other", "/home/user/~other"),
            ("/", "/"),
            ("/a/../../../b", "/b"),
            ("../../../etc", "/etc"),
            ("/a/./b", "/a/b"),
        ] {
            let path = resolve(OsStr::new(given), &user(), Some(Path::new("/work"))).expect("is a path");
            assert_eq!(path, Path::new(expected), "{given:?}");
        }
        assert_eq!(resolve(OsStr::new(""), &user(), None), Ok("/home/user".into()));
    }

    #[test]
    fn bytes_that_are_no_text_are_kept_and_zero_is_refused() {
        let odd = OsStr::from_bytes(b"/a/\xff\xfe");
        assert_eq!(resolve(odd, &user(), None).expect("is a path").as_os_str(), odd);
        assert_eq!(resolve(OsStr::new("/a\0b"), &user(), None), Err(PathError::ZeroByte));
    }
}
