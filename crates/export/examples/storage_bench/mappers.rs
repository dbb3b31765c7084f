//! Several processes that map one image privately, as VMs do with the memory they are restored from: how much of it they
//! share. The processes are Python's, since mapping is not safe Rust.

use crate::report::Table;
use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

/// Maps the file, reads a byte of every page, says so, and waits until its input ends.
const MAPPER: &str = "import mmap, sys
file = open(sys.argv[1], 'rb')
view = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
total = sum(view[offset] for offset in range(0, len(view), 4096))
print('mapped', flush=True)
sys.stdin.read()
";

struct Mapper {
    process: Child,
    input: Option<ChildStdin>,
}

/// Of one mapping, KiB.
#[derive(Debug, Default)]
struct Shares {
    rss: u64,
    pss: u64,
}

/// Adds RSS and PSS of `count` processes that map the image at `path`.
pub(crate) fn measure(path: &Path, count: usize, table: &mut Table) -> Result<()> {
    let mappers = (0..count).map(|_| Mapper::start(path)).collect::<Result<Vec<_>>>()?;
    let mut sum = Shares::default();
    for mapper in &mappers {
        let shares = mapper.shares(path)?;
        sum.rss += shares.rss;
        sum.pss += shares.pss;
    }
    let ratio = sum.pss as f64 / sum.rss as f64 * count as f64;
    table.row(vec![
        format!("{count} processes map one image"),
        format!("RSS {} MiB each", sum.rss / 1024 / count as u64),
        format!("PSS {:.1} MiB each", sum.pss as f64 / 1024.0 / count as f64),
        format!("PSS is {ratio:.2}/{count} of RSS"),
    ]);
    Ok(())
}

impl Mapper {
    fn start(path: &Path) -> Result<Self> {
        let mut command = Command::new("python3");
        command.args(["-c", MAPPER]).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().context("cannot start python3")?;
        let input = process.stdin.take();
        let output = process.stdout.take().context("python3 has no output")?;
        let mapper = Self { process, input };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).context("cannot read what python3 says")?;
        if line.trim() != "mapped" {
            bail!("python3 could not map {}", path.display());
        }
        Ok(mapper)
    }

    fn shares(&self, path: &Path) -> Result<Shares> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.process.id()))
            .context("cannot read the mappings of python3")?;
        let (mut shares, mut inside) = (Shares::default(), false);
        let name = path.display().to_string();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some(first), second) = (words.next(), words.next()) else { continue };
            let value = || second.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
            match first {
                "Rss:" if inside => shares.rss += value(),
                "Pss:" if inside => shares.pss += value(),
                _ if !first.ends_with(':') => inside = line.ends_with(&name),
                _ => {}
            }
        }
        Ok(shares)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        if let Some(mut input) = self.input.take() {
            // Its end is the signal; whether anything could be flushed does not matter.
            drop(input.flush());
        }
        drop(self.process.wait());
    }
}
