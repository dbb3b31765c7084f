//! What many sandboxes of one template take on the host's disk, together, and that it is given back. With a node of its own.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::own_node;
use aenv_testkit::client::{Client, Sandbox};
use serde_json::json;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

async fn run_as_root(client: &Client, sandbox: &Sandbox, script: &str) -> String {
    let ended = client.run_as("root", sandbox, script).await.unwrap();
    assert_eq!(ended.exit_code, 0, "{script}: {ended:?}");
    ended.stdout.trim().to_owned()
}

/// Bytes that a directory takes on its file system.
fn stored_bytes(directory: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "-B1"]).arg(directory).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn twenty_sandboxes_store_only_what_they_wrote_and_it_is_given_back() {
    const WRITTEN: u64 = 4 << 20;
    let node = own_node(7).await.unwrap();
    let client = node.client();
    let storage = node.settings().data_dir.join("storage");
    let first = client.create(600, &json!({})).await.unwrap();
    assert!(client.kill(&first).await.unwrap());
    let before = settled_bytes(&storage, u64::MAX).await;
    let mut sandboxes = Vec::new();
    for _ in 0..20 {
        let sandbox = client.create(900, &json!({})).await.unwrap();
        let script = format!("head -c {WRITTEN} /dev/urandom >/root/own && sync");
        run_as_root(&client, &sandbox, &script).await;
        sandboxes.push(sandbox);
    }
    let grown = stored_bytes(&storage) - before;
    // Besides their files, the file system's own blocks.
    assert!((20 * WRITTEN..20 * 3 * WRITTEN).contains(&grown), "{grown} bytes");
    for sandbox in &sandboxes {
        assert!(client.kill(sandbox).await.unwrap());
    }
    // Behind a log that is open the file system may keep some room ready: less than any sandbox wrote.
    let wanted = before + WRITTEN / 4;
    let after = settled_bytes(&storage, wanted).await;
    assert!(after <= wanted, "{before} bytes before, {after} after");
}

/// Stored bytes as soon as they are at most `wanted`, or do not change any more.
async fn settled_bytes(directory: &Path, wanted: u64) -> u64 {
    let asked = Instant::now();
    loop {
        let bytes = stored_bytes(directory);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let is_settled = stored_bytes(directory) == bytes && bytes <= wanted;
        if is_settled || asked.elapsed() > Duration::from_secs(30) {
            return bytes;
        }
    }
}
