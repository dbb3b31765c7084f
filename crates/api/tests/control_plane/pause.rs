//! Pausing and resuming over the control plane.

use crate::harness::{Harness, KEY};
use aenv_api::Server;
use aenv_orchestrator::SandboxState;
use aenv_testkit::client::Client;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn bad_pauses_and_resumes_are_refused_by_the_name_of_what_is_wrong() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base"}"#).await;
    let path = |action: &str| format!("/sandboxes/{id}/{action}");
    for (action, body, word) in [
        ("pause", "7", "invalid body"),
        ("pause", r#"{"memory":"no"}"#, "memory"),
        ("pause", r#"{"durability":"forever"}"#, "durability"),
        ("pause", r#"{"durability":"published"}"#, "durability: `published` needs a repository"),
        ("connect", r#"{"timeout":10,"memory":1}"#, "memory"),
        ("connect", r#"{"timeout":10,"onResume":"explode"}"#, "onResume"),
        ("connect", r#"{"timeout":10,"onResume":"reboot","memory":true}"#, "onResume: `reboot` contradicts"),
        ("resume", r#"{"timeout":0}"#, "Timeout must be greater than 0"),
        ("resume", r#"{"timeout":90000}"#, "Timeout cannot be greater than 24 hours"),
    ] {
        let answer = harness.refused("POST", &path(action), body, 400, word).await;
        assert_eq!(answer.headers["should-retry"], "false");
    }
    // What means nothing to a sandbox that runs does it no harm.
    let answer = harness.call("POST", &path("connect"), r#"{"timeout":10,"memory":false}"#).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(harness.call("GET", &format!("/sandboxes/{id}"), "").await.body["state"], "running");
}

#[tokio::test]
async fn what_becomes_of_a_sandbox_in_the_end_is_shown() {
    let harness = Harness::start(0).await;
    for (fields, lifecycle) in [
        ("", json!({"onTimeout": "kill", "autoResume": false})),
        (r#","autoPause":true"#, json!({"onTimeout": "pause", "autoResume": false})),
        (r#","autoPause":true,"autoPauseMemory":false"#, json!({"onTimeout": "pause", "autoResume": false})),
        (
            r#","autoPause":true,"autoResume":{"enabled":true}"#,
            json!({"onTimeout": "pause", "autoResume": true}),
        ),
    ] {
        let id = harness.create(&format!(r#"{{"templateID":"base"{fields}}}"#)).await;
        let detail = harness.call("GET", &format!("/sandboxes/{id}"), "").await.body;
        assert_eq!(detail["lifecycle"], lifecycle, "{fields}");
        assert!(detail.get("saved").is_none() && detail.get("pauseMode").is_none(), "{detail}");
    }
}

async fn states(harness: &Harness, query: &str) -> Vec<Value> {
    let listed = harness.call("GET", &format!("/v2/sandboxes?{query}"), "").await;
    assert_eq!(listed.status, 200, "{}", listed.body);
    listed.body.as_array().unwrap().iter().map(|item| item["state"].clone()).collect()
}

#[tokio::test]
async fn a_sandbox_is_paused_once_and_goes_on_as_the_same() {
    let harness = Harness::start(0).await;
    let created = harness.call("POST", "/v2/sandboxes", r#"{"templateID":"base","timeout":100}"#).await.body;
    let id = created["sandboxID"].as_str().unwrap();
    let path = |action: &str| format!("/sandboxes/{id}/{action}");
    for (number, body, level) in
        [(1, "", "process"), (2, "{}", "process"), (3, r#"{"durability":"local"}"#, "local")]
    {
        let paused = harness.call("POST", &path("pause"), body).await;
        assert_eq!((paused.status.as_u16(), &paused.body), (204, &json!("")));
        let reached = paused.headers["x-aenv-durability"].to_str().unwrap();
        assert!(reached == level || reached == "local", "{reached}");
        assert!(paused.headers["server-timing"].to_str().unwrap().contains("total;dur="));
        harness.refused("POST", &path("pause"), "", 409, "already paused").await;
        let refused = harness.refused("POST", &path("timeout"), r#"{"timeout":9}"#, 409, "is paused").await;
        assert_eq!(refused.body["error_code"], "sandbox_paused");
        harness.refused("POST", &path("refreshes"), "", 409, "is paused").await;

        let detail = harness.call("GET", &format!("/sandboxes/{id}"), "").await.body;
        assert_eq!((&detail["state"], &detail["pauseMode"]), (&json!("paused"), &json!("full")));
        assert_eq!(detail["saved"]["number"], number);
        assert_eq!(states(&harness, "state=paused").await, ["paused"]);
        assert!(states(&harness, "state=running").await.is_empty());
        let old = harness.call("GET", "/sandboxes", "").await.body;
        assert_eq!(old, json!([]), "the old list shows the running ones alone");

        let (resume, status) = if number == 2 {
            (harness.call("POST", &path("resume"), "").await, 201)
        } else {
            (harness.call("POST", &format!("/v2/sandboxes/{id}/connect"), "").await, 201)
        };
        assert_eq!(resume.status, status, "{}", resume.body);
        assert!(resume.headers.contains_key("x-aenv-tier"));
        assert_eq!(resume.body["sandboxID"], id);
        assert_eq!(resume.body["envdAccessToken"], created["envdAccessToken"]);
        let again = harness.call("POST", &path("connect"), r#"{"timeout":10}"#).await;
        assert_eq!(again.status, 200, "it runs already");
        harness.refused("POST", &path("resume"), "", 409, "is already running").await;
    }
}

#[tokio::test]
async fn a_paused_sandbox_is_killed_without_being_resumed() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base"}"#).await;
    assert_eq!(harness.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status, 204);
    assert_eq!(harness.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 204);
    harness.refused("GET", &format!("/sandboxes/{id}"), "", 404, "doesn't exist").await;
    harness.refused("POST", &format!("/sandboxes/{id}/pause"), "", 404, "doesn't exist").await;
}

/// A node on a port, and its client.
struct Served {
    client: Client,
    shutdown: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

impl Served {
    async fn start(harness: &Harness) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::new(&listener.local_addr().unwrap().to_string(), KEY);
        let server = Server::new(harness.router.clone(), Arc::new(harness.orchestrator.clone()));
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(server.run(listener, shutdown.clone()));
        Self { client, shutdown, serving }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.serving.await.unwrap();
    }
}

async fn seconds_left(harness: &Harness, id: &str) -> i64 {
    let detail = harness.call("GET", &format!("/sandboxes/{id}"), "").await.body;
    let end: jiff::Timestamp = detail["endAt"].as_str().unwrap().parse().unwrap();
    end.duration_since(jiff::Timestamp::now()).as_secs()
}

#[tokio::test]
async fn traffic_wakes_a_sandbox_that_is_to_be_woken_time_and_again_and_no_other() {
    let harness = Harness::start(0).await;
    let served = Served::start(&harness).await;
    let client = &served.client;
    let wish = json!({"autoPause": true, "autoResume": {"enabled": true}});
    let sandbox = client.create(60, &wish).await.unwrap();
    let pause = |id: String| {
        let harness = &harness;
        async move { harness.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status }
    };
    for _ in 0..3 {
        assert_eq!(client.health(&sandbox).await.unwrap().status, 204);
        assert_eq!(pause(sandbox.id.clone()).await, 204);
        let requests = (0..8).map(|_| client.health(&sandbox));
        for answer in futures_util::future::join_all(requests).await {
            assert_eq!(answer.unwrap().status, 204);
        }
        assert_eq!(states(&harness, "").await, ["running"]);
        let left = seconds_left(&harness, &sandbox.id).await;
        assert!((280..=300).contains(&left), "{left} seconds, five minutes at least were due");
    }
    assert!(client.kill(&sandbox).await.unwrap());

    for (wish, pause_body) in [
        (json!({"autoPause": true}), ""),
        // What would have to boot is not woken by just anybody.
        (json!({"autoResume": {"enabled": true}}), r#"{"memory":false}"#),
    ] {
        let sandbox = client.create(60, &wish).await.unwrap();
        let path = format!("/sandboxes/{}/pause", sandbox.id);
        assert_eq!(harness.call("POST", &path, pause_body).await.status, 204);
        let answer = client.health(&sandbox).await.unwrap();
        assert_eq!(answer.status, 502, "{wish}");
        assert_eq!(answer.json()["message"], "The sandbox was not found");
        assert_eq!(states(&harness, "").await, ["paused"]);
        assert!(client.kill(&sandbox).await.unwrap());
    }
    served.stop().await;
}

#[tokio::test]
async fn a_sandbox_whose_time_is_over_is_paused_where_that_was_wished() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base","timeout":1,"autoPause":true}"#).await;
    let is_paused = || {
        let view = harness.orchestrator.get(&id.parse().unwrap());
        view.is_ok_and(|view| view.saved.is_some() && view.state == SandboxState::Paused)
    };
    harness.eventually("it is paused", is_paused).await;
    let resumed = harness.call("POST", &format!("/v2/sandboxes/{id}/connect"), "").await;
    assert_eq!((resumed.status.as_u16(), &resumed.body["sandboxID"]), (201, &json!(id)));
}
