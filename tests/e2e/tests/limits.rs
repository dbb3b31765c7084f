//! What a sandbox may use of its host: where version 2 control groups are usable, each VM has limits it cannot raise, and
//! a death for memory is told as such. Where they are not, sandboxes work without (the other tests), and this one says so.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::{area, own_settings, shared_instance};
use aenv_testkit::node::Node;
use aenv_testkit::resources::vmm_of;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The version 2 group of a process, as a directory; none where that hierarchy is not mounted at its usual place.
fn group_of(pid: u32) -> Option<PathBuf> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?.to_owned();
    let group = PathBuf::from("/sys/fs/cgroup").join(path);
    group.join("memory.max").exists().then_some(group)
}

#[tokio::test]
async fn a_sandbox_has_limits_and_a_death_for_memory_is_told() {
    let mut settings = own_settings(6, &area().join("t6"));
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        settings.variables.push(("AENV_IO_WRITE_BYTES_PER_SECOND".to_owned(), "500000000".to_owned()));
    }
    let node = Node::start_with_templates_of(settings, &shared_instance().1).await.unwrap();
    let client = node.client();
    let [sandbox, neighbour] =
        [client.create(600, &json!({})).await.unwrap(), client.create(600, &json!({})).await.unwrap()];
    let pid = vmm_of("t6", &sandbox.id).unwrap();
    let name = format!("t6-{}", sandbox.id);
    let Some(group) = group_of(pid).filter(|group| group.ends_with(&name)) else {
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        eprintln!(
            "NOT TESTED: this host has no usable version 2 control groups, sandboxes run without limits"
        );
        return;
    };
    let read = |file: &str| std::fs::read_to_string(group.join(file)).unwrap().trim().to_owned();
    let detail = client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap().json();
    let processors = detail["cpuCount"].as_u64().unwrap();
    assert_eq!(read("cpu.max"), format!("{processors}00000 100000"));
    let memory: u64 = read("memory.max").parse().unwrap();
    assert!((512 << 20..2048 << 20).contains(&memory), "{memory}");
    assert!(read("pids.max").parse::<u64>().unwrap() < 1000);
    assert!(read("io.max").contains("wbps=500000000"), "{}", read("io.max"));
    assert_eq!(read("memory.oom.group"), "1");
    assert_eq!(read("cgroup.procs"), pid.to_string());
    // The jail has no way to these files.
    assert!(!PathBuf::from(format!("/proc/{pid}/root/sys/fs/cgroup")).exists());

    std::fs::write(group.join("memory.max"), "8M").unwrap();
    let started = Instant::now();
    let lost = loop {
        // Makes the guest, and so its VMM, touch memory; its answer may never come.
        drop(tokio::time::timeout(Duration::from_secs(2), client.run(&sandbox, "true")).await);
        let detail = client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap().json();
        if !detail["error_code"].is_null() || detail["state"] == "lost" {
            break detail;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "not lost: {detail}");
    };
    assert!(lost.to_string().contains("out_of_memory"), "{lost}");
    assert_eq!(client.run(&neighbour, "echo alive").await.unwrap(), "alive");
    assert!(client.kill(&sandbox).await.unwrap());
    let started = Instant::now();
    while group.exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "the group of a removed sandbox stays");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
