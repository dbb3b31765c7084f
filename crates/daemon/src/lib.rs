//! What the long-running programs have in common: their log, the limit of their descriptors, and what they write to a
//! terminal.
//!
//! Owns no state but the process's log, which is started once. Knows nothing of what the programs do.

use anyhow::{Context as _, Result, anyhow};
use std::io::Write as _;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Value of `--log`: form of the log on standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts the log of this process on standard error. `RUST_LOG` chooses what is logged; `info` without it.
///
/// # Errors
/// When it was started before.
pub fn start_log(format: LogFormat) -> Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => log.with_ansi(false).try_init(),
        LogFormat::Json => log.json().try_init(),
    };
    started.map_err(|error| anyhow!("cannot start the log: {error}"))
}

/// Allows as many open files as the process may allow itself: every VM, disk and connection costs some, and the limit that
/// programs start with is low.
///
/// # Errors
/// The system's error.
pub fn raise_descriptor_limit() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("cannot raise the limit of open files to its maximum")
}

/// Writes a line to standard output. A reader that went away is no error.
///
/// # Errors
/// When it cannot be written.
pub fn say(line: &str) -> std::io::Result<()> {
    match writeln!(std::io::stdout(), "{line}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// The exit code of a program that ended so; an error is written to standard error.
#[expect(clippy::print_stderr, reason = "the last words of a program that fails")]
#[must_use]
pub fn ending(ended: Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
