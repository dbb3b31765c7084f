//! `cargo xtask rig`: runs a command, or the suites, as root inside of a nested production machine.
//!
//! The machine is emulated by QEMU with a virtual AMD processor, so KVM, ublk and cgroup v2 are real inside wherever this
//! runs. It has the host's distribution, and this checkout at the same path, so programs built here run there.
//!
//! ```text
//! host   build ─▶ kernel, root disk (cached) ─▶ tar of the job's files ─▶ boot ─▶ output as it comes ─▶ exit code
//! rig             initramfs ─▶ root disk ─▶ rig/init: file systems, modules, disks ─▶ /run/rig/job ─▶ power off
//! ```
//! Owns `.aenv/cache/rig`. A run leaves nothing but its console in `.aenv/log`: the root disk and the data area are written
//! to unnamed temporary files, and QEMU dies with this process.

mod image;
pub(crate) mod inside;
mod lanes;
mod machine;
mod power_cut;
mod suites;
mod transport;

use crate::artifacts;
use crate::fetch;
use crate::process::require_root;
use crate::project::Project;
use crate::stages::{Stages, say, seconds};
use anyhow::{Context, Result, bail};
pub(crate) use lanes::run_all_suites;
use std::path::PathBuf;
use std::time::{Duration, Instant};
pub(crate) use suites::Extent;

/// Seconds for one suite where nobody says otherwise: several times what the longest takes.
const SUITE_LIMIT: u64 = 2400;
/// Memory of the machine where nobody says otherwise.
pub(crate) const MEMORY_MIB: u32 = 6144;
/// Processors of the machine where nobody says otherwise.
pub(crate) const PROCESSORS: u32 = 2;

/// What is wanted of one call.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only the suite of this name
    #[arg(long, conflicts_with = "command")]
    suite: Option<String>,
    /// Suites without what proves less for its time
    #[arg(long, conflicts_with = "command")]
    brief: bool,
    /// Take the programs and the guest's files as they are, instead of building them
    #[arg(long)]
    no_build: bool,
    /// Seconds until the machine is ended, for each suite
    #[arg(long, default_value_t = SUITE_LIMIT)]
    limit: u64,
    /// Memory of the machine in MiB
    #[arg(long, default_value_t = MEMORY_MIB)]
    memory: u32,
    /// Processors of the machine; without this as many as the suite wants
    #[arg(long)]
    processors: Option<u32>,
    /// A file or directory to bring in: its path here, and its absolute path inside
    #[arg(long = "file", value_name = "HOST:INSIDE")]
    files: Vec<String>,
    /// A variable of the command's environment
    #[arg(long = "env", value_name = "NAME=VALUE")]
    environment: Vec<String>,
    /// What to run instead of the suites; its working directory is this checkout's path
    #[arg(last = true)]
    command: Vec<String>,
}

/// A file or directory that is brought in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Carried {
    pub(crate) host: PathBuf,
    /// Absolute.
    pub(crate) inside: PathBuf,
}

/// One command for one boot of the machine.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Names the log of the console.
    pub(crate) name: String,
    pub(crate) command: Vec<String>,
    pub(crate) environment: Vec<(String, String)>,
    /// Besides the project's programs, the guest's files, and Firecracker with its jailer, which are always there.
    pub(crate) files: Vec<Carried>,
    /// From the start of QEMU to the command's end.
    pub(crate) limit: Duration,
    pub(crate) memory_mib: u32,
    pub(crate) processors: u32,
    /// The disk that is the data area, if not one that is thrown away.
    pub(crate) kept_area: Option<PathBuf>,
}

/// The task of the command line; gives the exit code of the command, or 0 when all suites passed.
pub(crate) fn run_task(project: &Project, options: &Options) -> Result<u8> {
    require_root()?;
    let mut stages = Stages::default();
    if !options.no_build {
        artifacts::make(project, &mut stages)?;
    }
    if options.command.is_empty() {
        return run_suites(project, &mut stages, options).map(|()| 0);
    }
    run_job(project, &mut stages, &options.job("command", options.command.clone(), Vec::new())?)
}

fn run_suites(project: &Project, stages: &mut Stages, options: &Options) -> Result<()> {
    let extent = if options.brief { Extent::Brief } else { Extent::Full };
    let wanted = suites::named(options.suite.as_deref(), extent)?;
    let mut failed = Vec::new();
    for suite in wanted {
        say(&format!("suite {}: {}", suite.name, suite.purpose));
        let (command, programs) = suite.prepare(project, stages, extent)?;
        let mut job = options.job(suite.name, command, programs)?;
        job.processors = options.processors.unwrap_or(suite.processors);
        let mut run = || match suite.command_after_power_cut(project) {
            None => run_job(project, stages, &job),
            Some(second) => power_cut::run(project, stages, &job, second),
        };
        let code = match run() {
            Err(error) if error.is::<machine::EndedByItself>() => {
                say(&format!("{error:#}"));
                say(
                    "the emulated processor was reset, and nothing in the machine can do that: once more, from the start",
                );
                run()
            }
            result => result,
        };
        let code = code?;
        if code != 0 {
            failed.push(format!("{} (exit code {code})", suite.name));
        }
    }
    if !failed.is_empty() {
        bail!("failed in the rig: {}", failed.join(", "));
    }
    Ok(())
}

/// Boots the machine, runs the job, streams its output to ours, gives its exit code. That the machine did not get so far is
/// an error.
pub(crate) fn run_job(project: &Project, stages: &mut Stages, job: &Job) -> Result<u8> {
    stages.run("Firecracker and its jailer", |voice| fetch::vmm_programs(project, voice))?;
    let image = image::make(project, stages)?;
    run_with(project, stages, &image, job)
}

fn run_with(project: &Project, stages: &mut Stages, image: &image::Image, job: &Job) -> Result<u8> {
    let transport = stages.run("files of the job", |_| transport::pack(project, job))?;
    let console = project.log_dir().join(format!("rig-{}.log", job.name));
    let mut machine = machine::Machine::start(image, transport, job, &console)?;
    stages.run("boot of the rig", |voice| machine.boot(voice))?;
    let started = Instant::now();
    let code = machine.finish()?;
    say(&format!("  command in the rig: exit code {code} after {}", seconds(started.elapsed())));
    Ok(code)
}

impl Options {
    fn job(&self, name: &str, command: Vec<String>, mut files: Vec<Carried>) -> Result<Job> {
        for pair in &self.files {
            let (host, inside) =
                pair.split_once(':').with_context(|| format!("--file {pair} is not HOST:INSIDE"))?;
            if !inside.starts_with('/') {
                bail!("--file {pair}: the path inside must be absolute");
            }
            let host = std::path::absolute(host).with_context(|| format!("--file {pair} is no path"))?;
            files.push(Carried { host, inside: PathBuf::from(inside) });
        }
        let variable = |pair: &String| match pair.split_once('=') {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => bail!("--env {pair} is not NAME=VALUE"),
        };
        Ok(Job {
            name: name.to_owned(),
            command,
            environment: self.environment.iter().map(variable).collect::<Result<_>>()?,
            files,
            limit: Duration::from_secs(self.limit),
            memory_mib: self.memory,
            processors: self.processors.unwrap_or(PROCESSORS),
            kept_area: None,
        })
    }
}
