//! Times commands from outside and from inside. Owns no state.
//!
//! The guest's clock cannot be compared with ours, so both sides measure durations: outside the whole exchange of
//! `/process.Process/Start`, inside a program that starts the very same command and takes the time itself.

use crate::http::Client;
use anyhow::{Context, Result, bail};
use base64::Engine as _;
use http::Method;
use serde_json::{Value, json};
use std::time::Instant;

/// Durations in milliseconds; entries at the same index belong together.
#[derive(Debug, Default)]
pub(super) struct Times {
    pub(super) round_trip: Vec<f64>,
    pub(super) inside: Vec<f64>,
}

impl Times {
    /// What the API adds to each command.
    pub(super) fn overhead(&self) -> Vec<f64> {
        self.round_trip.iter().zip(&self.inside).map(|(outside, inside)| outside - inside).collect()
    }
}

/// Starts `/bin/true` as often in the guest as asked and prints how long each took, in milliseconds.
const INSIDE: &str = "import subprocess, sys, time
for _ in range(int(sys.argv[1])):
    t = time.perf_counter(); subprocess.run(['/bin/true']); print((time.perf_counter() - t) * 1e3)";

/// Runs `/bin/true` `count` times through the API and `count` times inside.
pub(super) async fn measure(client: &mut Client, id: &str, count: usize) -> Result<Times> {
    let token = access_token(client, id).await?;
    let mut times = Times::default();
    for _ in 0..count {
        let started = Instant::now();
        run(client, id, &token, "/bin/true", &[]).await?;
        times.round_trip.push(super::milliseconds(started));
    }
    let count = count.to_string();
    let printed = run(client, id, &token, "/usr/bin/python3", &["-c", INSIDE, &count]).await?;
    times.inside = printed.lines().filter_map(|line| line.trim().parse().ok()).collect();
    // Two independent series: paired by rank, so that the tails are compared with the tails.
    times.round_trip.sort_by(f64::total_cmp);
    times.inside.sort_by(f64::total_cmp);
    Ok(times)
}

pub(super) async fn access_token(client: &mut Client, id: &str) -> Result<String> {
    let sandbox = client.api(Method::GET, &format!("/sandboxes/{id}"), &Value::Null).await?.success()?;
    Ok(sandbox["envdAccessToken"].as_str().unwrap_or_default().to_owned())
}

/// Runs a program in the guest and gives its standard output.
pub(super) async fn run(
    client: &mut Client,
    id: &str,
    token: &str,
    program: &str,
    arguments: &[&str],
) -> Result<String> {
    let message = json!({ "process": { "cmd": program, "args": arguments }, "stdin": false }).to_string();
    let headers = [
        ("content-type", "application/connect+json"),
        ("connect-protocol-version", "1"),
        ("e2b-sandbox-id", id),
        ("e2b-sandbox-port", "49983"),
        ("x-access-token", token),
        ("authorization", "Basic dXNlcjo="),
    ];
    let answer = client.send(Method::POST, "/process.Process/Start", &headers, envelope(&message)?).await?;
    if !answer.status.is_success() {
        bail!("Start was answered with {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
    }
    let mut output = Vec::new();
    let mut ended = false;
    for message in messages(&answer.body)? {
        if !message["error"].is_null() {
            bail!("Start failed: {}", message["error"]);
        }
        if let Some(data) = message["event"]["data"]["stdout"].as_str() {
            output.extend(
                base64::engine::general_purpose::STANDARD.decode(data).context("output is not base64")?,
            );
        }
        ended |= !message["event"]["end"].is_null();
    }
    if !ended {
        bail!("the stream of {program} ended without an end event");
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

/// One message of a Connect stream: flags, length, content.
fn envelope(message: &str) -> Result<Vec<u8>> {
    let length = u32::try_from(message.len()).context("the message is too long")?;
    let mut bytes = vec![0];
    bytes.extend(length.to_be_bytes());
    bytes.extend(message.as_bytes());
    Ok(bytes)
}

/// All messages of a Connect stream, the closing one included.
fn messages(mut stream: &[u8]) -> Result<Vec<Value>> {
    let mut messages = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<5>() {
        let length = usize::try_from(u32::from_be_bytes([header[1], header[2], header[3], header[4]]))?;
        let content = rest.get(..length).context("a message of the stream is cut off")?;
        messages.push(serde_json::from_slice(content).context("a message of the stream is no JSON")?);
        stream = &rest[length..];
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_are_written_and_read() {
        let mut stream = envelope(r#"{"a":1}"#).unwrap();
        stream.extend(envelope("{}").unwrap());
        assert_eq!(messages(&stream).unwrap(), [json!({ "a": 1 }), json!({})]);
        assert!(messages(&stream[..stream.len() - 1]).is_err());
    }
}
