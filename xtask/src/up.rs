//! From a checkout to a sandbox that answered, and back to nothing. Each stage is idempotent: what is there is kept, what
//! is missing is made, what changed is replaced. Owns no state beyond the files that [`crate::project`] names.

use crate::artifacts;
use crate::data_area::{Area, Ground};
use crate::fetch;
use crate::leftovers;
use crate::node::{Node, Record, Started, write_private};
use crate::process::{output_of, require_root};
use crate::project::Project;
use crate::settings::Settings;
use crate::stages::{Stages, say, seconds};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Makes a sandbox that answers.
pub(crate) fn up(project: &Project) -> Result<()> {
    require_root()?;
    let mut settings = Settings::load(project)?;
    let mut stages = Stages::default();
    if let Some(time) = time_before() {
        stages.add_done("install", time);
    }
    let rootfs = artifacts::make(project, &mut stages)?;
    if can_virtualise()? {
        stages.run("Firecracker and its jailer", |voice| fetch::vmm_programs(project, voice))?;
        settings.use_vmm_programs(&project.vmm_dir());
    }
    let node = node(project, settings, &rootfs)?;
    let area = Area::beside(&node.settings.data_dir)?;
    let ground = stages.run("data directory", |_| {
        let ground = match node.settings.disks_by_service() {
            true => Ground::Itself,
            false => area.prepare(node.settings.image_bytes)?,
        };
        node.import_template()?;
        Ok(ground)
    })?;
    if ground == (Ground::Image { mounted_now: true }) {
        say(&format!("    mounted {}: the file system below cannot share blocks", area.image.display()));
    }
    let started = stages.run("node", |_| node.ensure())?;
    say(match started {
        Started::Kept => "    it runs already, with its sandboxes",
        Started::Fresh => "    started; sandboxes of an earlier one are adopted",
        Started::Replaced => "    restarted, since its program or settings changed; its sandboxes go on",
    });
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start tokio")?;
    stages.run("template capture", |voice| runtime.block_on(node.wait_ready(voice)))?;
    let answer = stages.run("first sandbox", |_| first_sandbox(project))?;
    finish(project, &node.settings, &answer, stages.total());
    Ok(())
}

/// Whether this host can run Firecracker: a processor that virtualises, and the device. The node looks closer.
fn can_virtualise() -> Result<bool> {
    let processors = std::fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let flags = processors.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let virtualises = flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    Ok(virtualises && Path::new("/dev/kvm").exists())
}

/// Ends everything that `up` started; caches, images and the data stay.
pub(crate) fn down(project: &Project) -> Result<()> {
    require_root()?;
    let settings = Settings::load(project)?;
    let mut node = node(project, settings, Path::new(""))?;
    let mut ended = Vec::new();
    let record = Record::read(&node.record);
    if let Some(record) = &record {
        if record.stop()? {
            ended.push(format!("node (process {})", record.pid));
        }
        // What it was started with counts, not what the environment says now.
        node.settings.data_dir.clone_from(&record.data_dir);
        node.settings.instance.clone_from(&record.instance);
        node.settings.listen.clone_from(&record.listen);
        node.settings.passed_on.clone_from(&record.passed_on);
        if record.program.exists() {
            node.program.clone_from(&record.program);
        }
    }
    let area = Area::beside(&node.settings.data_dir)?;
    // Without a record there is something to end only if it can be seen: the record goes last.
    let to_purge = record.is_some() || leftovers::has_namespace(&node.settings.instance)?;
    if to_purge && node.program.exists() {
        area.prepare_again()?;
        ended.extend(node.purge()?.lines().map(str::to_owned).filter(|line| !line.is_empty()));
    }
    ended.extend(area.release()?);
    if node.record.exists() {
        std::fs::remove_file(&node.record)
            .with_context(|| format!("cannot remove {}", node.record.display()))?;
    }
    if ended.is_empty() {
        say("nothing was running");
    }
    for thing in ended {
        say(&format!("ended {thing}"));
    }
    Ok(())
}

/// [`down`], and everything that tasks made except the build output.
pub(crate) fn clean(project: &Project) -> Result<()> {
    down(project)?;
    let work = project.work_dir();
    if work.exists() {
        std::fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
        say(&format!("removed {}", work.display()));
    }
    Ok(())
}

/// What this host offers, in the words of the command line.
pub(crate) fn doctor(project: &Project) -> Result<()> {
    let mut build = Command::new("cargo");
    build.current_dir(project.root()).args([
        "build",
        "--release",
        "--quiet",
        "--package",
        "aenv",
        "--package",
        "aenv-node",
    ]);
    crate::process::run_aloud(&mut build)?;
    crate::process::run_aloud(Command::new(project.binary("aenv")).current_dir(project.root()).arg("doctor"))
}

/// The node of this checkout.
pub(crate) fn node(project: &Project, settings: Settings, rootfs: &Path) -> Result<Node> {
    let key = key_of(project, &settings)?;
    Ok(Node {
        program: project.binary("aenv-node"),
        guest_dir: project.guest_dir(),
        rootfs: rootfs.to_owned(),
        record: project.work_dir().join("run/node.json"),
        log: project.log_dir().join("node.log"),
        settings,
        key,
    })
}

/// The key of earlier runs, or a new one; the file for clients is written with the present addresses.
fn key_of(project: &Project, settings: &Settings) -> Result<String> {
    let path = project.env_file();
    let present = std::fs::read_to_string(&path).unwrap_or_default();
    let key = key_in(&present).unwrap_or_else(|| format!("e2b_{}", hex::encode(rand::random::<[u8; 20]>())));
    let data_dir = settings.data_dir.display();
    let text = format!("{}AENV_DOCTOR_DATA_DIR='{data_dir}'\n", env_text(&key, &settings.url()));
    if present != text {
        write_private(&path, text.as_bytes())?;
    }
    Ok(key)
}

/// The file that clients source.
pub(crate) fn env_text(key: &str, url: &str) -> String {
    format!("E2B_API_KEY={key}\nE2B_API_URL={url}\nE2B_SANDBOX_URL={url}\n")
}

fn key_in(text: &str) -> Option<String> {
    let key = text.lines().find_map(|line| line.strip_prefix("E2B_API_KEY="))?.trim();
    (key.len() >= 16).then(|| key.to_owned())
}

/// Creates a sandbox as a user would, lets it compute, and removes it again.
fn first_sandbox(project: &Project) -> Result<String> {
    let aenv = |arguments: &[&str]| {
        let mut command = Command::new(project.binary("aenv"));
        // The file just written counts here, not what the caller has in its environment.
        for name in ["E2B_API_KEY", "E2B_API_URL", "E2B_SANDBOX_URL"] {
            command.env_remove(name);
        }
        command.current_dir(project.root()).args(arguments);
        output_of(&mut command)
    };
    let started: serde_json::Value =
        serde_json::from_str(&aenv(&["start", "--detach", "--json", "--timeout", "2m", "base"])?)
            .context("`aenv start` printed no JSON")?;
    let id = started["sandboxID"].as_str().context("`aenv start` named no sandbox")?;
    let program = "import platform, socket; print(f'6 * 7 = {6 * 7}, says Python', platform.python_version(), \
                   'on Linux', platform.release(), 'of', socket.gethostname())";
    let answer = aenv(&["exec", "--no-stdin", id, "--", "python3", "-c", program]);
    let removed = aenv(&["rm", id]);
    let answer = answer?;
    removed?;
    Ok(answer.trim().to_owned())
}

fn finish(project: &Project, settings: &Settings, answer: &str, total: Duration) {
    let aenv = project.binary("aenv");
    let aenv = aenv.strip_prefix(project.root()).unwrap_or(&aenv).display();
    say(&format!(
        "\nThe first sandbox answered:  {answer}\n(It was removed again.)  Ready after {} at {}\n\n\
         Use it:\n  \
         set -a; source .aenv/env; set +a\n  \
         {aenv} start                      # a sandbox and a shell command line for it\n  \
         {aenv} exec ID -- uname -a        # also: ls, rm, timeout, upload, download, doctor\n  \
         python3 -c 'from e2b import Sandbox; print(Sandbox.create().commands.run(\"uname -a\").stdout)'\n\
         Stop it:  make down     The node's log: .aenv/log/node.log",
        seconds(total),
        settings.url()
    ));
}

/// Time since `make` began: installing packages and building this program.
fn time_before() -> Option<Duration> {
    let began: u64 = std::env::var("AENV_MAKE_STARTED").ok()?.parse().ok()?;
    SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_secs(began)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_kept_by_later_runs() {
        let key = "e2b_0123456789abcdef0123456789abcdef01234567";
        assert_eq!(key_in(&env_text(key, "http://127.0.0.1:8000")).as_deref(), Some(key));
        assert_eq!(key_in("E2B_API_KEY=\n"), None);
    }
}
