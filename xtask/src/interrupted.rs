//! What a run of the tests leaves when it is interrupted, also one of another checkout: test programs, nodes and their VMs,
//! mounts. Only one run may be under way on a host, since all use the same area and the same names of instances.
//!
//! Owns the lock that says so. Ends only processes whose environment names the test area.

use crate::data_area::Area;
use crate::node::{Record, start_time};
use crate::process::output_of;
use crate::project::Project;
use crate::stages::say;
use crate::test_node::AREA;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Where the lock lies; the kernel frees it with the process.
const LOCK: &str = "/run/aenv-t.lock";
/// Instances of tests: the shared node's, and those that single tests start.
const INSTANCES: [&str; 14] =
    ["t", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9", "t10", "t11", "t12", "t13"];
/// From SIGKILL to the end of a process that is in the middle of a disk write.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Held while a run is under way.
#[derive(Debug)]
pub(crate) struct Turn {
    _lock: File,
}

/// Takes the turn, or says that another run has it.
pub(crate) fn take_turn() -> Result<Turn> {
    let options = File::options().create(true).truncate(false).write(true).open(LOCK);
    let lock = options.with_context(|| format!("cannot open {LOCK}"))?;
    match lock.try_lock() {
        Ok(()) => Ok(Turn { _lock: lock }),
        Err(TryLockError::WouldBlock) => {
            bail!("another run of the tests is under way on this host: wait until it has ended")
        }
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {LOCK}")),
    }
}

/// Ends the nodes of this and of interrupted runs with everything of their instances, and removes the test area.
pub(crate) fn clear(project: &Project, area: &Area) -> Result<()> {
    if let Some(record) = Record::read(&project.test_dir().join("node.json")) {
        record.stop()?;
    }
    end_processes()?;
    purge_instances(&project.binary("aenv-node"))?;
    area.release()?;
    for directory in [area.directory.clone(), project.test_dir()] {
        if directory.exists() {
            std::fs::remove_dir_all(&directory)
                .with_context(|| format!("cannot remove {}", directory.display()))?;
        }
    }
    Ok(())
}

/// Test programs, and nodes that they or an earlier run started.
fn end_processes() -> Result<()> {
    let own = std::process::id();
    for entry in std::fs::read_dir("/proc").context("cannot list processes")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // A process may end while the list is read.
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        if u32::try_from(pid) == Ok(own) || !names_the_area(&environment) {
            continue;
        }
        let (Some(process), Some(started)) = (Pid::from_raw(pid), start_time(pid)) else { continue };
        match kill_process(process, Signal::KILL) {
            Ok(()) => say(&format!("    ended process {pid} of an earlier run")),
            Err(rustix::io::Errno::SRCH) => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot kill process {pid}")),
        }
        let asked = Instant::now();
        while start_time(pid) == Some(started) {
            if asked.elapsed() > END_LIMIT {
                bail!("process {pid} does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Whether a process was told to work in the test area.
fn names_the_area(environment: &[u8]) -> bool {
    environment.split(|byte| *byte == 0).any(|variable| {
        let value = |name: &str| variable.strip_prefix(name.as_bytes());
        value("AENV_TEST_AREA=").or_else(|| value("AENV_DATA_DIR=")).is_some_and(|value| {
            value.strip_prefix(AREA.as_bytes()).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        })
    })
}

/// VMs, namespaces, links, rules and control groups, by the node's own program.
fn purge_instances(program: &Path) -> Result<()> {
    if !program.exists() {
        return Ok(());
    }
    for instance in INSTANCES {
        // Made by every node when it starts, and emptied with everything else by a restart of the host.
        if !PathBuf::from(format!("/run/aenv/{instance}.lock")).exists() {
            continue;
        }
        let data_dir = Path::new(AREA).join(instance);
        let mut purge = Command::new(program);
        purge.arg("purge").env("AENV_INSTANCE", instance).env("AENV_DATA_DIR", data_dir);
        for line in output_of(&mut purge)?.lines().filter(|line| !line.is_empty()) {
            say(&format!("    ended {line}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_that_were_told_of_the_area_are_ended() {
        assert!(names_the_area(b"PATH=/bin\0AENV_TEST_AREA=/run/aenv-t\0"));
        assert!(names_the_area(b"AENV_DATA_DIR=/run/aenv-t/t3\0"));
        for other in
            ["AENV_DATA_DIR=/run/aenv-tests\0", "OTHER=/run/aenv-t\0", "AENV_DATA_DIR=/var/lib/aenv\0", ""]
        {
            assert!(!names_the_area(other.as_bytes()), "{other}");
        }
    }
}
