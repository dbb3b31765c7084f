//! Both halves of a power cut, inside of the rig: before it sandboxes are made and paused, after it those that were said to survive
//! it are looked for.
//!
//! ```text
//! returned  paused, `local`; resumed; more was written ────▶ lost: it ran, and the node says so
//! later     paused, `local`; resumed; paused, `process` ───▶ paused, as one of the two, and says so if it is the earlier
//! kept      paused, `local`, and the power is cut ─────────▶ paused; resumes with its files, its processes and its memory
//! ```
//! Nothing that would be made durable by chance comes between the answer about the last one and the cut. Owns the note of what was
//! promised, on the data area. Nothing is ended before the cut: the machine is.

use crate::artifacts;
use crate::node::Node;
use crate::process::{output_of, tail};
use crate::project::Project;
use crate::stages::{Stages, say};
use crate::test_node::{self, AREA};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Emulated guests on one emulated processor take their time.
const VARIABLES: [(&str, &str); 2] = [("AENV_DRIVER", "firecracker"), ("AENV_START_WAIT_SECONDS", "110")];
/// In the guest: on its disk, and in its memory alone.
const ON_DISK: &str = "/home/user/kept";
const IN_MEMORY: &str = "/dev/shm/kept";

/// Until nothing is left of a sandbox that was removed.
const REMOVAL_LIMIT: Duration = Duration::from_secs(60);

/// Which half.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum Half {
    /// Makes the sandboxes, and has the power cut.
    Before,
    /// Looks for them.
    After,
}

/// What was promised.
#[derive(Debug, Serialize, Deserialize)]
struct Promise {
    kept: String,
    returned: String,
    later: String,
    /// A process of `kept`.
    pid: String,
}

/// The node, and the command line as its user has it.
struct User<'a> {
    project: &'a Project,
    node: Node,
}

pub(super) fn run(project: &Project, half: Half) -> Result<()> {
    let mut stages = Stages::default();
    match half {
        Half::Before => before(project, &mut stages),
        Half::After => after(project, &mut stages),
    }
}

fn before(project: &Project, stages: &mut Stages) -> Result<()> {
    let variables = VARIABLES.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let node = stages.run("start a node, capture the template", |_| {
        test_node::start(project, &test_node::area(project), &artifacts::rootfs(project), &variables)
    })?;
    let user = User { project, node };
    let promise = stages.run("make sandboxes", |_| {
        let [kept, returned, later] = [user.start()?, user.start()?, user.start()?];
        let write = format!("echo first > {ON_DISK}; echo first > {IN_MEMORY}");
        for id in [&returned, &later] {
            user.shell(id, &write)?;
        }
        // It must not keep the output of the command open.
        let process = "setsid sleep 100000 </dev/null >/dev/null 2>&1 & echo $!";
        let pid = user.shell(&kept, &format!("{write}; {process}"))?.trim().to_owned();
        Ok(Promise { kept, returned, later, pid })
    })?;
    stages.run("pause some of them, and let them go on", |_| {
        for id in [&promise.returned, &promise.later] {
            user.aenv(&["pause", "--durability", "local", id])?;
            user.aenv(&["resume", id])?;
            user.shell(id, &format!("echo second > {ON_DISK}; echo second > {IN_MEMORY}"))?;
        }
        Ok(())
    })?;
    write_down(&promise)?;
    stages.run("pause, and cut the power", |_| {
        user.aenv(&["pause", &promise.later])?;
        user.aenv(&["pause", "--durability", "local", &promise.kept])?;
        cut()
    })?;
    bail!("the power was not cut")
}

fn after(project: &Project, stages: &mut Stages) -> Result<()> {
    let promise: Promise = serde_json::from_slice(&std::fs::read(note()).context("the promise is gone")?)?;
    let variables = VARIABLES.map(|(name, value)| (name.to_owned(), value.to_owned()));
    // The template is there too, and so is its capture: nothing is imported again.
    let node = test_node::describe(project, &artifacts::rootfs(project), &variables)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    stages.run("start the node again", |voice| {
        node.ensure()?;
        runtime.block_on(node.wait_ready(voice))
    })?;
    let user = User { project, node };
    let found = stages.run("what was local is there", |_| user.look(&promise));
    let found = found.and_then(|()| stages.run("nothing is left", |_| user.remove_all(&promise)));
    if found.is_err() {
        say(&format!("the end of the node's log:\n{}", tail(&user.node.log, 6000)));
    }
    found
}

impl User<'_> {
    fn look(&self, promise: &Promise) -> Result<()> {
        let Promise { kept, returned, later, pid } = promise;
        let listed = self.list()?;
        let state =
            |id: &str| listed.iter().find(|sandbox| sandbox["sandboxID"] == id).map(|it| it["state"].clone());
        ensure!(state(kept) == Some("paused".into()), "{kept} is {:?}, not paused", state(kept));
        ensure!(state(later) == Some("paused".into()), "{later} is {:?}, not paused", state(later));
        ensure!(state(returned) != Some("running".into()), "{returned} runs, whose VMM cannot");
        let saved = &self.inspect(kept)?["saved"];
        ensure!(saved["durability"] == "local" && saved["fallback"].is_null(), "{kept} was saved as {saved}");

        self.aenv(&["resume", kept])?;
        let seen = self.shell(kept, &format!("cat {ON_DISK} {IN_MEMORY}; kill -0 {pid} && echo lives"))?;
        ensure!(seen == "first\nfirst\nlives\n", "{kept} has {seen:?}");
        say("    it has its files, its memory and its process");

        let saved = self.inspect(later)?["saved"].clone();
        self.aenv(&["resume", later])?;
        let seen = self.shell(later, &format!("cat {ON_DISK} {IN_MEMORY}"))?;
        let wanted = if saved["fallback"].is_null() { "second\nsecond\n" } else { "first\nfirst\n" };
        ensure!(seen == wanted, "{later} has {seen:?}, and was saved as {saved}");
        say(&format!("    the one that was paused last is as its save {}", saved["number"]));

        let error = self.aenv(&["exec", returned, "--", "true"]).err().map(|error| format!("{error:#}"));
        let error = error.with_context(|| format!("{returned} answers"))?;
        ensure!(error.contains("host was restarted"), "{returned}: {error}");
        Ok(())
    }

    /// What was resumed can be used as ever; and with the sandboxes goes everything that was stored for them.
    fn remove_all(&self, promise: &Promise) -> Result<()> {
        self.aenv(&["pause", "--durability", "local", &promise.kept])?;
        for id in [&promise.kept, &promise.later, &promise.returned] {
            self.aenv(&["rm", id])?;
        }
        let asked = Instant::now();
        loop {
            let left = saves_in(&self.node.settings.data_dir)?;
            if left.is_empty() {
                break;
            }
            ensure!(asked.elapsed() < REMOVAL_LIMIT, "left behind: {left:?}");
            std::thread::sleep(Duration::from_millis(200));
        }
        super::end(&self.node)?;
        let sandboxes = names(&self.node.settings.data_dir.join("sandboxes"))?;
        ensure!(sandboxes.is_empty(), "left behind: {sandboxes:?}");
        Ok(())
    }

    fn start(&self) -> Result<String> {
        Ok(self.aenv(&["start", "--detach", "--timeout", "1h", "base"])?.trim().trim_matches('"').to_owned())
    }

    fn shell(&self, id: &str, script: &str) -> Result<String> {
        self.aenv(&["exec", id, "--", "sh", "-c", script])
    }

    fn list(&self) -> Result<Vec<Value>> {
        serde_json::from_str(&self.aenv(&["ls"])?).context("the list is not understood")
    }

    fn inspect(&self, id: &str) -> Result<Value> {
        serde_json::from_str(&self.aenv(&["inspect", id])?).context("the details are not understood")
    }

    fn aenv(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.project.binary("aenv"));
        output_of(test_node::client_environment(command.args(arguments), &self.node))
    }
}

/// Layer files and images of saves of sandboxes: see docs/storage.md.
fn saves_in(data_dir: &Path) -> Result<Vec<String>> {
    let storage = data_dir.join("storage");
    let found = [names(&storage.join("layers"))?, names(&storage.join("images"))?].concat();
    let kinds = ["memory-", ".layer-", "s-", "k-", "m-"];
    Ok(found.into_iter().filter(|name| kinds.iter().any(|kind| name.starts_with(kind))).collect())
}

fn names(directory: &Path) -> Result<Vec<String>> {
    let entries =
        std::fs::read_dir(directory).with_context(|| format!("cannot list {}", directory.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn note() -> PathBuf {
    Path::new(AREA).join("promise.json")
}

/// So that it survives the cut.
fn write_down(promise: &Promise) -> Result<()> {
    let mut file = File::create(note()).context("cannot write the promise down")?;
    file.write_all(&serde_json::to_vec(promise)?)?;
    file.sync_all()?;
    File::open(AREA)?.sync_all().context("cannot sync the data area")
}

/// Asks for the cut, and waits for it.
fn cut() -> Result<()> {
    let ports = Path::new("/sys/class/virtio-ports");
    for entry in std::fs::read_dir(ports).context("there are no ports: this is not the rig")? {
        let entry = entry?;
        if std::fs::read_to_string(entry.path().join("name"))?.trim() == "result" {
            let device = Path::new("/dev").join(entry.file_name());
            let mut port = File::options().write(true).open(&device).context("cannot open the port")?;
            port.write_all(b"cut\n").context("cannot ask for the cut")?;
            std::thread::sleep(Duration::from_secs(60));
            return Ok(());
        }
    }
    bail!("there is no port for the result: this is not the rig")
}
