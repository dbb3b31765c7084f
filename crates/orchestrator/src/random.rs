//! Secrets and ids, drawn from the operating system's generator only. Owns nothing.

use aenv_protocol::ids::{SandboxId, TemplateId};
use base64::Engine;
use rand::TryRngCore;
use rand::rngs::OsRng;

/// The operating system has no random bytes to give.
#[derive(Debug, thiserror::Error)]
#[error("the operating system's random generator failed: {0}")]
pub(crate) struct NoRandomness(String);

fn bytes<const N: usize>() -> Result<[u8; N], NoRandomness> {
    let mut bytes = [0_u8; N];
    OsRng.try_fill_bytes(&mut bytes).map_err(|error| NoRandomness(error.to_string()))?;
    Ok(bytes)
}

/// A new sandbox id: 103 bits of randomness.
pub(crate) fn sandbox_id() -> Result<SandboxId, NoRandomness> {
    // Values of 252 and above would make the first letters of the alphabet more likely.
    let mut random = bytes::<20>()?;
    while random.iter().any(|value| *value >= 252) {
        let again = bytes::<20>()?;
        for (value, fresh) in random.iter_mut().zip(again).filter(|(value, _)| **value >= 252) {
            *value = fresh;
        }
    }
    Ok(SandboxId::from_random(random))
}

/// A new template id, of the same shape as a sandbox id without its first letter.
pub(crate) fn template_id() -> Result<TemplateId, NoRandomness> {
    let id = sandbox_id()?;
    let tail = id.as_str().trim_start_matches('i');
    format!("t{tail}").parse().map_err(|error| NoRandomness(format!("{error}")))
}

/// A new snapshot id, of the same shape: callers use it where they would use that of a template.
pub(crate) fn snapshot_id() -> Result<TemplateId, NoRandomness> {
    let id = sandbox_id()?;
    format!("s{}", &id.as_str()[1..]).parse().map_err(|error| NoRandomness(format!("{error}")))
}

/// Access token of a sandbox: 40 hex digits.
pub(crate) fn access_token() -> Result<String, NoRandomness> {
    Ok(hex::encode(bytes::<20>()?))
}

/// A machine id: 32 hex digits.
pub(crate) fn machine_id() -> Result<String, NoRandomness> {
    Ok(hex::encode(bytes::<16>()?))
}

/// Seed for a guest's random number generator: 64 bytes in base64.
pub(crate) fn entropy() -> Result<String, NoRandomness> {
    Ok(base64::engine::general_purpose::STANDARD.encode(bytes::<64>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_and_tokens_do_not_repeat_and_have_their_shape() {
        let ids: HashSet<_> = (0..2000).map(|_| sandbox_id().unwrap()).collect();
        assert_eq!(ids.len(), 2000);
        assert!(template_id().unwrap().as_str().starts_with('t'));
        let token = access_token().unwrap();
        assert!(token.len() == 40 && token.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_eq!(machine_id().unwrap().len(), 32);
    }
}
