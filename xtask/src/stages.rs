//! Named steps of a task with their times: a spinner on a terminal, plain lines elsewhere. Owns the list of times.

use crate::process::Failed;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Outcome of one stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) time: Duration,
    pub(crate) failure: Option<String>,
    /// What a program that failed had said aloud at its end.
    pub(crate) said: Option<String>,
    /// Why it failed the first time, when it was done twice.
    pub(crate) first_failure: Option<String>,
}

/// How often something was tried before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Try {
    First,
    Second,
}

impl Outcome {
    fn new(name: &str, time: Duration, failure: Option<String>) -> Self {
        Self { name: name.to_owned(), time, failure, said: None, first_failure: None }
    }

    /// Why it failed: what was said, and the reason.
    pub(crate) fn told(&self) -> String {
        let parts = [self.said.as_deref(), self.failure.as_deref()];
        parts.into_iter().flatten().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

/// The stages of one task, in order.
#[derive(Debug, Default)]
pub(crate) struct Stages {
    outcomes: Vec<Outcome>,
}

/// What a running stage may say.
pub(crate) struct Voice {
    bar: ProgressBar,
}

impl Voice {
    /// Shows what is being done just now; lost when the output is no terminal.
    pub(crate) fn doing(&self, text: &str) {
        self.bar.set_message(text.chars().take(90).collect::<String>());
    }
}

impl Stages {
    /// Adds a stage that was done before this program could measure it.
    pub(crate) fn add_done(&mut self, name: &str, time: Duration) {
        say(&format!("  {name}: {}", seconds(time)));
        self.outcomes.push(Outcome::new(name, time, None));
    }

    /// Runs a stage whose failure ends the task.
    pub(crate) fn run<T>(&mut self, name: &str, work: impl FnOnce(&Voice) -> Result<T>) -> Result<T> {
        let voice = Voice { bar: spinner(name) };
        let started = Instant::now();
        let result = work(&voice);
        voice.bar.finish_and_clear();
        let time = started.elapsed();
        let mark = if result.is_ok() { "" } else { "FAILED after " };
        say(&format!("  {name}: {mark}{}", seconds(time)));
        let failure = result.as_ref().err().map(|error| format!("{error:#}"));
        self.outcomes.push(Outcome::new(name, time, failure));
        result.with_context(|| format!("stage `{name}` failed"))
    }

    /// Runs a stage that speaks aloud and whose failure is kept while others go on. Tells whether it succeeded.
    pub(crate) fn attempt(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> bool {
        say(&format!("\n=== {name}"));
        let started = Instant::now();
        let result = work();
        let time = started.elapsed();
        let error = result.err();
        let said =
            error.as_ref().and_then(|error| error.downcast_ref()).map(|Failed { said, .. }| said.clone());
        let failure = error.map(|error| format!("{error:#}"));
        match &failure {
            None => say(&format!("=== {name}: ok in {}", seconds(time))),
            Some(reason) => say(&format!("=== {name}: FAILED after {}\n{reason}", seconds(time))),
        }
        let succeeded = failure.is_none();
        self.outcomes.push(Outcome { said, ..Outcome::new(name, time, failure) });
        succeeded
    }

    /// As [`attempt`](Self::attempt), for work that depends on how fast this machine is just now: a failure is followed by a
    /// second try, and is kept, so that it is told at the end whatever comes of that.
    pub(crate) fn attempt_twice(&mut self, name: &str, work: impl Fn(Try) -> Result<()>) -> bool {
        if self.attempt(name, || work(Try::First)) {
            return true;
        }
        let first = self.outcomes.pop();
        let succeeded = self.attempt(&format!("{name}, once more"), || work(Try::Second));
        if let (Some(first), Some(second)) = (first, self.outcomes.last_mut()) {
            second.time += first.time;
            second.first_failure = Some(first.told());
        }
        succeeded
    }

    /// Keeps a stage that was not run, as a failure with its reason.
    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        say(&format!("\n=== {name}: not run, {reason}"));
        let failure = Some(format!("not run: {reason}"));
        self.outcomes.push(Outcome::new(name, Duration::ZERO, failure));
    }

    /// An error that names the stages that failed and carries what they said, if there are any.
    pub(crate) fn verdict(&self, whose: &str) -> Result<()> {
        let failed: Vec<_> = self.outcomes.iter().filter(|outcome| outcome.failure.is_some()).collect();
        if failed.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = failed.iter().map(|outcome| outcome.name.as_str()).collect();
        let what = format!("{whose} failed: {}", names.join(", "));
        let said: Vec<_> = failed.iter().map(|outcome| outcome.told()).collect();
        Err(Failed { what, said: said.join("\n") }.into())
    }

    pub(crate) fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Time of all stages.
    pub(crate) fn total(&self) -> Duration {
        self.outcomes.iter().map(|outcome| outcome.time).sum()
    }
}

fn spinner(name: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    if let Ok(style) = ProgressStyle::with_template("  {spinner} {prefix} [{elapsed}] {wide_msg:.dim}") {
        bar.set_style(style);
    }
    bar.set_prefix(name.to_owned());
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// A time for people: tenths of a second below a minute, else minutes and seconds.
pub(crate) fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(60) {
        format!("{:.1} s", time.as_secs_f64())
    } else {
        format!("{} min {:02} s", time.as_secs() / 60, time.as_secs() % 60)
    }
}

/// Prints a line for the person at the terminal. With [`complain`] the one place of this program that prints.
#[expect(clippy::print_stdout, reason = "this program's output is for people at a terminal")]
pub(crate) fn say(text: &str) {
    println!("{text}");
}

/// As [`say`], on standard error.
#[expect(clippy::print_stderr, reason = "this program's output is for people at a terminal")]
pub(crate) fn complain(text: &str) {
    eprintln!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_stage_is_kept_and_the_next_one_runs() {
        let mut stages = Stages::default();
        assert!(!stages.attempt("one", || anyhow::bail!("broken")));
        assert!(stages.attempt("two", || Ok(())));
        let failures: Vec<_> = stages.outcomes().iter().map(|outcome| outcome.failure.clone()).collect();
        assert_eq!(failures, [Some("broken".to_owned()), None]);
    }

    #[test]
    fn what_a_failed_program_said_is_kept_through_all_levels() {
        let mut inner = Stages::default();
        let failed =
            || Failed { what: "`tests` failed".to_owned(), said: "assertion left == right".to_owned() };
        inner.attempt("fine", || Ok(()));
        inner.attempt("tests", || Err(failed().into()));
        let mut outer = Stages::default();
        outer.attempt("checks", || inner.verdict("checks"));
        let told = outer.outcomes()[0].told();
        assert!(told.contains("assertion left == right") && told.contains("`tests` failed"), "{told}");
        assert!(told.ends_with("checks failed: tests"), "{told}");
        assert!(Stages::default().verdict("nothing").is_ok());
    }

    #[test]
    fn a_failure_that_does_not_come_again_is_kept() {
        let mut stages = Stages::default();
        assert!(stages.attempt_twice("fine", |_| Ok(())));
        assert!(stages.attempt_twice("late", |time| match time {
            Try::First => anyhow::bail!("too slow"),
            Try::Second => Ok(()),
        }));
        assert!(!stages.attempt_twice("broken", |time| anyhow::bail!("{time:?}")));
        let kept: Vec<_> = stages.outcomes().iter().map(|one| (&one.failure, &one.first_failure)).collect();
        let text = |text: &str| Some(text.to_owned());
        assert_eq!(kept, [(&None, &None), (&None, &text("too slow")), (&text("Second"), &text("First"))]);
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(seconds(Duration::from_millis(1234)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(754)), "12 min 34 s");
    }
}
