//! `aenv exec` against a fake sandbox: streams, input, exit codes, signals, broken connections.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use aenv_protocol::envd::process::{
    SendInputRequest, SendSignalRequest, Signal, StartRequest, process_input, process_selector,
};
use fake::{
    Asked, Body, FakeNode, ID, Pen, answer, broken, end_of_stream, ended, error_answer, exited, json_answer,
    process_answer, sandbox, started, stderr, stdout, unary_answer,
};
use http::Response;
use serde_json::json;
use std::io::{Read, Write};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

/// A node with one sandbox in which a started process does what `play` writes.
fn node_that_plays(play: impl Fn(&Pen) + Send + Sync + 'static) -> FakeNode {
    node_with(move |asked| {
        asked.path.ends_with("/Start").then(|| {
            let (pen, answer) = process_answer();
            play(&pen);
            answer
        })
    })
}

fn node_with(special: impl Fn(&Asked) -> Option<Response<Body>> + Send + Sync + 'static) -> FakeNode {
    FakeNode::start(move |asked| {
        if let Some(answer) = special(asked) {
            return answer;
        }
        match asked.path.as_str() {
            path if path == format!("/sandboxes/{ID}") => json_answer(200, &sandbox(ID, "running")),
            "/process.Process/SendInput" | "/process.Process/CloseStdin" | "/process.Process/SendSignal" => {
                unary_answer()
            }
            _ => error_answer(404, "no such thing"),
        }
    })
}

fn write_all(pen: &Pen, parts: Vec<std::io::Result<bytes::Bytes>>) {
    for part in parts {
        pen.send(part).unwrap();
    }
}

#[test]
fn streams_come_through_byte_by_byte_and_the_exit_code_is_the_commands() {
    let node = node_that_plays(|pen| {
        write_all(
            pen,
            vec![
                started(),
                stdout(b"a\0\xff\n"),
                stderr(b"\xfe err"),
                stdout(b"\xc3"),
                stdout(b"\xa4"),
                exited(7, "exit status 7"),
                end_of_stream(&json!({})),
            ],
        );
    });
    let arguments = ["exec", ID, "-u", "root", "-w", "/tmp", "-e", "A=b=c", "--", "ls", "-l", "a b"];
    let ended = node.run(arguments);
    assert_eq!(ended.code, Some(7), "{ended:?}");
    assert_eq!(ended.output.stdout, b"a\0\xff\n\xc3\xa4");
    assert_eq!(ended.output.stderr, b"\xfe err");

    let asked = node.asked().into_iter().find(|asked| asked.path.ends_with("/Start")).unwrap();
    assert_eq!(asked.header("x-access-token"), "token-of-the-sandbox");
    assert_eq!(asked.header("e2b-sandbox-id"), ID);
    assert_eq!(asked.header("e2b-sandbox-port"), "49983");
    assert_eq!(asked.header("authorization"), "Basic cm9vdDo=");
    assert!(asked.headers.get("connect-timeout-ms").is_none(), "a deadline would kill the command");
    let start: StartRequest = asked.enveloped();
    let process = start.process.into_option().unwrap();
    assert_eq!(process.cmd, "ls");
    assert_eq!(process.args, ["-l", "a b"]);
    assert_eq!(process.envs.get("A").map(String::as_str), Some("b=c"));
    assert_eq!(process.cwd.as_deref(), Some("/tmp"));
}

#[test]
fn a_shell_runs_only_what_c_gives_it() {
    let node =
        node_that_plays(|pen| write_all(pen, vec![started(), exited(0, ""), end_of_stream(&json!({}))]));
    let ended = node.run(["exec", ID, "-c", "echo $HOME", "--", "zero", "one"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let asked = node.asked().into_iter().find(|asked| asked.path.ends_with("/Start")).unwrap();
    let process = asked.enveloped::<StartRequest>().process.into_option().unwrap();
    assert_eq!(process.cmd, "/bin/bash");
    assert_eq!(process.args, ["-l", "-c", "echo $HOME", "zero", "one"]);
}

#[test]
fn a_signal_becomes_128_and_its_number() {
    let node = node_that_plays(|pen| {
        write_all(pen, vec![started(), exited(-1, "signal: killed"), end_of_stream(&json!({}))]);
    });
    assert_eq!(node.run(["exec", ID, "--", "x"]).code, Some(137));
}

#[test]
fn every_way_a_stream_can_break_is_125_with_the_reason() {
    type Ending = fn(&Pen);
    let endings: [(&str, Ending); 5] = [
        ("the connection breaks", |pen| write_all(pen, vec![broken()])),
        ("it just ends", |_| {}),
        ("it ends in the middle of an envelope", |pen| {
            write_all(pen, vec![Ok(bytes::Bytes::from_static(b"\0\0\0\x01\0abc"))]);
        }),
        ("it ends well without an end of the command", |pen| write_all(pen, vec![end_of_stream(&json!({}))])),
        ("the daemon says so", |pen| {
            let error = json!({"error": {"code": "unavailable", "message": "the sandbox is gone"}});
            write_all(pen, vec![end_of_stream(&error)]);
        }),
    ];
    for (name, ending) in endings {
        let stream = Arc::new(Mutex::new(None::<Pen>));
        let kept = stream.clone();
        let node = node_with(move |asked| {
            asked.path.ends_with("/Start").then(|| {
                let (pen, answer) = process_answer();
                write_all(&pen, vec![started(), stdout(b"part")]);
                *kept.lock().unwrap() = Some(pen);
                answer
            })
        });
        let mut child = node.command(["exec", ID, "--", "x"]).spawn().unwrap();
        let mut part = [0; 4];
        child.stdout.as_mut().unwrap().read_exact(&mut part).unwrap();
        assert_eq!(&part, b"part");
        ending(&stream.lock().unwrap().take().unwrap());
        let ended = ended(child.wait_with_output().unwrap());
        assert_eq!(ended.code, Some(125), "{name}: {ended:?}");
        assert!(
            ended.stderr.starts_with("error: the connection to the sandbox broke: "),
            "{name}: {}",
            ended.stderr
        );
        assert!(ended.stderr.contains("\nhint: "), "{name}: {}", ended.stderr);
    }
}

#[test]
fn a_broken_stream_is_explained_by_what_the_node_knows() {
    let node = FakeNode::start({
        let looked = std::sync::atomic::AtomicUsize::new(0);
        move |asked| {
            if asked.path.ends_with("/Start") {
                let (pen, answer) = process_answer();
                write_all(&pen, vec![started()]);
                return answer;
            }
            match looked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
                0 => json_answer(200, &sandbox(ID, "running")),
                _ => error_answer(404, "the sandbox was lost: its kernel panicked"),
            }
        }
    });
    let ended = node.run(["exec", ID, "--", "x"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("its kernel panicked"), "{}", ended.stderr);
}

#[test]
fn what_the_node_or_the_daemon_refuses_is_told_and_is_not_taken_for_the_commands_code() {
    let node = node_with(|asked| {
        asked.path.ends_with("/Start").then(|| {
            let (pen, answer) = process_answer();
            let error = json!({"error": {"code": "invalid_argument", "message": "cwd '/x' does not exist"}});
            write_all(&pen, vec![end_of_stream(&error)]);
            answer
        })
    });
    let ended = node.run(["exec", ID, "--", "x"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(125), "error: cwd '/x' does not exist\n"));

    let node = node_with(|asked| {
        (asked.path.ends_with("/Start") || asked.path == "/health").then(|| {
            let body = json!({"sandboxId": ID, "message": "The sandbox was not found", "code": 502});
            json_answer(502, &body)
        })
    });
    let ended = node.run(["exec", ID, "--", "x"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("The sandbox was not found"), "{}", ended.stderr);

    let node = FakeNode::start(|_| error_answer(404, "sandbox x was lost: guest_panic"));
    let ended = node.run(["exec", ID, "--", "x"]);
    assert_eq!(ended.code, Some(125), "{ended:?}");
    assert!(ended.stderr.contains("guest_panic") && ended.stderr.contains("hint: "), "{}", ended.stderr);
}

#[test]
fn piped_input_arrives_in_order_and_its_end_closes_the_commands_input() {
    let stream = Arc::new(Mutex::new(None::<Pen>));
    let received = Arc::new(Mutex::new(Vec::new()));
    let node = {
        let received = received.clone();
        node_with(move |asked| match asked.path.as_str() {
            "/process.Process/Start" => {
                let (pen, answer) = process_answer();
                assert_eq!(asked.enveloped::<StartRequest>().stdin, Some(true));
                write_all(&pen, vec![started()]);
                *stream.lock().unwrap() = Some(pen);
                Some(answer)
            }
            "/process.Process/SendInput" => {
                let request: SendInputRequest = asked.message();
                let selector = request.process.into_option().unwrap().selector;
                assert_eq!(selector, Some(process_selector::Selector::Pid(42)));
                let Some(process_input::Input::Stdin(bytes)) = request.input.into_option().unwrap().input
                else {
                    panic!("stdin expected")
                };
                received.lock().unwrap().extend_from_slice(&bytes);
                None
            }
            "/process.Process/CloseStdin" => {
                let pen = stream.lock().unwrap().take().unwrap();
                write_all(&pen, vec![exited(0, ""), end_of_stream(&json!({}))]);
                None
            }
            _ => None,
        })
    };
    let input: Vec<u8> = (0..3_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let mut child = node.command(["exec", ID, "--", "cat"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(*received.lock().unwrap() == input, "the input was changed on its way");
}

#[test]
fn a_command_that_wants_no_input_is_no_failure() {
    let stream = Arc::new(Mutex::new(None::<Pen>));
    let node = node_with(move |asked| match asked.path.as_str() {
        "/process.Process/Start" => {
            let (pen, answer) = process_answer();
            write_all(&pen, vec![started()]);
            *stream.lock().unwrap() = Some(pen);
            Some(answer)
        }
        "/process.Process/SendInput" => {
            if let Some(pen) = stream.lock().unwrap().take() {
                write_all(&pen, vec![stdout(b"first line"), exited(0, ""), end_of_stream(&json!({}))]);
            }
            Some(answer(500, json!({"code": "internal", "message": "broken pipe"}).to_string()))
        }
        _ => None,
    });
    let mut child = node.command(["exec", ID, "--", "head", "-1"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let feeding = std::thread::spawn(move || while input.write_all(&[b'x'; 65536]).is_ok() {});
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), "first line"), "{}", ended.stderr);
    feeding.join().unwrap();
}

/// A node whose process runs until it gets a signal, and then ends by it.
fn node_that_waits_for_a_signal() -> FakeNode {
    let stream = Arc::new(Mutex::new(None::<Pen>));
    node_with(move |asked| match asked.path.as_str() {
        "/process.Process/Start" => {
            let (pen, answer) = process_answer();
            write_all(&pen, vec![started(), stdout(b"running\n")]);
            *stream.lock().unwrap() = Some(pen);
            Some(answer)
        }
        "/process.Process/SendSignal" => {
            let request: SendSignalRequest = asked.message();
            let name = if request.signal == Signal::SIGNAL_SIGKILL { "killed" } else { "terminated" };
            if let Some(pen) = stream.lock().unwrap().take() {
                let _reader_may_be_gone = pen.send(exited(-1, &format!("signal: {name}")));
                let _reader_may_be_gone = pen.send(end_of_stream(&json!({})));
            }
            None
        }
        _ => None,
    })
}

fn signals_sent(node: &FakeNode) -> Vec<Signal> {
    node.asked()
        .iter()
        .filter(|asked| asked.path.ends_with("/SendSignal"))
        .map(|asked| asked.message::<SendSignalRequest>().signal.as_known().unwrap())
        .collect()
}

#[test]
fn interrupts_end_the_command_and_become_the_exit_code() {
    for (signal, code) in [(rustix::process::Signal::INT, 130), (rustix::process::Signal::TERM, 143)] {
        let node = node_that_waits_for_a_signal();
        let mut child = node.command(["exec", ID, "-n", "--", "sleep", "100"]).spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        output.read_exact(&mut [0; 8]).unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert_eq!(signals_sent(&node), [Signal::SIGNAL_SIGTERM]);
    }
}

#[test]
fn a_timeout_kills_the_command() {
    let node = node_that_waits_for_a_signal();
    let ended = node.run(["exec", ID, "--timeout", "200ms", "--", "sleep", "100"]);
    assert_eq!(ended.code, Some(124), "{ended:?}");
    assert!(ended.stderr.contains("longer than 0.2 s"), "{}", ended.stderr);
    assert_eq!(signals_sent(&node), [Signal::SIGNAL_SIGKILL]);
}

#[test]
fn a_closed_output_ends_quietly_and_kills_the_command() {
    let node = node_with(|asked| match asked.path.as_str() {
        "/process.Process/Start" => {
            let (pen, answer) = process_answer();
            write_all(&pen, vec![started()]);
            std::thread::spawn(move || {
                while pen.send(stdout(&[b'y'; 1000])).is_ok() {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            Some(answer)
        }
        _ => None,
    });
    let mut child = node.command(["exec", ID, "--", "yes"]).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 10]).unwrap();
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(141), ""));
    assert_eq!(signals_sent(&node), [Signal::SIGNAL_SIGKILL]);
}
