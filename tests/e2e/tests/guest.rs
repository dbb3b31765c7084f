//! What happens inside a guest, and on the way into it: processes, files, streams, ports, identity and clock.
#![expect(clippy::unwrap_used, reason = "a step that fails fails the test")]

use aenv_e2e::shared;
use aenv_testkit::client::{Client, Sandbox, envelope, messages};
use bytes::Bytes;
use http::StatusCode;
use serde_json::json;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

async fn sandbox(client: &Client) -> Sandbox {
    client.create(300, &json!({})).await.unwrap()
}

/// Waits until a server in the guest accepts connections.
async fn wait_for_port(client: &Client, sandbox: &Sandbox, port: u16) {
    let script = format!(
        "for i in $(seq 100); do (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && exit 0; sleep 0.1; done; exit 1"
    );
    client.run(sandbox, &script).await.unwrap();
}

#[tokio::test]
async fn two_siblings_differ_in_everything_that_identifies_them() {
    let client = shared();
    let (first, second) = (sandbox(&client).await, sandbox(&client).await);
    assert_eq!(client.run(&first, "hostname").await.unwrap(), first.id);
    for question in [
        "hostname",
        "cat /etc/hostname",
        "cat /etc/machine-id",
        "head -c 64 /dev/urandom | od -An -tx1",
        "python3 -c 'import uuid; print(uuid.uuid4())'",
        "echo $E2B_SANDBOX_ID",
    ] {
        let (one, other) =
            (client.run(&first, question).await.unwrap(), client.run(&second, question).await.unwrap());
        assert!(one.len() >= 10 && one != other, "{question}: {one} {other}");
    }
    client.kill(&first).await.unwrap();
    client.kill(&second).await.unwrap();
}

#[tokio::test]
async fn the_clock_of_a_restored_guest_is_right() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let before = now();
    let guest: f64 = client.run(&sandbox, "date +%s.%N").await.unwrap().parse().unwrap();
    let after = now();
    // The guest's reading lies between ours, give or take what a loaded machine without virtualisation drifts.
    assert!(guest > before - 1.0 && guest < after + 1.0, "{before} {guest} {after}");
    client.kill(&sandbox).await.unwrap();
}

#[tokio::test]
async fn commands_run_as_the_user_asked_for_with_their_exit_code_and_both_outputs() {
    let client = shared();
    let sandbox = client.create(300, &json!({ "envVars": { "COLOUR": "green" } })).await.unwrap();
    let ended =
        client.run_as("user", &sandbox, "whoami; pwd; echo $COLOUR; echo bad >&2; exit 7").await.unwrap();
    assert_eq!(ended.stdout, "user\n/home/user\ngreen\n");
    assert_eq!((ended.stderr.as_str(), ended.exit_code), ("bad\n", 7));
    assert_eq!(client.run_as("user", &sandbox, "sudo -n id -u").await.unwrap().stdout, "0\n");
    let error = client.run_as("nobody-here", &sandbox, "true").await.unwrap_err().to_string();
    assert!(error.contains("invalid username"), "{error}");
    // Output that nobody takes any more neither hangs nor hides the end.
    let closed = client.run_as("user", &sandbox, "exec >&- 2>&-; sleep 0.2; exit 3").await.unwrap();
    assert_eq!((closed.stdout.as_str(), closed.exit_code), ("", 3));
    let leaves = client.run_as("user", &sandbox, "sleep 60 & echo started").await.unwrap();
    assert_eq!((leaves.stdout.as_str(), leaves.exit_code), ("started\n", 0));
    client.kill(&sandbox).await.unwrap();
}

#[tokio::test]
async fn output_arrives_while_the_command_still_runs() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    let script = "echo early; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo late";
    let message =
        envelope(&json!({ "process": { "cmd": "/bin/bash", "args": ["-c", script] }, "stdin": false }));
    let mut connection = client.open().await.unwrap();
    let head = format!(
        "POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {}\r\n\
         Authorization: Basic cm9vdDo=\r\nConnect-Protocol-Version: 1\r\nContent-Type: application/connect+json\r\nContent-Length: {}\r\n\r\n",
        sandbox.id,
        sandbox.token,
        message.len()
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    connection.write_all(&message).await.unwrap();
    // "early\n" in base64, long before the command may end.
    read_until(&mut connection, b"ZWFybHkK").await;
    client.run(&sandbox, "touch /tmp/go").await.unwrap();
    read_until(&mut connection, b"bGF0ZQo=").await;
    client.kill(&sandbox).await.unwrap();
}

/// Reads until `wanted` was seen; what was read is returned.
async fn read_until(stream: &mut tokio::net::TcpStream, wanted: &[u8]) -> Vec<u8> {
    let mut seen = Vec::new();
    let read = async {
        while !seen.windows(wanted.len()).any(|window| window == wanted) {
            let mut buffer = [0; 4096];
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(count > 0, "ended early: {:?}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&buffer[..count]);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), read).await.expect("nothing more arrived");
    seen
}

#[tokio::test]
async fn a_stream_breaks_when_its_sandbox_is_killed() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    let running = {
        let (client, sandbox) = (client.clone(), sandbox.clone());
        tokio::spawn(async move { client.start("root", &sandbox, "echo started; sleep 100").await })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(client.kill(&sandbox).await.unwrap());
    // Broken, or closed with an error: never an end that looks like a success.
    if let Ok(answer) = tokio::time::timeout(Duration::from_secs(20), running).await.unwrap().unwrap() {
        let messages = messages(&answer.body).unwrap();
        assert!(messages.iter().any(|message| !message["error"].is_null()), "{messages:?}");
    }
}

#[tokio::test]
async fn a_server_that_listens_on_loopback_only_is_reached() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    let closed = client.guest_get(&sandbox, 8123, "/").await.unwrap();
    assert_eq!(closed.status, StatusCode::BAD_GATEWAY);
    assert_eq!(closed.json()["message"], "The sandbox is running but port is not open");
    assert_eq!(closed.json()["port"], 8123);
    let serve = "mkdir -p /srv/www; echo hello >/srv/www/page; cd /srv/www; setsid python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &";
    client.run(&sandbox, serve).await.unwrap();
    wait_for_port(&client, &sandbox, 8123).await;
    let mut page = client.guest_get(&sandbox, 8123, "/page").await.unwrap();
    // The relay to loopback notices a new listener within seconds.
    for _ in 0..100 {
        if page.status == StatusCode::OK {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        page = client.guest_get(&sandbox, 8123, "/page").await.unwrap();
    }
    assert_eq!((page.status, page.text().as_str()), (StatusCode::OK, "hello\n"));
    client.kill(&sandbox).await.unwrap();
}

/// Answers any upgrade and then sends back what it gets, in capitals.
const UPGRADE_SERVER: &str = r"
import socket
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('0.0.0.0', 8200)); s.listen()
while True:
    c, _ = s.accept(); head = b''
    while b'\r\n\r\n' not in head:
        d = c.recv(4096)
        if not d: break
        head += d
    if b'pgrade' not in head: c.close(); continue
    c.sendall(b'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n')
    while True:
        d = c.recv(4096)
        if not d: break
        c.sendall(d.upper())
    c.close()
";

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_both_ways() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    client
        .upload("root", &sandbox, "/srv/upgrade.py", Bytes::from_static(UPGRADE_SERVER.as_bytes()))
        .await
        .unwrap();
    client.run(&sandbox, "setsid python3 /srv/upgrade.py >/dev/null 2>&1 &").await.unwrap();
    wait_for_port(&client, &sandbox, 8200).await;
    let mut connection = client.open().await.unwrap();
    let head = format!(
        "GET /socket HTTP/1.1\r\nHost: 8200-{}.example.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        sandbox.id
    );
    connection.write_all(head.as_bytes()).await.unwrap();
    let answer = read_until(&mut connection, b"\r\n\r\n").await;
    assert!(answer.starts_with(b"HTTP/1.1 101"), "{:?}", String::from_utf8_lossy(&answer));
    for word in ["hello", "again"] {
        connection.write_all(word.as_bytes()).await.unwrap();
        read_until(&mut connection, word.to_uppercase().as_bytes()).await;
    }
    client.kill(&sandbox).await.unwrap();
}

#[tokio::test]
async fn a_hundred_megabytes_go_in_and_out_unchanged() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    // A cheap sequence without a period that a block size could hide.
    let mut state = 1_u32;
    let content: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_le_bytes()[3]
    })
    .take(100 << 20)
    .collect();
    let content = Bytes::from(content);
    let answer = client.upload("user", &sandbox, "big/file.bin", content.clone()).await.unwrap();
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(answer.json()[0]["path"], "/home/user/big/file.bin");
    let back = client.download("user", &sandbox, "big/file.bin").await.unwrap();
    assert_eq!(back.status, StatusCode::OK);
    assert!(back.body == content, "{} bytes came back", back.body.len());
    client.kill(&sandbox).await.unwrap();
}

#[tokio::test]
async fn odd_names_and_missing_things_are_answered_as_what_they_are() {
    let client = shared();
    let sandbox = sandbox(&client).await;
    for name in ["name with spaces", "ümläut 日本", "tab\tand\nnewline", "quote'\"$(id)", "..hidden"] {
        let answer = client.upload("user", &sandbox, name, Bytes::from_static(b"content")).await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{name:?}: {}", answer.text());
        let back = client.download("user", &sandbox, name).await.unwrap();
        assert_eq!((back.status, &back.body[..]), (StatusCode::OK, &b"content"[..]), "{name:?}");
    }
    let missing = client.download("user", &sandbox, "absent").await.unwrap();
    assert_eq!(missing.status, StatusCode::NOT_FOUND, "{}", missing.text());
    let directory = client.download("user", &sandbox, "/etc").await.unwrap();
    assert_eq!(directory.status, StatusCode::BAD_REQUEST, "{}", directory.text());
    let nobody = client.download("nobody-here", &sandbox, "x").await.unwrap();
    assert_eq!(nobody.status, StatusCode::UNAUTHORIZED, "{}", nobody.text());
    // A path that climbs ends in the guest's own root, never on the host.
    let climbed = client.download("root", &sandbox, "../../../../../../etc/hostname").await.unwrap();
    assert_eq!(climbed.text().trim_end(), sandbox.id);
    let mut intruder = sandbox.clone();
    intruder.token = "wrong".to_owned();
    assert_eq!(client.download("user", &intruder, "absent").await.unwrap().status, StatusCode::UNAUTHORIZED);
    for path in ["/init", "/init/", "//init", "/x/../init"] {
        let answer = client.guest_get(&sandbox, 49983, path).await.unwrap();
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}: {}", answer.text());
    }
    client.kill(&sandbox).await.unwrap();
}
