//! What a create says about the end of the life time, and about being woken.
//!
//! | `autoPause` | `autoPauseMemory` | `autoResume.enabled` | |
//! |---|---|---|---|
//! | no | absent or `true` | any | killed; when it is paused by hand, `autoResume` counts |
//! | no | `false` | any | 400 |
//! | yes | absent or `true` | any | paused |
//! | yes | `false` | no | paused without its memory |
//! | yes | `false` | yes | 400: what boots is never woken by traffic |

use crate::error::Failure;
use aenv_orchestrator::{OnTimeout, PauseMode};
use aenv_protocol::rest::NewSandbox;

/// What is to become of it when its time is over, and whether traffic wakes it.
///
/// # Errors
/// 400 that names the field which contradicts another one.
pub(crate) fn wished(request: &NewSandbox) -> Result<(OnTimeout, bool), Failure> {
    let auto_pause = request.auto_pause.unwrap_or(false);
    let keeps_memory = request.auto_pause_memory.unwrap_or(true);
    let auto_resume = request.auto_resume.is_some_and(|auto_resume| auto_resume.enabled);
    match (auto_pause, keeps_memory) {
        (false, true) => Ok((OnTimeout::Kill, auto_resume)),
        (true, true) => Ok((OnTimeout::Pause(PauseMode::Full), auto_resume)),
        (true, false) if !auto_resume => Ok((OnTimeout::Pause(PauseMode::Filesystem), false)),
        (true, false) => Err(Failure::field(
            "autoPauseMemory",
            "`false` cannot be combined with autoResume: a sandbox that has to boot is never woken by traffic",
        )),
        (false, false) => Err(Failure::field("autoPauseMemory", "`false` needs `autoPause: true`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_combination_has_its_meaning() {
        let of = |fields: &str| {
            wished(&serde_json::from_str(&format!(r#"{{"templateID":"base"{fields}}}"#)).unwrap()).ok()
        };
        let paused = |mode| OnTimeout::Pause(mode);
        for (fields, expected) in [
            ("", Some((OnTimeout::Kill, false))),
            (r#","autoPause":false,"autoPauseMemory":true"#, Some((OnTimeout::Kill, false))),
            (r#","autoResume":{"enabled":true}"#, Some((OnTimeout::Kill, true))),
            (r#","autoPause":true"#, Some((paused(PauseMode::Full), false))),
            (r#","autoPause":true,"autoResume":{"enabled":true}"#, Some((paused(PauseMode::Full), true))),
            (r#","autoPause":true,"autoPauseMemory":false"#, Some((paused(PauseMode::Filesystem), false))),
            (r#","autoPauseMemory":false"#, None),
            (r#","autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}"#, None),
        ] {
            assert_eq!(of(fields), expected, "{fields}");
        }
    }
}
