//! `bench pause`: how long pauses and resumes take at the HTTP API, how long guests stand still, and what is stored.
//!
//! Owns the sandboxes it makes and removes them. Runs against a node that is up, on the same host: to have cold resumes it ends
//! VMMs of its paused sandboxes. Judges nothing, prints what it measured.
//!
//! * idle: pause, wait until the state is stored and durable, resume from the stopped VMM, which the answer calls `hot`
//! * cold: the same, but the stopped VMM is ended before the resume; and a first command after it
//! * dirty: a program in the guest writes to each page of 100 MB, then pause; and once more after 1 MB. The same with 1 MB before:
//!   whether the second pause pays for what was written before the first, as ratios
//! * curve: one sandbox, always the same small change, what each of its pauses stores
//! * crowd: 1, 10, with `--full` 50 sandboxes, all paused at once and all resumed at once
//! * cycles (`--cycles`): very many pauses and resumes of one sandbox, what of memory, files and disk they leave
//! * baseline (`--driver`, or `--baseline`): the same without AENV, by full copies of memory and disk, or a boot; as ratios

mod cycles;
mod guest;
mod report;
mod session;

use super::naive;
use super::place::{self, Found, NESTED_BASELINE};
use super::{id_of, kill, milliseconds, numbers, post_sandbox, wait_for_standby};
use crate::http::Client;
use crate::project::Project;
use crate::stages::say;
use anyhow::{Context, Result};
use report::{Crowd, PauseSamples, Point, Report, ResumeSamples, SecondPause};
use session::{Pause, Session};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// How long a resumed guest is left alone, so that it is idle again.
const SETTLE: Duration = Duration::from_millis(300);
/// Sandboxes at once.
const CROWDS: [usize; 2] = [1, 10];
const FULL_CROWD: usize = 50;
/// What a guest of 512 MiB that does little takes of the host, its VMM included, with some room to spare.
const GUEST_MIB: usize = 160;
/// Written before each pause of the curve, and beside the much that was written before, in MB.
const LITTLE: usize = 1;

/// What is wanted of one run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Pauses of an idle guest, each followed by a hot resume
    #[arg(long, default_value_t = 50)]
    idle: usize,
    /// Cold resumes
    #[arg(long, default_value_t = 20)]
    cold: usize,
    /// Pauses of a guest that wrote much
    #[arg(long, default_value_t = 10)]
    dirty: usize,
    /// How much that is, in MB
    #[arg(long, default_value_t = 100)]
    megabytes: usize,
    /// Pauses of one sandbox with the same small change before each
    #[arg(long, default_value_t = 10)]
    curve: usize,
    /// Also 50 sandboxes at once
    #[arg(long)]
    full: bool,
    /// Pauses and resumes of one sandbox, looked at for what they leave
    #[arg(long, default_value_t = 0)]
    cycles: usize,
    /// Minutes after which no more of them is begun
    #[arg(long, default_value_t = 60)]
    cycles_limit: usize,
    /// Measure this driver in the nested production machine, with a node of its own, instead of the node that `up` started
    #[arg(long, value_name = "firecracker")]
    driver: Option<String>,
    /// Runs of the baseline: full copies of memory and disk; with --driver 5 by default, else none
    #[arg(long, value_name = "RUNS")]
    baseline: Option<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark against the node that `up` started, or with a driver in the nested machine.
pub(crate) fn run(project: &Project, options: &Options) -> Result<()> {
    if let Some(driver) = &options.driver {
        return place::nested(project, "bench-pause", driver, options.words());
    }
    let mut node = Found::of_up(project)?;
    let mut report = place::runtime()?.block_on(measure(&mut node, options))?;
    if let Some(runs) = options.baseline {
        naive::build(project)?;
        let measured = |area: &Path| naive::measure(project, naive::Of::Pause, "auto", area, runs);
        report.baseline = place::in_area(project, measured)?;
    }
    show(&report, options)
}

/// In the nested machine: a node of its own, the benchmark, the baseline.
pub(crate) fn run_inside(project: &Project, options: &Options) -> Result<()> {
    let driver = options.driver.as_deref().context("--driver is missing")?;
    let mut report =
        place::inside(project, driver, |node| place::runtime()?.block_on(measure(node, options)))?;
    let runs = options.baseline.unwrap_or(NESTED_BASELINE);
    report.baseline = naive::measure(project, naive::Of::Pause, driver, place::inside_area(), runs)?;
    show(&report, options)
}

impl Options {
    /// As the words of a command line, without the driver.
    fn words(&self) -> Vec<String> {
        let numbers = [
            ("--idle", self.idle),
            ("--cold", self.cold),
            ("--dirty", self.dirty),
            ("--megabytes", self.megabytes),
            ("--curve", self.curve),
            ("--cycles", self.cycles),
            ("--cycles-limit", self.cycles_limit),
            ("--baseline", self.baseline.unwrap_or(NESTED_BASELINE)),
        ];
        let mut words = place::words(&numbers, self.json);
        words.extend(self.full.then(|| "--full".to_owned()));
        words
    }
}

fn show(report: &Report, options: &Options) -> Result<()> {
    say(&if options.json { serde_json::to_string_pretty(report)? } else { report.to_string() });
    Ok(())
}

async fn measure(node: &mut Found, options: &Options) -> Result<Report> {
    let mut report = Report::default();
    let mut resumes = ResumeSamples::default();
    idle(node, options.idle, &mut report, &mut resumes).await?;
    cold(node, options.cold, &mut report, &mut resumes).await?;
    dirty(node, options, &mut report).await?;
    report.resume = resumes.summaries();
    report.curve = curve(node, options.curve).await?;
    for count in CROWDS.into_iter().chain(options.full.then_some(FULL_CROWD)) {
        if let Some(reason) = no_room_for(count)? {
            say(&format!("{count} sandboxes at once are left out: {reason}"));
            continue;
        }
        report.crowds.push(crowd(node, count).await?);
    }
    if options.cycles > 0 {
        let limit = Duration::from_secs(60).saturating_mul(u32::try_from(options.cycles_limit)?);
        report.cycles = Some(cycles::run(node, options.cycles, limit).await?);
    }
    Ok(report)
}

async fn idle(
    node: &mut Found,
    count: usize,
    report: &mut Report,
    resumes: &mut ResumeSamples,
) -> Result<()> {
    let mut pauses = PauseSamples::default();
    let mut session = Session::start(&mut node.client, &node.instance).await?;
    for _ in 0..count {
        tokio::time::sleep(SETTLE).await;
        pauses.add(session.pause().await?);
        resumes.add(session.resume().await?);
    }
    report.pause.extend(pauses.summaries("idle"));
    session.end().await
}

async fn cold(
    node: &mut Found,
    count: usize,
    report: &mut Report,
    resumes: &mut ResumeSamples,
) -> Result<()> {
    let mut pauses = PauseSamples::default();
    let mut session = Session::start(&mut node.client, &node.instance).await?;
    for _ in 0..count {
        tokio::time::sleep(SETTLE).await;
        pauses.add(session.pause().await?);
        session.cool().await?;
        resumes.add(session.resume().await?);
        resumes.add_first_command(session.command().await?);
    }
    report.pause.extend(pauses.summaries("idle, resumed cold before"));
    session.end().await
}

/// Much, then little; and little, then little: where only what was written since the last pause counts, both end alike.
async fn dirty(node: &mut Found, options: &Options, report: &mut Report) -> Result<()> {
    let mut much = PauseSamples::default();
    let (mut after_much, mut after_little) = (PauseSamples::default(), PauseSamples::default());
    for _ in 0..options.dirty {
        let (first, second) = written_twice(node, options.megabytes, options.megabytes).await?;
        much.add(first);
        after_much.add(second);
        after_little.add(written_twice(node, options.megabytes, LITTLE).await?.1);
    }
    let megabytes = options.megabytes;
    report.second = SecondPause::of(&after_much, &after_little);
    report.pause.extend(much.summaries(&format!("{megabytes} MB written")));
    for (before, samples) in [(megabytes, after_much), (LITTLE, after_little)] {
        let name = format!("{LITTLE} MB written, {before} before the last pause");
        report.pause.extend(samples.summaries(&name));
    }
    Ok(())
}

/// Pauses a guest with so many megabytes of memory after it wrote to some, and again after it wrote to few of them.
async fn written_twice(node: &mut Found, megabytes: usize, before: usize) -> Result<(Pause, Pause)> {
    let mut session = Session::start(&mut node.client, &node.instance).await?;
    session.start_writer(megabytes).await?;
    // What the start of the program wrote is not counted as written lately.
    session.pause().await?;
    session.resume().await?;
    session.write(before).await?;
    let first = session.pause().await?;
    session.resume().await?;
    session.write(LITTLE).await?;
    let second = session.pause().await?;
    session.end().await?;
    Ok((first, second))
}

async fn curve(node: &mut Found, count: usize) -> Result<Vec<Point>> {
    let mut session = Session::start(&mut node.client, &node.instance).await?;
    session.start_writer(LITTLE).await?;
    let mut points = Vec::new();
    let mut disk_before = None;
    for _ in 0..count {
        session.write(LITTLE).await?;
        session.write_file(LITTLE).await?;
        let pause = session.pause().await?;
        let disk = pause.disk_bytes;
        points.push(Point {
            number: pause.number,
            answer_ms: pause.answer,
            stopped_ms: pause.stopped,
            memory_bytes: pause.memory_bytes,
            disk_bytes: disk,
            disk_grown: disk.zip(disk_before).map(|(now, before)| now.wrapping_sub(before).cast_signed()),
            memory_layers: pause.memory_layers,
        });
        disk_before = disk;
        session.resume().await?;
    }
    session.end().await?;
    Ok(points)
}

/// Why so many mostly idle guests do not fit into this host's memory, if they do not.
fn no_room_for(sandboxes: usize) -> Result<Option<String>> {
    let table = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let available = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let available =
        available.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<usize>().ok());
    let available = available.context("/proc/meminfo does not tell what is available")? / 1024;
    let needed = sandboxes * GUEST_MIB;
    let reason = format!("they may need {needed} MiB, {available} MiB are available");
    Ok((needed > available).then_some(reason))
}

/// All paused at once, all resumed at once.
async fn crowd(node: &mut Found, count: usize) -> Result<Crowd> {
    let mut ids = Vec::new();
    for _ in 0..count {
        wait_for_standby(&mut node.client).await?;
        ids.push(id_of(&post_sandbox(&mut node.client).await?.success()?)?);
    }
    tokio::time::sleep(SETTLE).await;
    let started = Instant::now();
    let pauses = each(node, &ids, session::pause_once).await?;
    let paused = milliseconds(started);
    for id in &ids {
        session::wait_until_local(&mut node.client, id).await?;
    }
    let local = milliseconds(started);
    // A node that keeps no stopped VMM has none to be measured.
    let shares = ids.iter().filter_map(|id| numbers::pss_mib(&format!("aenv-{}-{id}", node.instance)).ok());
    let paused_pss_mib = shares.sum();
    let started = Instant::now();
    let resumes = each(node, &ids, session::resume_once).await?;
    let resumed = milliseconds(started);
    for id in &ids {
        kill(&mut node.client, id).await?;
    }
    Ok(Crowd {
        sandboxes: count,
        all_paused_ms: paused,
        all_local_ms: local,
        all_resumed_ms: resumed,
        pause: numbers::Summary::of(&pauses),
        resume: numbers::Summary::of(&resumes),
        paused_pss_mib,
    })
}

/// Calls `what` for every sandbox at once, each over a connection of its own; gives how long each took.
async fn each<F>(node: &Found, ids: &[String], what: fn(Client, String) -> F) -> Result<Vec<f64>>
where
    F: Future<Output = Result<f64>> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    for id in ids {
        tasks.spawn(what(node.another_client(), id.clone()));
    }
    let mut times = Vec::new();
    while let Some(time) = tasks.join_next().await {
        times.push(time.context("a request did not end")??);
    }
    Ok(times)
}
