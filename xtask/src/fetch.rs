//! Fetches the programs of `dependencies.toml`, from the first of their sources that can be reached.
//!
//! Owns `.aenv/cache/vmm`: the programs, and `source`, which says where they came from. A program whose SHA-256 is not the
//! pinned one is never put there, and it is an error whatever other sources there are.

use crate::process::{output_of, run_quietly};
use crate::project::Project;
use crate::stages::{Stages, Voice, say};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Seconds until a source that does not answer counts as one that cannot be reached.
const CONNECT_LIMIT: &str = "8";
/// Seconds for a whole archive.
const DOWNLOAD_LIMIT: &str = "600";

/// What `dependencies.toml` says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    firecracker: Dependency,
}

/// Programs of one release and where they can be had.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Dependency {
    version: String,
    programs: Vec<Program>,
    sources: Vec<Source>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Program {
    name: String,
    sha256: String,
}

/// A place to get all programs of a dependency from; `members` says by which path the source knows each.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum Source {
    /// A compressed tar archive.
    Archive { url: String, members: BTreeMap<String, PathBuf> },
    /// A package for Python, of which only the files are used.
    Wheel { requirement: String, python: String, members: BTreeMap<String, PathBuf> },
}

/// Makes sure that Firecracker and its jailer are there.
pub(crate) fn run(project: &Project) -> Result<()> {
    let mut stages = Stages::default();
    stages.run("Firecracker and its jailer", |voice| vmm_programs(project, voice))?;
    say(&format!("they are in {}", project.vmm_dir().display()));
    Ok(())
}

/// As [`run`], as a stage of another task.
pub(crate) fn vmm_programs(project: &Project, voice: &Voice) -> Result<()> {
    let path = project.root().join("dependencies.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: Manifest =
        toml::from_str(&text).with_context(|| format!("{} is not understood", path.display()))?;
    fetch(project, &manifest.firecracker, &project.vmm_dir(), voice)
}

fn fetch(project: &Project, dependency: &Dependency, directory: &Path, voice: &Voice) -> Result<()> {
    if dependency.programs.iter().all(|program| program.verify(&directory.join(&program.name)).is_ok()) {
        return Ok(());
    }
    std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let mut reasons = Vec::new();
    for source in &dependency.sources {
        let work = WorkDir::make(directory)?;
        match source.download(project, &work.0, voice) {
            Err(reason) => {
                say(&format!("    {} cannot be had: {reason:#}", source.describe()));
                reasons.push(format!("{}: {reason:#}", source.describe()));
            }
            Ok(tree) => {
                for program in &dependency.programs {
                    install(source, program, &tree, directory)?;
                }
                let origin = format!("{} from {}\n", dependency.version, source.describe());
                std::fs::write(directory.join("source"), origin).context("cannot note the source")?;
                say(&format!("    {} {}", dependency.version, source.describe()));
                return Ok(());
            }
        }
    }
    bail!(
        "no source of version {} can be reached:\n{}\nput the programs into {} by hand, or try again where one is reachable",
        dependency.version,
        reasons.join("\n"),
        directory.display()
    )
}

/// Puts one program of an unpacked source into its place, if it is the pinned one.
fn install(source: &Source, program: &Program, tree: &Path, directory: &Path) -> Result<()> {
    let member = source.members().get(&program.name).with_context(|| {
        format!("dependencies.toml names no member for {} in {}", program.name, source.describe())
    })?;
    let from = tree.join(member);
    program.verify(&from).with_context(|| format!("{} is refused", source.describe()))?;
    std::fs::set_permissions(&from, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", from.display()))?;
    let to = directory.join(&program.name);
    std::fs::rename(&from, &to).with_context(|| format!("cannot rename to {}", to.display()))
}

impl Program {
    fn verify(&self, path: &Path) -> Result<()> {
        let content = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let found = hex::encode(Sha256::digest(content));
        if found != self.sha256 {
            bail!("{} has SHA-256 {found}, dependencies.toml pins {}", self.name, self.sha256);
        }
        Ok(())
    }
}

impl Source {
    fn members(&self) -> &BTreeMap<String, PathBuf> {
        match self {
            Self::Archive { members, .. } | Self::Wheel { members, .. } => members,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Archive { url, .. } => url.clone(),
            Self::Wheel { requirement, .. } => format!("the Python package {requirement}"),
        }
    }

    /// Downloads and unpacks below `work`; gives the directory that members are relative to.
    fn download(&self, project: &Project, work: &Path, voice: &Voice) -> Result<PathBuf> {
        let log = project.log_dir().join("fetch.log");
        let tree = work.join("tree");
        std::fs::create_dir(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
        match self {
            Self::Archive { url, members } => {
                let archive = work.join("archive");
                voice.doing(&format!("asking {url}"));
                let mut curl = Command::new("curl");
                curl.args(["--fail", "--location", "--silent", "--show-error"])
                    .args(["--connect-timeout", CONNECT_LIMIT, "--max-time", DOWNLOAD_LIMIT, "--output"])
                    .arg(&archive)
                    .arg(url);
                run_quietly(&mut curl, &log, |_| ())?;
                let mut tar = Command::new("tar");
                tar.arg("-xzf").arg(&archive).arg("-C").arg(&tree).args(members.values());
                output_of(&mut tar)?;
            }
            Self::Wheel { requirement, python, members } => {
                voice.doing(&format!("downloading {requirement}"));
                let mut pip = Command::new(pip_python(work)?);
                pip.args([
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--only-binary=:all:",
                    "--python-version",
                    python,
                ])
                .arg("--dest")
                .arg(work)
                .arg(requirement);
                run_quietly(&mut pip, &log, |line| voice.doing(line))?;
                let wheel = std::fs::read_dir(work)?
                    .filter_map(|entry| Some(entry.ok()?.path()))
                    .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
                    .with_context(|| format!("pip downloaded no wheel of {requirement}"))?;
                unpack_wheel(&wheel, members, &tree)?;
            }
        }
        Ok(tree)
    }
}

/// A Python that has pip: the system's, or an environment of our own where that one comes without.
fn pip_python(work: &Path) -> Result<PathBuf> {
    let system = PathBuf::from("python3");
    if output_of(Command::new(&system).args(["-m", "pip", "--version"])).is_ok() {
        return Ok(system);
    }
    let environment = work.join("venv");
    output_of(Command::new(&system).args(["-m", "venv"]).arg(&environment))
        .context("neither pip nor venv is there: run scripts/bootstrap.sh --tests")?;
    Ok(environment.join("bin/python"))
}

/// A wheel is a zip archive; Python, which fetched it, unpacks it.
fn unpack_wheel(wheel: &Path, members: &BTreeMap<String, PathBuf>, tree: &Path) -> Result<()> {
    const SCRIPT: &str = "import sys, zipfile\n\
        zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2], members=sys.argv[3:])";
    output_of(Command::new("python3").args(["-c", SCRIPT]).arg(wheel).arg(tree).args(members.values()))
        .map(drop)
}

/// A directory for unfinished files, removed when dropped.
#[derive(Debug)]
struct WorkDir(PathBuf);

impl WorkDir {
    fn make(beside: &Path) -> Result<Self> {
        let path = beside.join(format!(".fetch-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            say(&format!("    cannot remove {}: {error}", self.0.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(content: &str) -> Program {
        Program { name: "program".to_owned(), sha256: hex::encode(Sha256::digest(content)) }
    }

    #[test]
    fn the_projects_manifest_is_understood_and_complete() {
        let path = Project::find().unwrap().root().join("dependencies.toml");
        let manifest: Manifest = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        for program in &manifest.firecracker.programs {
            assert_eq!(program.sha256.len(), 64, "{}", program.name);
            for source in &manifest.firecracker.sources {
                assert!(source.members().contains_key(&program.name), "{} of {source:?}", program.name);
            }
        }
    }

    #[test]
    fn only_the_pinned_program_is_installed() {
        let directory = tempfile::tempdir().unwrap();
        let (tree, target) = (directory.path().join("tree"), directory.path().join("target"));
        std::fs::create_dir_all(&tree).unwrap();
        std::fs::create_dir_all(&target).unwrap();
        let members = BTreeMap::from([("program".to_owned(), PathBuf::from("member"))]);
        let source = Source::Archive { url: "https://source.example".to_owned(), members };
        std::fs::write(tree.join("member"), "forged").unwrap();
        let error = format!("{:#}", install(&source, &program("genuine"), &tree, &target).unwrap_err());
        assert!(error.contains("source.example") && error.contains("pins"), "{error}");
        assert!(!target.join("program").exists());
        install(&source, &program("forged"), &tree, &target).unwrap();
        assert_eq!(std::fs::metadata(target.join("program")).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
