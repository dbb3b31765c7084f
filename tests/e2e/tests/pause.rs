//! Pause and resume: processes, files and memory go on where they were, whatever was killed meanwhile, and nothing is left.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::websocket::WebSocket;
use aenv_e2e::witness::{PORT, Witness, boot_of};
use aenv_e2e::{own_node, shared, shared_instance};
use aenv_testkit::client::{Client, Ended, Sandbox};
use aenv_testkit::node::Node;
use aenv_testkit::resources::{block_server_of, stored_things, vmm_of};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long something that happens by itself may take in a machine that is emulated itself, on a host that has other things to do.
const PATIENCE: Duration = Duration::from_secs(240);

async fn sandbox(client: &Client) -> Sandbox {
    client.create(900, &json!({ "metadata": { "test": "pause" } })).await.unwrap()
}

fn kill_process(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

fn kill_vmm(instance: &str, sandbox: &Sandbox) {
    kill_process(vmm_of(instance, &sandbox.id).unwrap());
}

async fn write(client: &Client, sandbox: &Sandbox, path: &str, content: String) {
    let answer = client.upload("root", sandbox, path, content.into()).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
}

async fn read(client: &Client, sandbox: &Sandbox, path: &str) -> String {
    let answer = client.download("root", sandbox, path).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.text());
    answer.text()
}

async fn listed(client: &Client, state: &str) -> Vec<String> {
    let list = client.get(&format!("/v2/sandboxes?state={state}&metadata=test%3Dpause")).await.unwrap();
    let list = list.json();
    list.as_array().unwrap().iter().map(|entry| entry["sandboxID"].as_str().unwrap().to_owned()).collect()
}

/// How far the guest's clock is off, in seconds, at least.
async fn skew(client: &Client, sandbox: &Sandbox) -> f64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let before = now();
    let guest: f64 = client.run(sandbox, "date +%s.%N").await.unwrap().parse().unwrap();
    (before - guest).max(guest - now()).max(0.0)
}

/// Again and again, from the stopped VMM and from what is stored, with a file more each time.
#[tokio::test]
async fn everything_goes_on_after_each_of_five_pauses() {
    let client = shared();
    let (instance, _) = shared_instance();
    let sandbox = sandbox(&client).await;
    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    for round in 1..=5 {
        write(&client, &sandbox, &format!("/root/file-{round}"), format!("content {round}")).await;
        assert_eq!(client.pause(&sandbox, &json!({})).await.unwrap(), "process");
        let again = client.ask_pause(&sandbox, &json!({})).await.unwrap();
        assert_eq!((again.status, &again.json()["code"]), (StatusCode::CONFLICT, &json!(409)));
        let detail = client.detail(&sandbox).await.unwrap();
        assert_eq!((&detail["state"], &detail["saved"]["number"]), (&json!("paused"), &json!(round)));
        assert!(listed(&client, "paused").await.contains(&sandbox.id));
        assert!(!listed(&client, "running").await.contains(&sandbox.id));
        assert_eq!(client.health(&sandbox).await.unwrap().status, StatusCode::BAD_GATEWAY);
        // At once, and when all of it is stored.
        match round {
            2 => kill_vmm(instance, &sandbox),
            4 => {
                let saved = client.until_local(&sandbox).await.unwrap();
                assert!(saved["saved"]["memoryLayers"].as_u64().unwrap() >= 1, "{saved}");
                assert!(saved["saved"]["diskBytes"].as_u64().unwrap() >= 4096, "{saved}");
                kill_vmm(instance, &sandbox);
            }
            _ => {}
        }
        let tier = client.resume(&sandbox).await.unwrap();
        if round % 2 == 0 {
            assert_eq!(tier, "cold");
        }
        witness.goes_on(&client, &sandbox).await.unwrap();
        for earlier in 1..=round {
            let content = read(&client, &sandbox, &format!("/root/file-{earlier}")).await;
            assert_eq!(content, format!("content {earlier}"), "after pause {round}");
        }
        assert!(listed(&client, "running").await.contains(&sandbox.id));
    }
    let resumed = client.connect(&sandbox, &json!({})).await.unwrap();
    assert_eq!(resumed.status, StatusCode::OK, "one that runs is not resumed");
    assert!(client.kill(&sandbox).await.unwrap());
}

/// Connections that clients kept go on, streams of commands break visibly, the commands do not.
#[tokio::test]
async fn after_a_long_pause_clocks_connections_and_commands_are_as_they_should_be() {
    let client = shared();
    let (instance, _) = shared_instance();
    let sandbox = sandbox(&client).await;
    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    let mut kept = client.keep().await.unwrap();
    let to_witness = || client.guest_request(&sandbox, PORT, Method::GET, "/");
    let to_daemon = || client.guest_request(&sandbox, 49983, Method::GET, "/health");
    assert_eq!(kept.get(to_witness()).await.unwrap().status, StatusCode::OK);
    assert_eq!(kept.get(to_daemon()).await.unwrap().status, StatusCode::NO_CONTENT);
    let running = {
        let (client, sandbox) = (client.clone(), sandbox.clone());
        let script = "echo $$ >/root/pid; until [ -e /root/go ]; do sleep 0.2; done; echo late; exit 3";
        tokio::spawn(async move { client.start("root", &sandbox, script).await })
    };
    client.run(&sandbox, "until [ -s /root/pid ]; do sleep 0.1; done").await.unwrap();

    client.pause(&sandbox, &json!({})).await.unwrap();
    // Broken, or ended by an error: never an end that looks like a success.
    if let Ok(answer) = tokio::time::timeout(PATIENCE, running).await.unwrap().unwrap() {
        assert!(Ended::of(&answer).is_err(), "{}", answer.text());
    }
    tokio::time::sleep(Duration::from_secs(20)).await;
    client.resume(&sandbox).await.unwrap();
    assert_eq!(kept.get(to_witness()).await.unwrap().status, StatusCode::OK);
    assert_eq!(kept.get(to_daemon()).await.unwrap().status, StatusCode::NO_CONTENT);
    let hot = skew(&client, &sandbox).await;
    assert!(hot <= 0.5, "{hot} s");
    witness.goes_on(&client, &sandbox).await.unwrap();

    client.pause(&sandbox, &json!({ "durability": "local" })).await.unwrap();
    kill_vmm(instance, &sandbox);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(client.resume(&sandbox).await.unwrap(), "cold");
    assert_eq!(kept.get(to_daemon()).await.unwrap().status, StatusCode::NO_CONTENT);
    assert_eq!(kept.get(to_witness()).await.unwrap().status, StatusCode::OK);
    let cold = skew(&client, &sandbox).await;
    assert!(cold <= 0.5, "{cold} s");
    witness.goes_on(&client, &sandbox).await.unwrap();

    // The command went on all the time, and is watched again.
    let pid: u64 = read(&client, &sandbox, "/root/pid").await.trim().parse().unwrap();
    let watched = {
        let (client, sandbox) = (client.clone(), sandbox.clone());
        tokio::spawn(async move { client.attach("root", &sandbox, pid).await })
    };
    // What is written before somebody watches is not kept.
    tokio::time::sleep(Duration::from_secs(1)).await;
    client.run(&sandbox, "touch /root/go").await.unwrap();
    let ended = Ended::of(&watched.await.unwrap().unwrap()).unwrap();
    assert_eq!((ended.stdout.as_str(), ended.exit_code), ("late\n", 3));
    assert!(client.kill(&sandbox).await.unwrap());
}

/// Nothing is lost by a pause that nobody asked for, nor is the first thing that wakes it.
#[tokio::test]
async fn a_sandbox_is_paused_when_its_time_is_over_and_traffic_wakes_it() {
    let client = shared();
    let more =
        json!({ "metadata": { "test": "pause" }, "autoPause": true, "autoResume": { "enabled": true } });
    let sandbox = client.create(900, &more).await.unwrap();
    let detail = client.detail(&sandbox).await.unwrap();
    assert_eq!(detail["lifecycle"], json!({ "onTimeout": "pause", "autoResume": true }));
    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    // Nothing but the pause itself may write this to the disk.
    client.run(&sandbox, "echo unflushed >/root/last").await.unwrap();
    let time = format!("/sandboxes/{}/timeout", sandbox.id);
    assert_eq!(client.post(&time, &json!({ "timeout": 1 })).await.unwrap().status, StatusCode::NO_CONTENT);
    // It is told as paused from the moment it stops, and what it saved once that is there.
    let is_saved = |detail: &Value| detail["state"] == "paused" && !detail["saved"].is_null();
    let paused = client.until(&sandbox, PATIENCE, is_saved).await.unwrap();
    assert_eq!(paused["saved"]["mode"], "full");
    assert_eq!(client.post(&time, &json!({ "timeout": 60 })).await.unwrap().status, StatusCode::CONFLICT);

    // The first thing that anybody does with it.
    assert_eq!(client.run(&sandbox, "cat /root/last").await.unwrap(), "unflushed");
    witness.goes_on(&client, &sandbox).await.unwrap();
    assert_eq!(client.detail(&sandbox).await.unwrap()["state"], "running");

    client.pause(&sandbox, &json!({})).await.unwrap();
    let woken = visits(&client, &sandbox, 4).await;
    assert_eq!(woken, [StatusCode::OK; 4], "all that came at once");
    witness.goes_on(&client, &sandbox).await.unwrap();

    // A connect without a body has a default, and its first command works.
    client.pause(&sandbox, &json!({})).await.unwrap();
    let path = format!("/v2/sandboxes/{}/connect", sandbox.id);
    assert_eq!(client.call(Method::POST, &path, "").await.unwrap().status, StatusCode::CREATED);
    assert_eq!(client.run(&sandbox, "cat /root/last").await.unwrap(), "unflushed");
    assert!(client.kill(&sandbox).await.unwrap());
}

/// Its connection breaks visibly, the one that a client opens then wakes it, and the program goes on. One that is to sleep is
/// not booted by that, however early the client is.
#[tokio::test]
async fn a_web_socket_wakes_what_was_paused_under_it() {
    let client = shared();
    let more = json!({ "metadata": { "test": "pause" }, "autoResume": { "enabled": true } });
    let sandbox = client.create(900, &more).await.unwrap();
    let mut socket = WebSocket::start(&client, &sandbox).await.unwrap();
    assert_eq!(socket.say("first").await.unwrap(), 1);
    for (count, early) in [(2, true), (3, false)] {
        let reconnected = {
            let (client, sandbox) = (client.clone(), sandbox.clone());
            tokio::spawn(async move {
                socket.until_broken().await?;
                if !early {
                    client
                        .until(&sandbox, PATIENCE, |detail| !detail["saved"]["pending"].is_string())
                        .await?;
                }
                WebSocket::until_open(&client, &sandbox, |status| status == StatusCode::CONFLICT).await
            })
        };
        client.pause(&sandbox, &json!({})).await.unwrap();
        socket = reconnected.await.unwrap().unwrap();
        assert_eq!(socket.say("again").await.unwrap(), count, "the program did not go on");
        assert_eq!(client.detail(&sandbox).await.unwrap()["state"], "running");
    }
    let refused = {
        let (client, sandbox) = (client.clone(), sandbox.clone());
        tokio::spawn(async move {
            socket.until_broken().await?;
            let mut seen = Vec::new();
            for _ in 0..10 {
                seen.push(WebSocket::open(&client, &sandbox).await?.err());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            anyhow::Ok(seen)
        })
    };
    client.pause(&sandbox, &json!({ "memory": false })).await.unwrap();
    assert_eq!(refused.await.unwrap().unwrap(), [Some(StatusCode::CONFLICT); 10]);
    assert_eq!(client.detail(&sandbox).await.unwrap()["state"], "paused");
    assert!(client.kill(&sandbox).await.unwrap());
}

/// The answers to requests that reach the program in the guest at once.
async fn visits(client: &Client, sandbox: &Sandbox, count: usize) -> Vec<StatusCode> {
    let asked: Vec<_> = (0..count)
        .map(|_| {
            let (client, sandbox) = (client.clone(), sandbox.clone());
            tokio::spawn(async move { client.guest_get(&sandbox, PORT, "/").await.unwrap().status })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(asked.await.unwrap());
    }
    answers
}

/// What comes after a boot can be paused as before.
#[tokio::test]
async fn a_disk_is_booted_when_no_memory_was_kept_or_a_boot_is_asked_for() {
    let client = shared();
    let (instance, _) = shared_instance();
    let sandbox = sandbox(&client).await;
    let witness = Witness::start(&client, &sandbox).await.unwrap();
    client.run(&sandbox, "echo kept >/root/kept").await.unwrap();
    client.pause(&sandbox, &json!({ "memory": false })).await.unwrap();
    let paused = client.detail(&sandbox).await.unwrap();
    assert_eq!((&paused["state"], &paused["pauseMode"]), (&json!("paused"), &json!("filesystem")));
    // The same token works: the guest booted, and was told who it is.
    client.resume(&sandbox).await.unwrap();
    witness.is_gone(&client, &sandbox).await.unwrap();
    assert_eq!(read(&client, &sandbox, "/root/kept").await, "kept\n");
    assert_eq!(client.run(&sandbox, "cat /etc/hostname").await.unwrap(), sandbox.id);

    let mut witness = Witness::start(&client, &sandbox).await.unwrap();
    client.pause(&sandbox, &json!({})).await.unwrap();
    client.until_local(&sandbox).await.unwrap();
    kill_vmm(instance, &sandbox);
    assert_eq!(client.resume(&sandbox).await.unwrap(), "cold");
    witness.goes_on(&client, &sandbox).await.unwrap();

    client.run(&sandbox, "echo second >/root/second").await.unwrap();
    client.pause(&sandbox, &json!({})).await.unwrap();
    client.resume_with(&sandbox, &json!({ "timeout": 600, "onResume": "reboot" })).await.unwrap();
    witness.is_gone(&client, &sandbox).await.unwrap();
    assert_eq!(read(&client, &sandbox, "/root/second").await, "second\n");
    assert!(client.kill(&sandbox).await.unwrap());
}

/// None is stuck in between, and none is answered as if it ran when it does not.
#[tokio::test]
async fn pauses_resumes_and_kills_that_meet_end_in_one_of_them() {
    let client = shared();
    let (instance, _) = shared_instance();
    let sandbox = sandbox(&client).await;
    let boot = boot_of(&client, &sandbox).await.unwrap();
    for _ in 0..5 {
        client.pause(&sandbox, &json!({})).await.unwrap();
        let resumes = together(&client, &sandbox, &["connect"; 3]).await;
        assert!(resumes.iter().all(StatusCode::is_success), "{resumes:?}");
        assert!(resumes.contains(&StatusCode::CREATED), "{resumes:?}");
        let both = together(&client, &sandbox, &["pause", "connect"]).await;
        let known = |status: &StatusCode| status.is_success() || *status == StatusCode::CONFLICT;
        assert!(both.iter().all(known), "{both:?}");
        let connected = client.connect(&sandbox, &json!({ "timeout": 600 })).await.unwrap();
        assert!(connected.status.is_success(), "{}", connected.text());
        assert_eq!(boot_of(&client, &sandbox).await.unwrap(), boot);
    }
    let resume = format!("/sandboxes/{}/resume", sandbox.id);
    let refused = client.post(&resume, &json!({})).await.unwrap();
    assert_eq!(refused.status, StatusCode::CONFLICT, "{}", refused.text());

    client.pause(&sandbox, &json!({})).await.unwrap();
    assert!(client.kill(&sandbox).await.unwrap(), "a paused one can be deleted");
    assert!(vmm_of(instance, &sandbox.id).is_err(), "its VMM stays");
    for path in ["connect", "pause", "resume"] {
        let path = format!("/sandboxes/{}/{path}", sandbox.id);
        let answer = client.post(&path, &json!({ "timeout": 60 })).await.unwrap();
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
    }
}

/// The answers to requests of one sandbox that are sent at once.
async fn together(client: &Client, sandbox: &Sandbox, words: &[&'static str]) -> Vec<StatusCode> {
    let asked: Vec<_> = words
        .iter()
        .map(|word| {
            let (client, path) = (client.clone(), format!("/sandboxes/{}/{word}", sandbox.id));
            tokio::spawn(async move { client.post(&path, &json!({ "timeout": 600 })).await.unwrap().status })
        })
        .collect();
    let mut answers = Vec::new();
    for asked in asked {
        answers.push(asked.await.unwrap());
    }
    answers
}

/// Node, block service and VMMs are killed while sandboxes are paused, and while one is being paused.
#[tokio::test]
async fn paused_sandboxes_survive_the_death_of_everything_and_leave_nothing() {
    let mut node = own_node(10).await.unwrap();
    let client = node.client();
    let first = client.create(60, &json!({})).await.unwrap();
    assert!(client.kill(&first).await.unwrap());
    let before = settled(&node, |stored| !stored.iter().any(|name| name.contains(&first.id))).await;

    let (hot, cold, caught) = (sandbox(&client).await, sandbox(&client).await, sandbox(&client).await);
    let mut witnesses = Vec::new();
    for sandbox in [&hot, &cold, &caught] {
        witnesses.push(Witness::start(&client, sandbox).await.unwrap());
    }
    client.pause(&hot, &json!({})).await.unwrap();
    client.pause(&cold, &json!({})).await.unwrap();
    let pausing = {
        let (client, caught) = (client.clone(), caught.clone());
        tokio::spawn(async move { client.pause(&caught, &json!({})).await })
    };
    tokio::time::sleep(Duration::from_millis(50)).await;
    node.kill().unwrap();
    // Whether it was answered is not said: only what was is kept.
    drop(pausing.await.unwrap());
    kill_vmm("t10", &cold);
    node.restart().await.unwrap();
    for sandbox in [&hot, &cold] {
        assert_eq!(client.detail(sandbox).await.unwrap()["state"], "paused");
    }
    assert_eq!(client.resume(&cold).await.unwrap(), "cold");
    client.resume(&hot).await.unwrap();
    let connected = client.connect(&caught, &json!({ "timeout": 600 })).await.unwrap();
    assert!(connected.status.is_success(), "{}", connected.text());
    for (witness, sandbox) in witnesses.iter_mut().zip([&hot, &cold, &caught]) {
        witness.goes_on(&client, sandbox).await.unwrap();
    }

    // The block service, with a disk and a memory image that nobody uses and with some that somebody does.
    client.pause(&hot, &json!({})).await.unwrap();
    client.pause(&cold, &json!({ "durability": "local" })).await.unwrap();
    let server = block_server_of("t10").unwrap();
    kill_process(server);
    kill_vmm("t10", &cold);
    assert_eq!(client.resume(&cold).await.unwrap(), "cold");
    client.resume(&hot).await.unwrap();
    assert_ne!(block_server_of("t10").unwrap(), server);
    for (witness, sandbox) in witnesses.iter_mut().zip([&hot, &cold, &caught]) {
        witness.goes_on(&client, sandbox).await.unwrap();
    }

    // A node that keeps no stopped VMM.
    client.pause(&hot, &json!({})).await.unwrap();
    node.kill().unwrap();
    node.set("AENV_HOT_SECONDS", "0");
    node.restart().await.unwrap();
    let cooled = |detail: &Value| detail["saved"]["tier"] == "cold" && detail["saved"]["pending"].is_null();
    client.until(&hot, PATIENCE, cooled).await.unwrap();
    assert!(vmm_of("t10", &hot.id).is_err(), "its VMM stays");
    assert_eq!(client.resume(&hot).await.unwrap(), "cold");
    witnesses[0].goes_on(&client, &hot).await.unwrap();

    // Paused cold, paused with its VMM, running.
    client.pause(&hot, &json!({})).await.unwrap();
    client.until(&hot, PATIENCE, cooled).await.unwrap();
    client.pause(&cold, &json!({})).await.unwrap();
    for sandbox in [&hot, &cold, &caught] {
        assert!(client.kill(sandbox).await.unwrap());
    }
    settled(&node, |stored| stored == before).await;
    node.purge().unwrap();
    let mut left = node.resources().unwrap();
    left.sandbox_directories.clear();
    assert!(left.is_nothing(), "{left:?}");
}

/// Waits until the node has no VM, and stores what it should; gives that.
async fn settled(node: &Node, wanted: impl Fn(&[String]) -> bool) -> Vec<String> {
    let asked = Instant::now();
    loop {
        let resources = node.resources().unwrap();
        let stored = stored_things(&node.settings().data_dir).unwrap();
        if resources.processes.is_empty() && resources.sandbox_directories.is_empty() && wanted(&stored) {
            return stored;
        }
        assert!(asked.elapsed() < PATIENCE, "not as it should be: {resources:?} {stored:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
