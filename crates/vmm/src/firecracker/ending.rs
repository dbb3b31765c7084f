//! Why a VM ended: a pure function of the evidence that is left.
//!
//! Must not touch the host. Firecracker ends when its guest resets, always with status 0; what the guest did before, only
//! the console tells. A guest can print whatever it likes, so the console counts only where Firecracker's own end agrees.
//!
//! ```text
//! exit 0 ──▶ console has a panic? ─▶ GuestPanic, else GuestShutdown      (our kill afterwards changes nothing)
//! killed because the guest halted ─▶ GuestShutdown
//! killed by us ─▶ Killed    other signal ─▶ VmmKilled, a fault: VmmCrashed    other status ─▶ VmmCrashed
//! status unknown (adopted) ─▶ the last line of the log tells the status, if it ended by itself
//! ```

use crate::cgroups::OutOfMemory;
use crate::driver::{Exit, ExitCause};
use crate::ending::{PANIC, exit_with, memory_exit, signal_exit, silent_exit};
use aenv_sys::process::Ended;

/// How Linux says that it has stopped for good. Firecracker has no power switch, so the machine goes on without doing
/// anything, and nothing but these words tells.
const HALTED: [&str; 2] = ["reboot: System halted", "reboot: Power down"];
/// How Firecracker ends its log.
const EXIT_CODE: &str = "exit_code=";
/// Status with which it answers a hang-up or the limit of CPU time, which somebody else sent or set.
const SIGNALLED_FROM_OUTSIDE: [i32; 2] = [154, 156];

/// All that is known of an ended VM.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Evidence {
    /// Whether [`crate::Machine::kill`] was called before.
    pub(super) kill_requested: bool,
    /// Whether it was ended because its guest had halted.
    pub(super) halted: bool,
    /// Exit status of a child of ours.
    pub(super) ended: Option<Ended>,
    /// Whose memory ran out, if the VM's control group counts a process that was killed for that.
    pub(super) out_of_memory: Option<OutOfMemory>,
    /// What Firecracker and the console printed last.
    pub(super) output: String,
}

/// Whether the guest says that it has stopped for good: in a line of its own, with the kernel's time before it.
pub(super) fn says_halted(output: &str) -> bool {
    output.lines().any(|line| {
        let words = line.strip_prefix('[').and_then(|line| line.split_once("] "));
        words.is_some_and(|(time, words)| {
            time.trim_start().parse::<f64>().is_ok() && HALTED.contains(&words.trim_end())
        })
    })
}

impl Evidence {
    /// Weighs the evidence: what the guest did counts before what we did afterwards.
    pub(super) fn exit(&self) -> Exit {
        let ended = self.ended.or_else(|| self.logged_status().map(Ended::Exited));
        if let Some(exit) = memory_exit(ended, self.out_of_memory) {
            return exit;
        }
        match ended {
            Some(Ended::Exited(0)) => self.guest_exit(),
            _ if self.halted => self.with_output(ExitCause::GuestShutdown, "the guest halted".to_owned()),
            _ if self.kill_requested => {
                Exit { cause: ExitCause::Killed, detail: "killed on request".to_owned() }
            }
            Some(Ended::Exited(status)) => {
                let cause = if SIGNALLED_FROM_OUTSIDE.contains(&status) {
                    ExitCause::VmmKilled
                } else {
                    ExitCause::VmmCrashed
                };
                let meaning = meaning(status);
                self.with_output(cause, format!("the VMM exited with status {status}{meaning}"))
            }
            Some(Ended::Signalled(signal)) => signal_exit(signal, &self.output),
            None => silent_exit(&self.output),
        }
    }

    /// The status that Firecracker logged as its last line.
    fn logged_status(&self) -> Option<i32> {
        let last = self.output.lines().map(str::trim_end).rfind(|line| !line.is_empty())?;
        last.rsplit_once(EXIT_CODE)?.1.parse().ok()
    }

    fn guest_exit(&self) -> Exit {
        match self.output.rfind(PANIC) {
            // The panic's own line, since the call trace behind it is long.
            Some(start) => {
                let line = self.output[start..].lines().next().unwrap_or_default();
                let detail = format!("the guest's kernel panicked; console: {}", line.trim_end());
                Exit { cause: ExitCause::GuestPanic, detail }
            }
            None => self.with_output(ExitCause::GuestShutdown, "the guest shut down".to_owned()),
        }
    }

    fn with_output(&self, cause: ExitCause, detail: String) -> Exit {
        exit_with(cause, detail, "log", &self.output)
    }
}

/// What Firecracker means by a status (`FcExitCode` of its sources).
fn meaning(status: i32) -> &'static str {
    match status {
        148 => " (a forbidden system call)",
        149 => " (bus error: a mapped file was cut short or cannot be read)",
        150 => " (segmentation fault)",
        151 => " (a file reached its size limit)",
        152 => " (bad configuration)",
        153 => " (bad arguments)",
        154 => " (the limit of CPU time)",
        155 => " (broken pipe)",
        156 => " (hang-up)",
        157 => " (illegal instruction)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOPPED: &str = "2026-01-01T00:00:00.1 [a:main] Firecracker exiting successfully. exit_code=0\n";

    fn ended(ended: Ended, output: &str) -> Evidence {
        Evidence { ended: Some(ended), output: output.to_owned(), ..Evidence::default() }
    }

    #[test]
    fn a_panic_is_told_from_a_reboot() {
        let panic = format!("[ 1.0] Kernel panic - not syncing: sysrq\r\ntrace\r\n{STOPPED}");
        let exit = ended(Ended::Exited(0), &panic).exit();
        assert_eq!(exit.cause, ExitCause::GuestPanic);
        assert!(exit.detail.ends_with("console: Kernel panic - not syncing: sysrq"), "{}", exit.detail);
        let reboot = ended(Ended::Exited(0), "[ 1.0] reboot: Restarting system\r\n").exit();
        assert_eq!(reboot.cause, ExitCause::GuestShutdown);
        assert!(reboot.detail.contains("Restarting system"));
    }

    #[test]
    fn a_printed_panic_does_not_explain_a_kill() {
        assert_eq!(ended(Ended::Signalled(9), PANIC).exit().cause, ExitCause::VmmKilled);
        assert_eq!(ended(Ended::Exited(148), PANIC).exit().cause, ExitCause::VmmCrashed);
        let killed = Evidence { kill_requested: true, ..ended(Ended::Signalled(9), PANIC) };
        assert_eq!(killed.exit().cause, ExitCause::Killed);
    }

    #[test]
    fn our_own_kill_does_not_hide_what_the_guest_did_before() {
        let panicked = Evidence { kill_requested: true, ..ended(Ended::Exited(0), PANIC) };
        assert_eq!(panicked.exit().cause, ExitCause::GuestPanic);
        let halted = Evidence { halted: true, kill_requested: true, ..ended(Ended::Signalled(9), "") };
        assert_eq!(halted.exit().cause, ExitCause::GuestShutdown);
    }

    #[test]
    fn a_death_for_memory_is_told_from_other_ends() {
        let cause = |ended| {
            let out_of_memory = Some(OutOfMemory::OwnLimit);
            Evidence { ended, out_of_memory, ..Evidence::default() }.exit().cause
        };
        assert_eq!(cause(Some(Ended::Signalled(9))), ExitCause::OutOfMemory);
        assert_eq!(cause(None), ExitCause::OutOfMemory);
        assert_eq!(cause(Some(Ended::Exited(0))), ExitCause::GuestShutdown);
        assert_eq!(cause(Some(Ended::Signalled(11))), ExitCause::VmmCrashed);
    }

    #[test]
    fn exit_statuses_are_classified() {
        let cause = |how| ended(how, "").exit().cause;
        assert_eq!(cause(Ended::Signalled(9)), ExitCause::VmmKilled);
        assert_eq!(cause(Ended::Signalled(11)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Signalled(31)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Exited(1)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Exited(156)), ExitCause::VmmKilled);
        let exit = ended(Ended::Exited(149), "Received SIGBUS\n").exit();
        assert!(exit.detail.contains("bus error") && exit.detail.contains("Received"), "{}", exit.detail);
    }

    #[test]
    fn the_log_tells_the_status_of_an_adopted_vm() {
        let unknown = |output: &str| Evidence { output: output.to_owned(), ..Evidence::default() }.exit();
        assert_eq!(unknown(STOPPED).cause, ExitCause::GuestShutdown);
        assert_eq!(unknown(&format!("{PANIC}\n{STOPPED}\n")).cause, ExitCause::GuestPanic);
        let error = "[a:main] Firecracker exiting with error. exit_code=148";
        assert_eq!(unknown(error).cause, ExitCause::VmmCrashed);
        let exit = unknown(&format!("{STOPPED}but it went on"));
        assert_eq!(exit.cause, ExitCause::VmmKilled);
        assert!(exit.detail.contains("unknown"), "{}", exit.detail);
    }

    #[test]
    fn a_halt_is_read_from_the_kernel_s_line() {
        assert!(says_halted("x\r\n[    9.1] reboot: System halted\r\n"));
        assert!(says_halted("[    9.1] reboot: Power down"));
        assert!(!says_halted("they say reboot: System halted\n"));
        assert!(!says_halted("[    9.1] reboot: System halted when it is over\n"));
    }
}
