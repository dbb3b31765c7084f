//! Where a benchmark runs: against the node that `up` started, or in the nested production machine with a node of its own.
//! Owns no state.

use super::naive;
use crate::artifacts;
use crate::data_area::Area;
use crate::http::Client;
use crate::node::Record;
use crate::project::Project;
use crate::rig;
use crate::stages::Stages;
use crate::test_node;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest time for a benchmark in the nested machine.
const NESTED_LIMIT: Duration = Duration::from_secs(1800);
/// Processors of the nested machine: with two, its emulation now and then loses a guest.
const GUEST_PROCESSORS: u32 = 1;
/// Seconds for a start in the nested machine: a turn comes late on one processor.
const START_WAIT: &str = "110";
/// Most that the file system of a baseline may take.
const AREA_BYTES: u64 = 16 << 30;
/// Runs of the baseline in the nested machine where nobody says otherwise.
pub(super) const NESTED_BASELINE: usize = 5;

/// A node to be measured.
pub(super) struct Found {
    pub(super) client: Client,
    pub(super) address: String,
    pub(super) key: String,
    pub(super) instance: String,
    pub(super) data_dir: PathBuf,
    /// Of its process.
    pub(super) pid: i32,
}

impl Found {
    /// The one that `up` started.
    pub(super) fn of_up(project: &Project) -> Result<Self> {
        let record = Record::read(&project.work_dir().join("run/node.json"))
            .filter(Record::is_alive)
            .context("no node is running: make up")?;
        let settings = std::fs::read_to_string(project.env_file()).context("cannot read .aenv/env")?;
        let key = settings
            .lines()
            .find_map(|line| line.strip_prefix("E2B_API_KEY="))
            .context(".aenv/env has no key")?;
        Ok(Self::new(&record, key))
    }

    fn new(record: &Record, key: &str) -> Self {
        Self {
            client: Client::new(&record.listen, key),
            address: record.listen.clone(),
            key: key.to_owned(),
            instance: record.instance.clone(),
            data_dir: record.data_dir.clone(),
            pid: record.pid,
        }
    }

    /// One more connection.
    pub(super) fn another_client(&self) -> Client {
        Client::new(&self.address, &self.key)
    }
}

/// What a benchmark's requests run on.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?)
}

/// Numbers and `--json` as the words of a command line.
pub(super) fn words(numbers: &[(&str, usize)], json: bool) -> Vec<String> {
    let mut words: Vec<String> =
        numbers.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]).collect();
    words.extend(json.then(|| "--json".to_owned()));
    words
}

/// Boots the nested machine and has it run `inside-rig NAME --driver DRIVER WORDS…`.
pub(super) fn nested(project: &Project, name: &str, driver: &str, words: Vec<String>) -> Result<()> {
    let mut stages = Stages::default();
    artifacts::make(project, &mut stages)?;
    stages.run("baseline program", |_| naive::build(project))?;
    let mut command = vec![project.binary("xtask").display().to_string()];
    command.extend(["inside-rig", name, "--driver", driver].map(str::to_owned));
    command.extend(words);
    let program = naive::program(project);
    let job = rig::Job {
        name: name.to_owned(),
        command,
        environment: Vec::new(),
        files: vec![rig::Carried { host: program.clone(), inside: program }],
        limit: NESTED_LIMIT,
        memory_mib: rig::MEMORY_MIB,
        processors: GUEST_PROCESSORS,
        kept_area: None,
    };
    match rig::run_job(project, &mut stages, &job)? {
        0 => Ok(()),
        code => bail!("the benchmark in the nested machine ended with exit code {code}"),
    }
}

/// In the nested machine: starts a node, measures it, and ends it, so that nothing of it takes time from a baseline.
pub(super) fn inside<T>(
    project: &Project,
    driver: &str,
    measure: impl FnOnce(&mut Found) -> Result<T>,
) -> Result<T> {
    let variables = [("AENV_DRIVER", driver), ("AENV_START_WAIT_SECONDS", START_WAIT)]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let node = test_node::start(project, &test_node::area(project), &artifacts::rootfs(project), &variables)?;
    let record = Record::read(&node.record).context("the node left no record")?;
    let report = measure(&mut Found::new(&record, &node.key))?;
    record.stop()?;
    node.purge()?;
    Ok(report)
}

/// Runs a baseline in a directory whose file system shares blocks: an image is mounted for it if need be.
pub(super) fn in_area<T>(project: &Project, run: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let area = Area::beside(&project.work_dir().join("bench"))?;
    area.prepare(AREA_BYTES)?;
    let done = run(&area.directory);
    area.release()?;
    done
}

/// A directory on a file system that shares blocks, in the nested machine.
pub(super) fn inside_area() -> &'static Path {
    Path::new(test_node::AREA)
}
