//! Snapshots and forks of running computers: what children have of their parent, what they have for themselves, and that nothing is left.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::witness::{Witness, boot_of};
use aenv_e2e::{own_node, shared};
use aenv_testkit::client::{Client, Sandbox};
use aenv_testkit::node::Node;
use aenv_testkit::resources::stored_things;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long something that happens by itself may take.
const PATIENCE: Duration = Duration::from_secs(60);
const MACHINE_ID: &str = "cat /etc/machine-id";

async fn snapshot(client: &Client, sandbox: &Sandbox, body: &Value) -> Value {
    let answer = client.post(&format!("/sandboxes/{}/snapshots", sandbox.id), body).await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    answer.json()
}

async fn delete(client: &Client, snapshot: &str) -> StatusCode {
    client.call(Method::DELETE, &format!("/templates/{snapshot}"), "").await.unwrap().status
}

async fn started_from(client: &Client, template: &str) -> Sandbox {
    client.create(900, &json!({ "templateID": template })).await.unwrap()
}

async fn fork(client: &Client, sandbox: &Sandbox, count: usize) -> Vec<Sandbox> {
    let body = json!({ "count": count, "timeout": 900 });
    let answer = client.post(&format!("/sandboxes/{}/fork", sandbox.id), &body).await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    let children = answer.json();
    let child = |child: &Value| {
        let text = |field: &str| child["sandbox"][field].as_str().unwrap_or_default().to_owned();
        assert!(!text("sandboxID").is_empty(), "{child}");
        Sandbox { id: text("sandboxID"), token: text("envdAccessToken") }
    };
    let children: Vec<Sandbox> = children.as_array().unwrap().iter().map(child).collect();
    assert_eq!(children.len(), count);
    children
}

/// The program in the guest goes on in each of them, and each is a machine of its own.
#[tokio::test]
async fn children_of_a_fork_go_on_and_are_machines_of_their_own() {
    let client = shared();
    let parent =
        client.create(900, &json!({ "metadata": { "test": "fork" }, "envVars": { "KEPT": "yes" } })).await;
    let parent = parent.unwrap();
    let mut witness = Witness::start(&client, &parent).await.unwrap();
    client.run(&parent, "echo before >/root/file").await.unwrap();
    // Draws random bytes all the time, without a pause in which a sibling could be told who it is.
    let drawing = "while :; do head -c 64 /dev/urandom | od -An -tx1 | tr -d ' \\n' >/dev/shm/new; \
                   mv /dev/shm/new /dev/shm/drawn; done";
    client.run(&parent, &format!("nohup sh -c \"{drawing}\" >/dev/null 2>&1 &")).await.unwrap();
    let children = fork(&client, &parent, 3).await;
    client.run(&parent, "echo parent >/root/file").await.unwrap();
    let (mut ids, mut tokens, mut random) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let (mut machines, mut boots) = (BTreeSet::new(), BTreeSet::new());
    for (number, child) in children.iter().enumerate() {
        witness.clone().goes_on(&client, child).await.unwrap();
        assert_eq!(client.run(child, "cat /root/file").await.unwrap(), "before");
        client.run(child, &format!("echo child {number} >/root/file")).await.unwrap();
        assert_eq!(client.run(child, "hostname").await.unwrap(), child.id);
        assert_eq!(client.run(child, "cat /run/e2b/.E2B_SANDBOX_ID").await.unwrap(), child.id);
        assert_eq!(client.run(child, "echo $KEPT").await.unwrap(), "yes");
        assert!(
            random.insert(client.run(child, "cat /dev/shm/drawn").await.unwrap()),
            "the same random bytes"
        );
        assert!(random.insert(client.run(child, "head -c 1024 /dev/urandom | sha256sum").await.unwrap()));
        let before = now();
        let clock: f64 = client.run(child, "date +%s.%N").await.unwrap().parse().unwrap();
        // Give or take what a loaded machine without virtualisation drifts.
        assert!(before - 1.0 < clock && clock < now() + 1.0, "{before} {clock}");
        machines.insert(client.run(child, MACHINE_ID).await.unwrap());
        boots.insert(boot_of(&client, child).await.unwrap());
        let detail = client.detail(child).await.unwrap();
        assert_eq!((&detail["parentID"], &detail["metadata"]["test"]), (&json!(parent.id), &json!("fork")));
        assert!(ids.insert(child.id.clone()) && tokens.insert(child.token.clone()));
    }
    assert!(random.insert(client.run(&parent, "cat /dev/shm/drawn").await.unwrap()), "those of the parent");
    assert!(random.insert(client.run(&parent, "head -c 1024 /dev/urandom | sha256sum").await.unwrap()));
    machines.insert(client.run(&parent, MACHINE_ID).await.unwrap());
    assert_eq!((machines.len(), boots.len()), (4, 1), "machine ids are their own, the boot is one");
    assert!(!ids.contains(&parent.id) && !tokens.contains(&parent.token));
    witness.goes_on(&client, &parent).await.unwrap();
    assert_eq!(client.run(&parent, "cat /root/file").await.unwrap(), "parent");
    // Neither token opens the other's.
    let stranger = Sandbox { id: children[0].id.clone(), token: parent.token.clone() };
    assert!(client.run(&stranger, "true").await.is_err());
    for sandbox in children.iter().chain([&parent]) {
        assert!(client.kill(sandbox).await.unwrap());
    }
}

/// Labels, environment of new programs and life time of each; what is not asked for is as of the parent.
#[tokio::test]
async fn each_child_of_a_fork_has_what_was_asked_for_it() {
    let client = shared();
    let parent =
        client.create(900, &json!({ "metadata": { "arm": "none" }, "envVars": { "KEPT": "yes" } })).await;
    let parent = parent.unwrap();
    let own = json!({ "metadata": { "arm": "a" }, "envVars": { "EXTRA": "one" }, "timeout": 600 });
    let body = json!({ "timeout": 1800, "children": [own, {}] });
    let answer = client.post(&format!("/sandboxes/{}/fork", parent.id), &body).await.unwrap();
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    let children = answer.json();
    let mut ends = Vec::new();
    for (number, (arm, extra)) in [("a", "one"), ("none", "")].into_iter().enumerate() {
        let text = |field: &str| children[number]["sandbox"][field].as_str().unwrap_or_default().to_owned();
        let child = Sandbox { id: text("sandboxID"), token: text("envdAccessToken") };
        assert_eq!(
            client.run(&child, "echo $KEPT $EXTRA").await.unwrap().trim(),
            format!("yes {extra}").trim()
        );
        let detail = client.detail(&child).await.unwrap();
        assert_eq!(detail["metadata"]["arm"], arm);
        ends.push(detail["endAt"].as_str().unwrap().to_owned());
        assert!(client.kill(&child).await.unwrap());
    }
    // They are written so that the later one comes later.
    assert!(ends[0] < ends[1], "600 seconds and 1800: {ends:?}");
    assert!(client.kill(&parent).await.unwrap());
}

/// Whatever ends meanwhile: the sandbox, other children, the node.
#[tokio::test]
async fn a_snapshot_is_started_from_again_and_again() {
    let mut node = own_node(13).await.unwrap();
    let client = node.client();
    let sandbox = client.create(900, &json!({})).await.unwrap();
    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    client.run(&sandbox, "echo kept >/root/file").await.unwrap();
    let taken = snapshot(&client, &sandbox, &json!({ "name": "Setup" })).await;
    let id = taken["snapshotID"].as_str().unwrap();
    assert_eq!((&taken["names"], &taken["state"]), (&json!(["setup"]), &json!("ready")));
    let of_then = witness.clone();
    witness.goes_on(&client, &sandbox).await.unwrap();
    client.pause(&sandbox, &json!({})).await.unwrap();
    let of_paused = snapshot(&client, &sandbox, &json!({})).await;
    let disk_alone = snapshot(&client, &sandbox, &json!({ "memory": false })).await;
    let list = client.get(&format!("/snapshots?sandboxID={}", sandbox.id)).await.unwrap().json();
    assert_eq!(list.as_array().unwrap().len(), 3);
    assert!(client.kill(&sandbox).await.unwrap());

    let first = started_from(&client, "setup").await;
    of_then.clone().goes_on(&client, &first).await.unwrap();
    node.kill().unwrap();
    node.restart().await.unwrap();
    let client = node.client();
    of_then.clone().goes_on(&client, &first).await.unwrap();
    let second = started_from(&client, id).await;
    of_then.clone().goes_on(&client, &second).await.unwrap();
    let third = started_from(&client, of_paused["snapshotID"].as_str().unwrap()).await;
    witness.clone().goes_on(&client, &third).await.unwrap();
    let booted = started_from(&client, disk_alone["snapshotID"].as_str().unwrap()).await;
    witness.is_gone(&client, &booted).await.unwrap();
    for child in [&first, &second, &third, &booted] {
        assert_eq!(client.run(child, "cat /root/file").await.unwrap(), "kept");
    }
    // A child is paused and resumed like any other, also when its snapshot is deleted.
    client.run(&second, "echo second >/root/file").await.unwrap();
    assert_eq!(delete(&client, id).await, StatusCode::NO_CONTENT);
    assert_eq!(delete(&client, id).await, StatusCode::NOT_FOUND);
    client.pause(&second, &json!({ "durability": "local" })).await.unwrap();
    client.resume(&second).await.unwrap();
    of_then.clone().goes_on(&client, &second).await.unwrap();
    assert_eq!(client.run(&second, "cat /root/file").await.unwrap(), "second");
    for child in [&first, &second, &third, &booted] {
        assert!(client.kill(child).await.unwrap());
    }
    for left in [&of_paused, &disk_alone] {
        assert_eq!(delete(&client, left["snapshotID"].as_str().unwrap()).await, StatusCode::NO_CONTENT);
    }
    nothing_is_stored(&node).await;
}

/// Of sandboxes and snapshots; what belongs to the template stays.
async fn nothing_is_stored(node: &Node) {
    let data_dir = &node.settings().data_dir;
    let is_ours = |thing: &String| {
        let name = thing.rsplit('/').next().unwrap_or_default();
        ["memory-", "n-", "h-", "x-", "s-", "k-", "m-"].iter().any(|first| name.starts_with(first))
    };
    let asked = Instant::now();
    loop {
        let left: Vec<String> = stored_things(data_dir).unwrap().into_iter().filter(is_ours).collect();
        let directories = std::fs::read_dir(data_dir.join("snapshots")).unwrap().count();
        if left.is_empty() && directories == 0 {
            return;
        }
        assert!(asked.elapsed() < PATIENCE, "{left:?} and {directories} directories are left");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Three levels, of which the middle ones are ended.
#[tokio::test]
async fn children_of_children_of_children_go_on() {
    let client = shared();
    let root = client.create(900, &json!({})).await.unwrap();
    let witness = Witness::start(&client, &root).await.unwrap();
    let mut level = vec![root];
    for depth in 0..3 {
        let mut next = Vec::new();
        // All leaves of the last level, two of each before: what is below has been seen by then.
        for (number, sandbox) in level.iter().enumerate() {
            client.run(sandbox, &format!("echo {depth}-{number} >>/root/path")).await.unwrap();
            next.extend(fork(&client, sandbox, if depth == 2 { 3 } else { 2 }).await);
            assert!(client.kill(sandbox).await.unwrap());
        }
        level = next;
    }
    assert_eq!(level.len(), 12);
    for (number, leaf) in level.iter().enumerate() {
        witness.clone().goes_on(&client, leaf).await.unwrap();
        let path = client.run(leaf, "cat /root/path").await.unwrap();
        let expected = format!("0-0\n1-{}\n2-{}", number / 6, number / 3);
        assert_eq!(path, expected);
        assert!(client.kill(leaf).await.unwrap());
    }
}
