use super::*;
use tokio::net::UnixListener;

const GREETING: &str =
    r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}}, "capabilities": ["oob"]}}"#;

#[test]
fn lines_are_parsed() {
    assert_eq!(parse(GREETING.as_bytes()), Ok(Message::Greeting));
    let event = br#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", "data": {"reason": "guest-reset"}}"#;
    let data = json!({"reason": "guest-reset"});
    assert_eq!(parse(event), Ok(Message::Event(Event { name: "SHUTDOWN".to_owned(), data })));
    let event = Event { name: "STOP".to_owned(), data: Value::Null };
    assert_eq!(parse(br#"{"event": "STOP"}"#), Ok(Message::Event(event)));
    let answer = Message::Answer { id: Some(3), result: Ok(json!({})) };
    assert_eq!(parse(br#"{"return": {}, "id": 3}"#), Ok(answer));
    let refusal = Refusal { class: "GenericError".to_owned(), desc: "no".to_owned() };
    let line = br#"{"id": 3, "error": {"class": "GenericError", "desc": "no"}}"#;
    assert_eq!(parse(line), Ok(Message::Answer { id: Some(3), result: Err(refusal) }));
    assert!(parse(b"{}").is_err());
    assert!(parse(b"not json").is_err());
}

/// A peer that greets, then answers each command by `answer`.
fn peer(answer: impl Fn(&str, u64) -> String + Send + 'static) -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("monitor");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (reader, mut writer) = listener.accept().await.unwrap().0.into_split();
        writer.write_all(format!("{GREETING}\n").as_bytes()).await.unwrap();
        let mut lines = BufReader::new(reader).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let request: Value = serde_json::from_str(&line).unwrap();
            let reply = answer(request["execute"].as_str().unwrap(), request["id"].as_u64().unwrap());
            if reply == "close" || writer.write_all(reply.as_bytes()).await.is_err() {
                return;
            }
        }
    });
    (directory, path)
}

async fn connect(path: &Path) -> Monitor {
    Monitor::connect(path, Duration::from_secs(10), Duration::from_millis(200)).await.unwrap()
}

#[tokio::test]
async fn commands_are_answered_refused_or_time_out() {
    let (_directory, path) = peer(|command, id| match command {
        "refuse" => {
            format!("{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no\"}}, \"id\": {id}}}\n")
        }
        "mute" => String::new(),
        "shout" => format!("{{\"event\": \"STOP\"}}\n{{\"return\": 7, \"id\": {id}}}\n"),
        "close" => "close".to_owned(),
        _ => format!("{{\"return\": {{}}, \"id\": {id}}}\n"),
    });
    let monitor = connect(&path).await;
    let mut events = monitor.subscribe();
    assert_eq!(monitor.execute("shout", json!({})).await.unwrap(), json!(7));
    assert_eq!(events.recv().await.unwrap().name, "STOP");
    let refused = monitor.execute("refuse", json!({})).await.unwrap_err();
    assert_eq!(refused.to_string(), "GenericError: no");
    assert!(matches!(monitor.execute("mute", json!({})).await, Err(MonitorError::Timeout(_))));
    assert!(monitor.waiting.lock().unwrap().as_ref().unwrap().is_empty());
    assert!(matches!(monitor.execute("close", json!({})).await, Err(MonitorError::Closed)));
    assert!(matches!(monitor.execute("stop", json!({})).await, Err(MonitorError::Closed)));
}

#[tokio::test]
async fn a_peer_that_ends_or_floods_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    for greeting in [
        String::new(),
        "x".repeat(usize::try_from(MAX_LINE).unwrap() + 1),
        "{\"event\": \"STOP\"}\n".to_owned(),
    ] {
        let path = directory.path().join("monitor");
        let listener = UnixListener::bind(&path).unwrap();
        let writes = tokio::spawn(async move {
            let mut peer = listener.accept().await.unwrap().0;
            // The other side may hang up in the middle.
            _ = peer.write_all(greeting.as_bytes()).await;
        });
        assert!(Monitor::connect(&path, Duration::from_secs(10), Duration::from_secs(1)).await.is_err());
        writes.await.unwrap();
        std::fs::remove_file(&path).unwrap();
    }
    let missing =
        Monitor::connect(&directory.path().join("none"), Duration::from_secs(1), Duration::from_secs(1))
            .await;
    assert!(matches!(missing, Err(MonitorError::Io(_))));
}
