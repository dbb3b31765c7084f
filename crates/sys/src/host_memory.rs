//! The memory of the host: how much there is, how much is left, and whether everything waits for it.
//!
//! Owns no state. Reads `/proc` and control groups of version 2, and changes nothing. Where a group above the VMs has a limit,
//! that counts like a smaller host.

use std::io;
use std::path::{Path, PathBuf};

const MEMINFO: &str = "/proc/meminfo";
const PRESSURE: &str = "/proc/pressure/memory";

/// Measures the memory that processes of one control group can have.
#[derive(Debug, Clone)]
pub struct MemoryGauge {
    /// The group and those above it, as far as they count memory.
    groups: Vec<PathBuf>,
}

impl MemoryGauge {
    /// For processes in a control group below `mount`, or on a host without such groups.
    #[must_use]
    pub fn new(mount_and_group: Option<(&Path, &Path)>) -> Self {
        let groups = mount_and_group.map(|(mount, group)| {
            let above = group.ancestors().take_while(|above| above.starts_with(mount));
            above.filter(|above| above.join("memory.max").exists()).map(Path::to_owned).collect()
        });
        Self { groups: groups.unwrap_or_default() }
    }

    /// Bytes that there are.
    ///
    /// # Errors
    /// When the kernel does not tell, or not in words that are known.
    pub fn total_bytes(&self) -> io::Result<u64> {
        let mut total = meminfo(&read(Path::new(MEMINFO))?, "MemTotal")?;
        for group in &self.groups {
            total = total.min(limit(&read(&group.join("memory.max"))?)?.unwrap_or(u64::MAX));
        }
        Ok(total)
    }

    /// Bytes that can be had without swapping. Cache that the kernel can drop counts as available.
    ///
    /// # Errors
    /// As [`Self::total_bytes`].
    pub fn available_bytes(&self) -> io::Result<u64> {
        let mut available = meminfo(&read(Path::new(MEMINFO))?, "MemAvailable")?;
        for group in &self.groups {
            let Some(limit) = limit(&read(&group.join("memory.max"))?)? else { continue };
            let used = number(&read(&group.join("memory.current"))?)?;
            let cache = statistic(&read(&group.join("memory.stat"))?, "inactive_file")?;
            available = available.min(limit.saturating_sub(used.saturating_sub(cache)));
        }
        Ok(available)
    }

    /// Share of the last ten seconds, 0 to 1, in which everything that could run waited for memory. Zero on kernels that do not
    /// tell.
    ///
    /// # Errors
    /// As [`Self::total_bytes`].
    pub fn stalled(&self) -> io::Result<f32> {
        let files = self.groups.iter().map(|group| group.join("memory.pressure"));
        let mut stalled = 0.0_f32;
        for file in files.chain([PathBuf::from(PRESSURE)]) {
            match read(&file) {
                Ok(text) => stalled = stalled.max(full_average(&text)?),
                Err(error) if is_untold(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(stalled)
    }
}

/// A kernel without pressure information, or with it switched off.
fn is_untold(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::Unsupported)
}

fn read(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| io::Error::new(error.kind(), format!("cannot read {}: {error}", path.display())))
}

fn unknown(what: &str, text: &str) -> io::Error {
    let shown: String = text.chars().take(80).collect();
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} is not in {shown:?}"))
}

/// A line is `NAME:   NUMBER kB` (proc_meminfo(5)).
fn meminfo(text: &str, name: &str) -> io::Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kibibytes = value.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes.saturating_mul(1024)).ok_or_else(|| unknown(name, text))
}

/// A number of bytes, or `max` for none.
fn limit(text: &str) -> io::Result<Option<u64>> {
    if text.trim() == "max" { Ok(None) } else { number(text).map(Some) }
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|_| unknown("a number", text))
}

/// A line is `NAME NUMBER`.
fn statistic(text: &str, name: &str) -> io::Result<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.and_then(|value| value.trim().parse().ok()).ok_or_else(|| unknown(name, text))
}

/// Lines are `some avg10=PERCENT …` and `full avg10=PERCENT …` (the kernel's Documentation/accounting/psi.rst).
fn full_average(text: &str) -> io::Result<f32> {
    let percent = text.lines().find_map(|line| line.strip_prefix("full avg10=")?.split(' ').next());
    let percent = percent.and_then(|percent| percent.parse::<f32>().ok());
    percent.map(|percent| percent / 100.0).ok_or_else(|| unknown("full avg10", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_the_kernel_are_understood_and_others_refused() {
        let text = "MemTotal:       24731648 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo(text, "MemTotal").unwrap(), 24_731_648 << 10);
        assert_eq!(meminfo(text, "MemAvailable").unwrap(), 1 << 20);
        assert!(meminfo(text, "Mem").is_err() && meminfo("", "MemTotal").is_err());
        assert_eq!(limit("max\n").unwrap(), None);
        assert_eq!(limit("4096\n").unwrap(), Some(4096));
        assert!(limit("many").is_err());
        let stat = "anon 7\ninactive_file_x 9\ninactive_file 8\n";
        assert_eq!(statistic(stat, "inactive_file").unwrap(), 8);
        let pressure =
            "some avg10=50.00 avg60=1.00 avg300=0.00 total=9\nfull avg10=12.50 avg60=0 avg300=0 total=1\n";
        assert!((full_average(pressure).unwrap() - 0.125).abs() < 1e-6);
        assert!(full_average("some avg10=1").is_err());
    }

    /// A group of 100 bytes with 60 in use, of which 20 are cache, below one of 1000.
    #[test]
    fn the_narrowest_group_counts() {
        let mount = tempfile::tempdir().unwrap();
        let group = mount.path().join("unit/vms");
        std::fs::create_dir_all(&group).unwrap();
        let write =
            |directory: &Path, file: &str, text: &str| std::fs::write(directory.join(file), text).unwrap();
        write(&group, "memory.max", "max\n");
        let unit = group.parent().unwrap();
        for (file, text) in [
            ("memory.max", "100\n"),
            ("memory.current", "60\n"),
            ("memory.stat", "anon 40\ninactive_file 20\n"),
            ("memory.pressure", "some avg10=0\nfull avg10=40.00 avg60=0.00\n"),
        ] {
            write(unit, file, text);
        }
        let gauge = MemoryGauge::new(Some((mount.path(), &group)));
        assert_eq!((gauge.total_bytes().unwrap(), gauge.available_bytes().unwrap()), (100, 60));
        assert!(gauge.stalled().unwrap() >= 0.4);
        let host = MemoryGauge::new(None);
        assert!(host.total_bytes().unwrap() >= host.available_bytes().unwrap());
        assert!(host.available_bytes().unwrap() > 1 << 20);
        write(unit, "memory.max", "nonsense");
        assert!(gauge.available_bytes().is_err());
    }
}
