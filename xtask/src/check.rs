//! The project's rules, checked: what rustfmt and clippy know, and what only this project demands.
//!
//! Owns no state. Each rule is a pure function from text to [`Finding`]s with a test that violates it; this file collects
//! input for them and prints what they find.

mod dependencies;
mod edges;
mod sources;
mod words;

use crate::artifacts;
use crate::process::{Failed, output_of, run_aloud};
use crate::project::Project;
use crate::stages::{Stages, say};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::Command;

/// One violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) severity: Severity,
    /// File, or package.
    pub(crate) place: String,
    pub(crate) message: String,
}

/// Whether a finding fails the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    Warning,
    Error,
}

impl Finding {
    fn error(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Error, place: place.into(), message: message.into() }
    }

    fn warning(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, place: place.into(), message: message.into() }
    }
}

/// Runs every rule; all of them, even when an early one fails.
pub(crate) fn run(project: &Project) -> Result<()> {
    let mut stages = Stages::default();
    stages.attempt("rustfmt", || {
        run_aloud(Command::new("cargo").current_dir(project.root()).args(["fmt", "--all", "--check"]))
    });
    stages.attempt("clippy", || {
        run_aloud(Command::new("cargo").current_dir(project.root()).args([
            "clippy",
            "--release",
            "--workspace",
            "--all-targets",
            "--quiet",
            "--",
            "-D",
            "warnings",
        ]))
    });
    stages
        .attempt("programs without what tests ask of their dependencies", || artifacts::check_alone(project));
    stages.attempt("dependencies: licences, sources, bans", || {
        let policy =
            std::fs::read_to_string(project.root().join("deny.toml")).context("cannot read deny.toml")?;
        report(dependencies::check(&metadata(project, &[])?, &dependencies::Policy::parse(&policy)?))
    });
    stages.attempt("dependency direction", || report(edges::check(&metadata(project, &["--no-deps"])?)));
    stages.attempt("sources: headers, sizes, names, unsafe", || {
        let mut findings = Vec::new();
        for (path, text) in tracked_texts(project)?.iter().filter(|(path, _)| path.ends_with(".rs")) {
            findings.extend(sources::check(path, text));
        }
        report(findings)
    });
    stages.attempt("stray words", || {
        let mut findings = Vec::new();
        for (path, text) in &tracked_texts(project)? {
            findings.extend(words::check(path, text));
        }
        report(findings)
    });
    stages.verdict("checks")
}

/// Says plainly what cannot be checked here.
pub(crate) fn advisories() -> Result<()> {
    say(
        "The advisory database (RustSec) is a git repository on a host that an offline machine cannot reach.",
    );
    let found = Command::new("cargo")
        .args(["deny", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !found {
        bail!(
            "cargo-deny is not installed: where the Internet is reachable, `cargo install cargo-deny`, then again"
        );
    }
    run_aloud(Command::new("cargo").args(["deny", "check", "advisories"]))
}

/// Prints the findings; errors among them fail.
fn report(mut findings: Vec<Finding>) -> Result<()> {
    findings.sort_by(|a, b| (b.severity, &a.place).cmp(&(a.severity, &b.place)));
    for finding in &findings {
        let severity = match finding.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        say(&format!("{severity}: {}: {}", finding.place, finding.message));
    }
    let errors: Vec<_> = findings.iter().filter(|finding| finding.severity == Severity::Error).collect();
    if errors.is_empty() {
        return Ok(());
    }
    let lines: Vec<_> =
        errors.iter().map(|finding| format!("{}: {}", finding.place, finding.message)).collect();
    Err(Failed { what: format!("{} violations", errors.len()), said: lines.join("\n") }.into())
}

fn metadata(project: &Project, options: &[&str]) -> Result<serde_json::Value> {
    let text = output_of(
        Command::new("cargo")
            .current_dir(project.root())
            .args([
                "metadata",
                "--format-version",
                "1",
                "--locked",
                "--filter-platform",
                "x86_64-unknown-linux-gnu",
            ])
            .args(options),
    )?;
    serde_json::from_str(&text).context("cargo metadata printed no JSON")
}

/// Every text file that is committed, or is there and not ignored: (path from the root, content).
fn tracked_texts(project: &Project) -> Result<Vec<(String, String)>> {
    let listing = output_of(Command::new("git").current_dir(project.root()).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut texts = Vec::new();
    for path in listing.split('\0').filter(|path| !path.is_empty()) {
        let file: PathBuf = project.root().join(path);
        // A file deleted but not yet committed is still listed; a binary file is no text.
        if let Some(text) = std::fs::read(&file).ok().and_then(|bytes| String::from_utf8(bytes).ok()) {
            texts.push((path.to_owned(), text));
        }
    }
    Ok(texts)
}
