//! `aenv timeout`: how long a sandbox lives from now on.

use crate::arguments::TimeoutArguments;
use crate::commands::{Context, pause};
use crate::failure::{Exit, Failure};
use crate::output::human_duration;
use aenv_protocol::rest::code;
use serde_json::json;
use std::time::Duration;

/// Sets the time to live.
pub(crate) async fn run(context: &Context, arguments: TimeoutArguments) -> Result<Exit, Failure> {
    let seconds = whole_seconds(arguments.duration);
    let id = &arguments.sandbox;
    context.api()?.set_timeout(id, seconds).await.map_err(|error| {
        let is_paused = error.is(code::PAUSED);
        let failure = Failure::from(error);
        // Its life time begins anew then.
        if is_paused {
            failure.with_hint(format!("{} --timeout …", pause::resume_hint(id)))
        } else {
            failure
        }
    })?;
    if context.printer.is_json() {
        context.printer.json(&json!({ "sandboxID": arguments.sandbox.as_str(), "timeout": seconds }))?;
    } else {
        let told = human_duration(Duration::from_secs(seconds.unsigned_abs()));
        context.printer.note(&format!("{} ends in {told}", arguments.sandbox));
    }
    Ok(Exit::DONE)
}

/// The unit of the API; a part of a second counts as a whole one.
pub(crate) fn whole_seconds(duration: Duration) -> i64 {
    let rounded_up = duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0));
    i64::try_from(rounded_up).unwrap_or(i64::MAX)
}
