//! Headers that tell how a request about a sandbox was served: by what, how durable, and where the time went.

use aenv_orchestrator::{Stage, Tier};
use aenv_protocol::rest::Durability;
use axum::response::Response;
use http::{HeaderName, HeaderValue};
use std::time::{Duration, Instant};

/// Says where the time went, in order of execution.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Says what served a create or a resume: `hot`, `warm` or `cold`.
const X_AENV_TIER: HeaderName = HeaderName::from_static("x-aenv-tier");
/// Says what the state that a pause saved survives: `process`, `local` or `published`.
const X_AENV_DURABILITY: HeaderName = HeaderName::from_static("x-aenv-durability");
/// Says how long the guest stood still, in milliseconds.
const X_AENV_STOPPED_MS: HeaderName = HeaderName::from_static("x-aenv-stopped-ms");

/// Adds where the time since `started` went.
pub(crate) fn put_timing(response: &mut Response, stages: &[Stage], started: Instant) {
    if let Ok(value) = HeaderValue::from_str(&server_timing(stages, started.elapsed())) {
        response.headers_mut().insert(SERVER_TIMING, value);
    }
}

/// Adds what served it.
pub(crate) fn put_tier(response: &mut Response, tier: Tier) {
    response.headers_mut().insert(X_AENV_TIER, HeaderValue::from_static(tier.as_str()));
}

/// Adds how durable what was saved is.
pub(crate) fn put_durability(response: &mut Response, durability: Durability) {
    response.headers_mut().insert(X_AENV_DURABILITY, HeaderValue::from_static(durability.as_str()));
}

/// Adds how long the guest stood still for what was asked, in milliseconds.
pub(crate) fn put_stopped(response: &mut Response, stopped: Duration) {
    if let Ok(value) = HeaderValue::from_str(&format!("{:.3}", stopped.as_secs_f64() * 1000.0)) {
        response.headers_mut().insert(X_AENV_STOPPED_MS, value);
    }
}

fn server_timing(stages: &[Stage], total: Duration) -> String {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1000.0;
    let mut parts: Vec<String> = stages
        .iter()
        .map(|stage| format!("{};dur={:.3}", stage.name, milliseconds(stage.duration)))
        .collect();
    parts.push(format!("total;dur={:.3}", milliseconds(total)));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_written_in_milliseconds() {
        let stages = [Stage { name: "claim", duration: Duration::from_micros(300) }];
        assert_eq!(server_timing(&stages, Duration::from_millis(2)), "claim;dur=0.300, total;dur=2.000");
    }
}
