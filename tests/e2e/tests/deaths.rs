//! The block service and VMMs are killed in the middle of pauses and resumes: what was saved is there, and can be resumed.
//!
//! The moments are those that a request, and what is shown of a sandbox, let one see from outside, and some milliseconds after the
//! request was sent. Which step that hits is not known: whatever it is, the sandbox runs, is paused, or is lost with a cause, and
//! only a state that was never said to be saved may be gone.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::{area, own_settings, shared_instance};
use aenv_testkit::client::{Answer, Client, Sandbox};
use aenv_testkit::node::Node;
use aenv_testkit::resources::{block_server_of, vmm_of};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

const INSTANCE: &str = "t12";
/// After a request was sent, in milliseconds: spread over what a pause and a cold resume take.
const MOMENTS: [u64; 4] = [0, 8, 40, 160];
/// For what has to happen by itself.
const PATIENCE: Duration = Duration::from_secs(60);

fn kill(pid: u32) {
    // One that has just ended by itself is as dead.
    let _output = Command::new("kill").args(["-9", &pid.to_string()]).output().unwrap();
}

/// A node that keeps no stopped VMMs: each resume starts one from what was saved.
async fn cold_node() -> Node {
    let mut settings = own_settings(12, &area().join(INSTANCE));
    settings.variables.push(("AENV_HOT_SECONDS".to_owned(), "0".to_owned()));
    Node::start_with_templates_of(settings, &shared_instance().1).await.unwrap()
}

async fn write(client: &Client, sandbox: &Sandbox, value: u64) {
    client
        .run(sandbox, &format!("echo {value} >/dev/shm/value; echo {value} >/home/user/value"))
        .await
        .unwrap();
}

/// What is in its memory and on its disk, which are of one moment.
async fn value(client: &Client, sandbox: &Sandbox) -> u64 {
    let values = client.run(sandbox, "cat /dev/shm/value /home/user/value").await.unwrap();
    let (memory, disk) = values.split_once('\n').unwrap();
    assert_eq!(memory, disk.trim(), "memory and disk are not of one moment");
    memory.parse().unwrap()
}

/// What is known of a sandbox when it has come to rest: its state, or why it was lost.
async fn at_rest(client: &Client, sandbox: &Sandbox) -> Value {
    let asked = Instant::now();
    loop {
        let detail = client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap().json();
        let is_lost = !detail["error_code"].is_null() || detail["state"] == "lost";
        let pid = vmm_of(INSTANCE, &sandbox.id).ok();
        if is_lost
            || detail["state"] == "paused" && pid.is_none()
            || detail["state"] == "running" && pid.is_some()
        {
            return detail;
        }
        assert!(asked.elapsed() < PATIENCE, "it does not come to rest, VMM {pid:?}: {detail}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sends a request, and kills after so many milliseconds.
async fn with_death(
    request: impl Future<Output = anyhow::Result<Answer>> + Send + 'static,
    milliseconds: u64,
    death: impl FnOnce(),
) -> Answer {
    let request = tokio::spawn(request);
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    death();
    request.await.unwrap().unwrap()
}

fn ask_pause(
    client: &Client,
    sandbox: &Sandbox,
) -> impl Future<Output = anyhow::Result<Answer>> + Send + 'static {
    let (client, sandbox) = (client.clone(), sandbox.clone());
    async move { client.ask_pause(&sandbox, &json!({})).await }
}

fn ask_resume(
    client: &Client,
    sandbox: &Sandbox,
) -> impl Future<Output = anyhow::Result<Answer>> + Send + 'static {
    let (client, sandbox) = (client.clone(), sandbox.clone());
    async move { client.connect(&sandbox, &json!({ "timeout": 600 })).await }
}

async fn nothing_is_left(mut node: Node) {
    let asked = Instant::now();
    loop {
        let left = node.resources().unwrap();
        if left.processes.is_empty() && left.sandbox_directories.is_empty() {
            break;
        }
        assert!(asked.elapsed() < PATIENCE, "{left:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    node.purge().unwrap();
    let left = node.resources().unwrap();
    assert!(left.is_nothing(), "{left:?}");
}

/// One after the other, since both use the instance `t12`.
#[tokio::test]
async fn deaths_in_the_middle_of_pauses_and_resumes_lose_nothing_that_was_saved() {
    let node = cold_node().await;
    let client = node.client();
    block_service(&client).await;
    vmms(&client).await;
    nothing_is_left(node).await;
}

/// Nobody sees more of its death than that something takes longer.
async fn block_service(client: &Client) {
    let sandbox = client.create(600, &json!({})).await.unwrap();
    for (round, moment) in (1..).zip(MOMENTS) {
        write(client, &sandbox, round).await;
        block_service_is_there().await;
        let death = || kill(block_server_of(INSTANCE).unwrap());
        let paused = with_death(ask_pause(client, &sandbox), moment, death).await;
        assert_eq!(paused.status, 204, "pause, {moment} ms: {}", paused.text());
        // While its memory is stored.
        let detail = client.detail(&sandbox).await.unwrap();
        if !detail["saved"]["pending"].is_null() {
            kill_when_it_answers(client, &sandbox).await;
        }
        client.until_local(&sandbox).await.unwrap();
        block_service_is_there().await;
        let resumed = with_death(ask_resume(client, &sandbox), moment, || {
            kill(block_server_of(INSTANCE).unwrap());
        })
        .await;
        assert_eq!(resumed.status, 201, "resume, {moment} ms: {}", resumed.text());
        assert_eq!(value(client, &sandbox).await, round, "{moment} ms");
    }
    assert!(client.kill(&sandbox).await.unwrap());
}

/// It may just be away since it was killed last: what is known of a sandbox can be told without it.
async fn block_service_is_there() {
    let asked = Instant::now();
    while let Err(error) = block_server_of(INSTANCE) {
        assert!(asked.elapsed() < PATIENCE, "{error:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// It may just be away.
async fn kill_when_it_answers(client: &Client, sandbox: &Sandbox) {
    let asked = Instant::now();
    while asked.elapsed() < PATIENCE {
        if let Ok(server) = block_server_of(INSTANCE) {
            return kill(server);
        }
        if client.detail(sandbox).await.unwrap()["saved"]["pending"].is_null() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// What was saved before is resumed; a sandbox that ran may be lost, with its cause.
async fn vmms(client: &Client) {
    for (round, moment) in (1..).zip(MOMENTS) {
        let sandbox = client.create(600, &json!({})).await.unwrap();
        write(client, &sandbox, round).await;
        client.pause(&sandbox, &json!({ "durability": "local" })).await.unwrap();

        // As soon as there is one, and later.
        let resumed = with_death(ask_resume(client, &sandbox), 0, || {}).await;
        assert_eq!(resumed.status, 201, "{}", resumed.text());
        write(client, &sandbox, 100 + round).await;
        let pid = vmm_of(INSTANCE, &sandbox.id).unwrap();
        let paused = with_death(ask_pause(client, &sandbox), moment, || kill(pid)).await;
        let found = at_rest(client, &sandbox).await;
        let wanted = match (paused.status.as_u16(), found["state"].as_str()) {
            (204, Some("paused")) => 100 + round,
            (_, Some("paused")) => {
                assert_eq!(found["saved"]["fallback"], "vmm_killed", "{found}");
                round
            }
            // It died before anything of the pause was begun.
            (status, _) if status != 204 && found.to_string().contains("vmm_killed") => {
                assert!(client.kill(&sandbox).await.unwrap());
                continue;
            }
            _ => panic!("pause, {moment} ms: {} {}, {found}", paused.status, paused.text()),
        };
        resume_with_death(client, &sandbox, moment, wanted).await;
        assert!(client.kill(&sandbox).await.unwrap());
    }
}

/// Resumes a paused sandbox whose VMM is killed so long after it was started; then once more, unless it had been said to run.
async fn resume_with_death(client: &Client, sandbox: &Sandbox, moment: u64, wanted: u64) {
    let resuming = tokio::spawn(ask_resume(client, sandbox));
    let asked = Instant::now();
    let pid = loop {
        if let Ok(pid) = vmm_of(INSTANCE, &sandbox.id) {
            break pid;
        }
        assert!(asked.elapsed() < PATIENCE, "no VMM was started");
        tokio::time::sleep(Duration::from_millis(2)).await;
    };
    tokio::time::sleep(Duration::from_millis(moment)).await;
    kill(pid);
    let resumed = resuming.await.unwrap().unwrap();
    let found = at_rest(client, sandbox).await;
    if resumed.status == 201 {
        assert!(found.to_string().contains("vmm_killed"), "it ran, and its VMM was killed: {found}");
        return;
    }
    assert_eq!(found["state"], "paused", "{} {}, {found}", resumed.status, resumed.text());
    client.resume(sandbox).await.unwrap();
    assert_eq!(value(client, sandbox).await, wanted, "{moment} ms");
}
