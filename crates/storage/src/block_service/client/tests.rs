//! Against a listener that answers what each test says.

use super::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};

/// Longer than any of these tests takes, unless the client waits for something that does not come.
const PATIENCE: Duration = Duration::from_secs(20);

fn disk() -> Name {
    "d".parse().unwrap()
}

/// Reads a request; its head as text. The body is of no interest here and short enough to come along.
async fn read_request(stream: &mut UnixStream) -> String {
    let mut seen = Vec::new();
    while !seen.windows(4).any(|window| window == b"\r\n\r\n") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "the request ended early");
    }
    String::from_utf8(seen).unwrap()
}

async fn answer(stream: &mut UnixStream, status: u16, body: &str) {
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
}

#[tokio::test]
async fn a_service_that_is_being_started_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stored.sock");
    let client = Client::new(&socket, PATIENCE);
    let asked = tokio::spawn(async move { client.delete_disk(&disk()).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let listener = UnixListener::bind(&socket).unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    assert!(read_request(&mut stream).await.starts_with("DELETE /v1/disks/d HTTP/1.1\r\n"));
    answer(&mut stream, 200, "{}").await;
    asked.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_request_whose_answer_was_lost_is_sent_again() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stored.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = Client::new(&socket, PATIENCE);
    let asked = tokio::spawn(async move { client.flush_disk(&disk()).await });
    let (mut dying, _) = listener.accept().await.unwrap();
    read_request(&mut dying).await;
    drop(dying);
    let (mut stream, _) = listener.accept().await.unwrap();
    read_request(&mut stream).await;
    answer(&mut stream, 200, "{}").await;
    asked.await.unwrap().unwrap();
}

#[tokio::test]
async fn one_connection_serves_several_requests() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stored.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = Client::new(&socket, PATIENCE);
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for _ in 0..3 {
            read_request(&mut stream).await;
            answer(&mut stream, 200, "{}").await;
        }
    });
    for _ in 0..3 {
        client.delete_disk(&disk()).await.unwrap();
    }
    serving.await.unwrap();
}

#[tokio::test]
async fn a_service_that_stays_away_or_silent_is_unavailable() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stored.sock");
    let client = Client::new(&socket, Duration::from_millis(50));
    let error = client.delete_disk(&disk()).await.unwrap_err();
    assert!(matches!(&error, ServiceError::Unavailable { socket: at, .. } if *at == socket), "{error}");
    assert!(error.to_string().contains("No such file"), "{error}");
    let _silent = UnixListener::bind(&socket).unwrap();
    let error = client.delete_disk(&disk()).await.unwrap_err();
    assert!(error.to_string().contains("no answer to DELETE /v1/disks/d"), "{error}");
}

#[tokio::test]
async fn errors_are_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("stored.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = Client::new(&socket, PATIENCE);
    let text = || "m".to_owned();
    let cases = [
        (400, r#"{"code":"invalid","message":"m"}"#, ServiceError::Invalid(text())),
        (404, r#"{"code":"not_found","message":"m"}"#, ServiceError::NotFound(text())),
        (409, r#"{"code":"conflict","message":"m"}"#, ServiceError::Conflict(text())),
        (507, r#"{"code":"no_space","message":"m"}"#, ServiceError::NoSpace(text())),
        (
            503,
            r#"{"code":"unavailable","message":"m"}"#,
            ServiceError::Unavailable { socket: socket.clone(), reason: text() },
        ),
        (500, r#"{"code":"internal","message":"m"}"#, ServiceError::Internal(text())),
    ];
    let replies = cases.clone();
    let serving = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for (status, body, _) in replies {
            read_request(&mut stream).await;
            answer(&mut stream, status, body).await;
        }
        for (status, body) in [(502, "<html>"), (200, "not json")] {
            read_request(&mut stream).await;
            answer(&mut stream, status, body).await;
        }
    });
    for (_, _, expected) in cases {
        assert_eq!(client.disk(&disk()).await.unwrap_err(), expected);
    }
    for _ in 0..2 {
        assert!(matches!(client.disk(&disk()).await.unwrap_err(), ServiceError::Internal(_)));
    }
    serving.await.unwrap();
}
