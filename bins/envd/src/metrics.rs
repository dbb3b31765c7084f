//! `GET /metrics`: use of the guest's resources, from `/proc` and the root filesystem.
//!
//! The share of processor time is measured over a short moment within the request, so that it needs no state.

use crate::http::Refusal;
use aenv_protocol::envd::files::Metrics;
use http::StatusCode;
use std::time::Duration;

/// How long processor time is watched.
const SAMPLE: Duration = Duration::from_millis(50);

/// Handler of `GET /metrics`.
///
/// # Errors
/// 500 when the kernel's figures cannot be read.
pub(crate) async fn answer() -> Result<axum::Json<Metrics>, Refusal> {
    let before = processor_time()?;
    tokio::time::sleep(SAMPLE).await;
    let after = processor_time()?;
    let memory = read("/proc/meminfo")?;
    let (total, available) = (memory_field(&memory, "MemTotal:"), memory_field(&memory, "MemAvailable:"));
    let cache = memory_field(&memory, "Cached:");
    let disk = rustix::fs::statvfs("/").map_err(|error| unreadable("/", &error.into()))?;
    let used = total.saturating_sub(available);
    Ok(axum::Json(Metrics {
        ts: rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec,
        cpu_count: std::thread::available_parallelism().map_or(1, |count| count.get() as u32),
        cpu_used_pct: share(before, after),
        mem_total: total,
        mem_used: used,
        mem_cache: cache,
        mem_total_mib: total >> 20,
        mem_used_mib: used >> 20,
        disk_total: disk.f_blocks * disk.f_frsize,
        disk_used: disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize,
    }))
}

fn unreadable(path: &str, error: &std::io::Error) -> Refusal {
    Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot read {path}: {error}"))
}

fn read(path: &str) -> Result<String, Refusal> {
    std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))
}

/// Ticks of all processors since the boot: idle and all.
fn processor_time() -> Result<(u64, u64), Refusal> {
    Ok(parse_processor_time(&read("/proc/stat")?))
}

fn parse_processor_time(stat: &str) -> (u64, u64) {
    let first = stat.lines().next().unwrap_or_default();
    // user nice system idle iowait irq softirq steal; guest time is part of user time already.
    let ticks: Vec<u64> = first.split_whitespace().skip(1).take(8).filter_map(|n| n.parse().ok()).collect();
    let idle = ticks.iter().skip(3).take(2).sum();
    (idle, ticks.iter().sum())
}

/// Share of time that was not idle, 0 to 100, with two decimals.
fn share(before: (u64, u64), after: (u64, u64)) -> f32 {
    let (idle, all) = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
    if all == 0 {
        return 0.0;
    }
    let hundredths = all.saturating_sub(idle) * 10_000 / all;
    hundredths as f32 / 100.0
}

/// A field of `/proc/meminfo` in bytes; 0 when the kernel does not tell it.
fn memory_field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or_default() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_kernels_texts() {
        let memory = "MemTotal:        1000 kB\nMemAvailable:     400 kB\nSwapCached:  5 kB\nCached:  7 kB\n";
        assert_eq!(memory_field(memory, "MemTotal:"), 1_024_000);
        assert_eq!(memory_field(memory, "Cached:"), 7168);
        assert_eq!(memory_field(memory, "None:"), 0);
        assert_eq!(parse_processor_time("cpu  1 2 3 4 5 6 7 8 9 9\ncpu0 1\n"), (9, 36));
        assert_eq!(parse_processor_time(""), (0, 0));
        assert!((share((0, 0), (25, 100)) - 75.0).abs() < 0.01);
        assert!(share((5, 5), (5, 5)).abs() < 0.01);
    }
}
