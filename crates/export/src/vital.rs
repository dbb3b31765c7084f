//! Threads without which requests are not answered. Owns nothing.
//!
//! A process that lives and does not answer keeps its guests waiting for good: only its death lets a successor recover them, and
//! nothing is lost by it. So when one of these threads fails, the process ends at once.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::{Builder, JoinHandle};

/// Starts one. It may end well; an error or a panic ends the process.
pub(crate) fn spawn(
    name: &str,
    run: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let thread = name.to_owned();
    Builder::new().name(name.to_owned()).spawn(move || {
        let reason = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it panicked".to_owned(),
        };
        tracing::error!(
            thread,
            "this process ends, to be recovered, for it does not answer any more: {reason}"
        );
        std::process::abort();
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    const ROLE: &str = "AENV_TEST_VITAL_ROLE";

    /// Not a test: what a child does.
    #[test]
    #[ignore = "the part of a child, run by the other tests"]
    fn role() {
        let Ok(role) = std::env::var(ROLE) else { return };
        let thread = spawn("vital", move || match role.as_str() {
            "error" => Err(io::Error::other("as the test asked")),
            "panic" => panic!("as the test asked"),
            _ => Ok(()),
        });
        thread.unwrap().join().unwrap();
        // Whoever was to end has ended by now.
        std::thread::sleep(Duration::from_millis(200));
    }

    #[test]
    fn a_process_ends_with_a_thread_that_failed_and_not_with_one_that_ended() {
        for (role, signal) in [("error", Some(6)), ("panic", Some(6)), ("end", None)] {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "vital::tests::role", "--ignored"]).env(ROLE, role);
            let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
            assert_eq!((status.signal(), status.success()), (signal, signal.is_none()), "{role}");
        }
    }
}
