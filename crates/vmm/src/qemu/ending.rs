//! Why a VM ended: a pure function of the evidence that is left.
//!
//! Must not touch the host. The evidence differs: of a child of ours the exit status is known; of an adopted VM only what
//! it said over QMP and in its log, and then the answer says so.

use crate::cgroups::OutOfMemory;
use crate::driver::{Exit, ExitCause};
use crate::ending::{PANIC, exit_with, memory_exit, signal_exit, silent_exit};
use aenv_sys::process::Ended;

/// How QEMU says that it was told to end.
const TERMINATED: &str = "terminating on signal";

/// What the VMM said when its guest stopped for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stopped {
    /// `reason` of the SHUTDOWN event, or the run state when the event was missed.
    pub(super) reason: String,
    /// What was on the console.
    pub(super) console: String,
}

/// All that is known of an ended VM.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Evidence {
    /// Whether [`crate::Machine::kill`] was called before.
    pub(super) kill_requested: bool,
    /// What the VMM said before.
    pub(super) stopped: Option<Stopped>,
    /// Exit status of a child of ours.
    pub(super) ended: Option<Ended>,
    /// Whose memory ran out, if the VM's control group counts a process that was killed for that.
    pub(super) out_of_memory: Option<OutOfMemory>,
    /// End of the VMM's log.
    pub(super) log: String,
}

impl Evidence {
    /// Weighs the evidence: what the guest did counts before what we did afterwards.
    pub(super) fn exit(&self) -> Exit {
        if let Some(stopped) = &self.stopped
            && let Some(exit) = self.guest_exit(stopped)
        {
            return exit;
        }
        if let Some(exit) = memory_exit(self.ended, self.out_of_memory) {
            return exit;
        }
        if self.kill_requested {
            return Exit { cause: ExitCause::Killed, detail: "killed on request".to_owned() };
        }
        match self.ended {
            Some(Ended::Signalled(signal)) => signal_exit(signal, &self.log),
            // It handles SIGTERM and the like by itself, says so in the log, and exits with 0.
            Some(Ended::Exited(0)) => {
                self.with_log(ExitCause::VmmKilled, "the VMM was told to quit".to_owned())
            }
            Some(Ended::Exited(status)) => {
                self.with_log(ExitCause::VmmCrashed, format!("the VMM exited with status {status}"))
            }
            None if self.log.trim().is_empty() || self.log.contains(TERMINATED) => silent_exit(&self.log),
            None => self.with_log(
                ExitCause::VmmCrashed,
                "the VMM is gone; its exit status is unknown, since it was started by an earlier process"
                    .to_owned(),
            ),
        }
    }

    fn guest_exit(&self, stopped: &Stopped) -> Option<Exit> {
        let (cause, what) = match stopped.reason.as_str() {
            "internal-error" => (ExitCause::VmmCrashed, "the VMM stopped the guest: internal error"),
            _ if stopped.console.contains(PANIC) => (ExitCause::GuestPanic, "the guest's kernel panicked"),
            // A VMM that is told to end stops its guest first.
            "host-signal" | "host-qmp-quit" => return None,
            _ if self.log.contains(TERMINATED) => return None,
            _ => (ExitCause::GuestShutdown, "the guest shut down"),
        };
        let detail = format!("{what} ({})", stopped.reason);
        let console = match stopped.console.find(PANIC) {
            // The panic's own line first, since the call trace behind it is long.
            Some(start) => stopped.console[start..].lines().next().unwrap_or_default(),
            None => &stopped.console,
        };
        Some(exit_with(cause, detail, "console", console))
    }

    fn with_log(&self, cause: ExitCause, detail: String) -> Exit {
        exit_with(cause, detail, "log", &self.log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stopped(reason: &str, console: &str) -> Evidence {
        let stopped = Some(Stopped { reason: reason.to_owned(), console: console.to_owned() });
        Evidence { stopped, ..Evidence::default() }
    }

    #[test]
    fn a_panic_is_told_from_a_reboot() {
        let panic =
            stopped("guest-reset", "x\n[ 1.0] Kernel panic - not syncing: sysrq\ntrace\ntrace").exit();
        assert_eq!(panic.cause, ExitCause::GuestPanic);
        assert!(panic.detail.ends_with("console: Kernel panic - not syncing: sysrq"), "{}", panic.detail);
        let reboot = stopped("guest-reset", "reboot: Restarting system\n").exit();
        assert_eq!(reboot.cause, ExitCause::GuestShutdown);
        assert!(reboot.detail.contains("Restarting system"));
        assert_eq!(stopped("guest-shutdown", "").exit().cause, ExitCause::GuestShutdown);
        assert_eq!(stopped("shutdown", "").exit().cause, ExitCause::GuestShutdown);
        assert_eq!(stopped("internal-error", "").exit().cause, ExitCause::VmmCrashed);
    }

    #[test]
    fn our_own_kill_does_not_hide_what_the_guest_did_before() {
        let evidence =
            Evidence { kill_requested: true, ended: Some(Ended::Signalled(9)), ..Evidence::default() };
        assert_eq!(evidence.exit().cause, ExitCause::Killed);
        let evidence = Evidence { kill_requested: true, ..stopped("guest-reset", PANIC) };
        assert_eq!(evidence.exit().cause, ExitCause::GuestPanic);
    }

    #[test]
    fn exit_statuses_are_classified() {
        let cause = |ended| Evidence { ended: Some(ended), ..Evidence::default() }.exit().cause;
        assert_eq!(cause(Ended::Signalled(9)), ExitCause::VmmKilled);
        assert_eq!(cause(Ended::Signalled(15)), ExitCause::VmmKilled);
        assert_eq!(cause(Ended::Signalled(11)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Signalled(31)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Exited(1)), ExitCause::VmmCrashed);
        assert_eq!(cause(Ended::Exited(0)), ExitCause::VmmKilled);
        let terminated = Evidence { ended: Some(Ended::Exited(0)), ..stopped("host-signal", "") };
        assert_eq!(terminated.exit().cause, ExitCause::VmmKilled);
        let log = "aenv-a: terminating on signal 15 from pid 1 (<unknown process>)".to_owned();
        let terminated = Evidence { ended: Some(Ended::Exited(0)), log, ..stopped("shutdown", "") };
        assert_eq!(terminated.exit().cause, ExitCause::VmmKilled);
        let panicked = Evidence { stopped: stopped("shutdown", PANIC).stopped, ..terminated };
        assert_eq!(panicked.exit().cause, ExitCause::GuestPanic);
    }

    #[test]
    fn an_unknown_exit_status_is_admitted() {
        let exit = Evidence::default().exit();
        assert_eq!(exit.cause, ExitCause::VmmKilled);
        assert!(exit.detail.contains("unknown"));
        let exit = Evidence { log: "qemu: cannot\n\nallocate\n".to_owned(), ..Evidence::default() }.exit();
        assert_eq!(exit.cause, ExitCause::VmmCrashed);
        assert!(exit.detail.ends_with("log: qemu: cannot\nallocate"), "{}", exit.detail);
    }
}
