//! `bench pause --cycles`: what very many pauses and resumes of one sandbox leave behind: processes, network namespaces, links and
//! mounts, memory and open files of the node and the block service, and room on the disk.
//!
//! Owns the sandbox it makes and removes it. Looks at processes and files of this host, and changes nothing of them.

use super::super::numbers::{self, Summary};
use super::super::place::Found;
use super::session::Session;
use crate::leftovers::{self, Counts};
use crate::stages::say;
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// Each so-manieth resume is a cold one.
const COLD_EVERY: usize = 50;
/// How often it is told how far it is.
const TOLD_EVERY: usize = 100;

/// What is used at one moment, all of it settled.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Footprint {
    /// Cycles that were made before.
    pub(super) cycles: usize,
    node: Process,
    block_service: Option<Process>,
    #[serde(flatten)]
    counts: Counts,
    /// What the files of the data directory take, in MiB.
    disk_mib: f64,
    /// How many there are.
    files: u64,
}

#[derive(Debug, Clone, Serialize)]
struct Process {
    resident_mib: f64,
    open_files: usize,
    threads: usize,
}

/// All that was seen.
#[derive(Debug, Serialize)]
pub(super) struct Cycles {
    /// Before the first, in the middle, and after the last one, the sandbox being paused each time.
    pub(super) footprints: Vec<Footprint>,
    pub(super) pause: Option<Summary>,
    pub(super) hot_resume: Option<Summary>,
    pub(super) cold_resume: Option<Summary>,
}

/// Pauses and resumes one sandbox `count` times, or for `limit`.
pub(super) async fn run(node: &mut Found, count: usize, limit: Duration) -> Result<Cycles> {
    let (data_dir, pid, instance) = (node.data_dir.clone(), node.pid, node.instance.clone());
    let mut session = Session::start(&mut node.client, &node.instance).await?;
    let (mut pauses, mut hot, mut cold) = (Vec::new(), Vec::new(), Vec::new());
    let mut footprints = Vec::new();
    let started = Instant::now();
    for cycle in 0..count {
        let last = cycle + 1 == count || started.elapsed() > limit;
        pauses.push(session.pause_once().await?);
        if cycle == 0 || cycle == count / 2 || last {
            session.settle().await?;
            footprints.push(look(cycle, pid, &instance, &data_dir)?);
        }
        let is_cold = cycle % COLD_EVERY == COLD_EVERY - 1;
        if is_cold {
            session.cool().await?;
        }
        let resumed = session.resume().await?;
        if resumed.tier == "cold" { &mut cold } else { &mut hot }.push(resumed.answer);
        if cycle % TOLD_EVERY == TOLD_EVERY - 1 {
            say(&format!("    {} cycles after {} s", cycle + 1, started.elapsed().as_secs()));
        }
        if last {
            break;
        }
    }
    session.end().await?;
    let [pause, hot_resume, cold_resume] = [pauses, hot, cold].map(|times| Summary::of(&times));
    Ok(Cycles { footprints, pause, hot_resume, cold_resume })
}

fn look(cycles: usize, node: i32, instance: &str, data_dir: &Path) -> Result<Footprint> {
    let (mut blocks, mut files) = (0, 0);
    add_files(data_dir, &mut blocks, &mut files)?;
    Ok(Footprint {
        cycles,
        node: process(node)?,
        block_service: block_service(data_dir)?.map(process).transpose()?,
        counts: leftovers::count(instance)?,
        disk_mib: (blocks * 512) as f64 / f64::from(1 << 20),
        files,
    })
}

fn process(pid: i32) -> Result<Process> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let number = |name: &str| -> Result<usize> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let word = line.and_then(|rest| rest.split_whitespace().next());
        word.with_context(|| format!("{path} has no {name}"))?
            .parse()
            .with_context(|| format!("{name} in {path}"))
    };
    let open_files = std::fs::read_dir(format!("/proc/{pid}/fd")).context("cannot list open files")?.count();
    Ok(Process { resident_mib: number("VmRSS:")? as f64 / 1024.0, open_files, threads: number("Threads:")? })
}

/// The block service of a data directory; none where disks are files.
fn block_service(data_dir: &Path) -> Result<Option<i32>> {
    let directory = data_dir.display().to_string();
    numbers::find_process(|words| {
        words.iter().any(|word| word.ends_with("aenv-stored"))
            && words.iter().any(|word| word == "serve")
            && words.contains(&directory)
    })
}

fn add_files(directory: &Path, blocks: &mut u64, files: &mut u64) -> Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        // It went meanwhile.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot list {}", directory.display())),
    };
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", directory.display()))?;
        let Ok(metadata) = entry.path().symlink_metadata() else { continue };
        if metadata.is_dir() {
            add_files(&entry.path(), blocks, files)?;
        } else {
            *blocks += metadata.blocks();
            *files += 1;
        }
    }
    Ok(())
}

/// As a table.
pub(super) fn table(cycles: &Cycles) -> String {
    let mut table = Table::new();
    let header = [
        "cycles before",
        "node MiB",
        "files open",
        "threads",
        "block service MiB",
        "files open",
        "threads",
        "disk MiB",
        "files",
        "processes",
        "namespaces",
        "links",
        "mounts",
    ];
    table.load_preset(UTF8_BORDERS_ONLY).set_header(header);
    let parts = |process: &Process| {
        [format!("{:.1}", process.resident_mib), process.open_files.to_string(), process.threads.to_string()]
    };
    for footprint in &cycles.footprints {
        let service = footprint.block_service.as_ref().map_or_else(Default::default, parts);
        let row = [footprint.cycles.to_string()].into_iter().chain(parts(&footprint.node)).chain(service);
        let disk = [format!("{:.1}", footprint.disk_mib), footprint.files.to_string()];
        let Counts { processes, namespaces, links, mounts } = footprint.counts;
        let counts = [processes, namespaces, links, mounts].map(|count| count.to_string());
        table.add_row(row.chain(disk).chain(counts));
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("below")).unwrap();
        std::fs::write(directory.path().join("below/file"), vec![1; 1 << 20]).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let before = look(0, own, "none", directory.path()).unwrap();
        assert!(before.block_service.is_none());
        assert_eq!(before.files, 1);
        assert!(before.node.resident_mib > 0.1 && before.node.threads >= 1, "{before:?}");
        let _more = std::fs::File::open(directory.path().join("below/file")).unwrap();
        std::fs::write(directory.path().join("another"), "").unwrap();
        let after = look(7, own, "none", directory.path()).unwrap();
        assert_eq!((after.cycles, after.files), (7, 2));
        let cycles =
            Cycles { footprints: vec![before, after], pause: None, hot_resume: None, cold_resume: None };
        let text = table(&cycles);
        assert!(text.contains("node MiB") && text.lines().count() >= 4, "{text}");
    }
}
