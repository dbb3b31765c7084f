//! The sandbox proxy over real sockets: what reaches the guest, what reaches the client, and what breaks when.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;
mod wake;

use aenv_protocol::envd::ENVD_PORT;
use aenv_protocol::envd::signature::{Operation, file_signature};
use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use harness::{Harness, PIECE, PROGRAM, aim, program, read_until};
use http::Request;
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

#[tokio::test]
async fn refusals_have_the_texts_that_clients_parse() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[]);
    let answer = harness.exchange("GET /health", &aim("igone", ENVD_PORT)).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(answer.contains("should-retry: false"), "{answer}");
    assert!(
        answer.ends_with(r#"{"code":502,"message":"The sandbox was not found","sandboxId":"igone"}"#),
        "{answer}"
    );

    let answer = harness.exchange("GET /", &aim("ione", PROGRAM)).await;
    let body = r#"{"code":502,"message":"The sandbox is running but port is not open","port":8080,"sandboxId":"ione"}"#;
    assert!(answer.starts_with("HTTP/1.1 502") && answer.ends_with(body), "{answer}");

    let browser = format!("{}user-agent: Mozilla/5.0\r\naccept: text/html\r\n", aim("igone", 80));
    let answer = harness.exchange("GET /", &browser).await;
    assert!(
        answer.contains("text/html") && answer.contains("<h1>The sandbox was not found</h1>"),
        "{answer}"
    );

    for (headers, text) in [
        ("e2b-sandbox-id: ione\r\n".to_owned(), "missing header"),
        (aim("i_one", 80), "Invalid sandbox ID"),
        ("e2b-sandbox-id: ione\r\ne2b-sandbox-port: x\r\n".to_owned(), "Invalid sandbox port"),
    ] {
        let answer = harness.exchange("GET /", &headers).await;
        assert!(answer.starts_with("HTTP/1.1 400") && answer.ends_with(text), "{answer}");
    }
}

#[tokio::test]
async fn the_control_plane_paths_of_the_daemon_are_out_of_reach() {
    let harness = Harness::start().await;
    let guest = program("daemon").await;
    harness.add("ione", 1, &[(ENVD_PORT, guest), (PROGRAM, guest), (49982, guest)]);
    for path in ["/init", "//init", "/x/../init", "/%69nit"] {
        let answer = harness.exchange(&format!("POST {path}"), &aim("ione", ENVD_PORT)).await;
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
        assert!(answer.contains("reserved for the E2B control plane"), "{answer}");
    }
    let answer = harness.exchange("GET /", &aim("ione", 49982)).await;
    assert!(answer.contains("port is not open"), "{answer}");
    assert!(harness.exchange("GET /", &aim("ione", ENVD_PORT)).await.ends_with("daemon"));
    assert!(harness.exchange("GET /health", "").await.ends_with("control plane"));
}

#[tokio::test]
async fn the_guest_sees_the_clients_host_and_no_hop_by_hop_header() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let text = "GET /head HTTP/1.1\r\nhost: 8080-ione.example.org:8000\r\nconnection: close, x-secret\r\n\
                x-secret: 1\r\nkeep-alive: 1\r\nx-kept: yes\r\n\r\n";
    let mut answer = String::new();
    harness.raw(text).await.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("host=8080-ione.example.org:8000\n"), "{answer}");
    assert!(answer.contains("x-kept=yes\n") && answer.contains("x-forwarded-for=127.0.0.1\n"), "{answer}");
    assert!(!answer.contains("x-secret=") && !answer.contains("keep-alive="), "{answer}");
}

#[tokio::test]
async fn both_directions_stream_at_the_same_time() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let head = format!(
        "POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n{}\r\n",
        aim("ione", PROGRAM)
    );
    let mut stream = harness.raw(&head).await;
    for word in ["alpha", "omega"] {
        stream.write_all(format!("5\r\n{word}\r\n").as_bytes()).await.unwrap();
        read_until(&mut stream, word).await;
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    read_until(&mut stream, "0\r\n\r\n").await;
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_is_told_to_go_on() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let rest = "host: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n";
    let head = format!("POST /count HTTP/1.1\r\n{rest}{}\r\n", aim("ione", PROGRAM));
    let mut stream = harness.raw(&head).await;
    read_until(&mut stream, "HTTP/1.1 100 Continue\r\n\r\n").await;
    stream.write_all(b"12345").await.unwrap();
    read_until(&mut stream, "\r\n\r\n5").await;
}

/// Highest memory use of this process in KiB.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_hundred_megabytes_pass_in_either_direction_in_constant_memory() {
    const PIECES: usize = 1600;
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let request = |method: &str, path: &str, body: Body| {
        let uri = format!("http://{}{path}", harness.address);
        let request = Request::builder().method(method).uri(uri);
        request.header("e2b-sandbox-id", "ione").header("e2b-sandbox-port", PROGRAM).body(body).unwrap()
    };
    let before = peak_memory();
    let piece = Bytes::from(vec![7; PIECE]);
    let up = Body::from_stream(stream::iter(0..PIECES).map(move |_| Ok::<_, Infallible>(piece.clone())));
    let answer = client.request(request("POST", "/count", up)).await.unwrap();
    let counted = answer.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(counted, (PIECES * PIECE).to_string());

    let answer = client.request(request("GET", &format!("/large/{PIECES}"), Body::empty())).await.unwrap();
    let mut down = answer.into_body().into_data_stream();
    let mut total = 0;
    while let Some(piece) = down.next().await {
        total += piece.unwrap().len();
    }
    assert_eq!(total, PIECES * PIECE);
    assert!(peak_memory() - before < 48 << 10, "grew from {before} to {} KiB", peak_memory());
}

#[tokio::test]
async fn a_stream_is_broken_and_not_ended_when_its_sandbox_ends() {
    let harness = Harness::start().await;
    let ended = harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let mut stream =
        harness.raw(&format!("GET /drip HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM))).await;
    read_until(&mut stream, "first drop\r\n").await;
    harness.end("ione", &ended);
    let mut rest = Vec::new();
    // Either a reset or an end of the connection; in no case the chunk that ends the body.
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty(), "{:?}", String::from_utf8_lossy(&rest));
}

#[tokio::test]
async fn a_request_without_answer_yet_is_told_that_the_sandbox_is_gone() {
    let harness = Harness::start().await;
    let ended = harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let mut stream =
        harness.raw(&format!("GET /hang HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM))).await;
    let early = tokio::time::timeout(std::time::Duration::from_millis(200), stream.read_u8()).await;
    assert!(early.is_err(), "an answer came too early");
    harness.end("ione", &ended);
    let answer = read_until(&mut stream, "was not found").await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_until_the_sandbox_ends() {
    let harness = Harness::start().await;
    let ended = harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let wish = "host: a\r\nconnection: Upgrade\r\nupgrade: echo\r\n";
    let head = format!("GET /upgrade HTTP/1.1\r\n{wish}{}\r\n", aim("ione", PROGRAM));
    let mut stream = harness.raw(&head).await;
    let answer = read_until(&mut stream, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 101") && answer.contains("upgrade: echo"), "{answer}");
    for word in ["ping", "pong"] {
        stream.write_all(word.as_bytes()).await.unwrap();
        assert_eq!(read_until(&mut stream, word).await, word);
    }
    harness.end("ione", &ended);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
}

#[tokio::test]
async fn a_signed_url_without_address_finds_the_sandbox_whose_token_signed_it() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(ENVD_PORT, program("one").await)]);
    harness.add("itwo", 2, &[(ENVD_PORT, program("two").await)]);
    let signature = file_signature("/a b", Operation::Read, "user", "token-of-itwo", Some(2_000_000_000));
    let signature: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
    for space in ["+", "%20"] {
        let query =
            format!("path=/a{space}b&username=user&signature={signature}&signature_expiration=2000000000");
        assert!(harness.exchange(&format!("GET /files?{query}"), "").await.ends_with("two"));
        let answer = harness.exchange(&format!("POST /files?{query}"), "").await;
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("invalid signature"), "{answer}");
    }
}

#[tokio::test]
async fn a_sandbox_that_came_back_never_gets_connections_of_its_former_life() {
    let harness = Harness::start().await;
    let ended = harness.add("ione", 1, &[(PROGRAM, program("first").await)]);
    assert!(harness.exchange("GET /", &aim("ione", PROGRAM)).await.ends_with("first"));
    harness.end("ione", &ended);
    harness.add("ione", 2, &[(PROGRAM, program("second").await)]);
    assert!(harness.exchange("GET /", &aim("ione", PROGRAM)).await.ends_with("second"));
}

#[tokio::test]
async fn a_kept_connection_that_was_just_closed_costs_a_reader_nothing() {
    let harness = Harness::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    harness.add("ione", 1, &[(PROGRAM, listener.local_addr().unwrap())]);
    let accepted = Arc::new(AtomicUsize::new(0));
    let counter = accepted.clone();
    // Answers one request, then reads the next one and hangs up without a word: the worst moment to close.
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                read_until(&mut stream, "\r\n\r\n").await;
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                read_until(&mut stream, "\r\n\r\n").await;
            });
        }
    });
    for _ in 0..3 {
        let answer = harness.exchange("GET /", &aim("ione", PROGRAM)).await;
        assert!(answer.ends_with("ok"), "{answer}");
    }
    assert!(accepted.load(Ordering::SeqCst) >= 2);
}

#[tokio::test]
async fn connections_into_a_guest_are_kept() {
    let harness = Harness::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    harness.add("ione", 1, &[(ENVD_PORT, listener.local_addr().unwrap())]);
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for _ in 0..3 {
            read_until(&mut stream, "\r\n\r\n").await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        }
    });
    for _ in 0..3 {
        assert!(harness.exchange("GET /", &aim("ione", ENVD_PORT)).await.ends_with("ok"));
    }
    server.await.unwrap();
}

#[tokio::test]
async fn shutdown_refuses_new_clients_and_ends_although_a_stream_is_open() {
    let harness = Harness::start().await;
    harness.add("ione", 1, &[(PROGRAM, program("p").await)]);
    let mut stream =
        harness.raw(&format!("GET /drip HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM))).await;
    read_until(&mut stream, "first drop\r\n").await;
    harness.shutdown.cancel();
    harness.server.await.unwrap();
    assert!(tokio::net::TcpStream::connect(harness.address).await.is_err());
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
}
