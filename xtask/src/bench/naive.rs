//! The baseline beside `bench create` and `bench pause`: how long a sandbox takes by booting one anew, and by full copies of
//! snapshots, with the same VMM on the same machine. Runs the program `naive_starts`; owns no state.

use super::numbers::Summary;
use crate::process::output_of;
use crate::project::Project;
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which ways are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// To a new sandbox.
    Create,
    /// To saved files, and back.
    Pause,
}

/// Milliseconds by way.
pub(crate) type Ways = BTreeMap<String, Summary>;

/// The program, once [`build`] made it.
pub(crate) fn program(project: &Project) -> PathBuf {
    project.binary("examples/naive_starts")
}

/// Builds the program, with the features of the whole workspace, so that nothing else is compiled anew.
pub(crate) fn build(project: &Project) -> Result<()> {
    let arguments = ["build", "--release", "--workspace", "--example", "naive_starts"];
    output_of(Command::new("cargo").current_dir(project.root()).args(arguments)).map(drop)
}

/// Runs it in `area`, a directory on a file system that shares blocks.
pub(crate) fn measure(project: &Project, of: Of, driver: &str, area: &Path, runs: usize) -> Result<Ways> {
    let mut command = Command::new(program(project));
    let of = match of {
        Of::Create => "create",
        Of::Pause => "pause",
    };
    command
        .env("AENV_BENCH_OF", of)
        .env("AENV_DRIVER", driver)
        .env("AENV_GUEST_DIR", project.guest_dir())
        .env("AENV_BENCH_DIR", area)
        .env("AENV_BENCH_RUNS", runs.to_string());
    let text = output_of(&mut command)?;
    let times: BTreeMap<String, Vec<f64>> =
        serde_json::from_str(text.trim()).context("the baseline's output is not understood")?;
    Ok(times.into_iter().filter_map(|(way, times)| Some((way, Summary::of(&times)?))).collect())
}

/// How many times longer than each of ours every way took, by the medians.
pub(crate) fn ratios(ways: &Ways, ours: &[(String, &Summary)]) -> String {
    let mut table = Table::new();
    let header = ["way, p50 as multiple of".to_owned(), "ms".to_owned()];
    let names = ours.iter().map(|(name, _)| name.clone());
    table.load_preset(UTF8_BORDERS_ONLY).set_header(header.into_iter().chain(names));
    for (way, summary) in ways {
        let multiples = ours.iter().map(|(_, own)| format!("{:.1}x", summary.p50 / own.p50));
        table.add_row([way.clone(), format!("{:.1}", summary.p50)].into_iter().chain(multiples));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_medians() {
        let summary = |times: &[f64]| Summary::of(times).unwrap();
        let ways = BTreeMap::from([("boot".to_owned(), summary(&[900.0, 1000.0, 5000.0]))]);
        let (hot, cold) = (summary(&[10.0]), summary(&[400.0]));
        let text = ratios(&ways, &[("hot".to_owned(), &hot), ("cold".to_owned(), &cold)]);
        assert!(text.contains("100.0x") && text.contains("2.5x") && text.contains("1000.0"), "{text}");
    }
}
