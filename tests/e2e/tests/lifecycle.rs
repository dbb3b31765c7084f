//! A sandbox from its create to its end, as seen through the API.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::shared;
use aenv_testkit::client::{Client, Sandbox};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;

async fn detail(client: &Client, sandbox: &Sandbox) -> Value {
    client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap().json()
}

fn end_of(detail: &Value) -> String {
    detail["endAt"].as_str().unwrap().to_owned()
}

fn ids(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|sandbox| sandbox["sandboxID"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_created_sandbox_is_shown_and_listed_until_it_is_killed() {
    let client = shared();
    let sandbox = client.create(60, &json!({ "metadata": { "test": "shown" } })).await.unwrap();
    let shown = detail(&client, &sandbox).await;
    assert_eq!(shown["sandboxID"], sandbox.id.as_str());
    assert_eq!(shown["state"], "running");
    assert_eq!(shown["metadata"]["test"], "shown");
    assert_eq!(client.health(&sandbox).await.unwrap().status, 204);
    assert!(ids(&client.get("/v2/sandboxes").await.unwrap().json()).contains(&sandbox.id));
    assert!(client.kill(&sandbox).await.unwrap());
    assert!(!client.kill(&sandbox).await.unwrap(), "a second kill finds nothing");
    let gone = client.get(&format!("/sandboxes/{}", sandbox.id)).await.unwrap();
    assert_eq!((gone.status, &gone.json()["code"]), (StatusCode::NOT_FOUND, &json!(404)));
    let health = client.health(&sandbox).await.unwrap();
    assert_eq!(health.status, StatusCode::BAD_GATEWAY);
    assert_eq!(health.json()["message"], "The sandbox was not found");
}

#[tokio::test]
async fn lists_are_filtered_by_metadata_and_state_and_come_in_pages() {
    let client = shared();
    let mut made = Vec::new();
    for number in 0..3 {
        let metadata = json!({ "metadata": { "group": "p a&g=e", "number": number.to_string() } });
        made.push(client.create(120, &metadata).await.unwrap());
    }
    // Encoded three times, as E2B's clients do: value, pair, query.
    let group = "metadata=group%3Dp%252520a%252526g%25253De";
    let all = client.get(&format!("/v2/sandboxes?{group}&state=running")).await.unwrap();
    let newest_first: Vec<String> = made.iter().rev().map(|sandbox| sandbox.id.clone()).collect();
    assert_eq!(ids(&all.json()), newest_first);
    let paused = client.get(&format!("/v2/sandboxes?{group}&state=paused")).await.unwrap();
    assert_eq!(paused.json(), json!([]));

    let first = client.get(&format!("/v2/sandboxes?{group}&limit=2")).await.unwrap();
    assert_eq!(ids(&first.json()), newest_first[..2]);
    let token = first.headers["x-next-token"].to_str().unwrap().to_owned();
    let second = client.get(&format!("/v2/sandboxes?{group}&limit=2&nextToken={token}")).await.unwrap();
    assert_eq!(ids(&second.json()), newest_first[2..]);
    assert!(!second.headers.contains_key("x-next-token"));
    for sandbox in &made {
        client.kill(sandbox).await.unwrap();
    }
}

#[tokio::test]
async fn a_sandbox_is_killed_when_its_time_is_over_and_not_before() {
    let client = shared();
    let sandbox = client.create(120, &json!({})).await.unwrap();
    let path = format!("/sandboxes/{}/timeout", sandbox.id);
    assert_eq!(client.post(&path, &json!({ "timeout": 4 })).await.unwrap().status, StatusCode::NO_CONTENT);
    let set = Instant::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(client.health(&sandbox).await.unwrap().status, 204, "killed too early");
    while client.health(&sandbox).await.unwrap().status != StatusCode::BAD_GATEWAY {
        assert!(set.elapsed() < Duration::from_secs(8), "still there");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(client.post(&path, &json!({ "timeout": 4 })).await.unwrap().status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_connect_extends_but_never_shortens() {
    let client = shared();
    let sandbox = client.create(300, &json!({})).await.unwrap();
    let before = end_of(&detail(&client, &sandbox).await);
    for path in ["/v2/sandboxes", "/sandboxes"] {
        let path = format!("{path}/{}/connect", sandbox.id);
        let answer = client.post(&path, &json!({ "timeout": 10 })).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.json()["sandboxID"], sandbox.id.as_str());
        assert_eq!(end_of(&detail(&client, &sandbox).await), before);
    }
    let path = format!("/v2/sandboxes/{}/connect", sandbox.id);
    client.post(&path, &json!({ "timeout": 3000 })).await.unwrap();
    assert!(end_of(&detail(&client, &sandbox).await) > before);
    client.kill(&sandbox).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_concurrent_creates_succeed() {
    let client = shared();
    let creates: Vec<_> = (0..20)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(
                async move { client.create(900, &json!({ "metadata": { "test": "twenty" } })).await },
            )
        })
        .collect();
    let mut made = Vec::new();
    let mut failures = Vec::new();
    for create in creates {
        match create.await.unwrap() {
            Ok(sandbox) => made.push(sandbox),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    for sandbox in &made {
        assert_eq!(client.run(sandbox, "cat /etc/hostname").await.unwrap(), sandbox.id);
    }
    for sandbox in &made {
        client.kill(sandbox).await.unwrap();
    }
    assert_eq!(failures, Vec::<String>::new());
    let mut distinct: Vec<_> = made.iter().map(|sandbox| &sandbox.id).collect();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), 20);
}

#[tokio::test]
async fn a_client_that_hangs_up_during_a_create_leaves_nothing_for_ever() {
    let client = shared();
    let body = json!({ "templateID": "base", "timeout": 5, "metadata": { "test": "hangup" } }).to_string();
    let key = aenv_e2e::setting("E2B_API_KEY");
    for _ in 0..5 {
        let mut connection = client.open().await.unwrap();
        let length = body.len();
        let head = format!(
            "POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        connection.write_all(body.as_bytes()).await.unwrap();
        drop(connection);
    }
    let started = Instant::now();
    tokio::time::sleep(Duration::from_secs(6)).await;
    loop {
        let list = client.get("/v2/sandboxes?metadata=test%3Dhangup").await.unwrap().json();
        if ids(&list).is_empty() {
            break;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "still there: {list}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn requests_that_make_no_sense_are_refused_with_their_reason() {
    let client = shared();
    let create = |body: &'static str| {
        let client = client.clone();
        async move { client.call(Method::POST, "/v2/sandboxes", body).await.unwrap() }
    };
    let cases = [
        (r#"{"templateID":"absent"}"#, 404, "absent"),
        (r#"{"templateID":"base","timeout":0}"#, 400, "imeout"),
        (r#"{"templateID":"base","timeout":-1}"#, 400, "imeout"),
        (r#"{"templateID":"base","timeout":99999999}"#, 400, "imeout"),
        (r#"{"templateID":"base","timeout":"soon"}"#, 400, "imeout"),
        (r#"{"templateID":"#, 400, ""),
        ("", 400, ""),
        ("[]", 400, ""),
        (r#"{"templateID":7}"#, 400, ""),
    ];
    for (body, status, word) in cases {
        let answer = create(body).await;
        assert_eq!(answer.status.as_u16(), status, "{body}: {}", answer.text());
        assert_eq!(answer.json()["code"], status, "{body}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word) && !message.is_empty(), "{body}: {message}");
    }
    for key in ["e2b_ffffffffffffffffffffffffffffffffffffffff", "short", "e2b_"] {
        let answer = client.with_key(key).get("/v2/sandboxes").await.unwrap();
        assert_eq!((answer.status.as_u16(), &answer.json()["code"]), (401, &json!(401)), "{key}");
    }
    for id in ["..%2F..%2Fetc", "%00", "A", "i".repeat(500).as_str()] {
        for method in [Method::GET, Method::DELETE] {
            let answer = client.call(method, &format!("/sandboxes/{id}"), "").await.unwrap();
            assert!(answer.status.is_client_error(), "{id}: {}", answer.status);
            assert_eq!(answer.json()["code"], answer.status.as_u16(), "{id}");
        }
    }
}
