//! The SHA-256 of some bytes, by which they are named and checked.
//!
//! Pure. Must not hash anything but bytes it is given.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::str::FromStr;

/// A SHA-256 digest. As text, 64 characters of `0-9a-f`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; Digest::BYTES]);

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no SHA-256 digest: it has 64 characters of 0-9 and a-f")]
pub struct NoDigest {
    /// The text.
    pub text: String,
}

impl Digest {
    /// Its length in bytes.
    pub const BYTES: usize = 32;

    /// The digest of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// A digest that was computed elsewhere.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl FromStr for Digest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Self, NoDigest> {
        let refused = || NoDigest { text: text.chars().take(2 * Self::BYTES + 1).collect() };
        // Names of objects are made of digests: each has one spelling only.
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(refused());
        }
        let mut bytes = [0; Self::BYTES];
        hex::decode_to_slice(text, &mut bytes).map_err(|_| refused())?;
        Ok(Self(bytes))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_one_spelling() {
        // The digest of no bytes, as FIPS 180-4's reference programs print it.
        let text = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").to_string(), text);
        assert_eq!(text.parse(), Ok(Digest::of(b"")));
        assert_eq!(serde_json::to_string(&Digest::of(b"")).unwrap(), format!("\"{text}\""));
        for wrong in ["", "e3", &text.to_uppercase(), &format!("{text}0"), &text.replace('e', "g"), "ä"] {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong:?}");
        }
    }
}
