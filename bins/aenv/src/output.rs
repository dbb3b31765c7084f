//! Everything a person or a program reads: results on standard output, words and progress on standard error.
//!
//! Owns the knowledge of what is a terminal. Results are tables on a terminal and JSON otherwise; words that only help
//! a person (what to do next, spinners, bars) appear only on a terminal. Text from outside is shown with its control
//! characters escaped, so that no label or error text can command the terminal. Must not decide anything.

use crate::failure::{Exit, Failure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// After this long a person wants to see that something happens.
const PATIENCE: Duration = Duration::from_secs(1);
/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(120);

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Table,
    Json,
}

/// The way out for everything but the streams of `exec` and `download`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    format: Format,
    errors_on_terminal: bool,
}

impl Printer {
    /// Looks at the standard streams; `json` asks for JSON wherever the output goes.
    pub(crate) fn new(json: bool) -> Self {
        let format = if json || !std::io::stdout().is_terminal() { Format::Json } else { Format::Table };
        Self { format, errors_on_terminal: std::io::stderr().is_terminal() }
    }

    /// Whether results are to be written as JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Writes one line.
    ///
    /// # Errors
    /// A quiet failure when nobody reads any more, a telling one when the output cannot be written.
    pub(crate) fn line(&self, text: &str) -> Result<(), Failure> {
        let mut output = std::io::stdout().lock();
        writeln!(output, "{text}").and_then(|()| output.flush()).map_err(|error| output_failure(&error))
    }

    /// Writes a value as JSON.
    ///
    /// # Errors
    /// As [`Printer::line`].
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value)
            .map_err(|error| Failure::new(format!("the result cannot be written as JSON: {error}")))?;
        self.line(&text)
    }

    /// Writes a table; cells are escaped here.
    ///
    /// # Errors
    /// As [`Printer::line`].
    pub(crate) fn table<const N: usize>(
        &self,
        header: [&str; N],
        rows: Vec<[String; N]>,
    ) -> Result<(), Failure> {
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        table.set_content_arrangement(comfy_table::ContentArrangement::Dynamic);
        table.set_header(header);
        for row in rows {
            table.add_row(row.map(|cell| printable(&cell)));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        for line in table.lines() {
            self.line(line.trim_end())?;
        }
        Ok(())
    }

    /// Tells a person what happened or what to do next; nobody else sees it.
    pub(crate) fn note(&self, text: &str) {
        if self.errors_on_terminal {
            error_line(&printable(text));
        }
    }

    /// Tells why the command failed and how to fix it.
    pub(crate) fn failure(&self, failure: &Failure) {
        if failure.is_quiet() {
            return;
        }
        error_line(&format!("error: {}", printable(&failure.to_string())));
        if let Some(hint) = failure.hint() {
            error_line(&format!("hint: {}", printable(hint)));
        }
    }

    /// Shows `what` with a turning mark as long as the answer is alive, if it takes longer than a second.
    pub(crate) fn spinner(&self, what: &str) -> Spinner {
        if !self.errors_on_terminal {
            return Spinner { task: None };
        }
        let what = printable(what);
        let task = tokio::spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            let bar = ClearedOnDrop(ProgressBar::new_spinner());
            bar.0.set_message(what);
            bar.0.enable_steady_tick(TICK);
            std::future::pending::<()>().await;
        });
        Spinner { task: Some(task) }
    }

    /// A bar for `total` bytes (unknown if absent) that appears if the transfer takes longer than a second.
    pub(crate) fn transfer(&self, total: Option<u64>) -> Transfer {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
        let template = match total {
            Some(_) => "{bar:30} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left",
            None => "{spinner} {bytes}, {bytes_per_sec}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Transfer { bar: ClearedOnDrop(bar), started: Instant::now(), hidden: self.errors_on_terminal }
    }
}

/// Takes a bar off the terminal however its life ends.
#[derive(Debug)]
struct ClearedOnDrop(ProgressBar);

impl Drop for ClearedOnDrop {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Shows that something goes on; disappears when dropped.
#[derive(Debug)]
pub(crate) struct Spinner {
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Shows how far a copy is; disappears when dropped.
#[derive(Debug)]
pub(crate) struct Transfer {
    bar: ClearedOnDrop,
    started: Instant,
    /// Whether the bar still waits for its moment; never on anything but a terminal.
    hidden: bool,
}

impl Transfer {
    /// Notes that so many more bytes went through.
    pub(crate) fn advance(&mut self, bytes: usize) {
        if self.hidden && self.started.elapsed() > PATIENCE {
            self.bar.0.set_draw_target(ProgressDrawTarget::stderr());
            self.hidden = false;
        }
        self.bar.0.inc(u64::try_from(bytes).unwrap_or(u64::MAX));
    }
}

/// A failed write to standard output: quiet when its reader has simply gone.
pub(crate) fn output_failure(error: &std::io::Error) -> Failure {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        Failure::quiet(Exit::CLOSED_PIPE)
    } else {
        Failure::new(format!("standard output cannot be written: {error}"))
    }
}

/// Writes to standard error. When even that is closed, nobody is left to be told.
fn error_line(text: &str) {
    let _nobody_listens = writeln!(std::io::stderr().lock(), "{text}");
}

/// The text with control characters shown instead of obeyed.
fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        let reorders = matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if (character.is_control() && character != '\n') || reorders {
            shown.extend(character.escape_default());
        } else {
            shown.push(character);
        }
    }
    shown
}

/// A duration as people say it, in its two largest units.
pub(crate) fn human_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes, rest) =
        (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{rest}s"),
        (0, 0, _) => format!("{minutes}m {rest}s"),
        (0, _, _) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

/// A size as people say it.
pub(crate) fn human_bytes(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

/// A size as people say it, from mebibytes.
pub(crate) fn human_mebibytes(mebibytes: u64) -> String {
    human_bytes(mebibytes.saturating_mul(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_are_told_in_two_units() {
        for (seconds, expected) in [(0, "0s"), (59, "59s"), (61, "1m 1s"), (3600, "1h 0m"), (90_061, "1d 1h")]
        {
            assert_eq!(human_duration(Duration::from_secs(seconds)), expected);
        }
    }

    proptest! {
        #[test]
        fn nothing_that_is_shown_commands_the_terminal(text in any::<String>()) {
            prop_assert!(!printable(&text).chars().any(|character| character.is_control() && character != '\n'));
        }
    }
}
