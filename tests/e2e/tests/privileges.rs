//! The node works with the capabilities that its systemd unit names, and with no others.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::{area, own_settings, shared_instance};
use aenv_testkit::node::{Node, copy_templates};
use serde_json::json;
use std::path::Path;

const UNIT: &str = include_str!("../../../packaging/systemd/aenv-node.service");

/// The capabilities of the unit, as `setpriv` spells them.
fn named() -> Vec<String> {
    let line = UNIT.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    line.split_whitespace().map(|name| name.trim_start_matches("CAP_").to_lowercase()).collect()
}

fn capabilities_of(pid: u32, set: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(set)).unwrap();
    u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
}

/// Templates whose captures are to be made anew.
fn copy_without_captures(from: &Path, to: &Path) {
    copy_templates(from, to).unwrap();
    for template in std::fs::read_dir(to.join("templates")).unwrap() {
        std::fs::remove_dir_all(template.unwrap().path().join("captures")).unwrap();
    }
}

#[tokio::test]
async fn a_node_with_the_capabilities_of_its_unit_alone_does_everything() {
    let mut settings = own_settings(5, &area().join("t5"));
    let plus: Vec<String> = named().iter().map(|name| format!("+{name}")).collect();
    let bounding = format!("--bounding-set=-all,{}", plus.join(","));
    settings.launcher =
        ["setpriv", "--no-new-privs", "--inh-caps=-all", &bounding, "--"].map(str::to_owned).to_vec();
    copy_without_captures(&shared_instance().1, &settings.data_dir);
    // Boots and captures the template too.
    let mut node = Node::start(settings).await.unwrap();
    let pid = node.pid().unwrap();
    // Fewer where this very test may not give them all.
    assert!(capabilities_of(pid, "CapEff").count_ones() as usize <= named().len());
    assert_eq!(capabilities_of(pid, "CapBnd"), capabilities_of(pid, "CapEff"));

    let client = node.client();
    let kept = client.create(600, &json!({})).await.unwrap();
    assert_eq!(client.run(&kept, "echo alive").await.unwrap(), "alive");
    let restricted = client.create(600, &json!({ "allow_internet_access": false })).await.unwrap();
    assert_eq!(client.run(&restricted, "echo alive").await.unwrap(), "alive");
    assert!(client.kill(&restricted).await.unwrap());
    node.kill().unwrap();
    node.restart().await.unwrap();
    assert_eq!(client.run(&kept, "echo adopted").await.unwrap(), "adopted");
    assert!(client.kill(&kept).await.unwrap());
    node.purge().unwrap();
    let mut after = node.resources().unwrap();
    after.sandbox_directories.clear();
    assert!(after.is_nothing(), "{after:?}");
}
