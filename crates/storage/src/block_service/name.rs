//! Names of disks, images and tops. They become names of files and exports, so no other character is let in.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Longest name, in bytes.
const MAX_BYTES: usize = 64;

/// Why a text is not a name.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("invalid name {text:?}: must be 1 to {MAX_BYTES} characters of a-z, 0-9 and -")]
pub struct InvalidName {
    text: String,
}

/// Name of a disk, an image or a top: 1 to 64 characters of `a-z`, `0-9` and `-`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = InvalidName;

    fn from_str(text: &str) -> Result<Self, InvalidName> {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if (1..=MAX_BYTES).contains(&text.len()) && text.bytes().all(allowed) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidName { text: text.chars().take(MAX_BYTES).collect() })
        }
    }
}

impl TryFrom<String> for Name {
    type Error = InvalidName;

    fn try_from(text: String) -> Result<Self, InvalidName> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_could_leave_a_directory_is_refused() {
        for text in ["", ".", "..", "a/b", "../a", "A", "a b", "ä", "a\0", &"a".repeat(65)] {
            assert!(text.parse::<Name>().is_err(), "{text:?}");
            assert!(serde_json::from_value::<Name>(text.into()).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn names_of_the_allowed_shape_survive_json(text in "[a-z0-9-]{1,64}") {
            let name: Name = text.parse().unwrap();
            let json = serde_json::to_string(&name).unwrap();
            prop_assert_eq!(serde_json::from_str::<Name>(&json).unwrap(), name);
        }

        #[test]
        fn any_text_is_a_name_or_an_error_that_is_not_long(text in ".{0,200}") {
            if let Err(error) = text.parse::<Name>() {
                prop_assert!(error.to_string().len() < 1000);
            }
        }
    }
}
