//! Where the end-to-end tests find what `cargo xtask test` prepared: a shared node, and room for nodes of their own.
//!
//! Owns no state. Each test binary covers one promise; tests that hurt a node start one for themselves.

pub mod websocket;
pub mod witness;

use aenv_testkit::client::Client;
use aenv_testkit::node::{Node, NodeSettings};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A value that `cargo xtask test` sets.
///
/// # Panics
/// When it is not set.
#[must_use]
pub fn setting(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: these tests are run by `cargo xtask test`"))
}

/// A client of the shared node.
#[must_use]
pub fn shared() -> Client {
    let url = setting("E2B_API_URL");
    Client::new(url.trim_start_matches("http://"), &setting("E2B_API_KEY"))
}

/// Directory on a file system that shares blocks, where every node of the tests keeps its data.
#[must_use]
pub fn area() -> PathBuf {
    PathBuf::from(setting("AENV_TEST_AREA"))
}

/// Instance and data directory of the shared node.
#[must_use]
pub fn shared_instance() -> (&'static str, PathBuf) {
    ("t", area().join("t"))
}

/// Whether tests may take their full time: `make test FULL=1`, `cargo xtask test --full`.
#[must_use]
pub fn is_full() -> bool {
    std::env::var_os("AENV_TEST_FULL").is_some()
}

/// Settings of a node that one test may hurt. `number` 1 to 12 is different for every test: it names the instance and
/// its network.
#[must_use]
pub fn own_settings(number: u8, data_dir: &Path) -> NodeSettings {
    NodeSettings {
        program: PathBuf::from(setting("AENV_TEST_NODE_PROGRAM")),
        guest_dir: PathBuf::from(setting("AENV_GUEST_DIR")),
        data_dir: data_dir.to_owned(),
        instance: format!("t{number}"),
        subnet: format!("100.{}.0.0/16", 66 + number),
        variables: ["AENV_STANDBYS", "AENV_WARM"].map(|name| (name.to_owned(), "0".to_owned())).into(),
        launcher: Vec::new(),
    }
}

/// A node of one test, with the templates of the shared one.
///
/// # Errors
/// When it does not become ready.
pub async fn own_node(number: u8) -> Result<Node> {
    let settings = own_settings(number, &area().join(format!("t{number}")));
    Node::start_with_templates_of(settings, &shared_instance().1).await
}

/// A small XFS of its own, to be filled up. Unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk {
    directory: PathBuf,
    image: PathBuf,
}

impl SmallDisk {
    /// Makes and mounts one of `gibibytes`.
    ///
    /// # Errors
    /// When it cannot be made or mounted.
    pub fn mount(name: &str, gibibytes: u64) -> Result<Self> {
        let disk = Self { directory: area().join(name), image: area().join(format!("{name}.image")) };
        std::fs::create_dir_all(&disk.directory).context("cannot make the mount point")?;
        std::fs::File::create(&disk.image)?.set_len(gibibytes << 30)?;
        run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&disk.image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&disk.image).arg(&disk.directory))?;
        Ok(disk)
    }

    /// Where it is mounted.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Takes all room but `mebibytes`; the file that does is returned and can be removed.
    ///
    /// # Errors
    /// When the file cannot be made.
    pub fn fill_but(&self, mebibytes: u64) -> Result<PathBuf> {
        let output = Command::new("df").args(["--output=avail", "-m"]).arg(&self.directory).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let free: u64 = text.lines().nth(1).context("df printed no number")?.trim().parse()?;
        let ballast = self.directory.join("ballast");
        let size = free.saturating_sub(mebibytes);
        run(Command::new("fallocate").args(["-l", &format!("{size}MiB")]).arg(&ballast))?;
        Ok(ballast)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = run(Command::new("umount").arg(&self.directory));
        let removed = std::fs::remove_file(&self.image);
        assert!(
            (unmounted.is_ok() && removed.is_ok()) || std::thread::panicking(),
            "{unmounted:?} {removed:?}"
        );
    }
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    anyhow::ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}
