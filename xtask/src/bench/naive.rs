//! The baseline beside `bench create`: how long a sandbox takes by booting one anew, and by a full copy of a snapshot, with the
//! same VMM on the same machine. Runs the program `naive_starts`; owns no state.

use super::numbers::Summary;
use crate::process::output_of;
use crate::project::Project;
use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

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
pub(crate) fn measure(project: &Project, driver: &str, area: &Path, runs: usize) -> Result<Ways> {
    let mut command = Command::new(program(project));
    command
        .env("AENV_DRIVER", driver)
        .env("AENV_GUEST_DIR", project.guest_dir())
        .env("AENV_BENCH_DIR", area)
        .env("AENV_BENCH_RUNS", runs.to_string());
    let text = output_of(&mut command)?;
    let times: BTreeMap<String, Vec<f64>> =
        serde_json::from_str(text.trim()).context("the baseline's output is not understood")?;
    Ok(times.into_iter().filter_map(|(way, times)| Some((way, Summary::of(&times)?))).collect())
}

/// How many times longer than a create of each tier every way took, by the medians.
pub(crate) fn ratios(ways: &Ways, creates: &BTreeMap<String, Summary>) -> String {
    let mut table = Table::new();
    let header = ["way, p50 as multiple of".to_owned(), "ms".to_owned()];
    let tiers = creates.keys().map(|tier| format!("create, {tier}"));
    table.load_preset(UTF8_BORDERS_ONLY).set_header(header.into_iter().chain(tiers));
    for (way, summary) in ways {
        let multiples = creates.values().map(|create| format!("{:.1}x", summary.p50 / create.p50));
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
        let creates =
            BTreeMap::from([("hot".to_owned(), summary(&[10.0])), ("cold".to_owned(), summary(&[400.0]))]);
        let text = ratios(&ways, &creates);
        assert!(text.contains("100.0x") && text.contains("2.5x") && text.contains("1000.0"), "{text}");
    }
}
