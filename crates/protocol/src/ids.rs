//! Identifiers that travel on the wire, validated on construction.
//!
//! Source of the shape: E2B's sandbox ids are `i` followed by 20 characters of `[a-z0-9]`, and its proxy accepts
//! only `^[a-z0-9]+$`; ids that follow it can be used as a DNS label, a directory name and a resource name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Longest id accepted from outside, in bytes: more can never name a resource of ours.
const MAX_ID_BYTES: usize = 64;

/// Why a text is not an id.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("invalid id {text:?}: must be 1 to {MAX_ID_BYTES} characters of a-z and 0-9")]
pub struct InvalidId {
    text: String,
}

macro_rules! id_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let valid = (1..=MAX_ID_BYTES).contains(&text.len())
                    && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
                if valid {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(InvalidId { text: text.chars().take(MAX_ID_BYTES).collect() })
                }
            }
        }
        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }
        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

id_type! {
    /// Names one sandbox for its whole life, across pauses and restarts of the node.
    SandboxId
}
id_type! {
    /// Names one template.
    TemplateId
}

impl SandboxId {
    /// Makes an id of E2B's shape from 20 random values; each value is reduced to one of 36 characters.
    #[must_use]
    pub fn from_random(random: [u8; 20]) -> Self {
        const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let tail = random.iter().map(|b| char::from(ALPHABET[usize::from(*b) % ALPHABET.len()]));
        Self(std::iter::once('i').chain(tail).collect())
    }

    /// Reads the id of a request path. E2B's older clients send `<sandboxID>-<clientID>`: the rest is dropped.
    ///
    /// # Errors
    /// When what stands before the first `-` is not an id.
    pub fn from_path(segment: &str) -> Result<Self, InvalidId> {
        segment.split('-').next().unwrap_or_default().parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_ids_have_the_shape_of_e2b_and_parse() {
        let id = SandboxId::from_random([255; 20]);
        assert_eq!(id.as_str().len(), 21);
        assert_eq!(id.as_str().parse::<SandboxId>().as_ref(), Ok(&id));
        assert_eq!(SandboxId::from_path(&format!("{id}-client")), Ok(id));
    }

    #[test]
    fn hostile_texts_are_refused() {
        for text in ["", "../etc", "A", "a b", "a/b", "ä", &"a".repeat(65)] {
            assert!(text.parse::<SandboxId>().is_err(), "{text:?}");
        }
    }
}
