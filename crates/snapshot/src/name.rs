//! The names that callers choose, each one segment of a key.
//!
//! Pure. Must not know what is named.

use crate::error::RepositoryError;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::str::FromStr;

/// The id of a snapshot or sandbox, a name or a tag, an owner: 1 to 128 characters of letters, digits, `-`, `_` and `.`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct Name(String);

const LONGEST: usize = 128;

impl Name {
    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A new one that nobody else has: 128 random bits.
    pub(crate) fn random() -> Self {
        Self(hex::encode(rand::random::<[u8; 16]>()))
    }
}

impl FromStr for Name {
    type Err = RepositoryError;

    fn from_str(text: &str) -> Result<Self, RepositoryError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let length = (1..=LONGEST).contains(&text.len());
        if !length || !text.bytes().all(is_plain) || text == "." || text == ".." {
            let what = format!("the name {:?}", text.chars().take(LONGEST + 1).collect::<String>());
            let reason = format!("it must have 1 to {LONGEST} letters, digits, `-`, `_` and `.`");
            return Err(RepositoryError::Invalid { what, reason });
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_be_another_key_is_refused() {
        for right in ["a", "iA-9_", "v1.2", ".5", &"a".repeat(128)] {
            assert_eq!(right.parse::<Name>().unwrap().as_str(), right);
        }
        for wrong in ["", ".", "..", "a/b", "a b", "a#1", "ä", "a%2f", &"a".repeat(129)] {
            assert!(wrong.parse::<Name>().is_err(), "{wrong:?}");
        }
    }
}
