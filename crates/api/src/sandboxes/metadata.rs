//! The metadata filter of lists, which E2B's clients encode three times.
//!
//! ```text
//! {"a b": "c&d"} ─ quote each ─▶ a%20b, c%26d ─ urlencode ─▶ a%2520b=c%2526d ─ as a query value ─▶ a%252520b%3Dc%252526d
//! ```
//! So, after the query itself is decoded: decode the whole, split at `&` and `=`, decode each part.

use crate::error::Failure;
use crate::extract::QueryPairs;
use percent_encoding::percent_decode;
use std::collections::BTreeMap;

/// Labels that a sandbox must have, all of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MetadataFilter(BTreeMap<String, String>);

impl MetadataFilter {
    /// Reads `metadata`.
    ///
    /// # Errors
    /// 400 that says which part is not a pair.
    pub(crate) fn of(query: &QueryPairs) -> Result<Self, Failure> {
        let Some(text) = query.get("metadata") else { return Ok(Self::default()) };
        let whole = decode(text)?;
        let mut wanted = BTreeMap::new();
        for pair in whole.split('&').filter(|pair| !pair.is_empty()) {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(Failure::field("metadata", format!("{pair:?} is not of the form key=value")));
            };
            wanted.insert(decode(key)?, decode(value)?);
        }
        Ok(Self(wanted))
    }

    /// Whether a sandbox with these labels passes.
    pub(crate) fn matches(&self, metadata: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| metadata.get(key) == Some(value))
    }
}

fn decode(text: &str) -> Result<String, Failure> {
    let spaced = text.replace('+', " ");
    match percent_decode(spaced.as_bytes()).decode_utf8() {
        Ok(decoded) => Ok(decoded.into_owned()),
        Err(_) => Err(Failure::field("metadata", format!("{text:?} is not UTF-8 after decoding"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
    use proptest::prelude::*;

    fn quote(text: &str) -> String {
        utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
    }

    proptest! {
        #[test]
        fn what_a_client_encodes_three_times_is_found(
            labels in prop::collection::btree_map(".{1,8}", ".{0,8}", 1..4)
        ) {
            let pairs = labels.iter().map(|(k, v)| (quote(k), quote(v)));
            let once = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
            let query = form_urlencoded::Serializer::new(String::new()).append_pair("metadata", &once).finish();
            let filter = MetadataFilter::of(&QueryPairs::of(&query)).unwrap();
            prop_assert_eq!(&filter.0, &labels);
            prop_assert!(filter.matches(&labels));
            prop_assert!(!filter.matches(&BTreeMap::new()));
        }
    }

    #[test]
    fn plain_filters_work_and_wrong_ones_are_named() {
        let filter = MetadataFilter::of(&QueryPairs::of("metadata=user%3Dme%26run%3D7")).unwrap();
        assert_eq!(filter.0.len(), 2);
        assert!(MetadataFilter::of(&QueryPairs::of("metadata=nopair")).is_err());
        assert!(MetadataFilter::of(&QueryPairs::of("metadata=a%3D%25ff")).is_err());
        assert_eq!(MetadataFilter::of(&QueryPairs::of("metadata=")).unwrap(), MetadataFilter::default());
    }
}
