//! A node with little memory: who gives way, what is refused and how; and the end of a node that pauses its sandboxes first.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::witness::Witness;
use aenv_e2e::{area, own_settings, shared_instance};
use aenv_testkit::client::{Answer, Client, Sandbox};
use aenv_testkit::node::Node;
use aenv_testkit::resources::vmm_of;
use http::StatusCode;
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

const INSTANCE: &str = "t11";

async fn small_node() -> Node {
    let mut settings = own_settings(11, &area().join(INSTANCE));
    // Two guests of 512 MiB.
    for (name, value) in [("AENV_MEMORY_LIMIT_MIB", "1024"), ("AENV_START_WAIT_SECONDS", "10")] {
        settings.variables.push((name.to_owned(), value.to_owned()));
    }
    Node::start_with_templates_of(settings, &shared_instance().1).await.unwrap()
}

async fn ask_create(client: &Client) -> Answer {
    client.post("/v2/sandboxes", &json!({ "templateID": "base", "timeout": 60 })).await.unwrap()
}

fn assert_no_memory(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
    let seconds: u32 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!(seconds > 0);
    let body = answer.json();
    assert_eq!(body["error_code"], "sandbox_capacity_unavailable");
    let message = body["message"].as_str().unwrap();
    assert!(message.contains("memory: 512 MiB needed, 1024 MiB committed of 1024 MiB"), "{message}");
}

async fn figures(client: &Client) -> [u64; 4] {
    let status = client.get("/node").await.unwrap().json();
    ["memoryCommittedBytes", "running", "paused", "hot"].map(|name| status[name].as_u64().unwrap())
}

/// Tells whether there was a process to ask.
fn ask_to_end(node: &Node) -> bool {
    let pid = node.pid().unwrap().to_string();
    Command::new("kill").args(["-TERM", &pid]).status().unwrap().success()
}

/// Nothing new may be begun while the node ends.
async fn until_ended(node: &mut Node) {
    let client = node.client();
    while !node.has_ended().unwrap() {
        if let Ok(answer) = client.post("/v2/sandboxes", &json!({ "templateID": "base" })).await {
            assert_ne!(answer.status, StatusCode::CREATED);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn is_paused_for_good(detail: &Value) -> bool {
    detail["state"] == "paused" && detail["saved"]["durability"] == "local"
}

async fn all_go_on(client: &Client, sandboxes: [&Sandbox; 2], witnesses: &mut [Witness; 2]) {
    for (sandbox, witness) in sandboxes.into_iter().zip(witnesses) {
        let connected = client.connect(sandbox, &json!({ "timeout": 600 })).await.unwrap();
        assert!(connected.status.is_success(), "{}", connected.text());
        witness.goes_on(client, sandbox).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_node_lets_paused_sandboxes_give_way_then_refuses_and_pauses_all_when_it_is_stopped() {
    let mut node = small_node().await;
    let client = node.client();
    let (first, second) =
        (client.create(900, &json!({})).await.unwrap(), client.create(900, &json!({})).await.unwrap());
    let mut witnesses =
        [Witness::start(&client, &first).await.unwrap(), Witness::start(&client, &second).await.unwrap()];
    client.pause(&first, &json!({ "durability": "local" })).await.unwrap();
    assert_eq!(figures(&client).await, [1 << 30, 1, 1, 1]);

    // There is room for two: the paused one gives way to the third.
    let third = client.create(900, &json!({})).await.unwrap();
    assert_eq!(client.detail(&first).await.unwrap()["saved"]["tier"], "cold");
    assert!(vmm_of(INSTANCE, &first.id).is_err(), "its VMM stays");
    assert_eq!(figures(&client).await, [1 << 30, 2, 1, 0]);
    assert_no_memory(&ask_create(&client).await);
    assert_no_memory(&client.connect(&first, &json!({ "timeout": 600 })).await.unwrap());
    assert_eq!(client.detail(&first).await.unwrap()["state"], "paused");
    assert!(client.kill(&third).await.unwrap());
    assert_eq!(client.resume(&first).await.unwrap(), "cold");
    witnesses[0].goes_on(&client, &first).await.unwrap();
    assert_no_memory(&ask_create(&client).await);

    // What the last process left is counted by the next one, which is to pause all before it ends.
    node.kill().unwrap();
    node.set("AENV_ON_STOP", "pause");
    node.restart().await.unwrap();
    assert_eq!(figures(&client).await, [1 << 30, 2, 0, 0]);
    assert!(ask_to_end(&node));
    until_ended(&mut node).await;
    // One of them loses its VMM, as all would if the host was switched off.
    let pid = vmm_of(INSTANCE, &second.id).unwrap().to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    node.restart().await.unwrap();
    for sandbox in [&first, &second] {
        let detail = client.detail(sandbox).await.unwrap();
        assert!(is_paused_for_good(&detail), "{detail}");
    }
    all_go_on(&client, [&first, &second], &mut witnesses).await;

    // A second signal ends it at once, whatever has become of the pauses.
    assert!(ask_to_end(&node));
    // Two that come at once are one to the kernel.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let _unless_it_was_faster = ask_to_end(&node);
    until_ended(&mut node).await;
    node.restart().await.unwrap();
    all_go_on(&client, [&first, &second], &mut witnesses).await;

    for sandbox in [&first, &second] {
        assert!(client.kill(sandbox).await.unwrap());
    }
    node.purge().unwrap();
    let mut left = node.resources().unwrap();
    left.sandbox_directories.clear();
    assert!(left.is_nothing(), "{left:?}");
}
