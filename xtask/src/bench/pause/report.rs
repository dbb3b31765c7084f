//! What `bench pause` measured: samples, their summaries, and the tables they are printed in. Owns no state.

use super::super::naive;
use super::super::numbers::{Summary, table};
use super::cycles::{self, Cycles};
use super::session::{Pause, Resume};
use comfy_table::{CellAlignment, Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// Everything measured, as printed with `--json`. Times in milliseconds.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// By what was done before the pause.
    pub(super) pause: BTreeMap<String, Pauses>,
    /// By tier, from the answers.
    pub(super) resume: BTreeMap<String, Resumes>,
    /// What the pause after little was written takes where much was written before the last one.
    pub(super) second: Option<SecondPause>,
    /// Pauses of one sandbox, with the same small change before each.
    pub(super) curve: Vec<Point>,
    pub(super) crowds: Vec<Crowd>,
    pub(super) cycles: Option<Cycles>,
    /// The same without AENV: `whole pause`, `eager copy`, `boot`, and QEMU's own `savevm` and `loadvm`.
    pub(super) baseline: naive::Ways,
}

#[derive(Debug, Serialize)]
pub(super) struct Pauses {
    /// What the answers named, and how often.
    durability: BTreeMap<String, usize>,
    answer: Summary,
    /// From the call until the state survives a loss of power.
    until_local: Summary,
    /// How long the guest stood still.
    stopped: Summary,
    /// From the node's `Server-Timing`.
    stages: BTreeMap<String, Summary>,
    /// What each pause added to the layers of memory.
    memory_mib: Option<Summary>,
}

#[derive(Debug, Serialize)]
pub(super) struct Resumes {
    answer: Summary,
    stages: BTreeMap<String, Summary>,
    /// A command right after it.
    first_command: Option<Summary>,
}

/// A pause after little was written, where much had been written before the pause before: how many times as much it takes as
/// one where little had. 1 where only what was written in between counts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct SecondPause {
    /// Medians of the answers.
    answer: f64,
    /// Medians of how long the guest stood still.
    stopped: f64,
    /// Medians of what was added to the layers of memory.
    memory: Option<f64>,
}

/// One pause of a row of them.
#[derive(Debug, Serialize)]
pub(super) struct Point {
    pub(super) number: u64,
    pub(super) answer_ms: f64,
    pub(super) stopped_ms: f64,
    /// What it added to the layers of memory.
    pub(super) memory_bytes: Option<u64>,
    /// What the disk stores beyond the template's.
    pub(super) disk_bytes: Option<u64>,
    /// The same, less what it was at the pause before.
    pub(super) disk_grown: Option<i64>,
    pub(super) memory_layers: u64,
}

/// Many sandboxes at once.
#[derive(Debug, Serialize)]
pub(super) struct Crowd {
    pub(super) sandboxes: usize,
    pub(super) all_paused_ms: f64,
    pub(super) all_local_ms: f64,
    pub(super) all_resumed_ms: f64,
    pub(super) pause: Option<Summary>,
    pub(super) resume: Option<Summary>,
    /// Proportional share of memory of all their stopped VMMs.
    pub(super) paused_pss_mib: f64,
}

#[derive(Debug, Default)]
pub(super) struct PauseSamples {
    durability: BTreeMap<String, usize>,
    answer: Vec<f64>,
    local: Vec<f64>,
    stopped: Vec<f64>,
    stages: BTreeMap<String, Vec<f64>>,
    memory_mib: Vec<f64>,
}

/// Samples of each tier.
#[derive(Debug, Default)]
pub(super) struct ResumeSamples(BTreeMap<String, ResumesOfTier>);

#[derive(Debug, Default)]
struct ResumesOfTier {
    answer: Vec<f64>,
    stages: BTreeMap<String, Vec<f64>>,
    first_command: Vec<f64>,
}

impl PauseSamples {
    pub(super) fn add(&mut self, pause: Pause) {
        *self.durability.entry(pause.durability).or_default() += 1;
        self.answer.push(pause.answer);
        self.local.push(pause.local);
        self.stopped.push(pause.stopped);
        self.memory_mib.extend(pause.memory_bytes.map(|bytes| bytes as f64 / f64::from(1 << 20)));
        add_stages(&mut self.stages, pause.stages);
    }

    /// Under that name; nothing of an empty series.
    pub(super) fn summaries(self, name: &str) -> Option<(String, Pauses)> {
        let pauses = Pauses {
            answer: Summary::of(&self.answer)?,
            until_local: Summary::of(&self.local)?,
            stopped: Summary::of(&self.stopped)?,
            stages: summaries(&self.stages),
            memory_mib: Summary::of(&self.memory_mib),
            durability: self.durability,
        };
        Some((name.to_owned(), pauses))
    }
}

impl SecondPause {
    /// Nothing of an empty series.
    pub(super) fn of(after_much: &PauseSamples, after_little: &PauseSamples) -> Option<Self> {
        let ratio = |of: fn(&PauseSamples) -> &[f64]| {
            let [much, little] = [Summary::of(of(after_much))?.p50, Summary::of(of(after_little))?.p50];
            (little > 0.0).then(|| much / little)
        };
        Some(Self {
            answer: ratio(|samples| &samples.answer)?,
            stopped: ratio(|samples| &samples.stopped)?,
            memory: ratio(|samples| &samples.memory_mib),
        })
    }
}

impl fmt::Display for SecondPause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answer, stopped, .. } = self;
        write!(
            f,
            "a pause after little was written, much : little written before the last pause\n  answer {answer:.2}x, the guest stood still {stopped:.2}x"
        )?;
        self.memory.map_or(Ok(()), |memory| write!(f, ", memory stored {memory:.2}x"))
    }
}

impl ResumeSamples {
    pub(super) fn add(&mut self, resume: Resume) {
        let tier = self.0.entry(resume.tier).or_default();
        tier.answer.push(resume.answer);
        add_stages(&mut tier.stages, resume.stages);
    }

    /// Of a command after a cold resume.
    pub(super) fn add_first_command(&mut self, time: f64) {
        self.0.entry("cold".to_owned()).or_default().first_command.push(time);
    }

    pub(super) fn summaries(self) -> BTreeMap<String, Resumes> {
        let of_tier = |(tier, samples): (String, ResumesOfTier)| {
            let resumes = Resumes {
                answer: Summary::of(&samples.answer)?,
                stages: summaries(&samples.stages),
                first_command: Summary::of(&samples.first_command),
            };
            Some((tier, resumes))
        };
        self.0.into_iter().filter_map(of_tier).collect()
    }
}

fn add_stages(stages: &mut BTreeMap<String, Vec<f64>>, of_one: Vec<(String, f64)>) {
    // A stage that is there twice, such as a write to the journal, counts as one.
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for (stage, time) in of_one {
        *sums.entry(stage).or_default() += time;
    }
    for (stage, time) in sums {
        stages.entry(stage).or_default().push(time);
    }
}

fn summaries(samples: &BTreeMap<String, Vec<f64>>) -> BTreeMap<String, Summary> {
    samples.iter().filter_map(|(name, times)| Some((name.clone(), Summary::of(times)?))).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<(String, &Summary)> = Vec::new();
        for (name, pauses) in &self.pause {
            let levels: Vec<&str> = pauses.durability.keys().map(String::as_str).collect();
            rows.push((format!("pause, {name} ({})", levels.join(", ")), &pauses.answer));
            rows.push(("    the guest stood still".to_owned(), &pauses.stopped));
            rows.push(("    until it is durable (local)".to_owned(), &pauses.until_local));
            rows.extend(pauses.stages.iter().map(|(stage, summary)| (format!("      {stage}"), summary)));
        }
        for (tier, resumes) in &self.resume {
            rows.push((format!("resume, {tier}"), &resumes.answer));
            rows.extend(resumes.stages.iter().map(|(stage, summary)| (format!("      {stage}"), summary)));
            rows.extend(
                resumes.first_command.iter().map(|summary| ("    a command after it".to_owned(), summary)),
            );
        }
        rows.extend(self.baseline.iter().map(|(way, summary)| (format!("baseline: {way}"), summary)));
        writeln!(f, "{}", table("milliseconds", &rows))?;
        if !self.baseline.is_empty() {
            writeln!(f, "{}", self.ratios())?;
        }
        let stored: Vec<_> = self
            .pause
            .iter()
            .filter_map(|(name, pauses)| Some((format!("pause, {name}"), pauses.memory_mib.as_ref()?)))
            .collect();
        writeln!(f, "{}", table("MiB of memory stored", &stored))?;
        if let Some(second) = &self.second {
            writeln!(f, "{second}")?;
        }
        writeln!(f, "{}", self.curve_table())?;
        write!(f, "{}", self.crowd_table())?;
        if let Some(cycles) = &self.cycles {
            let summaries = [
                ("pause", &cycles.pause),
                ("hot resume", &cycles.hot_resume),
                ("cold resume", &cycles.cold_resume),
            ];
            let rows: Vec<_> = summaries
                .into_iter()
                .filter_map(|(name, summary)| {
                    Some((format!("{name}, one after the other"), summary.as_ref()?))
                })
                .collect();
            write!(f, "\n{}\n{}", table("milliseconds", &rows), cycles::table(cycles))?;
        }
        Ok(())
    }
}

impl Report {
    /// A pause is compared with a pause, a resume with a resume.
    fn ratios(&self) -> String {
        let of = |wanted: &str| -> naive::Ways {
            self.baseline
                .iter()
                .filter(|(way, _)| *way == wanted)
                .map(|(way, s)| (way.clone(), s.clone()))
                .collect()
        };
        let pauses: Vec<_> =
            self.pause.iter().map(|(name, own)| (format!("pause, {name}"), &own.answer)).collect();
        let resumes: Vec<_> =
            self.resume.iter().map(|(tier, own)| (format!("resume, {tier}"), &own.answer)).collect();
        let ways = [
            ("whole pause", &pauses),
            ("savevm", &pauses),
            ("eager copy", &resumes),
            ("loadvm", &resumes),
            ("boot", &resumes),
        ];
        let was_measured = |(way, _): &(&str, _)| self.baseline.contains_key(*way);
        let tables = ways.into_iter().filter(was_measured).map(|(way, ours)| naive::ratios(&of(way), ours));
        tables.collect::<Vec<_>>().join("\n")
    }

    fn curve_table(&self) -> String {
        let header = ["the same change, then pause", "ms", "stopped ms", "memory KiB", "disk KiB", "layers"];
        let kib = |bytes: i64| format!("{:.0}", bytes as f64 / 1024.0);
        let unsigned = |bytes: u64| i64::try_from(bytes).map_or_else(|_| bytes.to_string(), kib);
        let rows = self.curve.iter().map(|point| {
            vec![
                point.number.to_string(),
                format!("{:.1}", point.answer_ms),
                format!("{:.1}", point.stopped_ms),
                point.memory_bytes.map(unsigned).unwrap_or_default(),
                // Of the first one all that the disk stores.
                point.disk_grown.map(kib).or_else(|| point.disk_bytes.map(unsigned)).unwrap_or_default(),
                point.memory_layers.to_string(),
            ]
        });
        right_aligned(&header, rows)
    }

    fn crowd_table(&self) -> String {
        let header = [
            "sandboxes at once",
            "all paused, ms",
            "each",
            "p50",
            "max",
            "all local, ms",
            "all resumed, ms",
            "each",
            "p50",
            "max",
            "paused, PSS MiB",
            "each",
        ];
        let parts = |summary: &Option<Summary>| match summary {
            Some(summary) => [format!("{:.1}", summary.p50), format!("{:.1}", summary.max)],
            None => [String::new(), String::new()],
        };
        let rows = self.crowds.iter().map(|crowd| {
            let [pause_p50, pause_max] = parts(&crowd.pause);
            let [resume_p50, resume_max] = parts(&crowd.resume);
            let each = |all: f64| format!("{:.1}", all / crowd.sandboxes as f64);
            vec![
                crowd.sandboxes.to_string(),
                format!("{:.1}", crowd.all_paused_ms),
                each(crowd.all_paused_ms),
                pause_p50,
                pause_max,
                format!("{:.1}", crowd.all_local_ms),
                format!("{:.1}", crowd.all_resumed_ms),
                each(crowd.all_resumed_ms),
                resume_p50,
                resume_max,
                format!("{:.0}", crowd.paused_pss_mib),
                each(crowd.paused_pss_mib),
            ]
        });
        right_aligned(&header, rows)
    }
}

fn right_aligned(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_BORDERS_ONLY).set_header(header.to_vec());
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause(answer: f64) -> Pause {
        Pause {
            answer,
            local: 90.0,
            stopped: 7.0,
            durability: "process".to_owned(),
            stages: vec![("journal".to_owned(), 1.0), ("stop".to_owned(), 2.0), ("journal".to_owned(), 3.0)],
            number: 1,
            memory_layers: 1,
            memory_bytes: Some(3 << 20),
            disk_bytes: None,
        }
    }

    #[test]
    fn a_stage_that_is_there_twice_is_summed() {
        let mut samples = PauseSamples::default();
        samples.add(pause(20.0));
        let (_, pauses) = samples.summaries("idle").unwrap();
        assert_eq!(pauses.stages["journal"].p50, 4.0);
        assert_eq!(pauses.durability["process"], 1);
        assert_eq!(pauses.memory_mib.unwrap().max, 3.0);
    }

    #[test]
    fn a_second_pause_is_compared_by_medians() {
        let samples = |answers: &[f64]| {
            let mut samples = PauseSamples::default();
            answers.iter().for_each(|answer| samples.add(pause(*answer)));
            samples
        };
        let second = SecondPause::of(&samples(&[1.0, 30.0, 90.0]), &samples(&[20.0])).unwrap();
        assert_eq!(second, SecondPause { answer: 1.5, stopped: 1.0, memory: Some(1.0) });
        assert!(second.to_string().contains("answer 1.50x"), "{second}");
        assert_eq!(SecondPause::of(&samples(&[1.0]), &PauseSamples::default()), None);
    }

    #[test]
    fn tables_name_tiers_levels_and_ratios() {
        let mut pauses = PauseSamples::default();
        pauses.add(pause(20.0));
        let mut resumes = ResumeSamples::default();
        for (tier, answer) in [("hot", 10.0), ("cold", 300.0)] {
            resumes.add(Resume { answer, tier: tier.to_owned(), stages: Vec::new() });
        }
        let point = |number, disk, grown| Point {
            number,
            answer_ms: 20.0,
            stopped_ms: 7.0,
            memory_bytes: Some(2048),
            disk_bytes: Some(disk),
            disk_grown: grown,
            memory_layers: number,
        };
        let report = Report {
            pause: pauses.summaries("idle").into_iter().collect(),
            resume: resumes.summaries(),
            curve: vec![point(1, 4096 << 10, None), point(2, 3072 << 10, Some(-1024 << 10))],
            baseline: [("whole pause", 4000.0), ("eager copy", 600.0), ("boot", 900.0)]
                .into_iter()
                .map(|(way, time)| (way.to_owned(), Summary::of(&[time]).unwrap()))
                .collect(),
            ..Report::default()
        };
        let text = report.to_string();
        for part in [
            "pause, idle (process)",
            "resume, cold",
            "200.0x",
            "60.0x",
            "2.0x",
            "90.0x",
            "3.0x",
            "4096",
            "-1024",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("400.0x"), "a pause is compared with a resume:\n{text}");
    }
}
