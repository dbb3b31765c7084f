use super::*;
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;

const LIMIT: Duration = Duration::from_secs(10);

/// Serves connections in order: each is given its answers, one per request.
fn serve(socket: &Path, connections: Vec<Vec<&'static str>>) -> std::thread::JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let mut requests = Vec::new();
        for answers in connections {
            let (mut stream, _) = listener.accept().unwrap();
            for answer in answers {
                let mut request = vec![0; 4096];
                let length = stream.read(&mut request).unwrap();
                requests.push(String::from_utf8_lossy(&request[..length]).into_owned());
                stream.write_all(answer.as_bytes()).unwrap();
            }
        }
        requests
    })
}

fn request() -> Request {
    Request { method: Method::Put, path: "/thing".to_owned(), body: Some(json!({"a": 1})) }
}

#[tokio::test]
async fn answers_are_told_from_refusals_and_a_broken_connection_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("api.socket");
    let done = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n";
    let refused = "HTTP/1.1 400 \r\nContent-Length: 25\r\n\r\n{\"fault_message\":\"not a\"}";
    let state = "HTTP/1.1 200 \r\nContent-Length: 19\r\n\r\n{\"state\":\"Running\"}";
    let server = serve(&socket, vec![vec![done, refused], vec![state]]);
    let api = Api::connect(&socket, std::process::id()).await.unwrap();
    assert_eq!(api.send(&request(), LIMIT).await.unwrap(), Value::Null);
    match api.send(&request(), LIMIT).await.unwrap_err() {
        ApiError::Refused { status: 400, fault } => assert_eq!(fault, "not a"),
        other => panic!("{other}"),
    }
    // The server hangs up in between; what is sent meanwhile may fail, but not for ever.
    let state = loop {
        match api.send(&request(), LIMIT).await {
            Err(ApiError::Closed(_)) => {}
            answer => break answer.unwrap(),
        }
    };
    assert_eq!(state["state"], "Running");
    let requests = server.join().unwrap();
    assert!(requests[0].starts_with("PUT /thing HTTP/1.1\r\n"), "{}", requests[0]);
    assert!(
        requests[0].contains("content-length: 7") && requests[0].ends_with("{\"a\":1}"),
        "{}",
        requests[0]
    );
}

#[tokio::test]
async fn silence_is_a_timeout_and_an_absent_socket_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("api.socket");
    let error = Api::connect(&socket, std::process::id()).await.unwrap_err();
    assert!(error.to_string().contains("api.socket"), "{error}");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = Api::connect(&socket, 1).await.unwrap_err();
    assert!(error.to_string().contains("instead of 1"), "{error}");
    let api = Api::connect(&socket, std::process::id()).await.unwrap();
    let error = api.send(&request(), Duration::from_millis(20)).await.unwrap_err();
    assert!(matches!(error, ApiError::Timeout(_)), "{error}");
}

#[tokio::test]
async fn a_path_longer_than_an_address_is_reached() {
    let directory = tempfile::tempdir().unwrap();
    let deep = directory.path().join("d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    let handle = File::open(&deep).unwrap();
    let _listener = UnixListener::bind(format!("/proc/self/fd/{}/api.socket", handle.as_raw_fd())).unwrap();
    Api::connect(&deep.join("api.socket"), std::process::id()).await.unwrap();
}

#[tokio::test]
async fn an_answer_without_end_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("api.socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let length = stream.read(&mut [0; 4096]).unwrap();
        assert!(length > 0);
        stream.write_all(b"HTTP/1.1 200 \r\nContent-Length: 1000000000000\r\n\r\n").unwrap();
        let mut sent = 0;
        // Ends when the reader hangs up.
        while stream.write_all(&[b'x'; 4096]).is_ok() {
            sent += 4096;
        }
        sent
    });
    let api = Api::connect(&socket, std::process::id()).await.unwrap();
    let error = api.send(&request(), LIMIT).await.unwrap_err();
    assert!(matches!(error, ApiError::TooLong(_)), "{error}");
    // The connection went with the error: the server sees its end while the client goes on living.
    let sent = tokio::task::spawn_blocking(move || server.join().unwrap()).await.unwrap();
    assert!(sent < 64 << 20);
    drop(api);
}
