//! Pausing and resuming over the control plane.

use crate::harness::Harness;
use serde_json::{Value, json};

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
#[ignore = "needs the orchestrator's pause and resume"]
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
#[ignore = "needs the orchestrator's pause and resume"]
async fn a_paused_sandbox_is_killed_without_being_resumed() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base"}"#).await;
    assert_eq!(harness.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status, 204);
    assert_eq!(harness.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 204);
    harness.refused("GET", &format!("/sandboxes/{id}"), "", 404, "doesn't exist").await;
    harness.refused("POST", &format!("/sandboxes/{id}/pause"), "", 404, "doesn't exist").await;
}
