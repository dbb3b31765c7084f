//! Tasks of the project, run by `cargo xtask …` and by the Makefile: check, up, down, test, bench.
//!
//! Owns no state. Reads environment and arguments, and hands over to one module per task.

mod artifacts;
mod bench;
mod check;
mod data_area;
mod http;
mod ladder;
mod leftovers;
mod node;
mod process;
mod project;
mod settings;
mod stages;
mod up;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Tasks of the project", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Format, lints, licences, sources and bans, dependency direction, sizes, names, stray words
    Check,
    /// Known vulnerabilities of dependencies; needs the Internet and cargo-deny
    Advisories,
    /// Build, start the node in the background, run a command in a first sandbox
    Up,
    /// Stop the node and every sandbox, unmount; images and caches stay
    Down,
    /// `down`, and remove what tasks made, except the build output
    Clean,
    /// The test ladder: checks, unit tests, real guests, the unmodified SDKs, leftovers
    Test(ladder::Options),
    /// Measure against the running node
    #[command(subcommand)]
    Bench(Bench),
    /// What this machine offers, what was chosen and why
    Doctor,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Create, exec, kill, memory: p50, p95, p99 and max
    Create(bench::Options),
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            stages::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    let project = project::Project::find()?;
    match task {
        Task::Check => check::run(&project),
        Task::Advisories => check::advisories(),
        Task::Up => up::up(&project),
        Task::Down => up::down(&project),
        Task::Clean => up::clean(&project),
        Task::Test(options) => ladder::run(&project, &options),
        Task::Bench(Bench::Create(options)) => bench::create(&project, &options),
        Task::Doctor => up::doctor(&project),
    }
}
