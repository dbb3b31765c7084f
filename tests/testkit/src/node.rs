//! A real node, started as a process on a data directory, port and instance of its own: killed, restarted and purged as a
//! test wishes.
//!
//! Owns the process and, through `aenv-node purge`, everything of the instance: dropping a [`Node`] leaves nothing.

use crate::client::Client;
use crate::resources::Resources;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// From start to a ready template, a boot without virtualisation on a loaded machine included.
const READY_LIMIT: Duration = Duration::from_secs(240);
/// First letters of the names of the images that keep the disks of captures.
const CAPTURES: &[u8] = b"c-";

/// What a node is started with.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// The program `aenv-node`.
    pub program: PathBuf,
    /// Kernel and initramfs.
    pub guest_dir: PathBuf,
    /// Where the node keeps its data.
    pub data_dir: PathBuf,
    /// Name of the instance, different for every node on the host.
    pub instance: String,
    /// Network of its slots, different too.
    pub subnet: String,
    /// Further variables, such as `AENV_STANDBYS`.
    pub variables: Vec<(String, String)>,
    /// A program and its arguments that execute the node, such as `setpriv` with what the node may; usually none.
    pub launcher: Vec<String>,
}

/// Copies the templates of one data directory into another one: captures with their disks, and images, blocks shared where that
/// is possible.
///
/// # Errors
/// When a file cannot be copied.
pub fn copy_templates(from: &Path, to: &Path) -> Result<()> {
    for (directory, parent) in [("templates", ""), ("storage/layers", "storage")] {
        copy(from, to, Path::new(directory), Path::new(parent))?;
    }
    let Ok(images) = std::fs::read_dir(from.join("storage/images")) else {
        // Disks are plain files there.
        return Ok(());
    };
    let mut disks = BTreeSet::new();
    for image in images {
        let image = image.context("cannot list the images of the block service")?;
        if !image.file_name().as_encoded_bytes().starts_with(CAPTURES) {
            continue;
        }
        let record = std::fs::read(image.path()).context("cannot read the record of a capture's disk")?;
        let record: serde_json::Value =
            serde_json::from_slice(&record).context("cannot understand the record of a capture's disk")?;
        let layers = record["layers"].as_array().into_iter().flatten();
        disks.extend(layers.filter_map(|layer| layer["disk"].as_str()).map(str::to_owned));
        copy(from, to, &Path::new("storage/images").join(image.file_name()), Path::new("storage/images"))?;
    }
    // Deleted disks, of which only what captures are made of is left: nothing of them changes.
    let disks = disks.iter().map(|disk| Path::new("storage/disks").join(disk));
    disks.into_iter().try_for_each(|disk| copy(from, to, &disk, Path::new("storage/disks")))
}

fn copy(from: &Path, to: &Path, what: &Path, parent: &Path) -> Result<()> {
    let parent = to.join(parent);
    std::fs::create_dir_all(&parent).context("cannot make the data directory")?;
    let status = Command::new("cp")
        .args(["-a", "--reflink=auto", "--sparse=always"])
        .arg(from.join(what))
        .arg(&parent)
        .status()
        .context("cannot run cp")?;
    if !status.success() {
        bail!("cannot copy {} of {}", what.display(), from.display());
    }
    Ok(())
}

/// A node and the means to hurt it.
#[derive(Debug)]
pub struct Node {
    settings: NodeSettings,
    address: String,
    key: String,
    process: Option<Child>,
}

impl Node {
    /// Starts a node whose templates are those of another data directory, captures included, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready; the end of its log is in the message.
    pub async fn start_with_templates_of(settings: NodeSettings, other_data_dir: &Path) -> Result<Self> {
        copy_templates(other_data_dir, &settings.data_dir)?;
        Self::start(settings).await
    }

    /// Starts a node and waits until its template is ready.
    ///
    /// # Errors
    /// As [`Node::start_with_templates_of`].
    pub async fn start(settings: NodeSettings) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").context("no free port")?;
        let address = listener.local_addr()?.to_string();
        drop(listener);
        let key = "e2b_00000000000000000000000000000000000000aa".to_owned();
        let mut node = Self { settings, address, key, process: None };
        node.restart().await?;
        Ok(node)
    }

    /// Starts the process again after it ended, and waits until it is ready.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub async fn restart(&mut self) -> Result<()> {
        let log =
            File::options().create(true).append(true).open(self.log()).context("cannot open the log")?;
        let child = self
            .command("serve")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot share the log")?)
            .stderr(log)
            .spawn()
            .context("cannot start the node")?;
        self.process = Some(child);
        let started = Instant::now();
        while !self.is_ready().await {
            if let Some(status) = self.process.as_mut().and_then(|process| process.try_wait().transpose()) {
                bail!("the node ended: {status:?}\n{}", self.end_of_log());
            }
            if started.elapsed() > READY_LIMIT {
                bail!("the node is not ready after {READY_LIMIT:?}\n{}", self.end_of_log());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn is_ready(&self) -> bool {
        let Ok(answer) = self.client().get("/templates").await else { return false };
        answer
            .json()
            .as_array()
            .is_some_and(|list| list.iter().any(|template| template["buildStatus"] == "ready"))
    }

    /// Sets a variable for the next start.
    pub fn set(&mut self, name: &str, value: &str) {
        let variables = &mut self.settings.variables;
        variables.retain(|(present, _)| present != name);
        variables.push((name.to_owned(), value.to_owned()));
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// When the process cannot be killed.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.kill().context("cannot kill the node")?;
            process.wait().context("cannot wait for the node")?;
        }
        Ok(())
    }

    /// Whether the process ended by itself, or because it was asked to.
    ///
    /// # Errors
    /// When the system does not tell.
    pub fn has_ended(&mut self) -> Result<bool> {
        let Some(process) = &mut self.process else { return Ok(true) };
        let ended = process.try_wait().context("cannot look at the node")?.is_some();
        if ended {
            self.process = None;
        }
        Ok(ended)
    }

    /// Kills the node and removes everything of its instance.
    ///
    /// # Errors
    /// When `aenv-node purge` fails.
    pub fn purge(&mut self) -> Result<()> {
        self.kill()?;
        let output = self.command("purge").output().context("cannot run aenv-node purge")?;
        if !output.status.success() {
            bail!("purge failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    /// A client with the right key.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::new(&self.address, &self.key)
    }

    /// Process id while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// What it was started with.
    #[must_use]
    pub fn settings(&self) -> &NodeSettings {
        &self.settings
    }

    /// What its instance has on this host.
    ///
    /// # Errors
    /// When a list of the system cannot be read.
    pub fn resources(&self) -> Result<Resources> {
        Resources::of(&self.settings.instance, &self.settings.data_dir)
    }

    fn log(&self) -> PathBuf {
        self.settings.data_dir.join("node.log")
    }

    /// The last lines of its log.
    #[must_use]
    pub fn end_of_log(&self) -> String {
        let log = std::fs::read(self.log()).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(12_000)..]).into_owned()
    }

    fn command(&self, task: &str) -> Command {
        let mut command = match self.settings.launcher.split_first() {
            None => Command::new(&self.settings.program),
            Some((launcher, arguments)) => {
                let mut command = Command::new(launcher);
                command.args(arguments).arg(&self.settings.program);
                command
            }
        };
        command
            .arg(task)
            .env("AENV_LISTEN", &self.address)
            .env("AENV_DATA_DIR", &self.settings.data_dir)
            .env("AENV_GUEST_DIR", &self.settings.guest_dir)
            .env("AENV_API_KEY", &self.key)
            .env("AENV_INSTANCE", &self.settings.instance)
            .env("AENV_SUBNET", &self.settings.subnet)
            .envs(self.settings.variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

#[expect(clippy::print_stdout, reason = "the only trace of a node that a failed test leaves")]
impl Drop for Node {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Gone with the data directory otherwise. Tests print what fails; this is shown with it.
            println!("the end of the node's log:\n{}", self.end_of_log());
        }
        // A test that failed half-way must not leave VMs on the machine; a second purge finds nothing.
        let result = self.purge().and_then(|()| {
            std::fs::remove_dir_all(&self.settings.data_dir).context("cannot remove the data directory")
        });
        assert!(result.is_ok() || std::thread::panicking(), "cannot purge: {result:?}");
    }
}
