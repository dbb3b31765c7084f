//! Signed file URLs: who has one may read or write one path without the access token.
//!
//! ```text
//! text      = path ":" ("read" | "write") ":" user ":" token [ ":" expiration ]
//! signature = "v1_" base64(sha256(text)) without "="
//! ```
//! `path` and `user` are those of the query, byte for byte (empty when absent); `expiration` is in Unix seconds.
//! Pure functions: the caller compares in constant time and asks the clock.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest as _, Sha256};

/// What a signed URL allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// `GET /files`.
    Read,
    /// `POST /files`.
    Write,
}

impl Operation {
    /// The word that is signed.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// The signature of a file URL; `expiration` in Unix seconds.
#[must_use]
pub fn file_signature(
    path: &str,
    operation: Operation,
    user: &str,
    token: &str,
    expiration: Option<i64>,
) -> String {
    let mut hash = Sha256::new();
    for part in [path, ":", operation.as_str(), ":", user, ":", token] {
        hash.update(part.as_bytes());
    }
    if let Some(expiration) = expiration {
        hash.update(format!(":{expiration}").as_bytes());
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected values were computed with E2B's Python SDK 2.63.0 (`get_signature`).
    #[test]
    fn signatures_equal_those_of_the_sdk() {
        assert_eq!(
            file_signature("/a b.txt", Operation::Read, "user", "tok", None),
            "v1_vKNrtB6v+giu9prkJsJejmS6R10X24HW5OfHa5SZGow"
        );
        assert_eq!(
            file_signature("", Operation::Write, "", "tok", Some(1_800_000_000)),
            "v1_CKZFPAXgW0VVJuEO32gmFjDFTGaBjmB1GeKVbxSdojg"
        );
    }

    #[test]
    fn every_part_is_signed() {
        let base = file_signature("p", Operation::Read, "u", "t", Some(1));
        for other in [
            file_signature("q", Operation::Read, "u", "t", Some(1)),
            file_signature("p", Operation::Write, "u", "t", Some(1)),
            file_signature("p", Operation::Read, "v", "t", Some(1)),
            file_signature("p", Operation::Read, "u", "s", Some(1)),
            file_signature("p", Operation::Read, "u", "t", Some(2)),
            file_signature("p", Operation::Read, "u", "t", None),
        ] {
            assert_ne!(base, other);
        }
    }
}
