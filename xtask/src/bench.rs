//! `bench create`: how long a create takes at the HTTP API, by tier, and where the time goes.
//!
//! Owns the sandboxes it makes and removes them. Runs against a node that is up; judges nothing, prints what it measured.
//!
//! * hot: one create at a time, waiting for the standby to be refilled in between
//! * cold: creates without a pause, so that no standby is there; the tier that served comes from the answer, not from us
//! * baseline (`--driver`, or `--baseline`): the same machine without AENV: boot anew, full copy of a snapshot; as ratios
//! * exec: a command's round trip through the API minus the time the same command took inside the guest

mod exec;
pub(crate) mod fork;
mod naive;
mod numbers;
pub(crate) mod pause;
mod place;
pub(crate) mod storage;

use crate::http::{Answer, Client};
use crate::project::Project;
use crate::stages::say;
use anyhow::{Context, Result, bail};
use http::Method;
use numbers::{Summary, table};
use place::NESTED_BASELINE;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for a standby to be refilled before a create is made anyway.
const REFILL_LIMIT: Duration = Duration::from_secs(20);
/// How long sandboxes live at most: many of them, on few processors, take their time.
const LIFE_SECONDS: u64 = 3600;
/// How often is asked whether it is.
const REFILL_POLL: Duration = Duration::from_millis(50);

/// What is wanted of one run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Creates that wait for a standby
    #[arg(long, default_value_t = 100)]
    hot: usize,
    /// Creates in a row, without waiting
    #[arg(long, default_value_t = 100)]
    cold: usize,
    /// Commands timed
    #[arg(long, default_value_t = 100)]
    exec: usize,
    /// Idle sandboxes whose memory is measured
    #[arg(long, default_value_t = 10)]
    idle: usize,
    /// Measure this driver in the nested production machine, with a node of its own, instead of the node that `up` started
    #[arg(long, value_name = "firecracker")]
    driver: Option<String>,
    /// Runs of the baseline: boot anew, full copy of a snapshot; with --driver 5 by default, else none
    #[arg(long, value_name = "RUNS")]
    baseline: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Everything measured, as printed with `--json`. Times in milliseconds.
#[derive(Debug, Default, Serialize)]
struct Report {
    create: BTreeMap<String, Summary>,
    /// Stages of creates by tier, from the node's `Server-Timing`.
    stages: BTreeMap<String, BTreeMap<String, Summary>>,
    kill: Option<Summary>,
    exec_round_trip: Option<Summary>,
    exec_inside: Option<Summary>,
    exec_overhead: Option<Summary>,
    /// Ways to a sandbox without AENV, and ours without the API.
    baseline: naive::Ways,
    /// Proportional share of memory of each idle sandbox's VMM, MiB.
    idle_pss_mib: Option<Summary>,
}

#[derive(Debug, Default)]
struct Samples {
    create: BTreeMap<String, Vec<f64>>,
    stages: BTreeMap<String, BTreeMap<String, Vec<f64>>>,
    kill: Vec<f64>,
}

/// Runs the benchmark against the node that `up` started, or with a driver in the nested machine.
pub(crate) fn create(project: &Project, options: &Options) -> Result<()> {
    if let Some(driver) = &options.driver {
        return place::nested(project, "bench", driver, options.words());
    }
    let mut node = place::Found::of_up(project)?;
    let mut report = place::runtime()?.block_on(measure(&mut node.client, &node.instance, options))?;
    if let Some(runs) = options.baseline {
        naive::build(project)?;
        // `auto`: what the node chose here, the baseline chooses too.
        let measured = |area: &Path| naive::measure(project, naive::Of::Create, "auto", area, runs);
        report.baseline = place::in_area(project, measured)?;
    }
    show(&report, options)
}

/// In the nested machine: a node of its own, the benchmark, the baseline.
pub(crate) fn create_inside(project: &Project, options: &Options) -> Result<()> {
    let driver = options.driver.as_deref().context("--driver is missing")?;
    let mut report = place::inside(project, driver, |node| {
        place::runtime()?.block_on(measure(&mut node.client, &node.instance, options))
    })?;
    let runs = options.baseline.unwrap_or(NESTED_BASELINE);
    report.baseline = naive::measure(project, naive::Of::Create, driver, place::inside_area(), runs)?;
    show(&report, options)
}

impl Options {
    /// As the words of a command line, without the driver.
    fn words(&self) -> Vec<String> {
        let numbers = [
            ("--hot", self.hot),
            ("--cold", self.cold),
            ("--exec", self.exec),
            ("--idle", self.idle),
            ("--baseline", self.baseline.unwrap_or(NESTED_BASELINE)),
        ];
        place::words(&numbers, self.json)
    }
}

fn show(report: &Report, options: &Options) -> Result<()> {
    if options.json {
        say(&serde_json::to_string_pretty(report)?);
    } else {
        print(report);
    }
    Ok(())
}

async fn measure(client: &mut Client, instance: &str, options: &Options) -> Result<Report> {
    let mut samples = Samples::default();
    for _ in 0..options.hot {
        wait_for_standby(client).await?;
        let id = timed_create(client, &mut samples).await?;
        timed_kill(client, &id, &mut samples).await?;
    }
    for _ in 0..options.cold {
        let id = timed_create(client, &mut samples).await?;
        timed_kill(client, &id, &mut samples).await?;
    }
    let mut report = Report { kill: Summary::of(&samples.kill), ..Report::default() };
    for (tier, times) in &samples.create {
        report.create.extend(Summary::of(times).map(|summary| (tier.clone(), summary)));
    }
    for (tier, stages) in &samples.stages {
        let summaries = stages.iter().filter_map(|(stage, times)| Some((stage.clone(), Summary::of(times)?)));
        report.stages.insert(tier.clone(), summaries.collect());
    }
    wait_for_standby(client).await?;
    let id = timed_create(client, &mut Samples::default()).await?;
    let times = exec::measure(client, &id, options.exec).await;
    kill(client, &id).await?;
    let times = times?;
    report.exec_round_trip = Summary::of(&times.round_trip);
    report.exec_inside = Summary::of(&times.inside);
    report.exec_overhead = Summary::of(&times.overhead());
    report.idle_pss_mib = idle_memory(client, instance, options.idle).await?;
    Ok(report)
}

/// Waits until the node says that a standby of `base` is there; a node without standbys is not waited for.
async fn wait_for_standby(client: &mut Client) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < REFILL_LIMIT {
        let templates = client.api(Method::GET, "/templates", &Value::Null).await?.success()?;
        let standbys: Vec<u64> = templates
            .as_array()
            .map(|list| list.iter().filter_map(|template| template["standbys"].as_u64()).collect())
            .unwrap_or_default();
        if standbys.is_empty() {
            tokio::time::sleep(Duration::from_secs(1)).await;
            return Ok(());
        }
        if standbys.iter().any(|count| *count > 0) {
            return Ok(());
        }
        tokio::time::sleep(REFILL_POLL).await;
    }
    Ok(())
}

/// What served a create or a resume, as its answer says.
fn tier_of(answer: &Answer) -> String {
    match answer.header("x-aenv-tier") {
        "" => "unnamed".to_owned(),
        tier => tier.to_owned(),
    }
}

async fn timed_create(client: &mut Client, samples: &mut Samples) -> Result<String> {
    let started = Instant::now();
    let answer = post_sandbox(client).await?;
    let time = milliseconds(started);
    let tier = tier_of(&answer);
    let stages = samples.stages.entry(tier.clone()).or_default();
    for (stage, duration) in numbers::server_timing(answer.header("server-timing")) {
        stages.entry(stage).or_default().push(duration);
    }
    samples.create.entry(tier).or_default().push(time);
    id_of(&answer.success()?)
}

async fn post_sandbox(client: &mut Client) -> Result<Answer> {
    let body = json!({ "templateID": "base", "timeout": LIFE_SECONDS });
    let answer = client.api(Method::POST, "/v2/sandboxes", &body).await?;
    if answer.status != http::StatusCode::CREATED {
        bail!("a create was answered with {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
    }
    Ok(answer)
}

async fn timed_kill(client: &mut Client, id: &str, samples: &mut Samples) -> Result<()> {
    let started = Instant::now();
    kill(client, id).await?;
    samples.kill.push(milliseconds(started));
    Ok(())
}

async fn kill(client: &mut Client, id: &str) -> Result<()> {
    client.api(Method::DELETE, &format!("/sandboxes/{id}"), &Value::Null).await?.success().map(drop)
}

fn id_of(sandbox: &Value) -> Result<String> {
    Ok(sandbox["sandboxID"].as_str().context("a created sandbox has no sandboxID")?.to_owned())
}

/// Memory of sandboxes that do nothing, from the kernel's proportional accounting.
async fn idle_memory(client: &mut Client, instance: &str, count: usize) -> Result<Option<Summary>> {
    let mut ids = Vec::new();
    for _ in 0..count {
        ids.push(id_of(&post_sandbox(client).await?.success()?)?);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let shares: Result<Vec<f64>> =
        ids.iter().map(|id| numbers::pss_mib(&format!("aenv-{instance}-{id}"))).collect();
    for id in &ids {
        kill(client, id).await?;
    }
    Ok(Summary::of(&shares?))
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn print(report: &Report) {
    let mut rows: Vec<(String, &Summary)> = Vec::new();
    for (tier, summary) in &report.create {
        rows.push((format!("create, {tier}"), summary));
        for (stage, summary) in report.stages.get(tier).into_iter().flatten() {
            rows.push((format!("    {stage}"), summary));
        }
    }
    let others = [
        ("kill", &report.kill),
        ("exec of /bin/true, round trip", &report.exec_round_trip),
        ("  the same inside the guest", &report.exec_inside),
        ("  overhead: difference of each pair", &report.exec_overhead),
    ];
    for (name, summary) in others {
        rows.extend(summary.as_ref().map(|summary| (name.to_owned(), summary)));
    }
    rows.extend(report.baseline.iter().map(|(way, summary)| (format!("baseline: {way}"), summary)));
    say(&table("milliseconds", &rows));
    if !report.baseline.is_empty() {
        let creates: Vec<_> =
            report.create.iter().map(|(tier, summary)| (format!("create, {tier}"), summary)).collect();
        say(&naive::ratios(&report.baseline, &creates));
    }
    if let Some(memory) = &report.idle_pss_mib {
        say(&table("MiB", &[("memory of an idle sandbox (PSS of its VMM)".to_owned(), memory)]));
    }
}
