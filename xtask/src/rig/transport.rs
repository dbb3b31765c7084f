//! The files of one run as a tar archive, which the rig reads from a disk and unpacks at its root. Owns nothing: the archive
//! is a file without a name, gone when the machine that reads it is.

use super::{Carried, Job};
use crate::project::Project;
use crate::test_node::AREA;
use anyhow::{Context, Result};
use std::fs::File;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};

/// Sizes of disks are counted in these.
const SECTOR_BYTES: u64 = 512;
/// Programs of the project that are always brought in.
const PROGRAMS: &[&str] = &["aenv", "aenv-node", "aenv-stored", "xtask"];
/// What the rig's PID 1 reads.
const RIG_RUN: &str = "run/rig";

/// Packs everything a job needs.
pub(super) fn pack(project: &Project, job: &Job) -> Result<File> {
    let file = tempfile::tempfile_in(project.rig_dir()).context("cannot make a temporary file")?;
    let mut archive = tar::Builder::new(file);
    archive.follow_symlinks(true);
    for carried in always(project).iter().chain(&job.files) {
        append(&mut archive, carried)?;
    }
    text(&mut archive, "job", &script(project, job))?;
    text(&mut archive, "guest-dir", &project.guest_dir().display().to_string())?;
    text(&mut archive, "area-dir", AREA)?;
    let mut file = archive.into_inner().context("cannot finish the archive")?;
    let end = file.stream_position().context("cannot measure the archive")?;
    file.set_len(end.next_multiple_of(SECTOR_BYTES)).context("cannot round up the archive")?;
    file.flush().and_then(|()| file.rewind()).context("cannot rewind the archive")?;
    Ok(file)
}

/// What every job finds: the project's programs at their own paths, Firecracker and its jailer on the search path, and the
/// file by which the task runner knows a checkout.
fn always(project: &Project) -> Vec<Carried> {
    let same = |path: PathBuf| Carried { host: path.clone(), inside: path };
    let programs = PROGRAMS.iter().map(|name| same(project.binary(name)));
    let vmm = ["firecracker", "jailer"].iter().map(|name| Carried {
        host: project.vmm_dir().join(name),
        inside: Path::new("/usr/local/bin").join(name),
    });
    programs.chain(vmm).chain([same(project.root().join("xtask/Cargo.toml"))]).collect()
}

fn append(archive: &mut tar::Builder<File>, carried: &Carried) -> Result<()> {
    let inside = carried.inside.strip_prefix("/").unwrap_or(&carried.inside);
    let appended = if carried.host.is_dir() {
        archive.append_dir_all(inside, &carried.host)
    } else {
        archive.append_path_with_name(&carried.host, inside)
    };
    appended
        .with_context(|| format!("cannot pack {} as {}", carried.host.display(), carried.inside.display()))
}

fn text(archive: &mut tar::Builder<File>, name: &str, content: &str) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(u64::try_from(content.len()).context("the text is too long")?);
    header.set_mode(0o644);
    archive
        .append_data(&mut header, Path::new(RIG_RUN).join(name), content.as_bytes())
        .with_context(|| format!("cannot pack {name}"))
}

/// A shell script that becomes the command.
fn script(project: &Project, job: &Job) -> String {
    let root = project.root().display().to_string();
    let target = project.target_dir().display().to_string();
    let path = format!("{target}/release:$PATH");
    let mut lines = vec![format!("cd {}", quoted(&root)), format!("export PATH=\"{path}\"")];
    for (name, value) in &job.environment {
        lines.push(format!("export {name}={}", quoted(value)));
    }
    lines.push(format!("export CARGO_TARGET_DIR={}", quoted(&target)));
    let guest_dir = project.guest_dir().display().to_string();
    lines.push(format!("export AENV_GUEST_DIR={}", quoted(&guest_dir)));
    lines.push(format!("exec {}", job.command.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")));
    lines.join("\n") + "\n"
}

/// One word for a shell, whatever is in it.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::time::Duration;

    #[test]
    fn the_script_becomes_the_command_with_its_words_and_variables() {
        let words = ["printf", "%s|", "a b", "it's", "$HOME", "\"*\"", ""];
        let job = Job {
            name: "test".to_owned(),
            command: words.map(str::to_owned).to_vec(),
            environment: vec![("NAME".to_owned(), "va'lue".to_owned())],
            files: Vec::new(),
            limit: Duration::from_secs(1),
            memory_mib: 1,
            processors: 1,
            kept_area: None,
        };
        let script = script(&Project::find().unwrap(), &job);
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "a b|it's|$HOME|\"*\"||");
        assert!(script.contains("export NAME='va'\\''lue'"), "{script}");
    }

    #[test]
    fn a_directory_is_packed_below_its_path_inside() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("file"), "content").unwrap();
        let mut archive = tar::Builder::new(tempfile::tempfile().unwrap());
        let carried = Carried { host: directory.path().to_owned(), inside: PathBuf::from("/a/b") };
        append(&mut archive, &carried).unwrap();
        let mut file = archive.into_inner().unwrap();
        file.rewind().unwrap();
        let mut archive = tar::Archive::new(file);
        let paths: Vec<_> =
            archive.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
        assert!(paths.contains(&PathBuf::from("a/b/file")), "{paths:?}");
    }
}
