//! What a node needs before it can start: programs, guest kernel, initramfs, root filesystem. Each step is idempotent.
//! Owns no state.

use crate::process::{run_aloud, run_quietly};
use crate::project::Project;
use crate::stages::{Stages, Voice};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs that a node consists of.
const PROGRAMS: [[&str; 2]; 3] =
    [["--package", "aenv"], ["--package", "aenv-node"], ["--package", "aenv-stored"]];

/// Makes everything, as stages of the caller's task; returns the root filesystem of the template `base`.
pub(crate) fn make(project: &Project, stages: &mut Stages) -> Result<PathBuf> {
    stages.run("build", |voice| build(project, voice, PROGRAMS.as_flattened()))?;
    guest(project, stages)
}

/// As [`make`], with all tests: in one build everything is compiled once, with the features that any part of the workspace
/// asks for. That the programs are complete without the tests' features is checked by [`check_alone`].
pub(crate) fn make_with_tests(project: &Project, stages: &mut Stages) -> Result<PathBuf> {
    let everything = ["--workspace", "--bins", "--tests", "--examples"];
    stages.run("build", |voice| build(project, voice, &everything))?;
    guest(project, stages)
}

/// Whether the programs compile with the features that they ask for themselves, as [`make`] builds them.
pub(crate) fn check_alone(project: &Project) -> Result<()> {
    let mut check = Command::new("cargo");
    check.current_dir(project.root()).args(["check", "--release", "--quiet"]).args(PROGRAMS.as_flattened());
    run_aloud(&mut check)
}

fn guest(project: &Project, stages: &mut Stages) -> Result<PathBuf> {
    let directory = project.guest_dir();
    let rootfs = rootfs(project);
    stages.run("guest kernel", |voice| {
        script(project, voice, "fetch-kernel.sh", &[&directory.join("kernel")])
    })?;
    stages.run("initramfs", |voice| {
        script(
            project,
            voice,
            "build-initramfs.sh",
            &[&directory.join("kernel"), &directory.join("envd"), &directory.join("initramfs.cpio")],
        )
    })?;
    stages.run("template root filesystem", |voice| {
        script(project, voice, "build-base-rootfs.sh", &[&rootfs])
    })?;
    Ok(rootfs)
}

/// Root filesystem of the template `base`, whether it was made already or not.
pub(crate) fn rootfs(project: &Project) -> PathBuf {
    project.guest_dir().join("base-rootfs.ext4")
}

/// Builds what `packages` choose, all programs among it; the guest daemon statically, and copies it to the guest's files, because a later build for tests
/// puts a dynamic one in its place.
fn build(project: &Project, voice: &Voice, packages: &[&str]) -> Result<()> {
    let log = project.log_dir().join("build.log");
    let cargo = |arguments: &[&str]| {
        let mut command = Command::new("cargo");
        command.current_dir(project.root()).args(arguments);
        command
    };
    let mut programs = cargo(&["build", "--release"]);
    programs.args(packages);
    run_quietly(&mut programs, &log, |line| voice.doing(line))?;
    let mut envd = cargo(&[
        "rustc",
        "--release",
        "--package",
        "envd",
        "--bin",
        "envd",
        "--",
        "-C",
        "target-feature=+crt-static",
    ]);
    run_quietly(&mut envd, &project.log_dir().join("build-envd.log"), |line| voice.doing(line))?;
    copy_if_different(&project.binary("envd"), &project.guest_dir().join("envd"))
}

/// Replaces `to` as a whole, and only when its content would change.
fn copy_if_different(from: &Path, to: &Path) -> Result<()> {
    let content = std::fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    if std::fs::read(to).is_ok_and(|present| present == content) {
        return Ok(());
    }
    let directory = to.parent().context("the guest daemon has no directory")?;
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let unfinished = to.with_extension("new");
    std::fs::copy(from, &unfinished).with_context(|| format!("cannot write {}", unfinished.display()))?;
    std::fs::rename(&unfinished, to).with_context(|| format!("cannot rename to {}", to.display()))
}

fn script(project: &Project, voice: &Voice, name: &str, arguments: &[&Path]) -> Result<()> {
    let mut command = Command::new(project.root().join("guest").join(name));
    command.current_dir(project.root()).args(arguments);
    let log = project.log_dir().join(name).with_extension("log");
    run_quietly(&mut command, &log, |line| voice.doing(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn an_unchanged_program_keeps_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("sub/to"));
        std::fs::write(&from, "one").unwrap();
        copy_if_different(&from, &to).unwrap();
        let inode = std::fs::metadata(&to).unwrap().ino();
        copy_if_different(&from, &to).unwrap();
        assert_eq!(std::fs::metadata(&to).unwrap().ino(), inode);
        std::fs::write(&from, "two").unwrap();
        copy_if_different(&from, &to).unwrap();
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "two");
    }
}
