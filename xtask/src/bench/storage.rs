//! `bench storage`: the layered storage through FUSE on this machine, or through ublk in the nested one, against a plain file
//! and NBD; and what costs time inside. Runs the program `storage_bench`; owns no state.

use crate::artifacts;
use crate::process::{output_of, run_aloud};
use crate::project::Project;
use crate::rig;
use crate::stages::Stages;
use anyhow::{Result, bail};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Longest time in the nested machine.
const NESTED_LIMIT: Duration = Duration::from_secs(900);
/// Where the nested machine has its large disk.
const NESTED_DIRECTORY: &str = "/var/tmp";

/// What is wanted of one run.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Measure ublk, in the nested production machine
    #[arg(long)]
    rig: bool,
    /// Seconds for each access
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// MiB of the disk
    #[arg(long, default_value_t = 512)]
    size: u64,
    /// GiB in the top that is sealed and recovered
    #[arg(long, default_value_t = 1)]
    seal: u64,
}

impl Options {
    fn words(&self, way: &str, directory: &str) -> Vec<String> {
        let pairs = [
            ("--way", way.to_owned()),
            ("--directory", directory.to_owned()),
            ("--seconds", self.seconds.to_string()),
            ("--size", self.size.to_string()),
            ("--seal", self.seal.to_string()),
        ];
        pairs.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect()
    }
}

/// Builds the program and runs it.
pub(crate) fn run(project: &Project, options: &Options) -> Result<()> {
    let mut stages = Stages::default();
    stages.run("benchmark program", |_| build(project))?;
    if options.rig {
        return run_nested(project, &mut stages, options);
    }
    let directory = project.work_dir();
    std::fs::create_dir_all(&directory)?;
    run_aloud(Command::new(program(project)).args(options.words("fuse", &directory.display().to_string())))
}

fn run_nested(project: &Project, stages: &mut Stages, options: &Options) -> Result<()> {
    artifacts::make(project, stages)?;
    let program = program(project);
    let mut command = vec![program.display().to_string()];
    command.extend(options.words("ublk", NESTED_DIRECTORY));
    let job = rig::Job {
        name: "bench-storage".to_owned(),
        command,
        environment: Vec::new(),
        files: vec![rig::Carried { host: program.clone(), inside: program }],
        limit: NESTED_LIMIT,
        memory_mib: rig::MEMORY_MIB,
        processors: rig::PROCESSORS,
        kept_area: None,
    };
    match rig::run_job(project, stages, &job)? {
        0 => Ok(()),
        code => bail!("the benchmark in the nested machine ended with exit code {code}"),
    }
}

/// With the features of the whole workspace, so that nothing else is compiled anew.
fn build(project: &Project) -> Result<()> {
    let arguments = ["build", "--release", "--workspace", "--example", "storage_bench"];
    output_of(Command::new("cargo").current_dir(project.root()).args(arguments)).map(drop)
}

fn program(project: &Project) -> PathBuf {
    project.binary("examples/storage_bench")
}
