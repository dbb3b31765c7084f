//! Snapshots and forks over the control plane.

use crate::harness::Harness;
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[tokio::test]
async fn bad_snapshots_and_forks_are_refused_by_the_name_of_what_is_wrong() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base"}"#).await;
    let path = |action: &str| format!("/sandboxes/{id}/{action}");
    for (action, body, word) in [
        ("snapshots", "7", "invalid body"),
        ("snapshots", r#"{"name":7}"#, "name"),
        ("snapshots", r#"{"name":"a/b"}"#, "name: "),
        ("snapshots", r#"{"name":""}"#, "name: "),
        ("snapshots", r#"{"name":"a:b c"}"#, "the tag"),
        ("snapshots", r#"{"name":"base"}"#, "is the name of a template"),
        ("snapshots", r#"{"memory":"no"}"#, "memory"),
        ("fork", "7", "invalid body"),
        ("fork", r#"{"count":0}"#, "count: 0 is not in 1 to 100"),
        ("fork", r#"{"count":101}"#, "count: 101"),
        ("fork", r#"{"timeout":0}"#, "Timeout must be greater than 0"),
        ("fork", r#"{"timeout":90000}"#, "Timeout cannot be greater than 24 hours"),
        ("fork", r#"{"count":2,"children":[{}]}"#, "children: 1 are described"),
        ("fork", r#"{"children":[{"envVars":{"":"x"}}]}"#, "envVars"),
        ("fork", r#"{"children":[{"metadata":7}]}"#, "children[0].metadata"),
    ] {
        let answer = harness.refused("POST", &path(action), body, 400, word).await;
        assert_eq!(answer.headers["should-retry"], "false", "{body}");
    }
    for query in ["limit=0", "nextToken=nonsense", "order=up"] {
        harness
            .refused("GET", &format!("/snapshots?{query}"), "", 400, query.split('=').next().unwrap())
            .await;
    }
    assert_eq!(harness.call("GET", "/snapshots", "").await.body, json!([]));
    for action in ["snapshots", "fork"] {
        harness.refused("POST", &format!("/sandboxes/inobody/{action}"), "", 404, "doesn't exist").await;
    }
    harness.refused("DELETE", "/templates/nobody", "", 404, "does not exist").await;
    harness.refused("DELETE", "/templates/base", "", 409, "is a template").await;
    assert_eq!(harness.call("GET", &format!("/sandboxes/{id}"), "").await.body["state"], "running");
}

async fn listed(harness: &Harness, query: &str) -> Vec<String> {
    let answer = harness.call("GET", &format!("/snapshots?{query}"), "").await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    let id = |item: &Value| item["snapshotID"].as_str().unwrap().to_owned();
    answer.body.as_array().unwrap().iter().map(id).collect()
}

#[tokio::test]
async fn snapshots_are_taken_listed_in_pages_started_from_and_deleted() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base"}"#).await;
    let other = harness.create(r#"{"templateID":"base"}"#).await;
    let mut ids = Vec::new();
    for body in ["", r#"{"name":"Setup"}"#, r#"{"name":"setup:v2"}"#, r#"{"memory":false}"#] {
        let taken = harness.call("POST", &format!("/sandboxes/{id}/snapshots"), body).await;
        assert_eq!(taken.status, 201, "{}", taken.body);
        let stopped: f64 = taken.headers["x-aenv-stopped-ms"].to_str().unwrap().parse().unwrap();
        assert!(stopped > 0.0 && taken.headers["server-timing"].to_str().unwrap().contains("total;dur="));
        assert_eq!((&taken.body["state"], &taken.body["sandboxID"]), (&json!("ready"), &json!(id)));
        assert_eq!(taken.body["mode"], if body.contains("memory") { "filesystem" } else { "full" });
        ids.push(taken.body["snapshotID"].as_str().unwrap().to_owned());
    }
    let newest: Vec<String> = ids.iter().rev().cloned().collect();
    assert_eq!(listed(&harness, "").await, newest);
    assert_eq!(listed(&harness, &format!("sandboxID={id}")).await, newest);
    assert_eq!(listed(&harness, &format!("sandboxID={other}")).await, Vec::<String>::new());
    assert_eq!(listed(&harness, "name=setup:v2").await, ids[2..3]);
    assert_eq!(listed(&harness, "name=setup").await, [ids[2].clone(), ids[1].clone()], "any tag of it");
    assert_eq!(listed(&harness, "name=Setup:V2").await, ids[2..3], "as names are taken");
    assert_eq!(listed(&harness, "name=none").await, Vec::<String>::new());
    let first = harness.call("GET", "/snapshots?limit=3", "").await;
    let token = first.headers["x-next-token"].to_str().unwrap();
    assert_eq!(listed(&harness, &format!("limit=3&nextToken={token}")).await, ids[..1]);

    for asked in [ids[0].as_str(), "setup", "setup:v2", ids[3].as_str()] {
        let child = harness.call("POST", "/v2/sandboxes", &json!({ "templateID": asked }).to_string()).await;
        assert_eq!(child.status, 201, "{}", child.body);
        let detail = format!("/sandboxes/{}", child.body["sandboxID"].as_str().unwrap());
        assert_eq!(harness.call("GET", &detail, "").await.body["parentID"], id);
    }
    assert!(harness.call("GET", &format!("/sandboxes/{id}"), "").await.body.get("parentID").is_none());
    for asked in ["setup%3Av2", ids[0].as_str()] {
        assert_eq!(harness.call("DELETE", &format!("/templates/{asked}"), "").await.status, 204);
        harness.refused("DELETE", &format!("/templates/{asked}"), "", 404, "does not exist").await;
    }
    assert_eq!(listed(&harness, "").await.len(), 2);
    let templates = harness.call("GET", "/templates", "").await.body;
    assert_eq!(templates.as_array().unwrap().len(), 1, "snapshots are no templates");
}

#[tokio::test]
async fn a_fork_answers_one_entry_for_each_child() {
    let harness = Harness::start(0).await;
    let wish = json!({ "templateID": "base", "metadata": { "of": "parent" } });
    let parent = harness.create(&wish.to_string()).await;
    let body = json!({ "timeout": 60, "children": [{}, { "metadata": { "arm": "b" } }] });
    let forked = harness.call("POST", &format!("/sandboxes/{parent}/fork"), &body.to_string()).await;
    assert_eq!(forked.status, 201, "{}", forked.body);
    assert!(forked.headers["server-timing"].to_str().unwrap().contains("children;dur="));
    let children = forked.body.as_array().unwrap();
    let mut ids = BTreeSet::from([parent.clone()]);
    for (child, metadata) in children.iter().zip([json!({ "of": "parent" }), json!({ "arm": "b" })]) {
        let child = &child["sandbox"];
        assert!(child["envdAccessToken"].is_string() && child["clientID"].is_string(), "{child}");
        assert!(ids.insert(child["sandboxID"].as_str().unwrap().to_owned()));
        let path = format!("/sandboxes/{}", child["sandboxID"].as_str().unwrap());
        let detail = harness.call("GET", &path, "").await.body;
        assert_eq!((&detail["metadata"], &detail["parentID"]), (&metadata, &json!(parent)));
    }
    assert_eq!(ids.len(), 3);
    assert_eq!(listed(&harness, "").await, Vec::<String>::new());
    // The default is one, that lives for 15 seconds.
    let one = harness.call("POST", &format!("/sandboxes/{parent}/fork"), "").await;
    assert_eq!((one.status.as_u16(), one.body.as_array().unwrap().len()), (201, 1));
}
