//! How a command fails: what is told to the person, how it could be fixed, and the exit code.
//!
//! Owns no state and prints nothing; `output` renders a [`Failure`].

use std::fmt;

/// Exit codes that mean something; documented in `aenv --help`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exit(pub(crate) u8);

impl Exit {
    /// Done.
    pub(crate) const DONE: Self = Self(0);
    /// Failed.
    pub(crate) const FAILED: Self = Self(1);
    /// The command line or the settings are wrong.
    pub(crate) const USAGE: Self = Self(2);
    /// A command in the sandbox ran longer than allowed (as `timeout` of coreutils).
    pub(crate) const TIMED_OUT: Self = Self(124);
    /// We failed, not the command we were to run in a sandbox (as `env` and `docker` for trouble of their own).
    pub(crate) const TRANSPORT: Self = Self(125);
    /// What a shell reports for a program that wrote to a closed pipe.
    pub(crate) const CLOSED_PIPE: Self = Self(128 + 13);

    /// The code of a program that was ended by a signal.
    pub(crate) fn signalled(signal: u8) -> Self {
        Self(128_u8.saturating_add(signal))
    }
}

/// Why a command ended without doing what it was asked to do.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    hint: Option<String>,
    exit: Exit,
    quiet: bool,
    lost_sandbox: bool,
}

impl Failure {
    /// A failure told as `error: message`.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, exit: Exit::FAILED, quiet: false, lost_sandbox: false }
    }

    /// An end that needs no words: the reader of our output has gone, or a person pressed Ctrl-C.
    pub(crate) fn quiet(exit: Exit) -> Self {
        Self { message: String::new(), hint: None, exit, quiet: true, lost_sandbox: false }
    }

    /// A failure because the sandbox went out of reach while something was under way.
    pub(crate) fn connection_broke(reason: &str) -> Self {
        let failure = Self::new(format!("the connection to the sandbox broke: {reason}"))
            .with_hint("`aenv ls --all` shows whether the sandbox still runs, and why not");
        Self { lost_sandbox: true, ..failure }
    }

    /// Adds the way out, told as `hint: …`.
    pub(crate) fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Changes the exit code.
    pub(crate) fn with_exit(mut self, exit: Exit) -> Self {
        self.exit = exit;
        self
    }

    /// Prepends what was being done.
    pub(crate) fn while_doing(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// Appends what was found out about it.
    pub(crate) fn because(mut self, reason: &str) -> Self {
        if !self.message.contains(reason) {
            self.message = format!("{}: {reason}", self.message);
        }
        self
    }

    /// Whether the sandbox went out of reach: asking about it may tell more.
    pub(crate) fn is_lost_sandbox(&self) -> bool {
        self.lost_sandbox
    }

    /// Code to end with.
    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }

    /// The way out, if one is known.
    pub(crate) fn hint(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Whether nothing is to be told.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// An error with everything that caused it, in one line.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
