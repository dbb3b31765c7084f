//! What runs inside of the rig: the proof of its stack, and test programs with or without a node of their own.
//!
//! The rig is thrown away at the end, so only what a test could stumble over is removed. Owns no state.

mod power_cut;
mod stack;

use crate::artifacts;
use crate::bench;
use crate::node::{Node, Record};
use crate::process::{describe, tail};
use crate::project::Project;
use crate::stages::{Stages, say};
use crate::test_node;
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// One thing to do inside.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Task {
    /// Boot a guest by Firecracker under its jailer
    Stack,
    /// Measure creates and their baseline with a node of its own
    Bench(bench::Options),
    /// Measure pauses, resumes and their baseline with a node of its own
    BenchPause(bench::pause::Options),
    /// One half of a power cut
    PowerCut {
        /// Before it, or after it
        half: power_cut::Half,
    },
    /// Run test programs one after the other, one test at a time
    Tests(Tests),
}

/// What the test programs get.
#[derive(Debug, clap::Args)]
pub(crate) struct Tests {
    /// Start a node with the template `base` first, and tell the tests where it is
    #[arg(long)]
    node: bool,
    /// A variable for the node and the tests
    #[arg(long = "env", value_name = "NAME=VALUE")]
    environment: Vec<String>,
    /// Only tests whose name contains this
    #[arg(long)]
    filter: Option<String>,
    /// The programs
    #[arg(required = true)]
    programs: Vec<PathBuf>,
}

/// Does it.
pub(crate) fn run(project: &Project, task: &Task) -> Result<()> {
    match task {
        Task::Stack => stack::run(project),
        Task::Bench(options) => bench::create_inside(project, options),
        Task::BenchPause(options) => bench::pause::run_inside(project, options),
        Task::PowerCut { half } => power_cut::run(project, *half),
        Task::Tests(tests) => tests.run(project),
    }
}

impl Tests {
    fn run(&self, project: &Project) -> Result<()> {
        let variables = self.environment.iter().map(variable).collect::<Result<Vec<_>>>()?;
        let mut stages = Stages::default();
        let mut node = None;
        if self.node {
            let started = stages.attempt("start a node, capture the template", || {
                let area = test_node::area(project);
                let rootfs = artifacts::rootfs(project);
                node = Some(test_node::start(project, &area, &rootfs, &variables)?);
                Ok(())
            });
            if !started {
                bail!("the node does not start, so no test was run");
            }
        }
        for program in &self.programs {
            let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
            stages.attempt(&name, || self.run_program(project, program, &variables, node.as_ref()));
        }
        if let Some(node) = &node {
            stages.attempt("end the node", || end(node));
        }
        let failed: Vec<_> = stages.outcomes().iter().filter(|outcome| outcome.failure.is_some()).collect();
        if !failed.is_empty() {
            if let Some(node) = &node {
                say(&format!("the end of the node's log:\n{}", tail(&node.log, 6000)));
            }
            let names: Vec<_> = failed.iter().map(|outcome| outcome.name.as_str()).collect();
            bail!("failed: {}", names.join(", "));
        }
        Ok(())
    }

    fn run_program(
        &self,
        project: &Project,
        program: &PathBuf,
        variables: &[(String, String)],
        node: Option<&Node>,
    ) -> Result<()> {
        let mut command = Command::new(program);
        // What passing tests print are the times they measured.
        command.args(["--test-threads=1", "--show-output"]).args(&self.filter).stdin(Stdio::null());
        command
            .env("AENV_GUEST_DIR", project.guest_dir())
            .env("AENV_TEST_GUEST", project.guest_dir())
            .env("AENV_TEST_AREA", test_node::AREA)
            .envs(variables.iter().map(|(name, value)| (name, value)));
        if let Some(node) = node {
            test_node::test_environment(&mut command, project, node);
        }
        let status = command.status().with_context(|| format!("cannot start `{}`", describe(&command)))?;
        if !status.success() {
            bail!("{status}");
        }
        Ok(())
    }
}

/// Ends the node, and by its own program everything of its instance.
fn end(node: &Node) -> Result<()> {
    if let Some(record) = Record::read(&node.record) {
        record.stop()?;
    }
    for line in node.purge()?.lines().filter(|line| !line.is_empty()) {
        say(&format!("    ended {line}"));
    }
    Ok(())
}

fn variable(pair: &String) -> Result<(String, String)> {
    let (name, value) = pair.split_once('=').with_context(|| format!("--env {pair} is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}
