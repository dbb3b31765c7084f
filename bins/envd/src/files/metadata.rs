//! Metadata that clients store with a file: `X-Metadata-<key>` headers, kept as extended attributes `user.e2b.<key>`.

use crate::filesystem::entry::{METADATA_PREFIX, lacks_attributes};
use crate::http::Refusal;
use http::{HeaderMap, StatusCode};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use xattr::FileExt as _;

const HEADER_PREFIX: &str = "x-metadata-";
/// Longest key: Linux allows 255 bytes of name, the prefix takes nine.
const MAX_KEY_BYTES: usize = 246;
/// Most bytes of all keys and values together: what fits beside an inode of ext4.
const MAX_TOTAL_BYTES: usize = 4096;

/// The metadata of a request, by lower-case key.
pub(crate) fn from_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, Refusal> {
    let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, message);
    let mut metadata = BTreeMap::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else { continue };
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            return Err(bad(format!("metadata keys must be 1 to {MAX_KEY_BYTES} bytes")));
        }
        let is_printable = value.as_bytes().iter().all(|byte| (0x20..0x7f).contains(byte));
        let Some(text) = value.to_str().ok().filter(|_| is_printable) else {
            return Err(bad(format!("the value of metadata '{key}' must be printable ASCII")));
        };
        total += key.len() + text.len();
        metadata.insert(key.to_owned(), text.to_owned());
    }
    if total > MAX_TOTAL_BYTES {
        return Err(bad(format!("metadata is {total} bytes long, more than {MAX_TOTAL_BYTES}")));
    }
    Ok(metadata)
}

/// Replaces all metadata of a file. Does not touch a file that has none and gets none.
pub(crate) fn replace(file: &File, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let names = match file.list_xattr() {
        Ok(names) => names.collect(),
        Err(error) if lacks_attributes(&error) && metadata.is_empty() => Vec::new(),
        Err(error) => return Err(error),
    };
    for name in names {
        let key = name.to_str().and_then(|name| name.strip_prefix(METADATA_PREFIX));
        if key.is_some_and(|key| !metadata.contains_key(key)) {
            file.remove_xattr(&name)?;
        }
    }
    for (key, value) in metadata {
        file.set_xattr(format!("{METADATA_PREFIX}{key}"), value.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
        let pair = |(key, value): &(&str, &[u8])| {
            let name = HeaderName::from_bytes(format!("X-Metadata-{key}").as_bytes()).expect("is a name");
            (name, HeaderValue::from_bytes(value).expect("is a value"))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn keys_become_lower_case_and_limits_hold() {
        let metadata = from_headers(&headers(&[("Author", b"me ~")])).expect("is fine");
        assert_eq!(metadata, BTreeMap::from([("author".to_owned(), "me ~".to_owned())]));
        for bad in [
            headers(&[("", b"x")]),
            headers(&[("k", "ä".as_bytes())]),
            headers(&[("k", b"a\tb")]),
            headers(&[(&"k".repeat(247), b"")]),
            headers(&[("k", "v".repeat(4096).as_bytes())]),
        ] {
            assert_eq!(from_headers(&bad).expect_err("is bad").status, StatusCode::BAD_REQUEST);
        }
    }
}
