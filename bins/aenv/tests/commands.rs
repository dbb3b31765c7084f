//! Everything but `exec` and files, against a fake node: arguments, settings, tables and JSON, hints, exit codes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{FakeNode, ID, KEY, answer, bare_command, ended, error_answer, json_answer, on_terminal, sandbox};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

const OTHER: &str = "i9876543210abcdefghij";

#[test]
fn wrong_command_lines_end_with_2_and_say_what_is_wrong() {
    let node = FakeNode::start(|_| panic!("nothing may be asked"));
    for (arguments, expected) in [
        (vec!["exec", ID], "COMMAND"),
        (vec!["exec", "../x", "--", "ls"], "not a sandbox id"),
        (vec!["start", "--timeout", "-1s"], "must not be negative"),
        (vec!["start", "--timeout", "0"], "longer than zero"),
        (vec!["start", "--env", "x"], "KEY=VALUE"),
        (vec!["timeout", ID, "999999999999999999999"], "too long"),
        (vec!["rm"], "ID"),
        (vec!["rm", "--all", ID], "cannot be used with"),
        (vec!["frobnicate"], "unrecognized"),
        (vec!["--api-url", "https://x", "ls"], "https is not supported"),
        (vec!["--api-url", "nonsense", "ls"], "--api-url"),
        (vec!["upload", ID, "/etc/hostname", ""], "empty"),
    ] {
        let ended = node.run(&arguments);
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(expected), "{arguments:?}: {}", ended.stderr);
        assert_eq!(ended.stdout, "", "{arguments:?}");
    }
    assert_eq!(node.run(["--version"]).stdout, format!("aenv {}\n", env!("CARGO_PKG_VERSION")));
    assert!(node.run(["--help"]).stdout.contains("125"), "exit codes are documented");
}

#[test]
fn without_settings_the_way_to_get_them_is_told() {
    let ended = ended(bare_command(["ls"]).output().unwrap());
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.starts_with("error: no API key"), "{}", ended.stderr);
    assert!(ended.stderr.contains("hint: run `make up`"), "{}", ended.stderr);
}

#[test]
fn options_win_over_the_environment_and_that_over_the_file_of_a_directory_above() {
    let node = FakeNode::start(|_| json_answer(200, &json!([])));
    let top = tempfile::tempdir().unwrap();
    let below = top.path().join("a/b");
    std::fs::create_dir_all(&below).unwrap();
    std::fs::create_dir(top.path().join(".aenv")).unwrap();
    let file = format!("# written by hand\nexport E2B_API_KEY='e2b_f11e'\nE2B_API_URL={}\n", node.url);
    std::fs::write(top.path().join(".aenv/env"), file).unwrap();

    let with = |arguments: &[&str], environment: &[(&str, &str)]| {
        let mut command = bare_command(arguments);
        ended(command.current_dir(&below).envs(environment.iter().copied()).output().unwrap())
    };
    assert_eq!(with(&["ls"], &[]).code, Some(0));
    assert_eq!(with(&["ls"], &[("E2B_API_KEY", "e2b_e0")]).code, Some(0));
    assert_eq!(with(&["ls", "--api-key", "e2b_a0"], &[("E2B_API_KEY", "e2b_e0")]).code, Some(0));
    let keys: Vec<String> = node.asked().iter().map(|asked| asked.header("x-api-key").to_owned()).collect();
    assert_eq!(keys, ["e2b_f11e", "e2b_e0", "e2b_a0"]);

    let unreachable = with(&["ls"], &[("E2B_API_URL", "http://127.0.0.1:1")]);
    assert_eq!(unreachable.code, Some(1));
    assert!(
        unreachable.stderr.contains("127.0.0.1:1") && unreachable.stderr.contains("make up"),
        "{unreachable:?}"
    );

    std::fs::write(top.path().join(".aenv/env"), "E2B_API_KEY=$(cat key)\n").unwrap();
    let unparsable = with(&["ls"], &[]);
    assert_eq!(unparsable.code, Some(2));
    assert!(unparsable.stderr.contains("line 1"), "{}", unparsable.stderr);
}

#[test]
fn lists_are_tables_on_a_terminal_and_json_in_a_pipe() {
    let node = FakeNode::start(|asked| {
        let mut lost = sandbox(OTHER, "lost");
        lost["lostReason"] = json!("out_of_memory");
        lost["lostDetail"] = json!("killed by the kernel\u{1b}[31m");
        if asked.query.contains("lost") {
            json_answer(200, &json!([sandbox(ID, "running"), lost]))
        } else {
            json_answer(200, &json!([sandbox(ID, "running")]))
        }
    });
    let piped = node.run(["ls"]);
    assert_eq!(piped.code, Some(0), "{piped:?}");
    let list: Value = serde_json::from_str(&piped.stdout).unwrap();
    assert_eq!(list[0]["sandboxID"], ID);
    assert_eq!(piped.stderr, "");

    let shown = on_terminal(&node.command(["ls"]));
    assert_eq!(shown.code, Some(0), "{shown:?}");
    for text in ["ID", "ENDS IN", ID, "base", "running", "512.00 MiB", "who=me"] {
        assert!(shown.stdout.contains(text), "{text}: {}", shown.stdout);
    }
    assert!(!shown.stdout.contains("REASON"));

    let all = on_terminal(&node.command(["ls", "--all"]));
    assert!(all.stdout.contains(OTHER) && all.stdout.contains("out_of_memory"), "{}", all.stdout);
    assert!(!all.stdout.contains("\u{1b}[31m"), "text from outside must not command the terminal");
    let forced = on_terminal(&node.command(["ls", "--json"]));
    assert!(serde_json::from_str::<Value>(&forced.stdout).is_ok(), "{}", forced.stdout);
}

#[test]
fn pages_are_followed_and_labels_are_sent() {
    let node = FakeNode::start(|asked| {
        if asked.query.contains("nextToken=a%2Bb") {
            return json_answer(200, &json!([sandbox(OTHER, "running")]));
        }
        let mut first = json_answer(200, &json!([sandbox(ID, "running")]));
        first.headers_mut().insert("x-next-token", "a+b".parse().unwrap());
        first
    });
    let ended = node.run(["ls", "--metadata", "a b=c&d"]);
    let list: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(list.as_array().map(Vec::len), Some(2), "{ended:?}");
    // `a%20b=c%26d`, encoded twice more.
    let expected = "metadata=a%252520b%253Dc%252526d";
    assert!(node.asked().iter().all(|asked| asked.query.contains(expected)), "{:?}", node.asked()[0].query);
}

#[test]
fn refusals_come_with_the_way_out() {
    for (status, message, hint) in [
        (401, "wrong key", "E2B_API_KEY"),
        (404, "no sandbox", "aenv ls"),
        (429, "too many", "aenv rm"),
        (503, "no room", "aenv rm"),
        (500, "oops", "log"),
    ] {
        let node = FakeNode::start(move |_| error_answer(status, message));
        let ended = node.run(["timeout", ID, "5m"]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.starts_with(&format!("error: {message}\nhint: ")), "{}", ended.stderr);
        assert!(ended.stderr.contains(hint), "{}", ended.stderr);
    }
    for not_a_node in ["<html>hello</html>", "{\"a\":", "[{}]", "", "null"] {
        let node = FakeNode::start(move |_| answer(200, not_a_node));
        let ended = node.run(["ls"]);
        assert_eq!(ended.code, Some(1), "{not_a_node}: {ended:?}");
        assert!(ended.stderr.contains("does not speak as the API of a node"), "{}", ended.stderr);
    }
}

#[test]
fn a_partial_failure_of_rm_names_what_failed_and_kills_the_rest() {
    let node = FakeNode::start(|asked| match asked.path.ends_with(ID) {
        true => answer(204, ""),
        false => error_answer(404, "no such sandbox"),
    });
    let ended = node.run(["rm", ID, OTHER, ID]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let outcomes: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(
        outcomes,
        json!([{"sandboxID": ID, "killed": true}, {"sandboxID": OTHER, "killed": false, "error": "no such sandbox"}])
    );
    assert!(ended.stderr.contains("1 of 2") && ended.stderr.contains(OTHER), "{}", ended.stderr);
    assert_eq!(node.asked().len(), 2, "an id given twice is killed once");
}

#[test]
fn rm_all_kills_the_lost_ones_too_and_forgives_those_that_ended_meanwhile() {
    let node = FakeNode::start(|asked| match (asked.method.as_str(), asked.path.ends_with(OTHER)) {
        ("GET", _) => json_answer(200, &json!([sandbox(ID, "running"), sandbox(OTHER, "lost")])),
        (_, true) => error_answer(404, "gone"),
        (_, false) => answer(204, ""),
    });
    let ended = node.run(["rm", "--all"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(node.asked()[0].query.contains("lost"));
    assert_eq!(node.asked().iter().filter(|asked| asked.method == "DELETE").count(), 2);
}

#[test]
fn start_sends_what_was_wished_prints_the_id_and_ends_when_nobody_can_press_a_key() {
    let node = FakeNode::start(|_| json_answer(201, &sandbox(ID, "running")));
    let ended = node.run([
        "start",
        "base:v1",
        "--timeout",
        "1500ms",
        "--env",
        "A=b",
        "--metadata",
        "x=y",
        "--no-internet",
    ]);
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), format!("{ID}\n").as_str()), "{ended:?}");
    let asked = &node.asked()[0];
    assert!(asked.is("POST", "/v2/sandboxes"));
    assert_eq!(asked.header("x-api-key"), KEY);
    let body: Value = serde_json::from_slice(&asked.body).unwrap();
    assert_eq!(
        body,
        json!({"templateID": "base:v1", "timeout": 2, "allow_internet_access": false,
               "metadata": {"x": "y"}, "envVars": {"A": "b"}})
    );
    let described: Value = serde_json::from_str(&node.run(["start", "-d", "--json"]).stdout).unwrap();
    assert_eq!(described["sandboxID"], ID);
}

#[test]
fn an_unknown_template_is_told_with_the_command_that_lists_them() {
    let node = FakeNode::start(|_| error_answer(404, "template \"x\" not found"));
    let ended = node.run(["start", "x"]);
    assert_eq!(ended.code, Some(1));
    assert_eq!(ended.stderr, "error: template \"x\" not found\nhint: `aenv template ls` lists templates\n");
}

#[test]
fn garbage_is_collected_by_the_node_and_what_went_is_shown() {
    let collected = json!({"captures": 1, "layers": 2, "directories": 0, "bytes": 3 << 20});
    let answered = collected.clone();
    let node = FakeNode::start(move |_| json_answer(200, &answered));
    let piped = node.run(["layer", "gc"]);
    assert_eq!(piped.code, Some(0), "{piped:?}");
    assert_eq!(serde_json::from_str::<Value>(&piped.stdout).unwrap(), collected);
    assert!(node.asked()[0].is("POST", "/storage/gc"));
    assert_eq!(node.asked()[0].header("x-api-key"), KEY);
    let shown = on_terminal(&node.command(["layer", "gc"]));
    for text in ["CAPTURES", "LAYERS", "DIRECTORIES", "3.00 MiB"] {
        assert!(shown.stdout.contains(text), "{text}: {}", shown.stdout);
    }

    let reflink = FakeNode::start(|_| error_answer(409, "this node's disks are files that share blocks"));
    let refused = reflink.run(["layer", "gc"]);
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""), "{refused:?}");
    assert!(refused.stderr.contains("files that share blocks"), "{}", refused.stderr);
    let unset = ended(bare_command(["layer", "gc"]).output().unwrap());
    assert_eq!(unset.code, Some(2), "{unset:?}");
}

#[test]
fn inspect_does_not_show_the_secret() {
    let node = FakeNode::start(|_| json_answer(200, &sandbox(ID, "running")));
    let ended = node.run(["inspect", ID]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains(ID) && !ended.stdout.contains("token-of-the-sandbox"), "{}", ended.stdout);
}

#[test]
fn inspect_shows_what_a_guest_waits_for() {
    let node = FakeNode::start(|_| {
        let mut waiting = sandbox(ID, "running");
        waiting["waitReason"] = json!("disk_waits_for_room");
        waiting["waitDetail"] = json!("no room in /data");
        json_answer(200, &waiting)
    });
    let shown = on_terminal(&node.command(["inspect", ID]));
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(shown.stdout.contains("disk_waits_for_room: no room in /data"), "{}", shown.stdout);
}

#[test]
fn a_reader_that_goes_away_ends_a_list_quietly() {
    let node = FakeNode::start(|_| json_answer(200, &Value::Array(vec![sandbox(ID, "running"); 1000])));
    let mut child = node.command(["ls"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(141), ""));
}

/// A directory with a stand-in for the node program that prints `report`.
fn path_with_node_program(report: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("aenv-node");
    std::fs::write(
        &program,
        format!("#!/bin/sh\n[ \"$*\" = 'doctor --json' ] && printf '%s' '{report}'\nexit 1\n"),
    )
    .unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    // The program under test must not find a real node program beside itself.
    std::fs::copy(env!("CARGO_BIN_EXE_aenv"), directory.path().join("aenv")).unwrap();
    directory
}

fn doctor(node: &FakeNode, report: &str) -> fake::Ended {
    let directory = path_with_node_program(report);
    let mut command = std::process::Command::new(directory.path().join("aenv"));
    command
        .args(["doctor"])
        .env_clear()
        .env("E2B_API_KEY", KEY)
        .env("E2B_API_URL", &node.url)
        .current_dir("/");
    ended(command.stdin(Stdio::null()).output().unwrap())
}

/// Of a node with room for four guests of a GiB each.
fn node_status(committed: u64, hot: u64) -> Value {
    json!({
        "memoryLimitBytes": 4_u64 << 30, "memoryCommittedBytes": committed << 30,
        "memoryAvailableBytes": 2_u64 << 30, "memoryLowBytes": 1 << 30,
        "starting": 1, "maxStarting": 3, "waiting": 0, "running": 1, "paused": 2, "hot": hot, "standbys": 0,
    })
}

#[test]
fn doctor_tells_how_full_the_node_is() {
    for (status, expected) in [
        (node_status(3, 1), "ok"),
        // Whoever is hot gives way.
        (node_status(4, 1), "ok"),
        (node_status(4, 0), "degraded"),
        (json!({"memoryCommittedBytes": "unknown"}), "degraded"),
    ] {
        let answered = status.clone();
        let node = FakeNode::start(move |asked| match asked.path.as_str() {
            "/health" => answer(200, "ok"),
            "/node" => json_answer(200, &answered),
            _ => json_answer(200, &json!([])),
        });
        let report: Value = serde_json::from_str(&doctor(&node, r#"{"checks":[]}"#).stdout).unwrap();
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["name"] == "capacity");
        assert_eq!(check.unwrap()["status"], expected, "{status}");
        let found = check.unwrap()["found"].as_str().unwrap();
        assert!(
            !status["hot"].is_u64() || found.contains("of 4.00 GiB; the host has 2.00 GiB left"),
            "{found}"
        );
    }
}

#[test]
fn doctor_adds_the_api_and_the_key_and_fails_only_on_what_is_missing() {
    let node = FakeNode::start(|asked| match asked.path.as_str() {
        "/health" => answer(200, "ok"),
        "/node" => json_answer(200, &node_status(1, 1)),
        _ => json_answer(200, &json!([])),
    });
    let degraded = r#"{"checks":[{"name":"kvm","status":"degraded","found":"none","advice":"use KVM"}]}"#;
    let ended = doctor(&node, degraded);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let names: Vec<&str> =
        report["checks"].as_array().unwrap().iter().filter_map(|check| check["name"].as_str()).collect();
    assert_eq!(names, ["kvm", "api", "key", "capacity"]);

    let missing = r#"{"checks":[{"name":"qemu","status":"missing","found":"none","advice":"install it"}]}"#;
    assert_eq!(doctor(&node, missing).code, Some(1));
    let silent = doctor(&node, "");
    assert_eq!(silent.code, Some(0), "no report of the machine is no proof that it is unfit: {silent:?}");
    assert!(silent.stdout.contains("not examined"), "{}", silent.stdout);

    let strict = FakeNode::start(|asked| match asked.path.as_str() {
        "/health" => answer(200, "ok"),
        _ => error_answer(401, "wrong key"),
    });
    let refused = doctor(&strict, degraded);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stdout.contains("does not accept it"), "{}", refused.stdout);
}
