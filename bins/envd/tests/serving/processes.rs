//! Processes over the wire: events, input, signals, and what happens when somebody goes away.

use crate::daemon::{Daemon, answer, envelope};
use aenv_protocol::envd::process::{ProcessConfig, StartRequest, StartResponse, process_event::Event};
use buffa::Message as _;
use serde_json::{Value, json};
use std::time::Duration;

fn running(daemon: &Daemon) -> Vec<i64> {
    let list = daemon.call("process.Process/List", &json!({})).json();
    let processes = list["processes"].as_array().cloned().unwrap_or_default();
    processes.iter().map(|process| process["pid"].as_i64().expect("has an id")).collect()
}

fn signal(daemon: &Daemon, pid: i64, name: &str) -> u16 {
    daemon.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": name})).status
}

/// Waits for something that must happen; the test runner's limit ends a wait in vain.
fn until(mut happened: impl FnMut() -> bool) {
    while !happened() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_process_tells_its_output_and_its_end() {
    let Some(daemon) = Daemon::start() else { return };
    let mut events = daemon.shell("printf out; printf err >&2; exit 3");
    assert!(events.pid() > 1);
    let (output, errors, end) = events.finish();
    assert_eq!((output.as_str(), errors.as_str()), ("out", "err"));
    assert_eq!(
        end,
        json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"})
    );
    let mut events = daemon.shell("kill -9 $$");
    events.pid();
    assert_eq!(
        events.finish().2,
        json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}),
        "a false `exited` is left out, as proto3 does"
    );
}

#[test]
fn a_process_gets_its_environment_in_order() {
    let Some(daemon) = Daemon::start() else { return };
    daemon.request("POST", "/init", &[], br#"{"envVars":{"A":"global","B":"global","HOME":"/x"}}"#);
    let process = json!({"cmd": "sh", "args": ["-c", "echo $A $B $C $HOME $USER $E2B_SANDBOX; pwd"],
        "envs": {"B": "own", "C": "own"}, "cwd": "/tmp"});
    let mut events = daemon.stream("process.Process/Start", &json!({"process": process}), &[]);
    events.pid();
    assert_eq!(events.finish().0, "global own own /x root true\n/tmp\n");
}

#[test]
fn the_binary_encoding_says_the_same() {
    let Some(daemon) = Daemon::start() else { return };
    let process = ProcessConfig { cmd: "echo".into(), args: vec!["hi".into()], ..Default::default() };
    let request = StartRequest { process: process.into(), stdin: Some(false), ..Default::default() };
    let headers = [("Content-Type", "application/connect+proto"), ("Connect-Protocol-Version", "1")];
    let body = envelope(&request.encode_to_vec());
    let answer = daemon.request("POST", "/process.Process/Start", &headers, &body);
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/connect+proto")));
    let mut rest = &answer.body[..];
    let mut kinds = Vec::new();
    while rest[0] == 0 {
        let length = u32::from_be_bytes(rest[1..5].try_into().expect("are four")) as usize;
        let message = StartResponse::decode_from_slice(&rest[5..5 + length]).expect("decodes");
        kinds.push(match message.event.event.as_ref().expect("is set") {
            Event::Start(_) => "start",
            Event::Data(_) => "data",
            Event::End(end) => {
                assert_eq!((end.exit_code, end.status.as_str()), (0, "exit status 0"));
                "end"
            }
            Event::Keepalive(_) => "keepalive",
        });
        rest = &rest[5 + length..];
    }
    assert_eq!(kinds, ["start", "data", "end"]);
    assert_eq!((rest[0], &rest[5..]), (2, &b"{}"[..]));
}

#[test]
fn what_cannot_start_is_told_in_the_last_frame() {
    let Some(daemon) = Daemon::start() else { return };
    let start = |message: Value, headers: &[(&str, &str)]| {
        daemon.stream("process.Process/Start", &message, headers).error()
    };
    let run = |command: &str, cwd: &str| json!({"process": {"cmd": command, "cwd": cwd}});
    assert_eq!(start(run("/no/such/program", "/"), &[])["code"], "invalid_argument");
    let directory = start(run("true", "/no/such"), &[]);
    assert_eq!(directory, json!({"code": "invalid_argument", "message": "cwd '/no/such' does not exist"}));
    assert_eq!(start(json!({}), &[])["code"], "invalid_argument");
    let user = start(run("true", "/"), &[("Authorization", "Basic bm9ib2R5aGVyZTo=")]);
    assert_eq!(user, json!({"code": "unauthenticated", "message": "invalid username: 'nobodyhere'"}));
    let terminal = json!({"process": {"cmd": "sh"}, "pty": {"size": {"cols": 80, "rows": 24}}});
    assert_eq!(start(terminal, &[])["code"], "unimplemented");
    let unknown =
        daemon.stream("process.Process/Connect", &json!({"process": {"pid": 4_000_000}}), &[]).error();
    assert_eq!(unknown, json!({"code": "not_found", "message": "process with pid 4000000 not found"}));
    assert!(running(&daemon).is_empty());
}

#[test]
fn a_timeout_ends_the_stream_and_not_the_process() {
    let Some(daemon) = Daemon::start() else { return };
    let message = json!({"process": {"cmd": "sleep", "args": ["1000"]}, "tag": "sleeper"});
    let mut events = daemon.stream("process.Process/Start", &message, &[("Connect-Timeout-Ms", "300")]);
    let pid = events.pid();
    assert_eq!(events.error()["code"], "deadline_exceeded");
    assert_eq!(running(&daemon), [pid]);
    let select = json!({"process": {"tag": "sleeper"}});
    let mut followed = daemon.stream("process.Process/Connect", &select, &[]);
    assert_eq!(followed.pid(), pid);
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGKILL"), 200);
    assert_eq!(followed.finish().2["status"], "signal: killed");
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGKILL"), 404);
    let mut late = daemon.stream("process.Process/Connect", &select, &[]);
    assert_eq!(late.pid(), pid);
    assert_eq!(late.finish().2["status"], "signal: killed", "the end is kept for a while");
}

#[test]
fn a_silent_process_sends_signs_of_life() {
    let Some(daemon) = Daemon::start() else { return };
    let message = json!({"process": {"cmd": "sleep", "args": ["1000"]}});
    let mut events = daemon.stream("process.Process/Start", &message, &[("Keepalive-Ping-Interval", "1")]);
    let pid = events.pid();
    assert_eq!(events.event(), json!({"keepalive": {}}));
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGTERM"), 200);
    assert_eq!(events.finish().2["status"], "signal: terminated");
}

#[test]
fn input_arrives_in_order_and_ends_when_closed() {
    let Some(daemon) = Daemon::start() else { return };
    let mut events = daemon.stream("process.Process/Start", &json!({"process": {"cmd": "cat"}}), &[]);
    let pid = events.pid();
    let send = |text: &str| {
        use base64::Engine as _;
        let stdin = base64::engine::general_purpose::STANDARD.encode(text);
        json!({"process": {"pid": pid}, "input": {"stdin": stdin}})
    };
    assert_eq!(daemon.call("process.Process/SendInput", &send("one ")).status, 200);
    let mut body = envelope(json!({"start": {"process": {"pid": pid}}}).to_string().as_bytes());
    for text in ["two ", "three "] {
        body.extend(envelope(json!({"data": {"input": send(text)["input"]}}).to_string().as_bytes()));
        body.extend(envelope(json!({"keepalive": {}}).to_string().as_bytes()));
    }
    let headers = [("Content-Type", "application/connect+json"), ("Connect-Content-Encoding", "identity")];
    let streamed = answer(&mut daemon.send("POST", "/process.Process/StreamInput", &headers, &body));
    assert_eq!(streamed.body, [envelope(b"{}"), vec![2, 0, 0, 0, 2, b'{', b'}']].concat());
    for _ in 0..2 {
        let closed = daemon.call("process.Process/CloseStdin", &json!({"process": {"pid": pid}}));
        assert!(matches!(closed.status, 200 | 404), "the process may have ended: {closed:?}");
    }
    assert_eq!(events.finish().0, "one two three ");
    let mut silent = daemon.shell("sleep 1000");
    let pid = silent.pid();
    let stdin = json!({"process": {"pid": pid}, "input": {"stdin": "eA=="}});
    assert_eq!(daemon.call("process.Process/SendInput", &stdin).json()["code"], "internal");
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGKILL"), 200);
    assert_eq!(daemon.call("process.Process/SendInput", &json!({})).json()["code"], "invalid_argument");
}

#[test]
fn outputs_that_end_early_or_never_do_not_hide_the_end() {
    let Some(daemon) = Daemon::start() else { return };
    let mut closed = daemon.shell("exec >&- 2>&-; sleep 0.2; exit 4");
    closed.pid();
    assert_eq!(closed.finish().2["exitCode"], 4);
    let directory = tempfile::tempdir().expect("makes");
    let survived = directory.path().join("survived");
    let script = format!("(sleep 0.5; echo to nobody; echo > {}) & echo started", survived.display());
    let mut left = daemon.shell(&script);
    left.pid();
    assert_eq!(left.finish().0, "started\n");
    assert!(!survived.exists(), "the end is not delayed by the child");
    until(|| survived.exists());
    let mut flooding = daemon.shell("timeout 5 yes & exit 6");
    flooding.pid();
    assert_eq!(flooding.finish().2["exitCode"], 6);
}

#[test]
fn a_process_goes_on_when_its_follower_hangs_up() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let done = directory.path().join("done");
    let mut events = daemon.shell(&format!("head -c 30000000 /dev/zero; echo > {}", done.display()));
    events.pid();
    drop(events);
    until(|| done.exists());
    until(|| running(&daemon).is_empty());
}

#[test]
fn a_slow_follower_slows_the_process_and_costs_no_memory() {
    let Some(daemon) = Daemon::start() else { return };
    let mut events = daemon.shell("yes");
    let pid = events.pid();
    let written = || {
        let text = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("runs");
        text.lines().find_map(|line| line.strip_prefix("wchar: ")).expect("is told").to_owned()
    };
    let mut before = written();
    until(|| {
        std::thread::sleep(Duration::from_millis(200));
        let now = written();
        let stopped = now == before;
        before = now;
        stopped
    });
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("runs");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("is told");
    let kilobytes: u64 = resident.trim().trim_end_matches(" kB").parse().expect("is a number");
    assert!(kilobytes < 64 * 1024, "{kilobytes} KiB are resident");
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGKILL"), 200);
}

#[test]
fn killing_takes_the_children_along_and_no_zombie_stays() {
    let Some(daemon) = Daemon::start() else { return };
    let mut events = daemon.shell("sleep 1000 & echo $!; wait");
    let pid = events.pid();
    let child = loop {
        let event = events.event();
        if event["data"]["stdout"].is_string() {
            use base64::Engine as _;
            let text = event["data"]["stdout"].as_str().expect("is text");
            let bytes = base64::engine::general_purpose::STANDARD.decode(text).expect("is base64");
            break String::from_utf8(bytes).expect("is text").trim().to_owned();
        }
    };
    assert_eq!(signal(&daemon, pid, "SIGNAL_SIGKILL"), 200);
    assert_eq!(events.finish().2["exitCode"], -1);
    // The orphan is reaped by the init of this machine, the leader by the daemon.
    let alive = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    };
    until(|| !alive(&child));
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    until(|| std::fs::read_to_string(&children).expect("runs").trim().is_empty());
}
