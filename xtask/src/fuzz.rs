//! Runs the fuzzers of `fuzz/` under libFuzzer with the address sanitizer, one after the other, each for a while.
//!
//! ```text
//! fuzz/corpus/TARGET ─▶ TARGET ─▶ .aenv/cache/fuzz/corpus/TARGET      what it learned, for the next run
//!                         └ finding ▶ .aenv/cache/fuzz/findings/TARGET  to be mended, and put into fuzz/corpus/TARGET
//! ```
//! Owns `.aenv/cache/fuzz`, the build included. Needs a nightly toolchain, nothing else: what `cargo fuzz` would do is set here.

use crate::process::run_aloud;
use crate::project::Project;
use anyhow::{Context, Result, bail};
use clap::Args;
use std::path::Path;
use std::process::Command;

/// The compiler counts edges and tells comparisons to libFuzzer, and the sanitizer sees wrong accesses to memory.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
     -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address";
/// Named, so that build scripts and macros of the build are not instrumented.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Memory of one fuzzer; what it reads must never need much.
const MEMORY_MIB: u32 = 1024;
/// Seconds after which one input counts as one that hangs.
const HANG_SECONDS: u32 = 30;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Fuzzers to run: `layer`, `index`, `zfile`, `tar`; all by default
    targets: Vec<String>,
    /// How long each runs
    #[arg(long, default_value_t = 300)]
    seconds: u32,
}

/// Builds and runs; the first finding ends it with an error.
pub(crate) fn run(project: &Project, options: &Options) -> Result<()> {
    let root = project.root().join("fuzz");
    let all = names(&root.join("fuzz_targets"))?;
    if let Some(unknown) = options.targets.iter().find(|target| !all.contains(target)) {
        bail!("there is no fuzzer {unknown}: there are {}", all.join(", "));
    }
    let cache = project.root().join(".aenv/cache/fuzz");
    let mut build = Command::new("cargo");
    build
        .args(["+nightly", "build", "--release", "--bins", "--target", TARGET])
        .current_dir(&root)
        .env("CARGO_TARGET_DIR", &cache)
        .env("RUSTFLAGS", FLAGS)
        // That of this task runner.
        .env_remove("RUSTUP_TOOLCHAIN");
    run_aloud(&mut build).context("fuzzers need a nightly toolchain: rustup toolchain install nightly")?;
    let targets = if options.targets.is_empty() { &all } else { &options.targets };
    targets.iter().try_for_each(|target| fuzz(&root, &cache, target, options.seconds))
}

fn fuzz(root: &Path, cache: &Path, target: &str, seconds: u32) -> Result<()> {
    let (learned, findings) = (cache.join("corpus").join(target), cache.join("findings").join(target));
    for directory in [&learned, &findings] {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let mut fuzzer = Command::new(cache.join(TARGET).join("release").join(target));
    fuzzer
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-timeout={HANG_SECONDS}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .arg("-print_final_stats=1")
        .arg(&learned)
        .arg(root.join("corpus").join(target));
    run_aloud(&mut fuzzer).with_context(|| {
        let (findings, corpus) = (findings.display(), root.join("corpus").join(target));
        format!("{target} found something: mend it, and keep the file of {findings} in {}", corpus.display())
    })
}

/// What a directory of programs has.
fn names(directory: &Path) -> Result<Vec<String>> {
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot list {}", directory.display()))?.path();
        names.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}
