//! Tasks of the project, run by `cargo xtask …` and by the Makefile: check, up, down, test, bench.
//!
//! Owns no state. Reads environment and arguments, and hands over to one module per task.

mod artifacts;
mod bench;
mod check;
mod data_area;
mod fetch;
mod fuzz;
mod http;
mod interrupted;
mod ladder;
mod leftovers;
mod node;
mod process;
mod project;
mod rig;
mod settings;
mod stages;
mod test_node;
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
    /// The test ladder: checks, unit tests, real guests, the nested rig, the unmodified SDKs, leftovers
    Test(ladder::Options),
    /// Fetch the programs of dependencies.toml: Firecracker and its jailer
    Fetch,
    /// Run a command or the suites in the nested production machine
    Rig(rig::Options),
    /// The part of `rig` that runs inside
    #[command(hide = true, subcommand)]
    InsideRig(rig::inside::Task),
    /// Measure the running node, or the storage alone
    #[command(subcommand)]
    Bench(Bench),
    /// Run the fuzzers of what reads layer files, under libFuzzer; needs a nightly toolchain
    Fuzz(fuzz::Options),
    /// What this machine offers, what was chosen and why
    Doctor,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Create, exec, kill, memory: p50, p95, p99 and max
    Create(bench::Options),
    /// Pause and resume: times by tier, stop of the guest, bytes stored by each pause, many at once
    Pause(bench::pause::Options),
    /// Disks through FUSE, or ublk with --rig, against a plain file and NBD; index, chains, seal, recovery, shared memory
    Storage(bench::storage::Options),
    /// Snapshots and forks against the node that `up` started
    Fork(bench::fork::Options),
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            stages::complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let project = project::Project::find()?;
    match task {
        Task::Check => check::run(&project)?,
        Task::Advisories => check::advisories()?,
        Task::Up => up::up(&project)?,
        Task::Down => up::down(&project)?,
        Task::Clean => up::clean(&project)?,
        Task::Test(options) => ladder::run(&project, &options)?,
        Task::Fetch => fetch::run(&project)?,
        // A command's own exit code is ours.
        Task::Rig(options) => return rig::run_task(&project, &options).map(ExitCode::from),
        Task::InsideRig(task) => rig::inside::run(&project, &task)?,
        Task::Bench(Bench::Create(options)) => bench::create(&project, &options)?,
        Task::Bench(Bench::Pause(options)) => bench::pause::run(&project, &options)?,
        Task::Bench(Bench::Storage(options)) => bench::storage::run(&project, &options)?,
        Task::Bench(Bench::Fork(options)) => bench::fork::run(&project, &options)?,
        Task::Fuzz(options) => fuzz::run(&project, &options)?,
        Task::Doctor => up::doctor(&project)?,
    }
    Ok(ExitCode::SUCCESS)
}
