//! What the HTTP layer is started with. Values only; read from files and environment by the program.

use std::fmt;
use std::time::Duration;
use subtle::{Choice, ConstantTimeEq as _};

/// How the HTTP layer is to behave.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Keys of which a request of the control plane must carry one.
    pub keys: Vec<ApiKey>,
    /// Domain reported to clients for building host names of sandboxes; may carry a port.
    pub domain: Option<String>,
    /// Longest life time a caller may ask for.
    pub max_timeout: Duration,
}

impl Settings {
    /// Whether `presented` is one of the keys. Takes as long for a nearly right key as for a wrong one.
    pub(crate) fn accepts(&self, presented: &[u8]) -> bool {
        let mut found = Choice::from(0);
        for key in &self.keys {
            found |= key.0.as_bytes().ct_eq(presented);
        }
        found.into()
    }
}

/// A key of the control plane. Never shown, not even in debug output.
#[derive(Clone)]
pub struct ApiKey(String);

/// Why a text cannot be an API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an API key must be 16 to 256 visible ASCII characters; `e2b_` and 40 hex digits suit every client")]
pub struct InvalidApiKey;

impl ApiKey {
    /// Takes a text as a key.
    ///
    /// # Errors
    /// When it is too short to be a secret, or cannot be sent in a header.
    pub fn new(text: &str) -> Result<Self, InvalidApiKey> {
        if (16..=256).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()) {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidApiKey)
        }
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole_and_never_shown() {
        let key = ApiKey::new("e2b_0123456789abcdef").unwrap();
        assert!(!format!("{key:?}").contains("0123"));
        let settings = Settings { keys: vec![key], domain: None, max_timeout: Duration::from_secs(1) };
        assert!(settings.accepts(b"e2b_0123456789abcdef"));
        assert!(!settings.accepts(b"e2b_0123456789abcde"));
        assert!(!settings.accepts(b""));
        assert_eq!(ApiKey::new("short").err(), Some(InvalidApiKey));
    }
}
