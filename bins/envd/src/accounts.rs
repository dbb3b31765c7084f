//! Users and groups of the guest, read from `/etc/passwd` and `/etc/group`.
//!
//! A static program has no name service, so the two files are read here, anew for each question: a command may have
//! changed them a moment ago. `root` exists even in an image without these files. Owns no state.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// One user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    /// Name.
    pub(crate) name: String,
    /// User id.
    pub(crate) uid: u32,
    /// Primary group id.
    pub(crate) gid: u32,
    /// All groups, the primary one first.
    pub(crate) groups: Vec<u32>,
    /// Home directory.
    pub(crate) home: PathBuf,
}

/// Why a user cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AccountError {
    /// Nobody has this name.
    #[error("invalid username: '{0}'")]
    Unknown(String),
    /// A file exists and cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What the two files say at one moment.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

impl Accounts {
    /// Reads the files below `etc`; a missing one is empty.
    ///
    /// # Errors
    /// When a file exists and cannot be read.
    pub(crate) fn read(etc: &Path) -> Result<Self, AccountError> {
        let read = |name| {
            let path = etc.join(name);
            match std::fs::read(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
                other => other.map_err(|source| AccountError::Read { path, source }),
            }
        };
        Ok(Self { passwd: read("passwd")?, group: read("group")? })
    }

    /// The user of that name.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn user(&self, name: &str) -> Result<User, AccountError> {
        let mut found = lines(&self.passwd, 7).find_map(|fields| {
            if fields[0] != name.as_bytes() {
                return None;
            }
            let (uid, gid) = (number(fields[2])?, number(fields[3])?);
            let home =
                if fields[5].is_empty() { Path::new("/") } else { Path::new(OsStr::from_bytes(fields[5])) };
            Some(User { name: name.to_owned(), uid, gid, groups: vec![gid], home: home.to_owned() })
        });
        if found.is_none() && name == "root" {
            found = Some(User { name: "root".into(), uid: 0, gid: 0, groups: vec![0], home: "/".into() });
        }
        let mut user = found.ok_or_else(|| AccountError::Unknown(name.to_owned()))?;
        for fields in lines(&self.group, 4) {
            let is_member = fields[3].split(|byte| *byte == b',').any(|member| member == name.as_bytes());
            match number(fields[2]) {
                Some(gid) if is_member && !user.groups.contains(&gid) => user.groups.push(gid),
                _ => {}
            }
        }
        Ok(user)
    }

    /// Name of a user id, or the number when it has none.
    #[must_use]
    pub(crate) fn user_name(&self, uid: u32) -> String {
        name_of(&self.passwd, 7, uid).unwrap_or_else(|| uid.to_string())
    }

    /// Name of a group id, or the number when it has none.
    #[must_use]
    pub(crate) fn group_name(&self, gid: u32) -> String {
        name_of(&self.group, 4, gid).unwrap_or_else(|| gid.to_string())
    }
}

/// The fields of each well-formed line.
fn lines(text: &[u8], fields: usize) -> impl Iterator<Item = Vec<&[u8]>> {
    text.split(|byte| *byte == b'\n')
        .map(|line| line.split(|byte| *byte == b':').collect::<Vec<_>>())
        .filter(move |line| line.len() >= fields && !line[0].is_empty())
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn name_of(text: &[u8], fields: usize, id: u32) -> Option<String> {
    lines(text, fields)
        .find(|line| number(line[2]) == Some(id))
        .map(|line| Cow::into_owned(String::from_utf8_lossy(line[0])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: b"root:x:0:0:root:/root:/bin/sh\nbroken:x:1\n# note\nuser:x:1000:1000:,,,:/home/user:/bin/bash\n\
                      bad:x:4294967296:1:::\nnohome:x:7:8:::\n\xff:x:9:9::/:/\n"
                .to_vec(),
            group: b"root:x:0:\nsudo:x:27:other,user\nuser:x:1000:user\ndocker:x:999:user\nhalf:x\nz:x:no:user\n".to_vec(),
        }
    }

    #[test]
    fn a_user_has_home_and_supplementary_groups() {
        let user = accounts().user("user").expect("exists");
        assert_eq!((user.uid, user.gid, user.home.as_path()), (1000, 1000, Path::new("/home/user")));
        assert_eq!(user.groups, [1000, 27, 999]);
        assert_eq!(accounts().user("nohome").expect("exists").home, Path::new("/"));
    }

    #[test]
    fn unknown_and_malformed_users_are_refused() {
        for name in ["", "nobody", "broken", "bad", "# note", "x", "user:x"] {
            let error = accounts().user(name).expect_err(name);
            assert_eq!(error.to_string(), format!("invalid username: '{name}'"));
        }
    }

    #[test]
    fn root_exists_in_an_image_without_accounts() {
        let directory = tempfile::tempdir().expect("makes");
        let empty = Accounts::read(directory.path()).expect("reads");
        assert_eq!(empty.user("root").expect("exists").uid, 0);
        assert!(empty.user("user").is_err());
    }

    #[test]
    fn ids_without_a_name_stay_numbers() {
        assert_eq!(accounts().user_name(1000), "user");
        assert_eq!(accounts().user_name(9), "\u{fffd}");
        assert_eq!(accounts().user_name(4242), "4242");
        assert_eq!(accounts().group_name(27), "sudo");
        assert_eq!(accounts().group_name(28), "28");
    }
}
