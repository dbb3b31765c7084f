//! Disks of sandboxes by the block service: their size, and what happens when the service dies or the host is full.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::{SmallDisk, own_node, own_settings, shared, shared_instance};
use aenv_testkit::client::{Client, Sandbox};
use aenv_testkit::node::{Node, copy_templates};
use aenv_testkit::resources::block_server_of;
use serde_json::json;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// Writes files, flushes them, forgets the cache and reads them back, for some seconds; ends with `good N`.
const VERIFIED: &str = r#"
import hashlib, os, random, sys, time
end, rounds, sums = time.time() + float(sys.argv[1]), 0, {}
while time.time() < end or rounds < 3:
    name = f"/root/verified-{rounds % 4}"
    if name in sums:
        with open("/proc/sys/vm/drop_caches", "w") as drop:
            drop.write("3")
        with open(name, "rb") as file:
            assert hashlib.sha256(file.read()).digest() == sums[name], name
    data = random.randbytes(random.randrange(1, 600000))
    with open(name, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sums[name] = hashlib.sha256(data).digest()
    rounds += 1
print("good", rounds)
"#;

async fn run_as_root(client: &Client, sandbox: &Sandbox, script: &str) -> String {
    let ended = client.run_as("root", sandbox, script).await.unwrap();
    assert_eq!(ended.exit_code, 0, "{script}: {ended:?}");
    ended.stdout.trim().to_owned()
}

#[tokio::test]
async fn a_guest_has_one_disk_with_a_filesystem_of_the_size_asked_for() {
    let client = shared();
    let sandbox = client.create(300, &json!({})).await.unwrap();
    let templates = client.get("/templates").await.unwrap().json();
    let base = &templates.as_array().unwrap()[0];
    let asked = base["diskSizeMB"].as_u64().unwrap();
    let disks = run_as_root(&client, &sandbox, "ls /sys/block | grep -v -e loop -e ram").await;
    assert_eq!(disks, "vda");
    let blocks = "python3 -c 'import os; s = os.statvfs(\"/\"); print(s.f_blocks * s.f_frsize >> 20)'";
    let size: u64 = run_as_root(&client, &sandbox, blocks).await.parse().unwrap();
    // What the file system needs for itself is not counted by statvfs.
    assert!(size <= asked && size > asked * 9 / 10, "{size} MiB of {asked}");
    let sectors: u64 = run_as_root(&client, &sandbox, "cat /sys/block/vda/size").await.parse().unwrap();
    assert!(sectors / 2048 > asked, "the disk has no room to grow: {sectors} sectors");
    let features = run_as_root(&client, &sandbox, "grep ' / ' /proc/mounts").await;
    assert!(features.contains("ext4"), "{features}");
    assert!(client.kill(&sandbox).await.unwrap());
}

/// The process of the block service that answers, as soon as it is none of `killed`.
async fn next_server(instance: &str, killed: &[u32]) -> u32 {
    let asked = Instant::now();
    loop {
        let found = block_server_of(instance).ok().filter(|server| !killed.contains(server));
        if let Some(server) = found
            && UnixStream::connect(format!("/run/aenv/{instance}/stored.sock")).is_ok()
        {
            return server;
        }
        assert!(asked.elapsed() < Duration::from_secs(90), "it was not started again after {killed:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn guests_wait_while_the_block_service_is_killed_and_a_purge_ends_them() {
    let mut node = own_node(9).await.unwrap();
    let client = node.client();
    let mut sandboxes = Vec::new();
    for _ in 0..2 {
        let sandbox = client.create(900, &json!({})).await.unwrap();
        client.upload("root", &sandbox, "/root/verified.py", VERIFIED.into()).await.unwrap();
        sandboxes.push(sandbox);
    }
    let work: Vec<_> = sandboxes
        .iter()
        .cloned()
        .map(|sandbox| {
            let client = client.clone();
            tokio::spawn(async move { run_as_root(&client, &sandbox, "python3 /root/verified.py 12").await })
        })
        .collect();
    let mut killed = Vec::new();
    for _ in 0..4 {
        let server = next_server("t9", &killed).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(Command::new("kill").args(["-9", &server.to_string()]).status().unwrap().success());
        killed.push(server);
    }
    for work in work {
        let said = work.await.unwrap();
        assert!(said.starts_with("good "), "{said}");
    }
    for sandbox in &sandboxes {
        let complaints =
            run_as_root(&client, sandbox, "dmesg | grep -c -i -e 'I/O error' -e 'EXT4-fs error' || true");
        assert_eq!(complaints.await, "0");
        assert!(client.kill(sandbox).await.unwrap());
    }
    // New disks are made as before.
    let sandbox = client.create(600, &json!({})).await.unwrap();
    assert_eq!(client.run(&sandbox, "echo alive").await.unwrap(), "alive");

    let endless = "nohup sh -c 'while :; do date >/root/now; sync; done' >/dev/null 2>&1 &";
    run_as_root(&client, &sandbox, endless).await;
    // Without the node nobody starts the service again.
    node.kill().unwrap();
    let server = block_server_of("t9").unwrap();
    assert!(Command::new("kill").args(["-9", &server.to_string()]).status().unwrap().success());
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(node.resources().unwrap().processes.len(), 1, "the VMM waits");
    node.purge().unwrap();
    let mut left = node.resources().unwrap();
    left.sandbox_directories.clear();
    assert!(left.is_nothing(), "{left:?}");
}

#[tokio::test]
async fn a_guest_that_writes_waits_while_the_host_is_full_and_goes_on() {
    let disk = SmallDisk::mount("t8-disk", 4).unwrap();
    let data_dir = disk.directory().join("data");
    copy_templates(&shared_instance().1, &data_dir).unwrap();
    let node = Node::start(own_settings(8, &data_dir)).await.unwrap();
    let client = node.client();
    let writer = client.create(900, &json!({})).await.unwrap();
    let other = client.create(900, &json!({})).await.unwrap();
    let ballast = disk.fill_but(60).unwrap();
    let script = "head -c 150000000 /dev/urandom >/root/much && sync && sha256sum </root/much | cut -c1-64 \
                  && echo 3 >/proc/sys/vm/drop_caches && sha256sum </root/much | cut -c1-64";
    let work = {
        let (client, writer) = (client.clone(), writer.clone());
        tokio::spawn(async move { run_as_root(&client, &writer, script).await })
    };
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert!(!work.is_finished(), "150 MB were written where 60 had room");
    // Reading needs no room.
    assert_eq!(client.run(&other, "cat /etc/hostname").await.unwrap(), other.id);
    std::fs::remove_file(ballast).unwrap();
    let sums = work.await.unwrap();
    let (first, second) = sums.split_once('\n').unwrap();
    assert_eq!(first, second);
    let complaints = "dmesg | grep -c -i -e 'I/O error' -e 'EXT4-fs error' || true";
    assert_eq!(run_as_root(&client, &writer, complaints).await, "0");
    drop(node);
}
