//! `bench fork`: snapshots of a sandbox that runs, children of it, and sandboxes that are started from a snapshot. Owns the sandboxes
//! and snapshots it makes and removes them; judges nothing.
//!
//! * stop: how long the parent's guest stands still, apart from the time of the answer
//! * children: from the call to the answer, and to each child's first command; memory and disk that each takes
//! * naive: what a full copy of a snapshot takes for one child (`--baseline`); ratios to the same number of children

use super::numbers::{Summary, table};
use super::{exec, id_of, kill, milliseconds, naive, numbers, place, post_sandbox, wait_for_standby};
use crate::http::{Answer, Client};
use crate::project::Project;
use crate::stages::say;
use anyhow::{Context, Result, bail, ensure};
use http::{Method, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// For the background to come to rest before memory and disk are looked at.
const REST: Duration = Duration::from_secs(3);

/// What is wanted of one run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Children of one fork, one number for each size
    #[arg(long, value_delimiter = ',', default_value = "1,4,16")]
    children: Vec<usize>,
    /// Forks of each size
    #[arg(long, default_value_t = 3)]
    forks: usize,
    /// Snapshots of one sandbox, and starts from one
    #[arg(long, default_value_t = 10)]
    snapshots: usize,
    /// Runs of the baseline: full copies of a snapshot
    #[arg(long, value_name = "RUNS")]
    baseline: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Everything measured. Times in milliseconds.
#[derive(Debug, Default, Serialize)]
struct Report {
    snapshot: BTreeMap<&'static str, Vec<f64>>,
    /// By number of children.
    forks: BTreeMap<usize, Forks>,
    baseline: naive::Ways,
}

#[derive(Debug, Default, Serialize)]
struct Forks {
    stopped: Vec<f64>,
    /// Until all children run.
    answer: Vec<f64>,
    /// From the call to each child's first command.
    first_command: Vec<f64>,
    /// Proportional share of memory of each idle child's VMM, MiB.
    pss_mib: Vec<f64>,
    /// What the data directory grew by, for each child, MiB.
    disk_mib: Vec<f64>,
}

/// Runs the benchmark against the node that `up` started.
pub(crate) fn run(project: &Project, options: &Options) -> Result<()> {
    let mut node = place::Found::of_up(project)?;
    let mut report = place::runtime()?.block_on(measure(&mut node, options))?;
    if let Some(runs) = options.baseline {
        naive::build(project)?;
        let measured = |area: &Path| naive::measure(project, naive::Of::Create, "auto", area, runs);
        report.baseline = place::in_area(project, measured)?;
    }
    if options.json {
        say(&serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    Ok(())
}

async fn measure(node: &mut place::Found, options: &Options) -> Result<Report> {
    let mut report = Report::default();
    let client = &mut node.client;
    wait_for_standby(client).await?;
    let parent = id_of(&post_sandbox(client).await?.success()?)?;
    report.snapshot = snapshots(client, &parent, options.snapshots).await?;
    for count in &options.children {
        let mut forks = Forks::default();
        for _ in 0..options.forks {
            fork(node, &parent, *count, &mut forks).await?;
        }
        report.forks.insert(*count, forks);
    }
    kill(&mut node.client, &parent).await?;
    Ok(report)
}

async fn snapshots(
    client: &mut Client,
    parent: &str,
    count: usize,
) -> Result<BTreeMap<&'static str, Vec<f64>>> {
    let mut times: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
    for _ in 0..count {
        let started = Instant::now();
        let answer = client.api(Method::POST, &format!("/sandboxes/{parent}/snapshots"), &json!({})).await?;
        let answered = milliseconds(started);
        times.entry("guest stopped").or_default().push(stopped(&answer)?);
        times.entry("answer, durable").or_default().push(answered);
        let taken = expect(&answer, "snapshot")?;
        let id = taken["snapshotID"].as_str().context("a snapshot has no id")?.to_owned();
        let started = Instant::now();
        let body = json!({ "templateID": id, "timeout": 300 });
        let child = client.api(Method::POST, "/v2/sandboxes", &body).await?;
        times.entry("start from it").or_default().push(milliseconds(started));
        let child = id_of(&expect(&child, "start from a snapshot")?)?;
        kill(client, &child).await?;
        client.api(Method::DELETE, &format!("/templates/{id}"), &Value::Null).await?.success()?;
    }
    Ok(times)
}

async fn fork(node: &mut place::Found, parent: &str, count: usize, forks: &mut Forks) -> Result<()> {
    let before = stored_mib(&node.data_dir)?;
    let started = Instant::now();
    let body = json!({ "count": count, "timeout": 600 });
    let answer = node.client.api(Method::POST, &format!("/sandboxes/{parent}/fork"), &body).await?;
    forks.answer.push(milliseconds(started));
    forks.stopped.push(stopped(&answer)?);
    let children = expect(&answer, "fork")?;
    let children = children.as_array().context("a fork answers no list")?;
    let mut ids = Vec::new();
    for child in children {
        let text = |field: &str| child["sandbox"][field].as_str().map(str::to_owned);
        let id = text("sandboxID").with_context(|| format!("a child did not start: {child}"))?;
        ids.push((id, text("envdAccessToken").unwrap_or_default()));
    }
    ensure!(ids.len() == count, "{} children of {count}", ids.len());
    let mut asked = tokio::task::JoinSet::new();
    for (id, token) in ids.clone() {
        let mut client = node.another_client();
        asked.spawn(async move {
            exec::run(&mut client, &id, &token, "/bin/true", &[]).await?;
            anyhow::Ok(milliseconds(started))
        });
    }
    for answered in asked.join_all().await {
        forks.first_command.push(answered?);
    }
    tokio::time::sleep(REST).await;
    for (id, _) in &ids {
        forks.pss_mib.push(numbers::pss_mib(&format!("aenv-{}-{id}", node.instance))?);
    }
    let grown = stored_mib(&node.data_dir)? - before;
    forks.disk_mib.push(grown.max(0.0) / count as f64);
    for (id, _) in &ids {
        kill(&mut node.client, id).await?;
    }
    Ok(())
}

fn expect(answer: &Answer, what: &str) -> Result<Value> {
    if answer.status != StatusCode::CREATED {
        bail!("a {what} was answered with {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
    }
    answer.success()
}

fn stopped(answer: &Answer) -> Result<f64> {
    let header = answer.header("x-aenv-stopped-ms");
    header
        .parse()
        .with_context(|| format!("the answer tells {header:?} for the time that the guest stood still"))
}

/// What a directory takes on its file system, in MiB.
fn stored_mib(directory: &Path) -> Result<f64> {
    let output = Command::new("du").args(["-s", "-B1"]).arg(directory).output().context("cannot run du")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let bytes: f64 =
        text.split_whitespace().next().and_then(|word| word.parse().ok()).context("du told nothing")?;
    Ok(bytes / f64::from(1 << 20))
}

fn print(report: &Report) {
    let mut rows: Vec<(String, Summary)> = Vec::new();
    let mut add =
        |name: String, times: &[f64]| rows.extend(Summary::of(times).map(|summary| (name, summary)));
    for (name, times) in &report.snapshot {
        add(format!("snapshot: {name}"), times);
    }
    for (count, forks) in &report.forks {
        add(format!("fork of {count}: guest stopped"), &forks.stopped);
        add(format!("fork of {count}: all children run"), &forks.answer);
        add(format!("fork of {count}: first command of each"), &forks.first_command);
    }
    for (way, summary) in &report.baseline {
        rows.push((format!("baseline, for one: {way}"), summary.clone()));
    }
    say(&table(
        "milliseconds",
        &rows.iter().map(|(name, summary)| (name.clone(), summary)).collect::<Vec<_>>(),
    ));
    let mut sizes: Vec<(String, Summary)> = Vec::new();
    for (count, forks) in &report.forks {
        let mut add = |name: String, values: &[f64]| sizes.extend(Summary::of(values).map(|it| (name, it)));
        add(format!("fork of {count}: memory of a child (PSS)"), &forks.pss_mib);
        add(format!("fork of {count}: disk for a child"), &forks.disk_mib);
    }
    say(&table("MiB", &sizes.iter().map(|(name, summary)| (name.clone(), summary)).collect::<Vec<_>>()));
    for (count, forks) in &report.forks {
        for (way, one) in &report.baseline {
            let Some(ours) = Summary::of(&forks.answer) else { continue };
            let multiple = one.p50 * *count as f64 / ours.p50;
            say(&format!("{count} by {way}, one after the other: {multiple:.1}x as long as a fork"));
        }
    }
}
