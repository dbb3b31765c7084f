//! What is allowed in which state of a sandbox: a pure function, without time, I/O or ids.
//!
//! ```text
//!            begin             started
//!   (none) ─────────▶ Starting ───────▶ Running ◀──────────────────────────────┐
//!                        │               │ │  ▲                                 │ resumed
//!                        │               │ │  │ pause failed, or copied         │
//!                        │         death │ │  └──────────────┐    saved         │
//!                        │               │ └─pause─▶ Capturing ──────────▶ Paused ◀──────▶ Resuming
//!                        │ failed        ▼           │ death    │ death,      ▲    resume,
//!                        │             Lost ◀────────┘          └─ an earlier ┘    resume failed
//!                        │               ▲                         save is there
//!                        │               └── nothing of its saves is left ── Paused
//!                        ▼
//!                     Killing ◀── kill: from everywhere;  expiry: from Running and Lost
//!                        └──▶ (none), when all is removed
//! ```
//!
//! A standby that is claimed begins its life as a sandbox at Starting. A paused sandbox is not lost when its stopped VMM dies:
//! what was saved is whole without it. Its time stands still.
//!
//! The phase is journalled before the side effects that belong to it, so the phase found after a crash tells what to do:
//! Starting and Killing are undone or finished, Running is adopted, Capturing is undone (the guest goes on), Paused stays,
//! Resuming is finished or undone, Lost is kept until its time is over.

use serde::{Deserialize, Serialize};

/// Where a sandbox, a standby or a template's preparation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// Its resources are being made.
    Starting,
    /// Its VM is whole.
    Running,
    /// Its state is being saved; nothing of that counts yet.
    Capturing,
    /// Its state is saved and whole; a VMM, if there is one, only stands by.
    Paused,
    /// It is being made to run from what was saved, which still counts.
    Resuming,
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
    /// Its time is over, and it is to be ended then.
    Expired,
    /// The VM ended without being asked to.
    Died,
    /// A caller wants to change its time.
    ChangeTime,
    /// Its state is to be saved: by a caller, or because its time is over.
    Pause,
    /// The state was saved.
    Saved,
    /// The state was saved, and the guest goes on.
    Copied,
    /// A step of the saving failed.
    PauseFailed,
    /// What it was last is gone (its VM ended during a pause, or the host before a save was durable), and there is an earlier
    /// save to go back to.
    FellBack,
    /// A caller wants it to run.
    Resume,
    /// The guest answered.
    Resumed,
    /// A step of the resume failed.
    ResumeFailed,
    /// The host was restarted before any save of it was durable.
    SavesGone,
}

/// Why an event has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// To callers it does not exist (yet, or any more).
    NotThere,
    /// It died by itself.
    Lost,
    /// It is paused.
    Paused,
    /// It is just being paused or resumed.
    Transitioning,
    /// The event cannot happen in this phase: late news, to be ignored.
    Meaningless,
}

/// The phase after `event`, or why there is no change.
pub(crate) fn next(phase: Phase, event: Event) -> Result<Phase, Refusal> {
    use Phase::{Capturing, Killing, Lost, Paused, Resuming, Running, Starting};
    match (phase, event) {
        (Starting, Event::Started)
        | (Capturing, Event::PauseFailed | Event::Copied)
        | (Resuming, Event::Resumed) => Ok(Running),
        (Starting, Event::StartFailed) | (Running | Lost, Event::Expired) => Ok(Killing),
        (Killing, Event::Kill) => Err(Refusal::NotThere),
        (_, Event::Kill) => Ok(Killing),
        (Running | Capturing, Event::Died) | (Capturing | Paused | Resuming, Event::SavesGone) => Ok(Lost),
        (Running, Event::ChangeTime | Event::Resume) => Ok(Running),
        (Running, Event::Pause) => Ok(Capturing),
        (Capturing, Event::Saved) | (Running | Capturing | Paused | Resuming, Event::FellBack) => Ok(Paused),
        (Paused, Event::Died) | (Resuming, Event::ResumeFailed) => Ok(Paused),
        (Paused, Event::Resume) => Ok(Resuming),
        (_, Event::ChangeTime | Event::Pause | Event::Resume) => Err(match phase {
            Starting | Killing => Refusal::NotThere,
            Lost => Refusal::Lost,
            Paused => Refusal::Paused,
            Running | Capturing | Resuming => Refusal::Transitioning,
        }),
        _ => Err(Refusal::Meaningless),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVENTS: [Event; 15] = [
        Event::Started,
        Event::StartFailed,
        Event::Kill,
        Event::Expired,
        Event::Died,
        Event::ChangeTime,
        Event::Pause,
        Event::Saved,
        Event::Copied,
        Event::PauseFailed,
        Event::FellBack,
        Event::Resume,
        Event::Resumed,
        Event::ResumeFailed,
        Event::SavesGone,
    ];

    fn walk(events: &[Event]) -> Vec<Phase> {
        let mut phases = vec![Phase::Starting];
        for event in events {
            let last = phases[phases.len() - 1];
            phases.push(next(last, *event).unwrap_or(last));
        }
        phases
    }

    fn any_events() -> impl Strategy<Value = Vec<Event>> {
        proptest::collection::vec(proptest::sample::select(&EVENTS[..]), 0..60)
    }

    proptest! {
        #[test]
        fn an_ending_is_never_taken_back(events in any_events()) {
            let rank = |phase: &Phase| match phase {
                Phase::Starting => 0,
                Phase::Running | Phase::Capturing | Phase::Paused | Phase::Resuming => 1,
                Phase::Lost => 2,
                Phase::Killing => 3,
            };
            let phases = walk(&events);
            prop_assert!(phases.windows(2).all(|pair| rank(&pair[0]) <= rank(&pair[1])), "{phases:?}");
        }

        #[test]
        fn from_everywhere_a_kill_ends_it(events in any_events()) {
            let mut events = events;
            events.push(Event::Kill);
            let phases = walk(&events);
            prop_assert_eq!(phases.last(), Some(&Phase::Killing));
        }

        #[test]
        fn at_most_one_kill_is_accepted(events in any_events()) {
            let phases = walk(&events);
            let accepted = phases.iter().zip(&events).filter(|(phase, event)| {
                **event == Event::Kill && next(**phase, **event).is_ok()
            });
            prop_assert!(accepted.count() <= 1);
        }

        #[test]
        fn it_is_paused_only_after_a_save_and_runs_again_only_by_a_resume(events in any_events()) {
            let phases = walk(&events);
            for (pair, event) in phases.windows(2).zip(&events) {
                match (pair[0], pair[1]) {
                    (from, Phase::Paused) if from != Phase::Paused => prop_assert!(matches!(
                        (from, event),
                        (_, Event::FellBack)
                            | (Phase::Capturing, Event::Saved)
                            | (Phase::Resuming, Event::ResumeFailed)
                    )),
                    (Phase::Paused, to) => prop_assert!(
                        matches!(to, Phase::Paused | Phase::Resuming | Phase::Killing)
                            || (to, *event) == (Phase::Lost, Event::SavesGone)
                    ),
                    (from, Phase::Running) if from != Phase::Running => prop_assert!(
                        matches!(event, Event::Started | Event::PauseFailed | Event::Copied | Event::Resumed)
                    ),
                    _ => {}
                }
            }
        }

        #[test]
        fn while_it_changes_nothing_else_is_begun(events in any_events()) {
            for phase in walk(&events) {
                if matches!(phase, Phase::Capturing | Phase::Resuming) {
                    for event in [Event::Pause, Event::Resume, Event::ChangeTime] {
                        prop_assert_eq!(next(phase, event), Err(Refusal::Transitioning));
                    }
                }
            }
        }
    }

    #[test]
    fn the_death_of_a_vmm_that_stands_by_loses_nothing() {
        assert_eq!(next(Phase::Paused, Event::Died), Ok(Phase::Paused));
        assert_eq!(next(Phase::Paused, Event::Expired), Err(Refusal::Meaningless), "its time stands still");
    }
}
