//! A node that is full, or about to stop, over the control plane.

use crate::harness::Harness;
use serde_json::json;
use std::time::Duration;

const BASE: &str = r#"{"templateID":"base"}"#;
/// Memory of the guests of `base`.
const GUEST: u64 = 512 << 20;

async fn full(guests: u64) -> Harness {
    Harness::start_with(|settings| {
        settings.memory_limit_bytes = guests * GUEST;
        settings.deadlines.queue = Duration::from_millis(200);
    })
    .await
}

#[tokio::test]
async fn a_full_node_answers_503_with_what_it_lacks_and_when_to_come_back() {
    let harness = full(1).await;
    let id = harness.create(BASE).await;
    let words = "memory: 512 MiB needed, 512 MiB committed of 512 MiB, and nothing gave way within 200ms";
    for path in ["/v2/sandboxes", "/sandboxes"] {
        let answer = harness.refused("POST", path, BASE, 503, words).await;
        assert_eq!(answer.body["error_code"], "sandbox_capacity_unavailable");
        assert_eq!(answer.headers["retry-after"], "10");
        assert!(!answer.headers.contains_key("should-retry"), "clients may try again");
    }
    // A paused one gives way, and is told the same when it is to go on.
    assert_eq!(harness.call("POST", &format!("/sandboxes/{id}/pause"), "").await.status, 204);
    let other = harness.create(BASE).await;
    let connect = format!("/v2/sandboxes/{id}/connect");
    let answer = harness.refused("POST", &connect, "", 503, "memory: 512 MiB needed").await;
    assert_eq!(answer.headers["retry-after"], "10");
    assert_eq!(harness.call("GET", &format!("/sandboxes/{id}"), "").await.body["state"], "paused");
    assert_eq!(harness.call("DELETE", &format!("/sandboxes/{other}"), "").await.status, 204);
    assert_eq!(harness.call("POST", &connect, "").await.status, 201);
}

#[tokio::test]
async fn a_full_queue_is_refused_at_once() {
    let harness = Harness::start_with(|settings| {
        (settings.max_starting, settings.max_waiting) = (1, 0);
    })
    .await;
    harness.host.fail_call(aenv_testkit::Operation::Init, 0, aenv_testkit::Fault::HangBefore);
    let starting = harness.call("POST", "/v2/sandboxes", BASE);
    let second = async {
        harness.host.wait_for_hang(1).await;
        let answer = harness.refused("POST", "/v2/sandboxes", BASE, 503, "places: 1 sandboxes").await;
        assert_eq!(answer.headers["retry-after"], "2");
    };
    tokio::select! {
        answer = starting => panic!("it should hang: {answer:?}"),
        () = second => {}
    }
}

#[tokio::test]
async fn the_figures_of_a_node_are_told_to_those_with_a_key() {
    let harness = full(4).await;
    harness.host.set_available_memory(7 << 30);
    let ids = [harness.create(BASE).await, harness.create(BASE).await];
    assert_eq!(harness.call("POST", &format!("/sandboxes/{}/pause", ids[0]), "").await.status, 204);
    let answer = harness.call("GET", "/node", "").await;
    assert_eq!(
        (answer.status.as_u16(), answer.body),
        (
            200,
            json!({
                "memoryLimitBytes": 4 * GUEST, "memoryCommittedBytes": 2 * GUEST,
                "memoryAvailableBytes": 7_u64 << 30, "memoryLowBytes": 0,
                "starting": 0, "maxStarting": 3, "waiting": 0,
                "running": 1, "paused": 1, "hot": 1, "standbys": 0,
            })
        )
    );
    let request = http::Request::get("/node").body(axum::body::Body::empty()).unwrap();
    assert_eq!(harness.send(request).await.status, 401);
}

#[tokio::test]
async fn a_node_that_pauses_its_sandboxes_to_stop_begins_nothing_new() {
    let harness = Harness::start(0).await;
    let id = harness.create(BASE).await;
    harness.orchestrator.pause_all(Duration::from_secs(20)).await;
    for path in ["/v2/sandboxes".to_owned(), format!("/v2/sandboxes/{id}/connect")] {
        let answer = harness.refused("POST", &path, BASE, 503, "shutting down").await;
        assert_eq!(answer.body["error_code"], "node_shutting_down");
        assert_eq!(answer.headers["retry-after"], "5");
    }
    assert_eq!(harness.call("GET", &format!("/sandboxes/{id}"), "").await.body["state"], "paused");
}
