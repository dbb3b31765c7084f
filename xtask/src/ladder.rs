//! The test ladder: checks, unit and property tests, real guests, the nested production machine, the unmodified SDKs, and what all that left behind.
//!
//! Owns `.aenv/test` and one node of the instance `t` on a port of its own, both gone at the end. A node that `up` started
//! is not touched. A failed rung does not stop the ones that can still run; the exit code tells whether all passed.

use crate::artifacts;
use crate::check;
use crate::data_area::Area;
use crate::interrupted;
use crate::leftovers;
use crate::node::{Node, Record};
use crate::process::{output_of, require_root, run_aloud};
use crate::project::Project;
use crate::rig;
use crate::stages::{Stages, Try, say, seconds};
use crate::test_node;
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::io::IsTerminal;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const CHECKS: &str = "checks";
const UNIT_TESTS: &str = "unit and property tests";
const DRIVER_TESTS: &str = "VMM driver with real guests";
const END_TO_END: &str = "end-to-end tests with real guests";
const RIG: &str = "production stack in the nested rig";

/// A rung that needs a running node.
type Rung = fn(&Project, &Node, Try) -> Result<()>;

/// What is wanted of one run.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only the stages whose name contains this, and what they need
    #[arg(long)]
    only: Option<String>,
    /// Also what proves less for its time: all end-to-end tests once more in the nested machine
    #[arg(long)]
    full: bool,
}

impl Options {
    fn extent(&self) -> rig::Extent {
        if self.full { rig::Extent::Full } else { rig::Extent::Brief }
    }

    fn wants(&self, stage: &str) -> bool {
        self.only.as_ref().is_none_or(|part| stage.to_lowercase().contains(&part.to_lowercase()))
    }
}

/// Runs the ladder.
pub(crate) fn run(project: &Project, options: &Options) -> Result<()> {
    require_root()?;
    let started = Instant::now();
    let except = up_instance(project);
    let mut stages = Stages::default();
    let area = test_node::area(project);
    let _turn = interrupted::take_turn()?;
    let mut rootfs = None;
    let made = stages.attempt("programs and guest artifacts", || {
        rootfs = Some(artifacts::make_with_tests(project, &mut Stages::default())?);
        Ok(())
    });
    // After the build: what other checkouts left is ended by the node's own program, too.
    stages.attempt("clear what an interrupted run left", || interrupted::clear(project, &area));
    let before = leftovers::look(project, &except)?;
    if options.wants(CHECKS) {
        stages.attempt(CHECKS, || check::run(project));
    }
    if options.wants(UNIT_TESTS) {
        stages.attempt(UNIT_TESTS, || unit_tests(project));
    }
    match rootfs.filter(|_| made) {
        None => stages.skip("real guests", "there are no guest artifacts"),
        Some(rootfs) => {
            if options.wants(DRIVER_TESTS) {
                stages.attempt(DRIVER_TESTS, || driver_tests(project));
            }
            if options.wants(RIG) {
                stages.attempt(RIG, || rig::run_all_suites(project, options.extent()));
            }
            with_node(project, &area, &rootfs, options, &mut stages);
        }
    }
    stages.attempt("end the node, remove the test area", || interrupted::clear(project, &area));
    stages.attempt("nothing is left behind", || compare(&before, &leftovers::look(project, &except)?));
    summary(&stages, started)
}

/// Rungs that need a running node.
fn with_node(project: &Project, area: &Area, rootfs: &Path, options: &Options, stages: &mut Stages) {
    let rungs: [(&str, Rung); 4] = [
        (END_TO_END, |project, node, _| end_to_end_tests(project, node, rig::Extent::Brief)),
        ("Python SDK", |project, node, time| python_suite(project, node, time, "requirements.txt", "venv")),
        ("Python SDK, previous generation", |project, node, time| {
            python_suite(project, node, time, "requirements-previous.txt", "venv-previous")
        }),
        ("JavaScript SDK", javascript_suite),
    ];
    let rungs: Vec<_> = rungs.into_iter().filter(|(name, _)| options.wants(name)).collect();
    if rungs.is_empty() {
        return;
    }
    let mut node = None;
    stages.attempt("start a node, capture the template", || {
        node = Some(test_node::start(project, area, rootfs, &[])?);
        Ok(())
    });
    for (name, rung) in rungs {
        match &node {
            // Nextest tries again what failed, and not all of it.
            Some(node) if name == END_TO_END => {
                stages.attempt(name, || end_to_end_tests(project, node, options.extent()));
            }
            Some(node) => {
                stages.attempt_twice(name, |time| rung(project, node, time));
            }
            None => stages.skip(name, "there is no node"),
        }
    }
}

/// Instance of the node that `up` started: its sandboxes come and go, and are not ours to count.
fn up_instance(project: &Project) -> String {
    let record = Record::read(&project.work_dir().join("run/node.json"));
    record.filter(Record::is_alive).map_or_else(|| "a".to_owned(), |record| record.instance)
}

/// The runner of tests: nextest where it is installed. It always gets the whole workspace and a filter: another choice of
/// packages has other features, and would be compiled again.
fn has_nextest() -> bool {
    Command::new("cargo").args(["nextest", "--version"]).output().is_ok_and(|output| output.status.success())
}

fn cargo(project: &Project, arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(project.root()).args(arguments).env("AENV_GUEST_DIR", project.guest_dir());
    command
}

/// Nextest over the whole workspace. What failed is shown at the end, where it is looked for; where nobody watches the
/// progress, a line for each test that passed would only hide it.
fn nextest(project: &Project, filter: &str, at_once: Option<u32>) -> Command {
    let mut command = cargo(project, &["nextest", "run", "--release", "--workspace", "--no-fail-fast"]);
    command.args(["--failure-output", "final", "-E", filter]);
    if !std::io::stdout().is_terminal() {
        command.args(["--status-level", "slow", "--final-status-level", "slow"]);
    }
    if let Some(count) = at_once {
        // Guests, whose speed is that of the machine: what fails is tried once more, and told as flaky if it passes then.
        command.args(["-j", &count.to_string(), "--retries", "1"]);
    }
    command
}

fn unit_tests(project: &Project) -> Result<()> {
    if has_nextest() {
        run_aloud(&mut nextest(project, "not (package(aenv-e2e) or binary(real_guest))", None))
    } else {
        // Cargo's own runner has no filter for one test program: the driver's comes in the next stage.
        let mut others = cargo(project, &["test", "--release", "--workspace", "--no-fail-fast"]);
        run_aloud(others.args(["--exclude", "aenv-e2e", "--exclude", "aenv-vmm"]))?;
        run_aloud(&mut cargo(
            project,
            &["test", "--release", "--package", "aenv-vmm", "--lib", "--no-fail-fast"],
        ))
    }
}

fn driver_tests(project: &Project) -> Result<()> {
    // One at a time: each of them fills the machine without virtualisation.
    if has_nextest() {
        run_aloud(&mut nextest(project, "binary(real_guest)", Some(1)))
    } else {
        let arguments = ["test", "--release", "--workspace", "--test", "real_guest", "--no-fail-fast"];
        run_aloud(cargo(project, &arguments).args(["--", "--test-threads", "1"]))
    }
}

fn end_to_end_tests(project: &Project, node: &Node, extent: rig::Extent) -> Result<()> {
    let mut command = if has_nextest() {
        nextest(project, "package(aenv-e2e)", Some(2))
    } else {
        let mut command = cargo(project, &["test", "--release", "-p", "aenv-e2e", "--no-fail-fast"]);
        command.args(["--", "--test-threads", "2"]);
        command
    };
    if extent == rig::Extent::Full {
        // Waits as long as they say, not shorter ones.
        command.env("AENV_TEST_FULL", "1");
    }
    run_aloud(test_node::test_environment(&mut command, project, node))
}

/// Runs the Python tests in an environment of their own, made again when the list of packages changes.
fn python_suite(
    project: &Project,
    node: &Node,
    time: Try,
    requirements: &str,
    environment: &str,
) -> Result<()> {
    let tests = project.root().join("tests/compat/python");
    let requirements = tests.join(requirements);
    let environment = project.work_dir().join(environment);
    install_once(&environment, &requirements, || {
        output_of(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))?;
        let pip = environment.join("bin/pip");
        output_of(Command::new(pip).args(["install", "--quiet", "--requirement"]).arg(&requirements))
            .map(drop)
    })?;
    let mut pytest = Command::new(environment.join("bin/python"));
    pytest.current_dir(&tests).args(["-B", "-m", "pytest", "-q"]);
    // What failed is remembered, outside of the sources.
    let memory = project.test_dir().join("pytest").join(environment.file_name().unwrap_or_default());
    pytest.args(["-o", "addopts=", "-o", &format!("cache_dir={}", memory.display())]);
    if time == Try::Second {
        pytest.arg("--last-failed");
    }
    run_aloud(test_node::client_environment(&mut pytest, node))
}

/// Runs the JavaScript tests beside an installed SDK: Node looks for packages from the test file upwards.
fn javascript_suite(project: &Project, node: &Node, _: Try) -> Result<()> {
    let tests = project.root().join("tests/compat/js");
    let environment = project.work_dir().join("js");
    let manifest = tests.join("package.json");
    install_once(&environment, &manifest, || {
        std::fs::create_dir_all(&environment)?;
        std::fs::copy(&manifest, environment.join("package.json"))?;
        output_of(Command::new("npm").current_dir(&environment).args(["install", "--no-package-lock"]))
            .map(drop)
    })?;
    std::fs::copy(tests.join("sdk.test.js"), environment.join("sdk.test.js"))
        .context("cannot copy the tests")?;
    let mut npm = Command::new("npm");
    npm.current_dir(&environment).args(["test"]);
    run_aloud(test_node::client_environment(&mut npm, node))
}

/// Calls `install` unless it succeeded before for the same list of packages.
fn install_once(environment: &Path, list: &Path, install: impl FnOnce() -> Result<()>) -> Result<()> {
    let content = std::fs::read(list).with_context(|| format!("cannot read {}", list.display()))?;
    let wanted = hex::encode(Sha256::digest(content));
    let stamp = environment.join("installed");
    if std::fs::read_to_string(&stamp).is_ok_and(|present| present == wanted) {
        return Ok(());
    }
    say(&format!("installing {}", list.display()));
    install()?;
    std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
}

fn compare(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Result<()> {
    let left: Vec<&str> = after.difference(before).map(String::as_str).collect();
    if !left.is_empty() {
        bail!("left behind:\n{}", left.join("\n"));
    }
    Ok(())
}

/// Times of all rungs, and one closing line.
fn summary(stages: &Stages, started: Instant) -> Result<()> {
    say("\nTimes");
    let mut failed = 0;
    for outcome in stages.outcomes() {
        let mark = match &outcome.failure {
            None if outcome.first_failure.is_some() => "flaky ",
            None => "ok    ",
            Some(_) => "FAILED",
        };
        failed += usize::from(outcome.failure.is_some());
        say(&format!("  {mark} {:>14}  {}", seconds(outcome.time), outcome.name));
    }
    say(&format!("  in all {:>14}\n", seconds(started.elapsed())));
    for outcome in stages.outcomes() {
        if let Some(first) = &outcome.first_failure {
            say(&format!("--- {}: the first time\n{first}\n", outcome.name));
        }
        if outcome.failure.is_some() {
            say(&format!("--- {}\n{}\n", outcome.name, outcome.told()));
        }
    }
    say(&format!("stages: {} passed, {failed} failed", stages.outcomes().len() - failed));
    if failed > 0 {
        bail!("the test ladder failed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_not_there_before_is_a_leftover() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert!(compare(&set(&["a"]), &set(&["a"])).is_ok());
        assert!(compare(&set(&["a"]), &set(&[])).is_ok());
        let error = compare(&set(&["a"]), &set(&["a", "tap"])).unwrap_err().to_string();
        assert!(error.contains("tap"), "{error}");
    }

    #[test]
    fn a_failed_stage_fails_the_ladder() {
        let mut stages = Stages::default();
        stages.attempt("fine", || Ok(()));
        assert!(summary(&stages, Instant::now()).is_ok());
        stages.skip("other", "no reason");
        assert!(summary(&stages, Instant::now()).is_err());
    }
}
