//! Procedures on the file tree: answers and error codes.

use crate::daemon::{Answer, Daemon};
use serde_json::{Value, json};
use std::path::Path;

#[expect(clippy::needless_pass_by_value, reason = "messages are made where they are sent")]
fn call(daemon: &Daemon, method: &str, message: Value) -> Answer {
    daemon.call(&format!("filesystem.Filesystem/{method}"), &message)
}

fn refused(answer: &Answer) -> (u16, String) {
    (answer.status, answer.json()["code"].as_str().unwrap_or_default().to_owned())
}

fn names(answer: &Answer) -> Vec<String> {
    let entries = answer.json()["entries"].as_array().cloned().unwrap_or_default();
    entries.iter().map(|entry| entry["name"].as_str().expect("has a name").to_owned()).collect()
}

#[test]
fn a_tree_is_made_looked_at_moved_and_removed() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let made = call(&daemon, "MakeDir", json!({"path": path("a/b")}));
    assert_eq!(made.json()["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(
        refused(&call(&daemon, "MakeDir", json!({"path": path("a/b")}))),
        (409, "already_exists".into())
    );
    std::fs::write(path("a/f"), "12345").expect("writes");
    assert_eq!(
        refused(&call(&daemon, "MakeDir", json!({"path": path("a/f")}))),
        (400, "invalid_argument".into())
    );
    assert_eq!(
        refused(&call(&daemon, "MakeDir", json!({"path": path("a/f/g")}))),
        (400, "invalid_argument".into())
    );
    let entry =
        call(&daemon, "Stat", json!({"path": path("a/f"), "unknownField": 1})).json()["entry"].clone();
    assert_eq!((&entry["size"], &entry["name"], &entry["owner"]), (&json!("5"), &json!("f"), &json!("root")));
    assert_eq!((&entry["mode"], &entry["permissions"]), (&json!(0o644), &json!("-rw-r--r--")));
    assert!(entry["modifiedTime"].as_str().is_some_and(|time| time.ends_with('Z')), "{entry}");
    assert_eq!(names(&call(&daemon, "ListDir", json!({"path": path("")}))), ["a"]);
    assert_eq!(names(&call(&daemon, "ListDir", json!({"path": path(""), "depth": 2}))), ["a", "b", "f"]);
    let moved = call(&daemon, "Move", json!({"source": path("a/f"), "destination": path("new/place/f")}));
    assert_eq!(moved.json()["entry"]["path"], json!(path("new/place/f")));
    for (method, message, code) in [
        ("Stat", json!({"path": path("a/f")}), "not_found"),
        ("Move", json!({"source": path("a/f"), "destination": path("x")}), "not_found"),
        ("ListDir", json!({"path": path("none")}), "not_found"),
        ("ListDir", json!({"path": path("new/place/f")}), "invalid_argument"),
        ("Stat", json!({"path": "/a\u{0}b"}), "invalid_argument"),
        ("Remove", json!({"path": "/x/.."}), "invalid_argument"),
        ("CreateWatcher", json!({"path": "/"}), "unimplemented"),
    ] {
        let answer = call(&daemon, method, message);
        assert_eq!(answer.json()["code"], code, "{method} {answer:?}");
    }
    for _ in 0..2 {
        assert_eq!(call(&daemon, "Remove", json!({"path": path("new")})).status, 200);
    }
    assert!(!Path::new(&path("new")).exists());
}

#[test]
fn what_a_user_makes_is_the_users_and_unknown_users_are_refused() {
    let Some(daemon) = Daemon::start() else { return };
    if !std::fs::read_to_string("/etc/passwd").unwrap_or_default().contains("\nnobody:") {
        return;
    }
    let directory = tempfile::tempdir().expect("makes");
    let path = directory.path().join("x/y").to_string_lossy().into_owned();
    let as_user = |user: &str| {
        use base64::Engine as _;
        let basic = base64::engine::general_purpose::STANDARD.encode(format!("{user}:"));
        let headers = [("Content-Type", "application/json"), ("Authorization", &*format!("Basic {basic}"))];
        let body = json!({"path": path}).to_string();
        daemon.request("POST", "/filesystem.Filesystem/MakeDir", &headers, body.as_bytes())
    };
    assert_eq!(as_user("nobody").json()["entry"]["owner"], "nobody");
    let parent = call(&daemon, "Stat", json!({"path": directory.path().join("x").to_string_lossy()}));
    assert_eq!(parent.json()["entry"]["owner"], "nobody");
    let unknown = as_user("no-such-user");
    assert_eq!(refused(&unknown), (401, "unauthenticated".into()));
    assert_eq!(unknown.json()["message"], "invalid username: 'no-such-user'");
}

#[test]
fn names_that_are_no_text_do_not_break_a_listing() {
    use std::os::unix::ffi::OsStrExt as _;
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    std::fs::write(directory.path().join(std::ffi::OsStr::from_bytes(b"a\xff\n")), "").expect("writes");
    let answer = call(&daemon, "ListDir", json!({"path": directory.path().to_string_lossy()}));
    assert_eq!(names(&answer), ["a\u{fffd}\n"]);
}
