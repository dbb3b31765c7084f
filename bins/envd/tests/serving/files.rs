//! Contents of files over HTTP.

use crate::daemon::{Answer, Daemon};
use aenv_protocol::envd::signature::{Operation, file_signature};
use serde_json::json;
use std::io::Write as _;

const OCTETS: (&str, &str) = ("Content-Type", "application/octet-stream");

fn url(path: &str) -> String {
    format!("/files?path={}", percent_encoding::utf8_percent_encode(path, percent_encoding::NON_ALPHANUMERIC))
}

fn message(answer: &Answer) -> String {
    answer.json()["message"].as_str().expect("is text").to_owned()
}

#[test]
fn a_file_travels_both_ways_whole_and_in_parts() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let path = directory.path().join("deep/ä \"q\".bin").to_string_lossy().into_owned();
    let content: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
    let written = daemon.request("POST", &url(&path), &[OCTETS], &content);
    assert_eq!(written.json(), json!([{"path": path, "name": "ä \"q\".bin", "type": "file"}]));
    let read = daemon.get(&url(&path));
    assert_eq!((read.status, read.header("content-length")), (200, Some("3000000")));
    assert!(read.body == content);
    let part = daemon.request("GET", &url(&path), &[("Range", "bytes=2999990-")], b"");
    assert_eq!((part.status, part.header("content-range")), (206, Some("bytes 2999990-2999999/3000000")));
    assert!(part.body == content[2_999_990..]);
    assert_eq!(daemon.request("GET", &url(&path), &[("Range", "bytes=3000000-")], b"").status, 416);
    let modified = read.header("last-modified").expect("is told").to_owned();
    let again = daemon.request("GET", &url(&path), &[("If-Modified-Since", &modified)], b"");
    assert_eq!((again.status, again.body.len()), (304, 0));
    assert_eq!(daemon.request("POST", &url(&path), &[OCTETS], b"").status, 200);
    let empty = daemon.get(&url(&path));
    assert_eq!((empty.status, empty.header("content-length"), empty.body.len()), (200, Some("0"), 0));
    assert!(!daemon.get(&url("/proc/version")).body.is_empty());
}

#[test]
fn forms_carry_several_files_and_metadata_is_kept_until_it_is_replaced() {
    let Some(daemon) = Daemon::start() else { return };
    // Extended attributes of users need a real filesystem.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("makes");
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    let part = |path: &str, content: &str| {
        format!(
            "--B\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{path}\"\r\n\r\n{content}\r\n"
        )
    };
    let form = ("Content-Type", "multipart/form-data; boundary=B");
    let body = format!("{}{}--B--\r\n", part(&path("x/1"), "one"), part(&path("2"), "two"));
    let written = daemon.request("POST", "/files", &[form, ("X-Metadata-Author", "me")], body.as_bytes());
    assert_eq!(
        written.json()[1],
        json!({"path": path("2"), "name": "2", "type": "file", "metadata": {"author": "me"}})
    );
    assert_eq!(std::fs::read_to_string(path("x/1")).expect("reads"), "one");
    let metadata = || {
        let entry = daemon.call("filesystem.Filesystem/Stat", &json!({"path": path("2")})).json();
        entry["entry"]["metadata"].clone()
    };
    assert_eq!(metadata(), json!({"author": "me"}));
    daemon.request("POST", &url(&path("2")), &[OCTETS, ("X-Metadata-Other", "x")], b"");
    assert_eq!(metadata(), json!({"other": "x"}));
    daemon.request("POST", &url(&path("2")), &[OCTETS], b"");
    assert_eq!(metadata(), json!(null));
    let twice = format!("{}{}--B--\r\n", part(&path("3"), "a"), part(&path("3"), "b"));
    for (content_type, body) in [
        (form.1, twice.as_str()),
        (form.1, "--B--\r\n"),
        (form.1, "nonsense"),
        ("multipart/form-data", body.as_str()),
        ("text/plain", "x"),
        ("application/octet-stream", "no path"),
    ] {
        let refused = daemon.request("POST", "/files", &[("Content-Type", content_type)], body.as_bytes());
        assert_eq!(refused.status, 400, "{content_type} {refused:?}");
    }
}

#[test]
fn odd_and_impossible_paths_have_an_answer() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let root = directory.path().to_string_lossy();
    let odd = format!("/files?path={root}/%ff%FEx");
    assert_eq!(daemon.request("POST", &odd, &[OCTETS], b"odd").status, 200);
    assert_eq!(daemon.get(&odd).body, b"odd");
    for (path, status) in [
        (format!("/files?path={root}/a%00b"), 400),
        (format!("/files?path={root}"), 400),
        (format!("/files?path={root}/none"), 404),
        (format!("/files?path={root}/%ff%FEx/below"), 404),
        (format!("/files?path={root}/{}", "n".repeat(300)), 400),
        ("/files?path=/dev/zero".into(), 400),
        ("/files?path=/etc/hostname&username=no-such-user".into(), 401),
    ] {
        let answer = daemon.get(&path);
        assert_eq!((answer.status, &answer.json()["code"]), (status, &json!(status)), "{path}");
    }
    assert_eq!(message(&daemon.get("/files?path=/none")), "path '/none' does not exist");
    assert_eq!(daemon.request("POST", &url(&root), &[OCTETS], b"x").status, 400);
    assert_eq!(daemon.request("POST", &url("/proc/none/x"), &[OCTETS], b"x").status, 404);
    let full = daemon.request("POST", &url("/dev/full"), &[OCTETS], &[0; 1_000_000]);
    assert_eq!(full.status, 507, "{full:?}");
}

#[test]
fn compressed_uploads_are_inflated_and_others_refused() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let path = directory.path().join("f").to_string_lossy().into_owned();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&[7; 100_000]).expect("compresses");
    let compressed = encoder.finish().expect("compresses");
    let gzip = [OCTETS, ("Content-Encoding", "gzip")];
    assert_eq!(daemon.request("POST", &url(&path), &gzip, &compressed).status, 200);
    assert_eq!(std::fs::read(&path).expect("reads"), [7; 100_000]);
    let other = format!("{path}.2");
    assert_eq!(daemon.request("POST", &url(&other), &gzip, &compressed[..20]).status, 400);
    assert!(!std::path::Path::new(&other).exists(), "a broken upload leaves nothing");
    assert_eq!(daemon.request("POST", &url(&path), &[OCTETS, ("Content-Encoding", "br")], b"x").status, 400);
}

#[test]
fn signed_addresses_stand_in_for_the_token() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let path = directory.path().join("f").to_string_lossy().into_owned();
    assert_eq!(daemon.request("POST", "/init", &[], br#"{"accessToken":"t"}"#).status, 204);
    let signed = |operation, expiration: Option<i64>| {
        let signature = file_signature(&path, operation, "root", "t", expiration);
        let signature = percent_encoding::utf8_percent_encode(&signature, percent_encoding::NON_ALPHANUMERIC);
        let expiration = expiration.map_or(String::new(), |at| format!("&signature_expiration={at}"));
        format!("{}&username=root&signature={signature}{expiration}", url(&path))
    };
    assert_eq!(daemon.request("POST", &signed(Operation::Write, None), &[OCTETS], b"x").status, 200);
    assert_eq!(daemon.get(&signed(Operation::Read, Some(4_000_000_000))).body, b"x");
    assert_eq!(daemon.request("GET", &url(&path), &[("X-Access-Token", "t")], b"").body, b"x");
    for (answer, text) in [
        (daemon.get(&url(&path)), "missing signature query parameter"),
        (daemon.get(&signed(Operation::Write, None)), "invalid signature"),
        (daemon.get(&signed(Operation::Read, Some(1))), "signature is already expired"),
        (
            daemon.request("GET", &signed(Operation::Read, None), &[("X-Access-Token", "no")], b""),
            "access token present in header but does not match",
        ),
    ] {
        assert_eq!((answer.status, answer.json()), (401, json!({"code": 401, "message": text})));
    }
}

#[test]
fn an_upload_that_breaks_off_leaves_no_file() {
    let Some(daemon) = Daemon::start() else { return };
    let directory = tempfile::tempdir().expect("makes");
    let path = directory.path().join("f");
    let mut connection = std::net::TcpStream::connect(("127.0.0.1", daemon.port)).expect("connects");
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: g\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\n",
        url(&path.to_string_lossy())
    );
    connection.write_all(head.as_bytes()).expect("sends");
    connection.write_all(&[1; 1000]).expect("sends");
    while !path.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    drop(connection);
    while path.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(daemon.get("/health").status, 204);
}
