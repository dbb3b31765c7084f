//! The control plane route by route: what the clients' models need, and every refusal with its reason.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod capacity;
mod harness;
mod pause;
mod snapshots;

use aenv_api::Server;
use aenv_protocol::envd::{ENVD_PORT, ENVD_VERSION};
use aenv_testkit::client::Client;
use aenv_testkit::{ExitCause, Fault, Operation};
use axum::body::Body;
use harness::{Harness, KEY};
use http::{Request, StatusCode};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

const BASE: &str = r#"{"templateID":"base"}"#;

#[tokio::test]
async fn a_create_answers_all_a_client_needs_and_says_what_served_it() {
    let harness = Harness::start(1).await;
    let answer = harness.call("POST", "/v2/sandboxes", BASE).await;
    assert_eq!(answer.status, 201, "{}", answer.body);
    assert_eq!(answer.body["envdVersion"], ENVD_VERSION);
    assert_eq!(answer.body["domain"], "sandboxes.example.org");
    assert_eq!(answer.body["alias"], "base");
    for field in ["templateID", "sandboxID", "clientID", "envdAccessToken"] {
        assert!(answer.body[field].is_string(), "{field}: {}", answer.body);
    }
    assert_eq!(answer.headers["x-aenv-tier"], "hot");
    let timing = answer.headers["server-timing"].to_str().unwrap();
    assert!(timing.contains("total;dur="), "{timing}");

    let id = answer.body["sandboxID"].as_str().unwrap();
    let detail = harness.call("GET", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(detail.status, 200);
    assert_eq!(detail.body["state"], "running");
    assert_eq!(detail.body["envdAccessToken"], answer.body["envdAccessToken"]);
    assert_eq!(detail.body["allowInternetAccess"], true);
    assert!(detail.body.get("waitReason").is_none(), "{}", detail.body);
    assert_eq!(detail.body["lifecycle"], json!({"autoResume": false, "onTimeout": "kill"}));
    // Old clients append their own id.
    assert_eq!(harness.call("GET", &format!("/sandboxes/{id}-aenv"), "").await.status, 200);
    // The name may carry the only tag there is.
    harness.create(r#"{"templateID":"base:default"}"#).await;
}

/// Life time that a sandbox shows, in whole seconds.
async fn life_time(harness: &Harness, id: &str) -> i128 {
    let detail = harness.call("GET", &format!("/sandboxes/{id}"), "").await.body;
    let time = |field: &str| detail[field].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    // The two are taken a moment apart.
    (time("endAt").duration_since(time("startedAt")).as_millis() + 500).div_euclid(1000)
}

#[tokio::test]
async fn the_two_generations_differ_in_their_defaults() {
    let harness = Harness::start(0).await;
    let old = harness.call("POST", "/sandboxes", BASE).await.body;
    assert!(old.get("envdAccessToken").is_none(), "{old}");
    let secured = harness.call("POST", "/sandboxes", r#"{"templateID":"base","secure":true}"#).await.body;
    assert!(secured["envdAccessToken"].is_string());
    let new = harness.call("POST", "/v2/sandboxes", r#"{"templateID":"base","secure":false}"#).await.body;
    assert!(new["envdAccessToken"].is_string(), "the second generation is always secured");
    assert_eq!(life_time(&harness, old["sandboxID"].as_str().unwrap()).await, 15);
    assert_eq!(life_time(&harness, new["sandboxID"].as_str().unwrap()).await, 300);
}

#[tokio::test]
async fn bad_creates_are_refused_by_the_name_of_what_is_wrong() {
    let harness = Harness::start(0).await;
    let field = |text: &str| format!(r#"{{"templateID":"base",{text}}}"#);
    let cases = [
        (String::new(), 400, "empty"),
        ("[]".to_owned(), 400, "invalid body"),
        ("{".to_owned(), 400, "invalid body"),
        (format!("{BASE} x"), 400, "trailing"),
        ("{}".to_owned(), 400, "templateID"),
        (r#"{"templateID":7}"#.to_owned(), 400, "templateID"),
        (r#"{"templateID":""}"#.to_owned(), 400, "templateID"),
        (r#"{"templateID":"../../etc"}"#.to_owned(), 404, "../../etc"),
        (r#"{"templateID":"absent"}"#.to_owned(), 404, "absent"),
        (field(r#""timeout":0"#), 400, "Timeout must be greater than 0"),
        (field(r#""timeout":-1"#), 400, "Timeout must be greater than 0"),
        (field(r#""timeout":86401"#), 400, "Timeout cannot be greater than 24 hours"),
        (field(r#""timeout":1e300"#), 400, "timeout"),
        (field(r#""timeout":99999999999999999999"#), 400, "timeout"),
        (field(r#""timeout":"soon""#), 400, "timeout"),
        (field(r#""timeout":1.5"#), 400, "timeout"),
        (field(r#""metadata":{"a":1}"#), 400, "metadata.a"),
        (field(r#""metadata":[]"#), 400, "metadata"),
        (field(r#""envVars":{"A":null}"#), 400, "envVars.A"),
        (field(r#""envVars":{"A=B":"c"}"#), 400, "envVars"),
        (field(r#""autoPause":"yes""#), 400, "autoPause"),
        (field(r#""autoPauseMemory":false"#), 400, "autoPauseMemory: `false` needs `autoPause: true`"),
        (
            field(r#""autoPause":true,"autoPauseMemory":false,"autoResume":{"enabled":true}"#),
            400,
            "cannot be combined with autoResume",
        ),
        (field(r#""autoResume":true"#), 400, "autoResume"),
        (field(r#""network":{"denyOut":["1.1.1.1"]}"#), 400, "network.denyOut: not supported yet"),
        (field(r#""volumeMounts":[{"name":"v","path":"/v"}]"#), 400, "volumeMounts: not supported yet"),
        (field(r#""mcp":{"x":{}}"#), 400, "mcp: not supported yet"),
        (field(&format!(r#""metadata":{{"a":"{}"}}"#, "x".repeat(1 << 20))), 413, "1048576 bytes"),
        (format!("{}{}", "[".repeat(5000), "]".repeat(5000)), 400, ""),
    ];
    for (body, status, word) in &cases {
        let answer = harness.refused("POST", "/v2/sandboxes", body, *status, word).await;
        assert_eq!(answer.headers["should-retry"], "false");
    }
    assert_eq!(harness.host.counts().vms, 0);
}

#[tokio::test]
async fn only_a_key_of_the_node_opens_the_control_plane_and_health_is_open() {
    let harness = Harness::start(0).await;
    let with = |path: &str, name: &str, value: &str| {
        let request = Request::get(path).header(name, value).body(Body::empty()).unwrap();
        harness.send(request)
    };
    assert_eq!(with("/sandboxes", "x-api-key", KEY).await.status, 200);
    assert_eq!(with("/sandboxes", "x-api-key", "another-key-of-this-node").await.status, 200);
    assert_eq!(with("/sandboxes", "authorization", &format!("Bearer {KEY}")).await.status, 200);
    for (name, value) in [
        ("x-none", ""),
        ("x-api-key", ""),
        ("x-api-key", &KEY[1..]),
        ("x-api-key", "e2b_ffffffffffffffffffffffffffffffffffffffff"),
        ("authorization", KEY),
        ("authorization", "Bearer"),
        ("authorization", "Basic e2b_"),
    ] {
        for path in ["/sandboxes", "/v2/sandboxes", "/sandboxes/i1", "/templates", "/templates/aliases/base"]
        {
            let answer = with(path, name, value).await;
            assert_eq!(
                (answer.status, &answer.body["code"]),
                (StatusCode::UNAUTHORIZED, &json!(401)),
                "{path}"
            );
            assert!(value.len() < 20 || !answer.body.to_string().contains(value), "the key is echoed");
        }
    }
    let answer = with("/health", "x-none", "").await;
    assert_eq!((answer.status, answer.body), (StatusCode::OK, json!("Health check successful")));
}

#[tokio::test]
async fn unknown_routes_methods_and_sandboxes_are_named() {
    let harness = Harness::start(0).await;
    harness.refused("GET", "/sandboxes/i1/nothing", "", 404, "GET /sandboxes/i1/nothing").await;
    harness.refused("PUT", "/sandboxes", "{}", 405, "PUT").await;
    harness.refused("POST", "/health", "", 405, "POST").await;
    harness.refused("GET", "/storage/gc", "", 405, "GET").await;
    let long = "i".repeat(500);
    for id in ["iabsent", "..%2F..%2Fetc", "%00", "A", "%20", long.as_str()] {
        for (method, path, body) in [
            ("GET", "", ""),
            ("DELETE", "", ""),
            ("POST", "/connect", r#"{"timeout":10}"#),
            ("POST", "/pause", ""),
            ("POST", "/resume", ""),
            ("POST", "/timeout", r#"{"timeout":10}"#),
            ("POST", "/refreshes", ""),
        ] {
            harness.refused(method, &format!("/sandboxes/{id}{path}"), body, 404, "doesn't exist").await;
        }
    }
    let answer = harness.call("GET", "/sandboxes/%FF", "").await;
    assert_eq!((answer.status, &answer.body["code"]), (StatusCode::BAD_REQUEST, &json!(400)));
}

#[tokio::test]
async fn a_node_whose_disks_are_no_layers_has_none_to_collect() {
    let harness = Harness::start(0).await;
    let without_key = Request::post("/storage/gc").body(Body::empty()).unwrap();
    assert_eq!(harness.send(without_key).await.status, StatusCode::UNAUTHORIZED);
    let answer = harness.call("POST", "/storage/gc", "").await;
    assert_eq!((answer.status, &answer.body["code"]), (StatusCode::CONFLICT, &json!(409)));
    assert!(answer.body.to_string().contains("AENV_DISKS=reflink"), "{}", answer.body);
    assert_eq!(answer.headers["should-retry"], "false");
}

#[tokio::test]
async fn a_life_time_is_extended_shortened_and_ended() {
    let harness = Harness::start(0).await;
    let id = harness.create(r#"{"templateID":"base","timeout":100}"#).await;
    let path = |action: &str| format!("/sandboxes/{id}/{action}");
    let answer = harness.call("POST", &path("connect"), r#"{"timeout":10}"#).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.body["sandboxID"], id.as_str());
    assert_eq!(life_time(&harness, &id).await, 100, "a connect never shortens");
    assert_eq!(harness.call("POST", &format!("/v2/sandboxes/{id}/connect"), "").await.status, 200);
    assert!(life_time(&harness, &id).await >= 300, "the second generation has a default");
    harness.refused("POST", &path("connect"), "{}", 400, "timeout").await;
    harness.refused("POST", &path("connect"), r#"{"timeout":0}"#, 400, "greater than 0").await;
    harness.refused("POST", &path("connect"), r#"{"timeout":90000}"#, 400, "24 hours").await;

    assert_eq!(harness.call("POST", &path("refreshes"), r#"{"duration":3600}"#).await.status, 204);
    assert!(life_time(&harness, &id).await >= 3600);
    harness.refused("POST", &path("refreshes"), r#"{"duration":3601}"#, 400, "duration").await;
    harness.refused("POST", &path("refreshes"), r#"{"duration":-1}"#, 400, "duration").await;
    harness.refused("POST", &path("resume"), "", 409, "is already running").await;

    assert_eq!(harness.call("POST", &path("timeout"), r#"{"timeout":60}"#).await.status, 204);
    assert!(life_time(&harness, &id).await < 100, "set_timeout may shorten");
    harness.refused("POST", &path("timeout"), r#"{"timeout":90000}"#, 400, "24 hours").await;
    harness.refused("POST", &path("timeout"), "{}", 400, "timeout").await;
    assert_eq!(harness.call("POST", &path("timeout"), r#"{"timeout":-5}"#).await.status, 204);
    harness.eventually("the sandbox is gone", || harness.orchestrator.list().is_empty()).await;
    harness.refused("GET", &format!("/sandboxes/{id}"), "", 404, "doesn't exist").await;
}

#[tokio::test]
async fn a_second_kill_finds_nothing() {
    let harness = Harness::start(0).await;
    let id = harness.create(BASE).await;
    assert_eq!(harness.call("DELETE", &format!("/sandboxes/{id}"), "").await.status, 204);
    harness.refused("DELETE", &format!("/sandboxes/{id}"), "", 404, "doesn't exist").await;
    harness.refused("GET", &format!("/sandboxes/{id}"), "", 404, "doesn't exist").await;
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let harness = Harness::start(0).await;
    let mut ids = Vec::new();
    for number in 0..5 {
        let body =
            json!({"templateID": "base", "metadata": {"parity": (number % 2).to_string(), "a b": "c&d=é"}});
        ids.push(harness.create(&body.to_string()).await);
    }
    let list = |query: String| {
        let harness = &harness;
        async move {
            let answer = harness.call("GET", &format!("/v2/sandboxes?{query}"), "").await;
            assert_eq!(answer.status, 200, "{}", answer.body);
            let items = answer.body.as_array().unwrap().clone();
            let ids: Vec<String> =
                items.iter().map(|i| i["sandboxID"].as_str().unwrap().to_owned()).collect();
            let token = answer.headers.get("x-next-token").map(|token| token.to_str().unwrap().to_owned());
            let total = answer.headers.get("x-total-running").map(|total| total.to_str().unwrap().to_owned());
            (ids, token, total)
        }
    };
    let newest_first: Vec<String> = ids.iter().rev().cloned().collect();
    assert_eq!(list(String::new()).await, (newest_first.clone(), None, Some("5".to_owned())));
    assert_eq!(list("order=asc".to_owned()).await.0, ids);
    assert_eq!(list("state=paused".to_owned()).await, (vec![], None, None));
    assert_eq!(list("template=base".to_owned()).await.0.len(), 5);
    assert!(list("template=other".to_owned()).await.0.is_empty());
    assert!(list("startedAfter=2999-01-01T00:00:00Z".to_owned()).await.0.is_empty());

    // {"a b": "c&d=é", "parity": "1"} as the clients write it.
    let encoded = "a%252520b%3Dc%252526d%25253D%2525C3%2525A9%26parity%3D1";
    let odd = list(format!("metadata={encoded}")).await;
    assert_eq!((odd.0.len(), odd.2), (2, Some("2".to_owned())));
    let old = harness.call("GET", &format!("/sandboxes?metadata={encoded}"), "").await.body;
    assert_eq!(old.as_array().unwrap().len(), 2);

    let (first, token, total) = list("limit=3".to_owned()).await;
    assert_eq!(total.as_deref(), Some("5"));
    let token = token.unwrap();
    let (second, end, _) = list(format!("limit=3&nextToken={token}")).await;
    assert_eq!([first, second].concat(), newest_first);
    assert!(end.is_none());
    for (query, word) in [
        (format!("order=asc&nextToken={token}"), "nextToken"),
        ("nextToken=@".to_owned(), "nextToken"),
        ("limit=0".to_owned(), "limit"),
        ("limit=101".to_owned(), "limit"),
        ("state=dead".to_owned(), "state"),
        ("order=up".to_owned(), "order"),
        ("startedAfter=yesterday".to_owned(), "startedAfter"),
        ("metadata=nopair".to_owned(), "metadata"),
    ] {
        harness.refused("GET", &format!("/v2/sandboxes?{query}"), "", 400, word).await;
    }
}

#[tokio::test]
async fn a_lost_sandbox_says_why_and_is_listed_only_to_those_who_ask() {
    let harness = Harness::start(0).await;
    let (lost, lives) = (harness.create(BASE).await, harness.create(BASE).await);
    assert!(harness.host.end_vm(&format!("t-{lost}"), ExitCause::GuestPanic, "Kernel panic - not syncing"));
    let detail = format!("/sandboxes/{lost}");
    let mut word = String::new();
    for _ in 0..200 {
        let answer = harness.call("GET", &detail, "").await;
        word = answer.body["error_code"].as_str().unwrap_or_default().to_owned();
        if answer.status == 404 && !word.is_empty() {
            assert!(answer.body["message"].as_str().unwrap().contains("Kernel panic"), "{}", answer.body);
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(word, "guest_panic");
    let connect = harness.call("POST", &format!("{detail}/connect"), r#"{"timeout":10}"#).await;
    assert_eq!((connect.status, &connect.body["error_code"]), (StatusCode::NOT_FOUND, &json!("guest_panic")));

    let listed = harness.call("GET", "/v2/sandboxes", "").await.body;
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(listed[0]["sandboxID"], lives.as_str());
    let listed = harness.call("GET", "/v2/sandboxes?state=lost", "").await.body;
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!((&listed[0]["state"], &listed[0]["lostReason"]), (&json!("lost"), &json!("guest_panic")));
    assert_eq!(harness.call("DELETE", &detail, "").await.status, 204);
    assert_eq!(harness.call("GET", "/v2/sandboxes?state=lost", "").await.body, json!([]));
}

#[tokio::test]
async fn a_sandbox_that_reached_its_memory_limit_says_so() {
    let harness = Harness::start(0).await;
    let id = harness.create(BASE).await;
    assert!(harness.host.end_vm(&format!("t-{id}"), ExitCause::OutOfMemory, "memory limit reached"));
    let gone =
        |error: aenv_orchestrator::Error| matches!(error, aenv_orchestrator::Error::SandboxLost { .. });
    harness
        .eventually("the loss is seen", || harness.orchestrator.get(&id.parse().unwrap()).is_err_and(gone))
        .await;
    let answer = harness.refused("GET", &format!("/sandboxes/{id}"), "", 404, "memory limit").await;
    assert_eq!(answer.body["error_code"], "out_of_memory");
    let listed = harness.call("GET", "/v2/sandboxes?state=lost", "").await.body;
    assert_eq!(listed[0]["lostReason"], "out_of_memory");
}

#[tokio::test]
async fn a_warm_standby_is_shown_and_says_what_it_served() {
    let harness = Harness::start_warm(0, 1).await;
    let shown = harness.call("GET", "/templates", "").await.body;
    assert_eq!((&shown[0]["standbys"], &shown[0]["warm"]), (&json!(0), &json!(1)));
    let answer = harness.call("POST", "/v2/sandboxes", BASE).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.body);
    assert_eq!(answer.headers["x-aenv-tier"], "warm");
    let timing = answer.headers["server-timing"].to_str().unwrap();
    assert!(timing.contains("load;dur="), "{timing}");
}

#[tokio::test]
async fn a_node_that_fails_or_stops_says_so_with_the_right_status() {
    let harness = Harness::start(0).await;
    harness.host.fail_always(Operation::Restore, Fault::Fail);
    let answer = harness.call("POST", "/v2/sandboxes", BASE).await;
    assert!(answer.status.is_server_error(), "{}", answer.body);
    assert_eq!(answer.body["code"], answer.status.as_u16());
    harness.host.heal();
    harness.create(BASE).await;
    harness.orchestrator.shutdown().await;
    let answer = harness.refused("POST", "/v2/sandboxes", BASE, 503, "shutting down").await;
    assert!(answer.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn templates_are_listed_and_found_by_name() {
    let harness = Harness::start(0).await;
    for path in ["/templates", "/v2/templates", "/v2/templates?limit=1"] {
        let answer = harness.call("GET", path, "").await;
        let template = &answer.body[0];
        // Every field that the clients' model requires, `null` included.
        for field in [
            "templateID",
            "buildID",
            "cpuCount",
            "memoryMB",
            "diskSizeMB",
            "public",
            "aliases",
            "names",
            "createdAt",
            "updatedAt",
            "createdBy",
            "lastSpawnedAt",
            "spawnCount",
            "buildCount",
            "envdVersion",
            "buildStatus",
        ] {
            assert!(template.get(field).is_some(), "{path} {field}: {template}");
        }
        assert_eq!((&template["names"], &template["buildStatus"]), (&json!(["base"]), &json!("ready")));
        for name in ["base", "base%3Adefault", template["templateID"].as_str().unwrap()] {
            let found = harness.call("GET", &format!("/templates/aliases/{name}"), "").await;
            assert_eq!((found.status, &found.body["templateID"]), (StatusCode::OK, &template["templateID"]));
        }
    }
    harness.refused("GET", "/templates/aliases/team%2Fname%3Adefault", "", 404, "team/name:default").await;
    harness.refused("GET", "/v2/templates?limit=0", "", 400, "limit").await;
}

#[tokio::test]
async fn a_created_sandbox_is_reached_on_the_same_port_until_it_is_killed() {
    let harness = Harness::start(0).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = Server::new(harness.router.clone(), Arc::new(harness.orchestrator.clone()));
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(server.run(listener, shutdown.clone()));

    let client = Client::new(&address, KEY);
    let sandbox = client.create(60, &json!({})).await.unwrap();
    assert_eq!(client.health(&sandbox).await.unwrap().status, 204);
    let closed = client.guest_get(&sandbox, 81, "/").await.unwrap();
    assert_eq!(closed.status, 502);
    assert_eq!(closed.json()["message"], "The sandbox is running but port is not open");
    assert!(client.kill(&sandbox).await.unwrap());
    let gone = client.guest_get(&sandbox, ENVD_PORT, "/health").await.unwrap();
    assert_eq!(
        (gone.status, &gone.json()["message"]),
        (StatusCode::BAD_GATEWAY, &json!("The sandbox was not found"))
    );
    assert!(!client.kill(&sandbox).await.unwrap());
    shutdown.cancel();
    serving.await.unwrap();
}
