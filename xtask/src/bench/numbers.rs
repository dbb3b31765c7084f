//! Percentiles, the table they are printed in, and numbers read from the system. Owns no state.

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;

/// Percentiles of one series, by nearest rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) n: usize,
    pub(crate) p50: f64,
    pub(crate) p95: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Summary {
    /// Of any number of samples; none of an empty series.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let rank = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
        Some(Self { n: sorted.len(), p50: rank(50), p95: rank(95), p99: rank(99), max })
    }
}

/// A table of series for a terminal.
pub(crate) fn table(unit: &str, rows: &[(String, &Summary)]) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY).set_header([unit, "n", "p50", "p95", "p99", "max"]);
    for (name, summary) in rows {
        let number = |value: f64| format!("{value:.1}");
        table.add_row([
            name.clone(),
            summary.n.to_string(),
            number(summary.p50),
            number(summary.p95),
            number(summary.p99),
            number(summary.max),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Names and durations (milliseconds) of a `Server-Timing` header.
pub(crate) fn server_timing(header: &str) -> Vec<(String, f64)> {
    header
        .split(',')
        .filter_map(|metric| {
            let mut parts = metric.split(';').map(str::trim);
            let name = parts.next().filter(|name| !name.is_empty())?;
            let duration = parts.find_map(|part| part.strip_prefix("dur="))?.parse().ok()?;
            Some((name.to_owned(), duration))
        })
        .collect()
}

/// The process whose command line names the VM.
pub(crate) fn process_of(vm: &str) -> Result<i32> {
    // QEMU's spelling, and Firecracker's.
    let names = [format!("process={vm}"), format!("--id\0{}", vm.trim_start_matches("aenv-"))];
    let found = find_process(|words| {
        let line = words.join("\0");
        names.iter().any(|name| line.contains(name))
    });
    found?.with_context(|| format!("no process of {vm} is on this host"))
}

/// A process whose command line is as wanted.
pub(crate) fn find_process(wanted: impl Fn(&[String]) -> bool) -> Result<Option<i32>> {
    for entry in std::fs::read_dir("/proc").context("cannot list processes")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes end while they are looked at.
        let Ok(command_line) = std::fs::read(entry.path().join("cmdline")) else { continue };
        let words: Vec<String> = command_line
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        if wanted(&words) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// Proportional share of memory of the process whose command line names the VM, in MiB.
pub(crate) fn pss_mib(vm: &str) -> Result<f64> {
    let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", process_of(vm)?))
        .context("cannot read a VMM's memory")?;
    let kib: f64 = rollup
        .lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
        .context("a VMM's memory accounting has no Pss line")?;
    Ok(kib / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let summary = Summary::of(&samples).unwrap();
        assert_eq!((summary.p50, summary.p95, summary.p99, summary.max), (50.0, 95.0, 99.0, 100.0));
        assert_eq!(Summary::of(&[7.0]).unwrap().p50, 7.0);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn server_timing_is_read() {
        let parsed = server_timing("claim;dur=0.4, init;desc=\"x\";dur=12.5, nothing");
        assert_eq!(parsed, [("claim".to_owned(), 0.4), ("init".to_owned(), 12.5)]);
    }
}
