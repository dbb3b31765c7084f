//! What the end of a VM means with whatever driver: the evidence that all of them leave.
//!
//! Pure functions; each driver weighs what it alone knows beside them (`qemu/ending.rs`, `firecracker/ending.rs`).

use crate::cgroups::OutOfMemory;
use crate::driver::{Exit, ExitCause};
use aenv_sys::process::Ended;
use std::fmt::Write as _;

/// Last lines of console and log that go into the detail.
const DETAIL_LINES: usize = 20;
/// How every Linux says that it cannot go on.
pub(crate) const PANIC: &str = "Kernel panic - not syncing";

/// An end for memory: only a death by SIGKILL, or one whose status nobody knows, can be the OOM killer's.
pub(crate) fn memory_exit(ended: Option<Ended>, out_of_memory: Option<OutOfMemory>) -> Option<Exit> {
    if !matches!(ended, None | Some(Ended::Signalled(9))) {
        return None;
    }
    let detail = match out_of_memory? {
        OutOfMemory::OwnLimit => {
            "the VMM reached the memory limit of its sandbox and was killed by the kernel"
        }
        OutOfMemory::Elsewhere => "the host ran out of memory and the kernel chose this VMM to be killed",
    };
    Some(Exit { cause: ExitCause::OutOfMemory, detail: detail.to_owned() })
}

/// An end by a signal that was not ours.
pub(crate) fn signal_exit(signal: i32, log: &str) -> Exit {
    match signal {
        signal if is_fault(signal) => {
            exit_with(ExitCause::VmmCrashed, format!("the VMM crashed with signal {signal}"), "log", log)
        }
        signal => {
            let hint = match signal {
                9 => " (by hand, or by the host's OOM killer: see the kernel log)",
                _ => "",
            };
            exit_with(
                ExitCause::VmmKilled,
                format!("the VMM was killed by signal {signal}{hint}"),
                "log",
                log,
            )
        }
    }
}

/// An end of which nothing is known but that it came.
pub(crate) fn silent_exit(log: &str) -> Exit {
    let what = "the VMM is gone without a word, probably killed; its exit status is unknown, since it was started by an \
                earlier process";
    exit_with(ExitCause::VmmKilled, what.to_owned(), "log", log)
}

/// An end with the last lines of the text that proves it, if there are any.
pub(crate) fn exit_with(cause: ExitCause, mut detail: String, name: &str, text: &str) -> Exit {
    let text = last_lines(text);
    if !text.is_empty() {
        // Writing to a string cannot fail.
        _ = write!(detail, "; {name}: {text}");
    }
    Exit { cause, detail }
}

/// The last lines of a text without empty ones.
pub(crate) fn last_lines(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(DETAIL_LINES)..].join("\n")
}

/// Signals a program draws upon itself: ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS.
fn is_fault(signal: i32) -> bool {
    matches!(signal, 4 | 5 | 6 | 7 | 8 | 11 | 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_for_memory_is_told_from_other_kills() {
        for ended in [None, Some(Ended::Signalled(9))] {
            for whose in [OutOfMemory::OwnLimit, OutOfMemory::Elsewhere] {
                assert_eq!(
                    memory_exit(ended, Some(whose)).map(|exit| exit.cause),
                    Some(ExitCause::OutOfMemory)
                );
            }
            assert_eq!(memory_exit(ended, None), None);
        }
        for ended in [Ended::Signalled(11), Ended::Exited(0), Ended::Exited(1)] {
            assert_eq!(memory_exit(Some(ended), Some(OutOfMemory::OwnLimit)), None, "{ended:?}");
        }
    }

    #[test]
    fn faults_are_told_from_kills_and_the_log_goes_along() {
        for (signal, cause) in [
            (9, ExitCause::VmmKilled),
            (15, ExitCause::VmmKilled),
            (11, ExitCause::VmmCrashed),
            (31, ExitCause::VmmCrashed),
        ] {
            assert_eq!(signal_exit(signal, "").cause, cause, "{signal}");
        }
        let exit = signal_exit(6, "one\n\ntwo\n");
        assert!(exit.detail.ends_with("signal 6; log: one\ntwo"), "{}", exit.detail);
        assert!(silent_exit("").detail.contains("unknown"));
    }
}
