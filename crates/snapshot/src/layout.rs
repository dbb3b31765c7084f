//! Where everything lies. The only place that makes keys or takes them apart.
//!
//! ```text
//! blobs/DIGEST/PUBLICATION              content, immutable; DIGEST is its SHA-256, PUBLICATION who brought it
//! condemned/DIGEST/PUBLICATION          that blob is taken by nobody any more, and will be removed
//! publications/PUBLICATION.json         what somebody is publishing, or holds, just now
//! manifests/SNAPSHOT/PUBLICATION.json   the snapshot; or that the publication never becomes one
//! aliases/NAME/TAG/GENERATION.json      what a name means; the highest generation counts
//! heads/SANDBOX/GENERATION.json         who owns a sandbox, and its state; the highest generation counts
//! collections/TOKEN.json                asks the store for the time, for a moment
//! ```
//! Pure. Must not read what lies there.

use crate::name::Name;
use aenv_storage::digest::Digest;
use object_store::path::Path;

pub(crate) const BLOBS: &str = "blobs";
pub(crate) const CONDEMNED: &str = "condemned";
pub(crate) const PUBLICATIONS: &str = "publications";
pub(crate) const MANIFESTS: &str = "manifests";
pub(crate) const ALIASES: &str = "aliases";
pub(crate) const HEADS: &str = "heads";
pub(crate) const COLLECTIONS: &str = "collections";

/// One stored copy of some content. Its key is never used for another copy, so nobody takes a new one for one that is
/// being removed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BlobKey {
    pub(crate) digest: Digest,
    pub(crate) publication: Name,
}

impl BlobKey {
    /// Where it lies.
    pub(crate) fn path(&self) -> Path {
        Path::from(format!("{BLOBS}/{}/{}", self.digest, self.publication))
    }

    /// Where it is said that it is condemned.
    pub(crate) fn marker(&self) -> Path {
        Path::from(format!("{CONDEMNED}/{}/{}", self.digest, self.publication))
    }

    /// Reads the key of a blob or of a marker; none when it is neither.
    pub(crate) fn parse(path: &Path) -> Option<Self> {
        let mut parts = path.as_ref().split('/');
        let (Some(BLOBS | CONDEMNED), Some(digest), Some(publication), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return None;
        };
        Some(Self { digest: digest.parse().ok()?, publication: publication.parse().ok()? })
    }
}

/// All copies of `digest`, or all their markers.
pub(crate) fn copies(kind: &str, digest: &Digest) -> Path {
    Path::from(format!("{kind}/{digest}"))
}

pub(crate) fn publication(publication: &Name) -> Path {
    document(PUBLICATIONS, publication)
}

pub(crate) fn collection(token: &Name) -> Path {
    document(COLLECTIONS, token)
}

pub(crate) fn manifest(snapshot: &Name, publication: &Name) -> Path {
    Path::from(format!("{MANIFESTS}/{snapshot}/{publication}.json"))
}

/// Where the manifests of `snapshot` lie.
pub(crate) fn manifests(snapshot: &Name) -> Path {
    Path::from(format!("{MANIFESTS}/{snapshot}"))
}

/// The snapshot and the publication of a manifest's key.
pub(crate) fn parse_manifest(path: &Path) -> Option<(Name, Name)> {
    let rest = path.as_ref().strip_prefix(MANIFESTS)?.strip_prefix('/')?;
    let (snapshot, publication) = rest.split_once('/')?;
    Some((snapshot.parse().ok()?, publication.strip_suffix(".json")?.parse().ok()?))
}

pub(crate) fn alias(name: &Name, tag: &Name) -> Path {
    Path::from(format!("{ALIASES}/{name}/{tag}"))
}

pub(crate) fn head(sandbox: &Name) -> Path {
    Path::from(format!("{HEADS}/{sandbox}"))
}

/// One generation of a register. Padded, so that their order is that of their names.
pub(crate) fn generation(register: &Path, generation: u64) -> Path {
    register.clone().join(format!("{generation:016x}.json"))
}

pub(crate) fn parse_generation(path: &Path) -> Option<u64> {
    let digits = path.filename()?.strip_suffix(".json")?;
    if digits.len() != 16 {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

fn document(kind: &str, name: &Name) -> Path {
    Path::from(format!("{kind}/{name}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_were_made() {
        let key = BlobKey { digest: Digest::of(b"a"), publication: "p1".parse().unwrap() };
        assert_eq!(BlobKey::parse(&key.path()), Some(key.clone()));
        assert_eq!(BlobKey::parse(&key.marker()), Some(key));
        let (snapshot, publication): (Name, Name) = ("s.1".parse().unwrap(), "p".parse().unwrap());
        assert_eq!(parse_manifest(&manifest(&snapshot, &publication)), Some((snapshot.clone(), publication)));
        let register = head(&snapshot);
        assert_eq!(parse_generation(&generation(&register, 300)), Some(300));
        assert!(generation(&register, 9) < generation(&register, 16));
    }

    #[test]
    fn foreign_keys_are_no_keys() {
        for foreign in ["blobs/x/p", "blobs", "other/a/b", &format!("blobs/{}", Digest::of(b""))] {
            assert_eq!(BlobKey::parse(&Path::from(foreign)), None, "{foreign}");
        }
        assert_eq!(parse_manifest(&Path::from("manifests/a")), None);
        assert_eq!(parse_generation(&Path::from("heads/a/1.json")), None);
    }
}
