//! The suites that run in the rig, as one table. Owns nothing.

use super::{Carried, PROCESSORS};
use crate::process::output_of;
use crate::project::Project;
use crate::stages::Stages;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

/// What is proved in one boot of the rig.
#[derive(Debug)]
pub(super) struct Suite {
    pub(super) name: &'static str,
    pub(super) purpose: &'static str,
    /// Arguments of `xtask inside-rig`; the paths of the test programs are put behind them.
    inside: &'static [&'static str],
    /// Test programs to build and bring in.
    programs: &'static [TestProgram],
    /// Those that are left out unless everything is asked for: they prove less for their time.
    full_only: &'static [TestProgram],
    /// Arguments of `xtask inside-rig` in a second boot with the same data area, after the first one has asked for a power cut; none
    /// where there is one boot.
    after_power_cut: &'static [&'static str],
    /// Whether it is left out as a whole unless everything is asked for.
    is_full_only: bool,
    /// Processors of the machine, where nobody says otherwise.
    pub(super) processors: u32,
}

/// How much of each suite is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// What every change has to pass.
    Brief,
    /// Everything.
    Full,
}

/// A test program of the workspace.
#[derive(Debug)]
struct TestProgram {
    package: &'static str,
    /// Name of the test target; the package's library has its own name.
    target: &'static str,
}

/// End-to-end tests with Firecracker. A turn comes late on one processor, so it is waited for longer.
const ON_ONE_PROCESSOR: &[&str] = &[
    "tests",
    "--node",
    "--env",
    "AENV_DRIVER=firecracker",
    "--env",
    "AENV_MUST_TEST=1",
    "--env",
    "AENV_START_WAIT_SECONDS=110",
];

const SUITES: &[Suite] = &[
    Suite {
        name: "stack",
        purpose: "Firecracker under its jailer boots our guest: KVM, cgroup v2, tap, network namespace",
        inside: &["stack"],
        programs: &[],
        full_only: &[],
        after_power_cut: &[],
        is_full_only: false,
        processors: PROCESSORS,
    },
    Suite {
        name: "block",
        purpose: "disks and images as block devices by ublk, also while memory is short, by the tests of crates/export and of the block service",
        inside: &["tests", "--env", "AENV_MUST_TEST=1"],
        programs: &[
            TestProgram { package: "aenv-export", target: "ublk" },
            TestProgram { package: "aenv-stored", target: "ublk" },
        ],
        full_only: &[TestProgram { package: "aenv-stored", target: "memory_pressure" }],
        after_power_cut: &[],
        is_full_only: false,
        processors: PROCESSORS,
    },
    // Guests, several at a time, here and below: with two emulated processors, one of them now and then stays in a guest for ever,
    // a restored guest never answers, or the machine ends (seen with QEMU 10.0.2). With one, everything takes longer.
    Suite {
        name: "driver",
        purpose: "the Firecracker driver and control groups, by the tests of crates/vmm, and what the kernel tells of writes",
        inside: &["tests", "--env", "AENV_TEST_DRIVER=firecracker", "--env", "AENV_MUST_TEST=1"],
        programs: &[
            TestProgram { package: "aenv-sys", target: "writes" },
            TestProgram { package: "aenv-vmm", target: "cgroups" },
            TestProgram { package: "aenv-vmm", target: "real_guest" },
        ],
        full_only: &[],
        after_power_cut: &[],
        is_full_only: false,
        processors: 1,
    },
    Suite {
        name: "end-to-end",
        purpose: "the end-to-end tests with Firecracker, unchanged",
        inside: ON_ONE_PROCESSOR,
        programs: &[
            TestProgram { package: "aenv-e2e", target: "faults" },
            TestProgram { package: "aenv-e2e", target: "limits" },
            TestProgram { package: "aenv-e2e", target: "storage" },
        ],
        full_only: &[
            TestProgram { package: "aenv-e2e", target: "guest" },
            TestProgram { package: "aenv-e2e", target: "isolation" },
            TestProgram { package: "aenv-e2e", target: "privileges" },
        ],
        after_power_cut: &[],
        is_full_only: false,
        processors: 1,
    },
    Suite {
        name: "power-cut",
        purpose: "the power of the host is cut: what was said to be durable is there, and resumes with its memory",
        inside: &["power-cut", "before"],
        programs: &[],
        full_only: &[],
        after_power_cut: &["power-cut", "after"],
        is_full_only: false,
        processors: 1,
    },
    Suite {
        name: "crowd",
        purpose: "the end-to-end tests of life cycle, pauses and disks with Firecracker and ublk, twenty guests at once among them",
        inside: ON_ONE_PROCESSOR,
        programs: &[],
        full_only: &[
            TestProgram { package: "aenv-e2e", target: "lifecycle" },
            TestProgram { package: "aenv-e2e", target: "pause" },
            TestProgram { package: "aenv-e2e", target: "sharing" },
        ],
        after_power_cut: &[],
        is_full_only: true,
        processors: 1,
    },
];

/// The suite of that name, or all; a suite that has nothing to run in this extent is left out.
pub(super) fn named(name: Option<&str>, extent: Extent) -> Result<Vec<&'static Suite>> {
    let asked = |suite: &&Suite| name.is_none_or(|name| suite.name == name);
    if name.is_none() {
        return Ok(SUITES.iter().filter(|suite| extent == Extent::Full || !suite.is_full_only).collect());
    }
    let wanted: Vec<_> = SUITES.iter().filter(asked).collect();
    if wanted.is_empty() {
        let names: Vec<_> = SUITES.iter().map(|suite| suite.name).collect();
        bail!("there is no suite {}: there are {}", name.unwrap_or_default(), names.join(", "));
    }
    Ok(wanted)
}

impl Suite {
    /// The command of the second boot, if there is one.
    pub(super) fn command_after_power_cut(&self, project: &Project) -> Option<Vec<String>> {
        (!self.after_power_cut.is_empty()).then(|| inside(project, self.after_power_cut))
    }

    /// Builds its test programs; gives the command and the files to bring in.
    pub(super) fn prepare(
        &self,
        project: &Project,
        stages: &mut Stages,
        extent: Extent,
    ) -> Result<(Vec<String>, Vec<Carried>)> {
        let mut command = inside(project, self.inside);
        let mut files = Vec::new();
        if !(self.programs.is_empty() && self.full_only.is_empty()) {
            let built = stages.run("test programs", |_| build_tests(project))?;
            let others = if extent == Extent::Full { self.full_only } else { &[] };
            for program in self.programs.iter().chain(others) {
                let path = program.find(&built)?;
                command.push(path.display().to_string());
                files.push(Carried { host: path.clone(), inside: path });
            }
        }
        Ok((command, files))
    }
}

/// The command line of one thing to do inside.
fn inside(project: &Project, arguments: &[&str]) -> Vec<String> {
    let words = arguments.iter().map(|word| (*word).to_owned());
    [project.binary("xtask").display().to_string(), "inside-rig".to_owned()]
        .into_iter()
        .chain(words)
        .collect()
}

impl TestProgram {
    fn find(&self, built: &[Value]) -> Result<PathBuf> {
        let wanted = built.iter().find(|artifact| {
            let id = artifact["package_id"].as_str().unwrap_or_default();
            artifact["profile"]["test"] == true
                && artifact["target"]["name"] == self.target
                && is_package(id, self.package)
        });
        wanted
            .and_then(|artifact| artifact["executable"].as_str())
            .map(PathBuf::from)
            .with_context(|| format!("cargo built no test program {} of {}", self.target, self.package))
    }
}

/// Whether an id like `path+file:///checkout/crates/vmm#aenv-vmm@0.1.0` names the package; the name may stand as the last
/// part of the path only, when both are the same.
fn is_package(id: &str, name: &str) -> bool {
    let (path, fragment) = id.rsplit_once('#').unwrap_or((id, ""));
    match fragment.split_once('@') {
        Some((named, _)) => named == name,
        None => path.rsplit('/').next() == Some(name),
    }
}

/// Builds all tests of the workspace (a choice of packages would be compiled with other features, so anew), and gives what
/// cargo says about each.
fn build_tests(project: &Project) -> Result<Vec<Value>> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(project.root()).args(["test", "--release", "--workspace", "--no-run"]);
    let messages = output_of(cargo.args(["--message-format", "json-render-diagnostics"]))?;
    messages
        .lines()
        .map(|line| serde_json::from_str(line).context("cargo's message is not understood"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_test_program_is_found_among_cargos_messages() {
        let artifact = |id: &str, target: &str, test: bool| {
            json!({ "package_id": id, "target": { "name": target }, "profile": { "test": test },
                    "executable": format!("/target/{target}-{test}") })
        };
        let built = [
            artifact("path+file:///c/crates/vmm#aenv-vmm@0.1.0", "real_guest", false),
            artifact("path+file:///c/crates/other#other@0.1.0", "real_guest", true),
            artifact("path+file:///c/crates/vmm#aenv-vmm@0.1.0", "real_guest", true),
        ];
        let program = TestProgram { package: "aenv-vmm", target: "real_guest" };
        assert_eq!(program.find(&built).unwrap(), PathBuf::from("/target/real_guest-true"));
        assert!(program.find(&built[..2]).is_err());
        assert!(is_package("path+file:///c/bins/envd#0.1.0", "envd"));
    }

    #[test]
    fn an_unknown_suite_is_refused_with_those_that_exist() {
        assert_eq!(named(None, Extent::Full).unwrap().len(), SUITES.len());
        assert!(named(None, Extent::Brief).unwrap().iter().all(|suite| suite.name != "crowd"));
        let error = named(Some("none"), Extent::Full).unwrap_err().to_string();
        assert!(error.contains("stack"), "{error}");
    }
}
