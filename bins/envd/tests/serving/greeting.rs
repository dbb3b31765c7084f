//! Greeting, tokens, and what is open to whom.

use crate::daemon::Daemon;
use serde_json::json;

#[test]
fn health_and_preflights_need_no_token() {
    let Some(daemon) = Daemon::start() else { return };
    let greeted = daemon.request("POST", "/init", &[], br#"{"accessToken":"secret"}"#);
    assert_eq!((greeted.status, greeted.header("x-envd-version")), (204, Some("0.6.13")));
    assert_eq!(daemon.get("/health").status, 204);
    let headers = [("Origin", "http://x"), ("Access-Control-Request-Method", "POST")];
    let preflight = daemon.request("OPTIONS", "/process.Process/List", &headers, b"");
    assert_eq!(preflight.status, 204);
    assert_eq!(preflight.header("access-control-allow-origin"), Some("*"));
    assert_eq!(preflight.header("access-control-max-age"), Some("7200"));
}

#[test]
fn a_token_closes_everything_else_and_only_its_holder_may_greet_again() {
    let Some(daemon) = Daemon::start() else { return };
    assert_eq!(daemon.get("/envs").json(), json!({"E2B_SANDBOX": "true"}));
    let init = |headers: &[(&str, &str)], body: serde_json::Value| {
        daemon.request("POST", "/init", headers, body.to_string().as_bytes()).status
    };
    assert_eq!(init(&[], json!({"accessToken": "one", "envVars": {"A": "1", "B": "2"}})), 204);
    let refused = daemon.get("/envs");
    assert_eq!((refused.status, &refused.json()["code"]), (401, &json!(401)));
    assert!(refused.json()["message"].as_str().expect("is text").starts_with("unauthorized access, please"));
    assert_eq!(daemon.call("process.Process/List", &json!({})).status, 401);
    assert_eq!(daemon.get("/metrics").status, 401);
    let envs = |token| daemon.request("GET", "/envs", &[("X-Access-Token", token)], b"");
    assert_eq!(envs("two").status, 401);
    assert_eq!(envs("one").json(), json!({"A": "1", "B": "2", "E2B_SANDBOX": "true"}));
    assert_eq!(envs("one").header("cache-control"), Some("no-store"));
    assert_eq!(init(&[], json!({"accessToken": "two"})), 401);
    assert_eq!(init(&[("X-Access-Token", "bad")], json!({})), 401);
    assert_eq!(init(&[], json!({"accessToken": "one", "envVars": {"C": "3"}})), 204);
    assert_eq!(envs("one").json(), json!({"C": "3", "E2B_SANDBOX": "true"}));
    assert_eq!(init(&[("X-Access-Token", "one")], json!({"accessToken": "two"})), 204);
    assert_eq!(envs("one").status, 401);
    assert_eq!(init(&[("X-Access-Token", "two")], json!({})), 204);
    assert_eq!(daemon.get("/envs").status, 200);
}

#[test]
fn an_old_greeting_changes_nothing_unless_it_makes_another_sandbox() {
    let Some(daemon) = Daemon::start() else { return };
    let init = |value: &str, second: u32, sandbox: Option<&str>| {
        let identity = sandbox.map(|id| {
            json!({"sandboxId": id, "templateId": "base", "hostname": "h", "machineId": "0", "entropy": ""})
        });
        let stamp = format!("2026-11-30T12:00:{second:02}.123456789Z");
        let body = json!({"envVars": {"V": value}, "timestamp": stamp, "identity": identity});
        assert_eq!(daemon.request("POST", "/init", &[], body.to_string().as_bytes()).status, 204);
        daemon.get("/envs").json()["V"].as_str().expect("is set").to_owned()
    };
    assert_eq!(init("first", 10, Some("i1")), "first");
    assert_eq!(init("older", 9, Some("i1")), "first");
    assert_eq!(init("older", 9, None), "first");
    assert_eq!(init("other", 9, Some("i2")), "other");
    assert_eq!(daemon.get("/envs").json()["E2B_SANDBOX_ID"], "i2");
    assert_eq!(init("newer", 11, None), "newer");
}

#[test]
fn whoever_holds_the_token_may_have_everything_flushed_several_at_a_time() {
    let Some(daemon) = Daemon::start() else { return };
    let sync = |token: &str| daemon.request("POST", "/sync", &[("X-Access-Token", token)], b"").status;
    assert_eq!(sync(""), 204, "a daemon without a token is open");
    assert_eq!(daemon.get("/sync").status, 405);
    assert_eq!(daemon.request("POST", "/init", &[], br#"{"accessToken":"secret"}"#).status, 204);
    assert_eq!(sync("other"), 401);
    assert_eq!(daemon.request("POST", "/sync", &[], b"").status, 401);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8).map(|_| scope.spawn(|| sync("secret"))).collect();
        for call in calls {
            assert_eq!(call.join().expect("ends"), 204);
        }
    });
}

#[test]
fn bad_greetings_are_refused() {
    let Some(daemon) = Daemon::start() else { return };
    for bad in ["[", "{\"timestamp\":\"now\"}", "{\"envVars\":7}"] {
        let refused = daemon.request("POST", "/init", &[], bad.as_bytes());
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(400)), "{bad}");
    }
    let refused = daemon.request("POST", "/init", &[], &vec![b' '; 3 << 20]);
    assert_eq!((refused.status, &refused.json()["code"]), (413, &json!(413)));
    assert_eq!(daemon.request("POST", "/init", &[], b"").status, 204);
}

#[test]
fn metrics_are_plausible() {
    let Some(daemon) = Daemon::start() else { return };
    let metrics = daemon.get("/metrics").json();
    assert!(metrics["cpu_count"].as_u64() >= Some(1), "{metrics}");
    assert!(metrics["mem_used"].as_u64() <= metrics["mem_total"].as_u64(), "{metrics}");
    assert!(metrics["disk_used"].as_u64() <= metrics["disk_total"].as_u64(), "{metrics}");
    assert!(
        metrics["cpu_used_pct"].as_f64().is_some_and(|share| (0.0..=100.0).contains(&share)),
        "{metrics}"
    );
}
