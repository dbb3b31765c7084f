//! `bench create`: how long a create takes, hot and cold, where the time goes, and what an idle sandbox costs.
//!
//! Hot: one create after another, each waiting until a standby is there again. Cold: creates with no standby to claim,
//! measured against a node that keeps none. Times are taken at the client, over a kept connection.

use super::client::{Node, Target};
use super::statistics::Sample;
use crate::stages::say;
use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Longest wait for a standby to be refilled.
const REFILL_LIMIT: Duration = Duration::from_secs(60);
/// How often the number of standbys is asked for between two measurements.
const REFILL_POLL: Duration = Duration::from_millis(50);
/// A pause after the refill, so that its last work is not measured.
const SETTLE: Duration = Duration::from_millis(150);
/// Commands timed inside and outside the guest.
const EXEC_ROUNDS: usize = 50;
/// Idle sandboxes whose memory is added up.
const IDLE_SANDBOXES: usize = 5;

/// Where and how much to measure.
pub(crate) struct Plan {
    pub(crate) url: String,
    pub(crate) key: String,
    pub(crate) template: String,
    pub(crate) count: usize,
    /// Whether each create waits for a standby first.
    pub(crate) wait_for_standby: bool,
}

/// Everything measured in one run.
#[derive(Default)]
pub(crate) struct Measured {
    tiers: BTreeMap<String, Sample>,
    stages: BTreeMap<(String, String), Sample>,
    first_answer: Sample,
    kill: Sample,
    exec_outside: Sample,
    exec_inside: Sample,
    idle_pss_mib: Vec<f64>,
}

/// Times creates and kills.
pub(crate) async fn creates(plan: &Plan, measured: &mut Measured) -> Result<()> {
    let node = Node::new(&plan.url, &plan.key);
    for round in 0..plan.count {
        if plan.wait_for_standby {
            wait_for_standby(&node, &plan.template).await?;
        }
        let start = Instant::now();
        let (response, target) = node.create(&plan.template).await.with_context(|| format!("create {round}"))?;
        let took = start.elapsed();
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let tier = header("x-aenv-tier").to_owned();
        for (stage, milliseconds) in parse_server_timing(header("server-timing")) {
            measured.stages.entry((tier.clone(), stage)).or_default().add_milliseconds(milliseconds);
        }
        measured.tiers.entry(tier).or_default().add(took);
        let start = Instant::now();
        node.run(&target, "/bin/true", &[]).await?;
        measured.first_answer.add(start.elapsed());
        let start = Instant::now();
        node.kill(&target).await?;
        measured.kill.add(start.elapsed());
    }
    Ok(())
}

/// Times a command through the API and the same command inside the guest.
pub(crate) async fn exec(plan: &Plan, measured: &mut Measured) -> Result<()> {
    let node = Node::new(&plan.url, &plan.key);
    let (_, target) = node.create(&plan.template).await?;
    let result = exec_rounds(&node, &target, measured).await;
    node.kill(&target).await?;
    result
}

async fn exec_rounds(node: &Node, target: &Target, measured: &mut Measured) -> Result<()> {
    // The guest times the start and end of the same program, with its own clock, as often as we do from outside.
    let script = format!(
        "import os,time\nfor _ in range({EXEC_ROUNDS}):\n t=time.perf_counter()\n p=os.posix_spawn('/bin/true',['true'],{{}})\n \
         os.waitpid(p,0)\n print(time.perf_counter()-t)"
    );
    let inside = node.run(target, "/usr/bin/python3", &["-c", &script]).await?;
    for line in inside.lines() {
        let seconds: f64 = line.parse().with_context(|| format!("a time of the guest: {line:?}"))?;
        measured.exec_inside.add_milliseconds(seconds * 1000.0);
    }
    for _ in 0..EXEC_ROUNDS {
        let start = Instant::now();
        node.run(target, "/bin/true", &[]).await?;
        measured.exec_outside.add(start.elapsed());
    }
    Ok(())
}

/// Adds up the memory of VMM processes of idle sandboxes, each shared page counted in proportion.
pub(crate) async fn idle_memory(plan: &Plan, measured: &mut Measured) -> Result<()> {
    let node = Node::new(&plan.url, &plan.key);
    let mut targets = Vec::new();
    for _ in 0..IDLE_SANDBOXES {
        targets.push(node.create(&plan.template).await?.1);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let result = targets.iter().map(|target| pss_mib(&target.id)).collect::<Result<Vec<f64>>>();
    for target in &targets {
        node.kill(target).await?;
    }
    measured.idle_pss_mib = result?;
    Ok(())
}

/// PSS of the process whose name ends with the sandbox's id.
fn pss_mib(sandbox: &str) -> Result<f64> {
    for entry in std::fs::read_dir("/proc").context("cannot list /proc")? {
        let directory = entry?.path();
        let Ok(line) = std::fs::read(directory.join("cmdline")) else { continue };
        let name = line.split(|byte| *byte == 0).next().unwrap_or_default();
        if !name.ends_with(sandbox.as_bytes()) {
            continue;
        }
        let rollup = std::fs::read_to_string(directory.join("smaps_rollup"))
            .with_context(|| format!("cannot read the memory of the VMM of {sandbox}"))?;
        let kib = rollup.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
        return kib.map(|kib| kib / 1024.0).context("no Pss line");
    }
    bail!("no process is named after sandbox {sandbox}: run this on the node's host, as root")
}

async fn wait_for_standby(node: &Node, template: &str) -> Result<()> {
    let deadline = Instant::now() + REFILL_LIMIT;
    while node.standbys(template).await? == 0 {
        if Instant::now() > deadline {
            bail!("no standby within {REFILL_LIMIT:?}: does the node keep any?");
        }
        tokio::time::sleep(REFILL_POLL).await;
    }
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

/// The stages of a `Server-Timing` header with their milliseconds.
fn parse_server_timing(header: &str) -> Vec<(String, f64)> {
    let parse = |part: &str| {
        let (name, duration) = part.trim().split_once(";dur=")?;
        Some((name.to_owned(), duration.parse().ok()?))
    };
    header.split(',').filter_map(parse).collect()
}

impl Measured {
    /// Prints tables for people.
    pub(crate) fn print(&self) {
        let mut table = new_table(&["milliseconds", "n", "p50", "p95", "p99", "max"]);
        for (tier, sample) in &self.tiers {
            add_row(&mut table, &format!("create, {tier}"), sample);
        }
        add_row(&mut table, "first command after create", &self.first_answer);
        add_row(&mut table, "kill", &self.kill);
        add_row(&mut table, "exec /bin/true, round trip", &self.exec_outside);
        add_row(&mut table, "exec /bin/true, inside the guest", &self.exec_inside);
        say(&table.to_string());
        let mut table = new_table(&["stage, milliseconds", "n", "p50", "p95", "p99", "max"]);
        for ((tier, stage), sample) in &self.stages {
            add_row(&mut table, &format!("{tier}: {stage}"), sample);
        }
        say(&table.to_string());
        if let (Some(outside), Some(inside)) = (self.exec_outside.percentile(50), self.exec_inside.percentile(50)) {
            say(&format!("exec overhead (difference of the medians): {:.1} ms", outside - inside));
        }
        if let (Some(hot), Some(cold)) = (self.median("hot"), self.median("cold")) {
            say(&format!("cold / hot (medians): {:.1}", cold / hot));
        }
        if !self.idle_pss_mib.is_empty() {
            let mean = self.idle_pss_mib.iter().sum::<f64>() / self.idle_pss_mib.len() as f64;
            say(&format!("PSS of the VMM of an idle sandbox: {mean:.1} MiB (mean of {})", self.idle_pss_mib.len()));
        }
    }

    /// The same for programs.
    pub(crate) fn json(&self) -> Value {
        let row = |sample: &Sample| {
            json!({"n": sample.count(), "p50": sample.percentile(50), "p95": sample.percentile(95),
                   "p99": sample.percentile(99), "max": sample.max()})
        };
        let tiers: BTreeMap<_, _> = self.tiers.iter().map(|(tier, sample)| (tier, row(sample))).collect();
        let stages: BTreeMap<_, _> =
            self.stages.iter().map(|((tier, stage), sample)| (format!("{tier}:{stage}"), row(sample))).collect();
        json!({"unit": "ms", "create": tiers, "stages": stages, "first_command": row(&self.first_answer),
               "kill": row(&self.kill), "exec": row(&self.exec_outside), "exec_in_guest": row(&self.exec_inside),
               "idle_pss_mib": self.idle_pss_mib})
    }

    fn median(&self, tier: &str) -> Option<f64> {
        self.tiers.get(tier)?.percentile(50)
    }
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn add_row(table: &mut Table, name: &str, sample: &Sample) {
    if sample.count() == 0 {
        return;
    }
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.1}"));
    table.add_row([
        name.to_owned(),
        sample.count().to_string(),
        number(sample.percentile(50)),
        number(sample.percentile(95)),
        number(sample.percentile(99)),
        number(sample.max()),
    ]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_timing_is_read() {
        assert_eq!(
            parse_server_timing("claim;dur=0.300, total;dur=2.000"),
            [("claim".to_owned(), 0.3), ("total".to_owned(), 2.0)]
        );
        assert_eq!(parse_server_timing(""), []);
    }
}
