//! What is killed, panics or runs full: nothing is lost, nothing is leaked, the cause is told. Each test has its own node.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::{SmallDisk, own_node, own_settings, shared_instance};
use aenv_testkit::client::{Client, Sandbox};
use aenv_testkit::node::{Node, copy_templates};
use aenv_testkit::resources::{open_descriptors, vmm_of};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

/// Polls what GET says of a sandbox until it is lost.
async fn lost(client: &Client, sandbox: &Sandbox) -> Value {
    let asked = Instant::now();
    loop {
        let detail = client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap().json();
        if !detail["error_code"].is_null() || detail["state"] == "lost" {
            return detail;
        }
        assert!(asked.elapsed() < Duration::from_secs(30), "not lost: {detail}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn five(client: &Client) -> Vec<Sandbox> {
    let mut sandboxes = Vec::new();
    for number in 0..5 {
        let sandbox =
            client.create(600, &json!({ "metadata": { "number": number.to_string() } })).await.unwrap();
        client.run(&sandbox, &format!("echo {number} >/tmp/number")).await.unwrap();
        sandboxes.push(sandbox);
    }
    sandboxes
}

/// The answers of all, in order.
async fn numbers(client: &Client, sandboxes: &[Sandbox]) -> Vec<String> {
    let mut numbers = Vec::new();
    for sandbox in sandboxes {
        numbers.push(client.run(sandbox, "cat /tmp/number").await.unwrap());
    }
    numbers
}

#[tokio::test]
async fn sandboxes_survive_the_death_of_the_node_and_a_purge_leaves_nothing() {
    let mut node = own_node(1).await.unwrap();
    let client = node.client();
    let sandboxes = five(&client).await;
    let processes = node.resources().unwrap().processes;
    assert_eq!(processes.len(), 5);
    for _ in 0..2 {
        node.kill().unwrap();
        assert_eq!(node.resources().unwrap().processes, processes, "VMMs die with the node");
        node.restart().await.unwrap();
        assert_eq!(numbers(&client, &sandboxes).await, ["0", "1", "2", "3", "4"]);
        assert_eq!(node.resources().unwrap().processes, processes);
    }
    let detail = client.get(&format!("/sandboxes/{}", sandboxes[3].id)).await.unwrap().json();
    assert_eq!((&detail["state"], &detail["metadata"]["number"]), (&json!("running"), &json!("3")));
    for sandbox in &sandboxes[..2] {
        assert!(client.kill(sandbox).await.unwrap());
    }
    settled(&node, 3).await;
    node.purge().unwrap();
    let mut after = node.resources().unwrap();
    after.sandbox_directories.clear();
    assert!(after.is_nothing(), "{after:?}");
}

/// Waits until the node has as many VMs and directories of sandboxes as it should.
async fn settled(node: &Node, sandboxes: usize) {
    let asked = Instant::now();
    loop {
        let resources = node.resources().unwrap();
        if resources.processes.len() == sandboxes && resources.sandbox_directories.len() == sandboxes {
            return;
        }
        assert!(asked.elapsed() < Duration::from_secs(20), "not {sandboxes}: {resources:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn a_lost_sandbox_says_why_and_others_are_unharmed() {
    let mut node = own_node(2).await.unwrap();
    let client = node.client();
    let sandboxes = five(&client).await;
    let healthy = &sandboxes[4..];

    let script = "sleep 0.3; echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger";
    // The stream breaks with the guest.
    drop(client.start("root", &sandboxes[0], script).await);
    let panicked = lost(&client, &sandboxes[0]).await;
    assert!(panicked.to_string().contains("guest_panic"), "{panicked}");

    let pid = vmm_of("t2", &sandboxes[1].id).unwrap();
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    let killed = lost(&client, &sandboxes[1]).await;
    assert!(killed.to_string().contains("vmm_killed"), "{killed}");

    let pid = vmm_of("t2", &sandboxes[2].id).unwrap();
    node.kill().unwrap();
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    node.restart().await.unwrap();
    let killed_meanwhile = lost(&client, &sandboxes[2]).await;
    assert!(killed_meanwhile.to_string().contains("vmm_"), "{killed_meanwhile}");

    for sandbox in &sandboxes[..3] {
        assert_eq!(client.health(sandbox).await.unwrap().status, 502);
        assert!(client.kill(sandbox).await.unwrap(), "a lost sandbox can be removed");
    }
    assert_eq!(numbers(&client, healthy).await, ["4"]);
    settled(&node, 2).await;
}

#[tokio::test]
async fn creates_on_a_full_disk_are_refused_and_leave_nothing() {
    let disk = SmallDisk::mount("t3-disk", 4).unwrap();
    let data_dir = disk.directory().join("data");
    copy_templates(&shared_instance().1, &data_dir).unwrap();
    let node = Node::start(own_settings(3, &data_dir)).await.unwrap();
    let client = node.client();
    let running = client.create(600, &json!({})).await.unwrap();
    settled(&node, 1).await;
    let before = node.resources().unwrap();
    let ballast = disk.fill_but(100).unwrap();
    for _ in 0..5 {
        let answer = client.post("/v2/sandboxes", &json!({ "templateID": "base" })).await.unwrap();
        assert_eq!(answer.status.as_u16(), 503, "{}", answer.text());
        assert_eq!(answer.json()["code"], 503);
        assert!(answer.json()["message"].as_str().unwrap().contains("capacity"), "{}", answer.text());
    }
    assert_eq!(client.run(&running, "echo alive").await.unwrap(), "alive");
    let after = node.resources().unwrap();
    assert_eq!((after.processes, after.sandbox_directories), (before.processes, before.sandbox_directories));
    std::fs::remove_file(ballast).unwrap();
    // The file system gives the room back in the background.
    let mut again = client.create(600, &json!({})).await;
    for _ in 0..40 {
        if again.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        again = client.create(600, &json!({})).await;
    }
    let again = again.unwrap();
    assert_eq!(client.run(&again, "echo alive").await.unwrap(), "alive");
    drop(node);
}

#[tokio::test]
async fn many_cycles_leave_no_descriptor_process_or_directory_behind() {
    let node = own_node(4).await.unwrap();
    let client = node.client();
    let cycle = || async {
        let sandbox = client.create(600, &json!({})).await.unwrap();
        assert_eq!(client.run(&sandbox, "echo alive").await.unwrap(), "alive");
        assert!(client.kill(&sandbox).await.unwrap());
    };
    cycle().await;
    settled(&node, 0).await;
    let before = open_descriptors(node.pid().unwrap()).unwrap();
    for _ in 0..8 {
        cycle().await;
    }
    settled(&node, 0).await;
    let after = open_descriptors(node.pid().unwrap()).unwrap();
    // Connections that are kept for a while count too: a leak would be at least one per cycle.
    assert!(after < before + 8, "{before} descriptors before, {after} after");
    assert_eq!(node.resources().unwrap().processes, Vec::<u32>::new());
}
