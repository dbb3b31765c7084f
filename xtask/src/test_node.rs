//! The node that tests share, on this machine and in the rig: where its data lies, what it is told, what its clients are told.
//! Owns no state; the node's record and the mounted area are found again by their paths.

use crate::data_area::Area;
use crate::node::{Node, write_private};
use crate::project::Project;
use crate::settings::Settings;
use crate::stages::Stages;
use crate::up::env_text;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the test area is mounted: short, because the paths of control sockets are limited to 107 bytes.
pub(crate) const AREA: &str = "/run/aenv-t";
/// Size of the image behind it; it is sparse.
const AREA_BYTES: u64 = 24 << 30;
/// Network of the shared node; nodes that tests start for themselves take others of 100.64.0.0/10.
const SUBNET: &str = "100.65.0.0/16";

/// The file system for all data of tests.
pub(crate) fn area(project: &Project) -> Area {
    Area { directory: PathBuf::from(AREA), image: project.test_dir().join("area.xfs") }
}

/// The node, on a free port and with a new key; nothing is started. `variables` are handed to it as they are.
pub(crate) fn describe(project: &Project, rootfs: &Path, variables: &[(String, String)]) -> Result<Node> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr())?.port();
    let mut passed_on = vec![("AENV_SUBNET".to_owned(), SUBNET.to_owned())];
    passed_on.extend_from_slice(variables);
    let settings = Settings {
        listen: format!("127.0.0.1:{port}"),
        data_dir: PathBuf::from(AREA).join("t"),
        image_bytes: AREA_BYTES,
        instance: "t".to_owned(),
        passed_on,
    };
    let key = format!("e2b_{}", hex::encode(rand::random::<[u8; 20]>()));
    write_private(&project.test_dir().join("env"), env_text(&key, &settings.url()).as_bytes())?;
    Ok(Node {
        program: project.binary("aenv-node"),
        guest_dir: project.guest_dir(),
        rootfs: rootfs.to_owned(),
        record: project.test_dir().join("node.json"),
        log: project.log_dir().join("test-node.log"),
        settings,
        key,
    })
}

/// Prepares the area, imports the template and starts the node; it is ready when this returns.
pub(crate) fn start(
    project: &Project,
    area: &Area,
    rootfs: &Path,
    variables: &[(String, String)],
) -> Result<Node> {
    std::fs::create_dir_all(project.test_dir()).context("cannot make the test directory")?;
    area.prepare(AREA_BYTES)?;
    let node = describe(project, rootfs, variables)?;
    std::fs::create_dir_all(&node.settings.data_dir).context("cannot make the data directory")?;
    node.import_template()?;
    node.ensure()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Stages::default().run("template capture", |voice| runtime.block_on(node.wait_ready(voice)))?;
    Ok(node)
}

/// What the SDKs read.
pub(crate) fn client_environment<'a>(command: &'a mut Command, node: &Node) -> &'a mut Command {
    command
        .env("E2B_API_KEY", &node.key)
        .env("E2B_API_URL", node.settings.url())
        .env("E2B_SANDBOX_URL", node.settings.url())
}

/// What the end-to-end tests read.
pub(crate) fn test_environment<'a>(
    command: &'a mut Command,
    project: &Project,
    node: &Node,
) -> &'a mut Command {
    client_environment(command, node)
        .env("AENV_GUEST_DIR", &node.guest_dir)
        .env("AENV_TEST_AREA", AREA)
        .env("AENV_TEST_NODE_PROGRAM", &node.program)
        .env("AENV_TEST_CLI_PROGRAM", project.binary("aenv"))
}
