//! What is allowed in which state of a sandbox: a pure function, without time, I/O or ids.
//!
//! ```text
//!            begin             started                 kill, expiry
//!   (none) ─────────▶ Starting ───────▶ Running ─────────────────────▶ Killing ──▶ (none)
//!                        │                 │ death                       ▲  all removed
//!                        │ failed, kill    ▼                kill, expiry │
//!                        │               Lost ───────────────────────────┤
//!                        └───────────────────────────────────────────────┘
//! ```
//!
//! A standby that is claimed begins its life as a sandbox at Starting.
//! The phase is journalled before the side effects that belong to it, so the phase found after a crash tells what to do:
//! Starting and Killing are undone or finished, Running is adopted, Lost is kept until its time is over.

use serde::{Deserialize, Serialize};

/// Where a sandbox, a standby or a template's preparation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// Its resources are being made.
    Starting,
    /// Its VM is whole.
    Running,
    /// Its VM died by itself; the record is kept for callers.
    Lost,
    /// Its resources are being removed; after that there is no record any more.
    Killing,
}

/// What can happen to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Everything was made and the guest answered.
    Started,
    /// A step of the start failed.
    StartFailed,
    /// A caller wants it ended.
    Kill,
    /// Its time is over.
    Expired,
    /// The VM ended without being asked to, or its guest does not answer.
    Died,
    /// A caller wants to change its time.
    ChangeTime,
}

/// Why an event has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// To callers it does not exist (yet, or any more).
    NotThere,
    /// It died by itself.
    Lost,
    /// The event cannot happen in this phase: late news, to be ignored.
    Meaningless,
}

/// The phase after `event`, or why there is no change.
pub(crate) fn next(phase: Phase, event: Event) -> Result<Phase, Refusal> {
    use Event::{ChangeTime, Died, Expired, Kill, StartFailed, Started};
    use Phase::{Killing, Lost, Running, Starting};
    match (phase, event) {
        (Starting, Started) => Ok(Running),
        (Starting, StartFailed | Kill) => Ok(Killing),
        (Running | Lost, Kill | Expired) => Ok(Killing),
        (Running, Died) => Ok(Lost),
        (Running, ChangeTime) => Ok(Running),
        (Lost, ChangeTime) => Err(Refusal::Lost),
        (Starting | Killing, ChangeTime) | (Killing, Kill) => Err(Refusal::NotThere),
        (Starting, Expired | Died)
        | (Running | Lost | Killing, Started | StartFailed)
        | (Lost | Killing, Died)
        | (Killing, Expired) => Err(Refusal::Meaningless),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 6] =
        [Event::Started, Event::StartFailed, Event::Kill, Event::Expired, Event::Died, Event::ChangeTime];

    fn walk(events: &[Event]) -> Vec<Phase> {
        let mut phases = vec![Phase::Starting];
        for event in events {
            let last = phases[phases.len() - 1];
            phases.push(next(last, *event).unwrap_or(last));
        }
        phases
    }

    proptest! {
        #[test]
        fn an_ending_is_never_taken_back(events in proptest::collection::vec(proptest::sample::select(&EVENTS[..]), 0..40)) {
            let rank = |phase: &Phase| match phase {
                Phase::Starting => 0,
                Phase::Running => 1,
                Phase::Lost => 2,
                Phase::Killing => 3,
            };
            let phases = walk(&events);
            prop_assert!(phases.windows(2).all(|pair| rank(&pair[0]) <= rank(&pair[1])), "{phases:?}");
        }

        #[test]
        fn from_everywhere_a_kill_ends_it(events in proptest::collection::vec(proptest::sample::select(&EVENTS[..]), 0..40)) {
            let mut events = events;
            events.push(Event::Kill);
            let phases = walk(&events);
            prop_assert_eq!(phases.last(), Some(&Phase::Killing));
        }

        #[test]
        fn at_most_one_kill_is_accepted(events in proptest::collection::vec(proptest::sample::select(&EVENTS[..]), 0..40)) {
            let phases = walk(&events);
            let accepted = phases.iter().zip(&events).filter(|(phase, event)| {
                **event == Event::Kill && next(**phase, **event).is_ok()
            });
            prop_assert!(accepted.count() <= 1);
        }
    }
}
