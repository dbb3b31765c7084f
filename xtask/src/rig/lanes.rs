//! All suites of the rig for the test ladder: those with one processor run beside one another where the host has room, each
//! in a task runner of its own with a log of its own. Owns nothing but these processes.

use super::suites::{self, Suite};
use super::{Extent, MEMORY_MIB};
use crate::process::{Failed, run_quietly, tail};
use crate::project::Project;
use crate::stages::{say, seconds};
use anyhow::{Context, Result, anyhow};
use std::collections::VecDeque;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Memory that the host keeps for itself beside its nested machines.
const RESERVE_MIB: u64 = 2048;
/// How much of a failed suite's log is shown.
const SHOWN_BYTES: u64 = 10_000;

/// All suites with the usual machine; programs, tests and guest files are there.
pub(crate) fn run_all_suites(project: &Project, extent: Extent) -> Result<()> {
    let suites = suites::named(None, extent)?;
    let (with_one, with_more): (Vec<_>, Vec<_>) = suites.into_iter().partition(|suite| suite.processors == 1);
    let mut failures = run_in_lanes(project, extent, with_more, 1)?;
    failures.extend(run_in_lanes(project, extent, with_one, lanes_of_this_host()?)?);
    if failures.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = failures.iter().map(|(name, _)| *name).collect();
    let said: Vec<_> = failures.iter().map(|(_, said)| said.as_str()).collect();
    Err(Failed { what: format!("failed in the rig: {}", names.join(", ")), said: said.join("\n") }.into())
}

/// Runs the suites, `count` at once; gives the names of those that failed, and what they said.
fn run_in_lanes(
    project: &Project,
    extent: Extent,
    suites: Vec<&'static Suite>,
    count: usize,
) -> Result<Vec<(&'static str, String)>> {
    let waiting = Mutex::new(VecDeque::from(suites));
    let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let lane = || {
        let mut failures = Vec::new();
        while let Some(suite) = next() {
            // One emulated processor is slow, and slower when the host is busy.
            let repeated = run_apart(project, extent, suite).or_else(|error| {
                say(&format!("suite {}, which is run once more:\n{error:#}", suite.name));
                run_apart(project, extent, suite)
            });
            if let Err(error) = repeated {
                failures.push((suite.name, format!("{error:#}")));
            }
        }
        failures
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..count).map(|_| scope.spawn(lane)).collect();
        let ends = lanes.into_iter().map(|lane| lane.join().map_err(|_| anyhow!("a thread panicked")));
        Ok(ends.collect::<Result<Vec<_>>>()?.concat())
    })
}

fn run_apart(project: &Project, extent: Extent, suite: &Suite) -> Result<()> {
    let log = project.log_dir().join(format!("rig-suite-{}.log", suite.name));
    // Not this process's own file, which the build of everything has replaced.
    let mut command = Command::new(project.binary("xtask"));
    command.current_dir(project.root()).args(["rig", "--no-build", "--suite", suite.name]);
    if extent == Extent::Brief {
        command.arg("--brief");
    }
    let started = Instant::now();
    let result = run_quietly(&mut command, &log, |_| ());
    let mark = if result.is_ok() { "ok" } else { "FAILED" };
    let results = results(&log)?;
    say(&format!(
        "suite {}, {}: {mark} after {}\n{results}",
        suite.name,
        suite.purpose,
        seconds(started.elapsed())
    ));
    result.map_err(|error| {
        // The rest of the error is the end of the log, of which more is shown here.
        let what = error.to_string().lines().next().unwrap_or_default().to_owned();
        anyhow!("{what}\n{}\n(all of it: {})", tail(&log, SHOWN_BYTES), log.display())
    })
}

/// What the suite's test programs say about themselves.
fn results(log: &Path) -> Result<String> {
    let text = std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))?;
    let lines = text.lines().filter(|line| line.starts_with("=== ") || line.starts_with("test result"));
    Ok(lines.map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n"))
}

/// Two where processors and memory are there for two machines.
fn lanes_of_this_host() -> Result<usize> {
    let processors = std::thread::available_parallelism().context("cannot count the processors")?.get();
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = available_mib(&text).context("/proc/meminfo has no MemAvailable")?;
    Ok(lanes(processors, available))
}

fn lanes(processors: usize, available_mib: u64) -> usize {
    let has_memory = available_mib >= 2 * u64::from(MEMORY_MIB) + RESERVE_MIB;
    if processors >= 2 && has_memory { 2 } else { 1 }
}

fn available_mib(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_machines_run_at_once_only_where_there_is_room_for_both() {
        assert_eq!(available_mib("MemFree: 1 kB\nMemAvailable:   20480000 kB\n"), Some(20_000));
        assert_eq!(available_mib("MemAvailable: many\n"), None);
        assert_eq!(lanes(2, 20_000), 2);
        assert_eq!(lanes(2, 14_000), 1);
        assert_eq!(lanes(1, 20_000), 1);
    }

    #[test]
    fn a_suites_results_are_what_its_tests_say() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let text = "boot\n=== cgroups\ntest a ... ok\ntest result: ok. 1 passed\n=== cgroups: ok in 1 s\n";
        std::fs::write(log.path(), text).unwrap();
        let shown = results(log.path()).unwrap();
        assert_eq!(shown, "  === cgroups\n  test result: ok. 1 passed\n  === cgroups: ok in 1 s");
        assert!(results(Path::new("/nonexistent")).is_err());
    }
}
