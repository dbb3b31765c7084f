//! The rate of the CPU's time-stamp counter.
//!
//! Owns nothing.

use std::time::{Duration, Instant};

/// Ticks of the time-stamp counter per millisecond, measured against the monotonic clock for `duration`.
///
/// 20 ms tell it to about 10 parts in a million. `None` where the CPU has no such counter.
#[must_use]
pub fn measure_khz(duration: Duration) -> Option<u64> {
    let (start, first) = (Instant::now(), ticks()?);
    std::thread::sleep(duration);
    let (last, elapsed) = (ticks()?, start.elapsed());
    let khz = u128::from(last.wrapping_sub(first)) * 1_000_000 / elapsed.as_nanos().max(1);
    u64::try_from(khz).ok()
}

#[cfg(target_arch = "x86_64")]
fn ticks() -> Option<u64> {
    // SAFETY: reads a counter that every x86-64 CPU has and that Linux leaves open to user space.
    Some(unsafe { std::arch::x86_64::_rdtsc() })
}

#[cfg(not(target_arch = "x86_64"))]
fn ticks() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn rate_is_plausible() {
        if let Some(khz) = super::measure_khz(std::time::Duration::from_millis(20)) {
            assert!((100_000..20_000_000).contains(&khz), "{khz}");
        }
    }
}
