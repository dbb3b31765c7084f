//! `aenv upload` and `aenv download` against a fake sandbox: bytes, names, what is left behind on failure.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake;

use fake::{
    Asked, Body, FakeNode, ID, answer, bare_command, broken, ended, error_answer, json_answer, names,
    sandbox, written_body,
};
use http::Response;
use serde_json::json;
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

fn node_with_files(files: impl Fn(&Asked) -> Response<Body> + Send + Sync + 'static) -> FakeNode {
    FakeNode::start(move |asked| match asked.path.as_str() {
        "/files" => files(asked),
        _ => json_answer(200, &sandbox(ID, "running")),
    })
}

fn written(path: &str) -> Response<Body> {
    json_answer(200, &json!([{"path": path, "name": "x", "type": "file"}]))
}

fn file_requests(node: &FakeNode) -> Vec<Asked> {
    node.asked().into_iter().filter(|asked| asked.path == "/files").collect()
}

#[test]
fn an_upload_sends_the_bytes_and_a_name_of_any_bytes() {
    let node = node_with_files(|_| written("/home/user/x"));
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join(OsStr::from_bytes(b"a\xff b"));
    let bytes: Vec<u8> = (0..2_000_000_u32).map(|n| u8::try_from(n % 253).unwrap()).collect();
    std::fs::write(&local, &bytes).unwrap();
    let words: [&OsStr; 6] =
        ["upload".as_ref(), ID.as_ref(), "-u".as_ref(), "root".as_ref(), local.as_os_str(), "dir&/".as_ref()];
    let ended = node.run(words);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let asked = &file_requests(&node)[0];
    assert_eq!(asked.query, "path=dir%26%2Fa%FF%20b&username=root");
    assert_eq!(asked.header("content-type"), "application/octet-stream");
    assert_eq!(asked.header("x-access-token"), "token-of-the-sandbox");
    assert!(asked.body == bytes, "the bytes were changed on their way");
}

#[test]
fn standard_input_can_be_uploaded() {
    let node = node_with_files(|_| written("/tmp/x"));
    let mut child = node.command(["upload", ID, "-", "/tmp/x"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from a pipe").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(&file_requests(&node)[0].body[..], b"from a pipe");
}

#[test]
fn what_cannot_be_uploaded_is_told() {
    let node = node_with_files(|_| error_answer(507, "no room left"));
    let directory = node.run(["upload", ID, "/tmp", "/tmp/x"]);
    assert_eq!(directory.code, Some(1));
    assert!(
        directory.stderr.contains("is a directory") && directory.stderr.contains("hint: "),
        "{directory:?}"
    );
    let missing = node.run(["upload", ID, "/nonexistent", "/tmp/x"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("/nonexistent cannot be read"), "{missing:?}");
    assert_eq!(file_requests(&node).len(), 0);
    let full = node.run(["upload", ID, "/etc/passwd", "/tmp/x"]);
    assert_eq!(full.code, Some(1));
    assert!(full.stderr.contains("/etc/passwd was not uploaded: no room left"), "{full:?}");
}

#[test]
fn a_download_is_there_whole_with_the_mode_of_a_new_file_or_of_the_old_one() {
    let bytes: Vec<u8> = (0..2_000_000_u32).map(|n| u8::try_from(n % 253).unwrap()).collect();
    let served = bytes.clone();
    let node = node_with_files(move |_| answer(200, served.clone()));
    let directory = tempfile::tempdir().unwrap();
    let new = directory.path().join("new");
    let ended = node.run(["download", ID, "/tmp/x y", new.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(file_requests(&node)[0].query, "path=%2Ftmp%2Fx%20y");
    assert!(std::fs::read(&new).unwrap() == bytes);
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    std::fs::write(directory.path().join("ordinary"), "").unwrap();
    assert_eq!(mode(&new), mode(&directory.path().join("ordinary")));

    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(node.run(["download", ID, "/tmp/x", new.to_str().unwrap()]).code, Some(0));
    assert_eq!(mode(&new), 0o640);

    assert_eq!(node.run(["download", ID, "/tmp/named", directory.path().to_str().unwrap()]).code, Some(0));
    assert!(directory.path().join("named").is_file());
    let piped = node.run(["download", ID, "/tmp/x", "-"]);
    assert!(piped.output.stdout == bytes, "{:?}", piped.code);
    assert_eq!(node.run(["download", ID, "/tmp/x", "/dev/null"]).code, Some(0));
}

#[test]
fn a_download_that_breaks_leaves_what_was_there_and_nothing_else() {
    let node = node_with_files(|_| {
        let (pen, body) = written_body();
        pen.send(Ok(bytes::Bytes::from_static(b"a part of it"))).unwrap();
        pen.send(broken()).unwrap();
        Response::builder().header("content-length", "1000").body(body).unwrap()
    });
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("kept");
    std::fs::write(&local, "old").unwrap();
    let ended = node.run(["download", ID, "/tmp/x", local.to_str().unwrap()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("/tmp/x was not downloaded: the connection"), "{}", ended.stderr);
    assert_eq!(std::fs::read_to_string(&local).unwrap(), "old");
    assert_eq!(names(directory.path()), ["kept"]);
}

#[test]
fn an_interrupted_download_leaves_nothing() {
    let (first, came) = std::sync::mpsc::channel();
    let node = node_with_files(move |_| {
        let (pen, body) = written_body();
        pen.send(Ok(bytes::Bytes::from_static(b"a part of it"))).unwrap();
        first.send(pen).unwrap();
        Response::new(body)
    });
    let directory = tempfile::tempdir().unwrap();
    let local = directory.path().join("new");
    let child = node.command(["download", ID, "/tmp/x", local.to_str().unwrap()]).spawn().unwrap();
    let _pen = came.recv_timeout(Duration::from_secs(20)).unwrap();
    while names(directory.path()).is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), rustix::process::Signal::INT)
        .unwrap();
    let ended = ended(child.wait_with_output().unwrap());
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(130), ""));
    assert_eq!(names(directory.path()), Vec::<String>::new());
}

#[test]
fn what_cannot_be_downloaded_is_told_and_makes_no_file() {
    let node = node_with_files(|_| error_answer(404, "path '/x' does not exist"));
    let directory = tempfile::tempdir().unwrap();
    let ended = node.run(["download", ID, "/x", directory.path().join("x").to_str().unwrap()]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("/x was not downloaded: path '/x' does not exist"), "{ended:?}");
    assert_eq!(names(directory.path()), Vec::<String>::new());
    let ended = node.run(["download", ID, "/x", "/nonexistent/directory/x"]);
    assert_eq!(ended.code, Some(1));
    let unset = fake::ended(bare_command(["download", ID, "/x", "x"]).output().unwrap());
    assert_eq!(unset.code, Some(2));
}
