//! Life times as callers send them, in whole seconds.

use crate::error::Failure;
use std::time::Duration;

/// Checks a life time that must be positive.
///
/// # Errors
/// 400 in E2B's words.
pub(crate) fn positive(seconds: i64, max: Duration) -> Result<Duration, Failure> {
    match u64::try_from(seconds) {
        Ok(seconds) if seconds > 0 => within(seconds, max),
        _ => Err(Failure::bad_request("Timeout must be greater than 0")),
    }
}

/// Checks a life time of which zero and less mean "now".
///
/// # Errors
/// 400 in E2B's words.
pub(crate) fn maybe_now(seconds: i64, max: Duration) -> Result<Duration, Failure> {
    within(u64::try_from(seconds).unwrap_or(0), max)
}

fn within(seconds: u64, max: Duration) -> Result<Duration, Failure> {
    if seconds <= max.as_secs() {
        return Ok(Duration::from_secs(seconds));
    }
    let limit = match max.as_secs() {
        whole if whole % 3600 == 0 => format!("{} hours", whole / 3600),
        other => format!("{other} seconds"),
    };
    Err(Failure::bad_request(format!("Timeout cannot be greater than {limit}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[test]
    fn limits_are_inclusive_and_extremes_do_not_overflow() {
        assert_eq!(positive(1, DAY).unwrap(), Duration::from_secs(1));
        assert_eq!(positive(86_400, DAY).unwrap(), DAY);
        for seconds in [0, -1, i64::MIN, 86_401, i64::MAX] {
            assert!(positive(seconds, DAY).is_err(), "{seconds}");
        }
        assert_eq!(maybe_now(i64::MIN, DAY).unwrap(), Duration::ZERO);
        assert!(maybe_now(i64::MAX, DAY).is_err());
    }
}
