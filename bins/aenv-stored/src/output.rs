//! The one place where this program writes to its terminal; its log goes through `tracing`.

use std::io::Write as _;

/// Writes a line to standard output. A reader that went away is no error.
pub(crate) fn say(line: &str) -> std::io::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// Writes a line to standard error.
#[expect(clippy::print_stderr, reason = "the last words of a program that fails")]
pub(crate) fn complain(line: &str) {
    eprintln!("{line}");
}
