//! JSON documents with a version number.
//!
//! ```text
//! {"version": 1, …}     fields that are not known are left alone within a version; another version is refused
//! ```
//! Pure. Must not know what the documents say.

use crate::error::{RepositoryError, Result};
use object_store::path::Path;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// What is written, and the newest that is read.
const VERSION: u64 = 1;

#[derive(Serialize)]
struct Written<'a, T> {
    version: u64,
    #[serde(flatten)]
    document: &'a T,
}

#[derive(Deserialize)]
struct Head {
    version: u64,
}

/// The document as it is stored at `key`.
pub(crate) fn write<T: Serialize>(key: &Path, document: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(&Written { version: VERSION, document })
        .map_err(|error| RepositoryError::Invalid { what: key.to_string(), reason: error.to_string() })
}

/// The document that is stored at `key`.
pub(crate) fn read<T: DeserializeOwned>(key: &Path, bytes: &[u8]) -> Result<T> {
    let damaged = |reason: String| RepositoryError::Damaged { object: key.to_string(), reason };
    let head: Head = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    if head.version != VERSION {
        return Err(RepositoryError::UnknownVersion {
            object: key.to_string(),
            version: head.version,
            known: VERSION,
        });
    }
    let mut text = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut text).map_err(|error| damaged(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        number: u8,
    }

    #[test]
    fn the_version_decides_before_anything_else_is_read() {
        let key = Path::from("a/b");
        let written = write(&key, &Sample { number: 7 }).unwrap();
        assert_eq!(String::from_utf8_lossy(&written), r#"{"version":1,"number":7}"#);
        assert_eq!(read::<Sample>(&key, &written).unwrap(), Sample { number: 7 });
        let more = br#"{"version":1,"number":7,"later":true}"#;
        assert_eq!(read::<Sample>(&key, more).unwrap(), Sample { number: 7 });

        let newer = read::<Sample>(&key, br#"{"version":2,"other":[]}"#).unwrap_err();
        assert!(matches!(newer, RepositoryError::UnknownVersion { version: 2, known: 1, .. }), "{newer}");
        for damaged in ["", "{}", "[]", r#"{"version":1}"#, r#"{"version":1,"number":700}"#] {
            let error = read::<Sample>(&key, damaged.as_bytes()).unwrap_err();
            assert!(matches!(error, RepositoryError::Damaged { .. }), "{damaged:?}: {error}");
            assert!(error.to_string().contains("a/b"), "{error}");
        }
    }
}
