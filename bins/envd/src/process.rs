//! Processes started by clients, and who follows them.
//!
//! ```text
//!  start ─▶ running ──leader reaped──▶ draining ──pipes empty──▶ ended ──RETENTION──▶ forgotten
//!             │  ▲                                                 │
//!   followers ┴──┘ each has a bounded queue                        └ `Connect` answers start + end
//! ```
//! * One task per process ([`output`]) reads its pipes and hands chunks to the followers of that moment. A follower
//!   that reads slowly slows the process down, as a pipe would; without followers output is read and dropped.
//! * [`table`] knows all processes; it forgets the ended ones after a while.
//! * [`rpc`] translates between the wire and this module.

mod input;
mod output;
pub(crate) mod rpc;
pub(crate) mod table;

use crate::reaper::Ending;
use aenv_protocol::envd::process::{ProcessConfig, process_event};
use bytes::Bytes;
use input::Input;
use std::sync::Mutex;
use std::time::Instant;
use tokio::sync::mpsc;

/// Events that wait for one follower. Each is at most one chunk, so a follower costs at most 128 KiB.
const FOLLOWER_QUEUE: usize = 4;

/// What followers are told.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A piece of standard output.
    Output(Bytes),
    /// A piece of standard error.
    Errors(Bytes),
    /// The end. Nothing follows.
    End(Ending),
}

/// One process.
#[derive(Debug)]
pub(crate) struct Process {
    /// Process, group and session id.
    pub(crate) pid: i32,
    /// What was asked for.
    pub(crate) config: ProcessConfig,
    /// Name given by the client.
    pub(crate) tag: Option<String>,
    /// Standard input.
    pub(crate) input: Input,
    progress: Mutex<Progress>,
}

#[derive(Debug)]
enum Progress {
    Running(Vec<mpsc::Sender<Event>>),
    Ended(Ending, Instant),
}

impl Process {
    fn progress(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Events from now on; of an ended process only its end.
    pub(crate) fn follow(&self) -> mpsc::Receiver<Event> {
        let (sender, receiver) = mpsc::channel(FOLLOWER_QUEUE);
        match &mut *self.progress() {
            Progress::Running(followers) => followers.push(sender),
            Progress::Ended(ending, _) => {
                // The queue is empty and its receiver is held: this cannot fail.
                let _sent = sender.try_send(Event::End(*ending));
            }
        }
        receiver
    }

    /// Whether the end was not announced yet.
    pub(crate) fn is_running(&self) -> bool {
        matches!(*self.progress(), Progress::Running(_))
    }

    /// When the end was announced.
    fn ended_at(&self) -> Option<Instant> {
        match &*self.progress() {
            Progress::Running(_) => None,
            Progress::Ended(_, at) => Some(*at),
        }
    }
}

/// The wire's words for an ending. They are those of Go's `os.ProcessState`, which clients of E2B know.
#[must_use]
pub(crate) fn end_event(ending: Ending) -> process_event::EndEvent {
    let (exit_code, exited, status) = match ending {
        Ending::Exited(code) => (code, true, format!("exit status {code}")),
        Ending::Killed(signal) => (-1, false, format!("signal: {}", signal_name(signal))),
    };
    let error = (exit_code != 0).then(|| status.clone());
    process_event::EndEvent { exit_code, exited, status, error, ..Default::default() }
}

/// Go's name of a signal.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_are_told_in_the_words_of_the_protocol() {
        let zero = end_event(Ending::Exited(0));
        assert_eq!((zero.exit_code, zero.exited, zero.status.as_str()), (0, true, "exit status 0"));
        assert_eq!(zero.error, None);
        let three = end_event(Ending::Exited(3));
        assert_eq!((three.exit_code, three.error.as_deref()), (3, Some("exit status 3")));
        let killed = end_event(Ending::Killed(9));
        assert_eq!((killed.exit_code, killed.exited), (-1, false));
        assert_eq!(
            (killed.status.as_str(), killed.error.as_deref()),
            ("signal: killed", Some("signal: killed"))
        );
        assert_eq!(end_event(Ending::Killed(40)).status, "signal: signal 40");
    }
}
