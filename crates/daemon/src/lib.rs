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

/// How a program logs.
#[derive(Debug, Clone, clap::Args)]
pub struct LogOptions {
    /// Form of the log on standard error
    #[arg(long, env = "AENV_LOG", value_enum, default_value = "text")]
    pub log: LogFormat,
    /// What is logged: a level (`error` to `trace`), or levels by module (`info,aenv_export=debug`)
    #[arg(long, env = "RUST_LOG", default_value = "info", value_parser = checked_filter)]
    pub log_filter: String,
}

impl LogOptions {
    /// The same, as arguments of another program that takes them.
    #[must_use]
    pub fn arguments(&self) -> [String; 4] {
        let format = match self.log {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        ["--log", format, "--log-filter", &self.log_filter].map(str::to_owned)
    }
}

fn checked_filter(text: &str) -> Result<String, String> {
    EnvFilter::try_new(text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// Starts the log of this process on standard error.
///
/// # Errors
/// When it was started before.
pub fn start_log(options: &LogOptions) -> Result<()> {
    let filter = EnvFilter::try_new(&options.log_filter).context("cannot understand what is to be logged")?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match options.log {
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        log: LogOptions,
    }

    #[test]
    fn what_is_told_to_another_program_says_the_same_there() {
        for (format, filter) in [("text", "info"), ("json", "debug,aenv_export=trace")] {
            let given = ["it", "--log", format, "--log-filter", filter];
            let told = Arguments::parse_from(given).log.arguments();
            assert_eq!(told, given[1..]);
        }
        let refused =
            Arguments::try_parse_from(["it", "--log-filter", "a=nonsense"]).unwrap_err().to_string();
        assert!(refused.contains("--log-filter"), "{refused}");
    }
}
