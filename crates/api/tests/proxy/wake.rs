//! Traffic to paused sandboxes: who is woken, who waits for it, and what those are told who wait in vain.

use crate::harness::{Harness, PROGRAM, aim, program, read_until};
use aenv_orchestrator::{Error, LossCause, Shortage};
use aenv_protocol::envd::ENVD_PORT;
use aenv_protocol::envd::signature::{Operation, file_signature};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn all_who_wait_for_a_sandbox_share_one_wake_upgrades_included() {
    let harness = Arc::new(Harness::start().await);
    let let_go = harness.put_to_sleep("ione", 2, &[(PROGRAM, program("awake").await)]);
    let requests: Vec<_> = (0..10)
        .map(|_| {
            let harness = Arc::clone(&harness);
            tokio::spawn(async move { harness.exchange("GET /", &aim("ione", PROGRAM)).await })
        })
        .collect();
    let wish = "host: a\r\nconnection: Upgrade\r\nupgrade: echo\r\n";
    let mut socket =
        harness.raw(&format!("GET /upgrade HTTP/1.1\r\n{wish}{}\r\n", aim("ione", PROGRAM))).await;
    harness.until_waking().await;
    // Time for the others to arrive; those that come later find it awake.
    tokio::time::sleep(Duration::from_millis(200)).await;
    let_go.cancel();
    for request in requests {
        let answer = request.await.unwrap();
        assert!(answer.ends_with("awake"), "{answer}");
    }
    let answer = read_until(&mut socket, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    socket.write_all(b"ping").await.unwrap();
    assert_eq!(read_until(&mut socket, "ping").await, "ping");
    assert_eq!(harness.wakes(), 1);
}

#[tokio::test]
async fn the_first_word_on_a_web_socket_wakes() {
    let harness = Harness::start().await;
    harness.put_to_sleep("ione", 2, &[(PROGRAM, program("awake").await)]).cancel();
    let wish = "host: a\r\nconnection: Upgrade\r\nupgrade: echo\r\n";
    let mut socket =
        harness.raw(&format!("GET /upgrade HTTP/1.1\r\n{wish}{}\r\n", aim("ione", PROGRAM))).await;
    assert!(read_until(&mut socket, "\r\n\r\n").await.starts_with("HTTP/1.1 101"));
    assert_eq!(harness.wakes(), 1);
}

#[tokio::test]
async fn a_signed_url_wakes_the_sandbox_whose_token_signed_it() {
    let harness = Harness::start().await;
    harness.put_to_sleep("ione", 1, &[(ENVD_PORT, program("one").await)]).cancel();
    harness.put_to_sleep("itwo", 2, &[(ENVD_PORT, program("two").await)]).cancel();
    let signature = file_signature("/a", Operation::Read, "", "token-of-itwo", None);
    let signature: String = form_urlencoded::byte_serialize(signature.as_bytes()).collect();
    let forged = harness.exchange("GET /files?path=/a&signature=v1_forged", "").await;
    assert!(forged.starts_with("HTTP/1.1 401"), "{forged}");
    assert_eq!(harness.wakes(), 0);
    let answer = harness.exchange(&format!("GET /files?path=/a&signature={signature}"), "").await;
    assert!(answer.ends_with("two"), "{answer}");
    assert_eq!(harness.wakes(), 1);
}

#[tokio::test]
async fn what_the_guest_never_gets_wakes_nobody() {
    let harness = Harness::start().await;
    harness.put_to_sleep("ione", 1, &[(ENVD_PORT, program("one").await)]).cancel();
    for path in ["/init", "/sync"] {
        let answer = harness.exchange(&format!("POST {path}"), &aim("ione", ENVD_PORT)).await;
        assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    }
    let answer = harness.exchange("GET /", &aim("ione", 49982)).await;
    assert!(answer.contains("The sandbox is paused"), "{answer}");
    assert_eq!(harness.wakes(), 0);
}

#[tokio::test]
async fn one_that_may_not_be_woken_is_told_as_paused_and_by_its_health_as_not_running() {
    let harness = Harness::start().await;
    harness.pause("ione");
    for (request, port) in
        [("POST /process.Process/Start", ENVD_PORT), ("GET /files", ENVD_PORT), ("GET /health", PROGRAM)]
    {
        let answer = harness.exchange(request, &aim("ione", port)).await;
        assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
        assert!(answer.to_ascii_lowercase().contains("should-retry: false"), "{answer}");
        assert!(answer.contains("The sandbox is paused: resume it"), "{answer}");
    }
    let answer = harness.exchange("GET /health", &aim("ione", ENVD_PORT)).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(answer.contains("The sandbox was not found"), "{answer}");
    assert_eq!(harness.wakes(), 0);
}

#[tokio::test]
async fn a_client_that_kept_its_connection_through_a_pause_notices_nothing() {
    let harness = Harness::start().await;
    let mut ended = harness.add("ione", 1, &[(PROGRAM, program("before").await)]);
    let request = format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM));
    let mut client = harness.raw(&request).await;
    read_until(&mut client, "before").await;
    for (lifecycle, name) in [(2, "after"), (3, "again")] {
        harness.put_to_sleep("ione", lifecycle, &[(PROGRAM, program(name).await)]).cancel();
        harness.end("ione", &ended);
        ended = CancellationToken::new();
        client.write_all(request.as_bytes()).await.unwrap();
        let answer = read_until(&mut client, name).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    assert_eq!(harness.wakes(), 2);
}

#[tokio::test]
async fn a_request_that_is_under_way_when_its_sandbox_is_paused_is_told_to_come_back() {
    let harness = Harness::start().await;
    let address = program("before").await;
    let ended = harness.add("ione", 1, &[(PROGRAM, address)]);
    let mut stream =
        harness.raw(&format!("GET /hang HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM))).await;
    let early = tokio::time::timeout(Duration::from_millis(200), stream.read_u8()).await;
    assert!(early.is_err(), "an answer came too early");
    harness.put_to_sleep("ione", 2, &[(PROGRAM, address)]);
    harness.end("ione", &ended);
    let answer = read_until(&mut stream, "transitioning").await;
    assert!(answer.starts_with("HTTP/1.1 409"), "{answer}");
}

#[tokio::test]
async fn those_who_wait_in_vain_are_told_why() {
    let harness = Harness::start().await;
    let id = || "ione".parse().unwrap();
    let lost = Error::SandboxLost { id: id(), cause: LossCause::GuestPanic, detail: "panic".to_owned() };
    let failed = Error::Internal { context: "loading".to_owned(), reason: "no such layer".to_owned() };
    for (error, status, text, comes_back) in [
        (Error::SandboxNotFound(id()), 502, "The sandbox was not found", false),
        (lost, 502, "The sandbox was not found", false),
        (Error::Transitioning(id()), 409, "The sandbox is still transitioning. Try again in a moment.", true),
        (Error::NoCapacity(Shortage::Room("full".to_owned())), 503, "no capacity on this node: full", true),
        (Error::ShuttingDown, 503, "shutting down", true),
        (failed, 502, "could not be resumed: loading: no such layer", false),
        (Error::Incompatible { id: id(), reason: "cpu".to_owned() }, 502, "could not be resumed", false),
    ] {
        harness.put_to_sleep_for_good("ione", error);
        let answer = harness.exchange("GET /", &aim("ione", PROGRAM)).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        assert!(answer.contains(text) && answer.contains(r#""sandboxId":"ione""#), "{answer}");
        assert_eq!(answer.contains("retry-after: 1"), comes_back, "{answer}");
        assert_eq!(answer.contains("should-retry: false"), !comes_back, "{answer}");
    }
    assert_eq!(harness.wakes(), 7, "a wake that failed is tried again by the next request");
}

#[tokio::test]
async fn nobody_waits_for_ever_and_the_wake_goes_on() {
    let harness = Harness::start().await;
    let let_go = harness.put_to_sleep("ione", 2, &[(PROGRAM, program("awake").await)]);
    let mut stream = harness.raw(&format!("GET / HTTP/1.1\r\nhost: a\r\n{}\r\n", aim("ione", PROGRAM))).await;
    harness.until_waking().await;
    let answer = read_until(&mut stream, "still being resumed").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: 1"), "{answer}");
    let_go.cancel();
    assert!(harness.exchange("GET /", &aim("ione", PROGRAM)).await.ends_with("awake"));
    assert_eq!(harness.wakes(), 1);
}
