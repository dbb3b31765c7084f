//! The least of an HTTP client that a benchmark needs: one kept connection, so that connecting is not measured.

use anyhow::{Context, Result, bail};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// A node as a client sees it.
pub(super) struct Node {
    url: String,
    key: String,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// A sandbox as far as requests into it need it.
pub(super) struct Target {
    pub(super) id: String,
    pub(super) token: Option<String>,
}

impl Node {
    pub(super) fn new(url: &str, key: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self { url: url.trim_end_matches('/').to_owned(), key: key.to_owned(), client }
    }

    /// One request to the API; the whole answer.
    pub(super) async fn api(&self, method: Method, path: &str, body: Option<Value>) -> Result<Response<Bytes>> {
        let request = Request::builder()
            .method(&method)
            .uri(format!("{}{path}", self.url))
            .header("x-api-key", &self.key)
            .header("content-type", "application/json")
            .body(Full::from(body.map(|body| body.to_string()).unwrap_or_default()))?;
        self.send(request).await.with_context(|| format!("{method} {path}"))
    }

    /// Creates a sandbox of `template`; the answer with its headers, and how to reach the sandbox.
    pub(super) async fn create(&self, template: &str) -> Result<(Response<Bytes>, Target)> {
        let body = serde_json::json!({"templateID": template, "timeout": 600});
        let response = self.api(Method::POST, "/v2/sandboxes", Some(body)).await?;
        if response.status() != StatusCode::CREATED {
            bail!("create answered {}: {}", response.status(), String::from_utf8_lossy(response.body()));
        }
        let sandbox: Value = serde_json::from_slice(response.body()).context("answer to create")?;
        let id = sandbox["sandboxID"].as_str().context("answer to create has no sandboxID")?.to_owned();
        let token = sandbox["envdAccessToken"].as_str().map(str::to_owned);
        Ok((response, Target { id, token }))
    }

    pub(super) async fn kill(&self, target: &Target) -> Result<()> {
        let response = self.api(Method::DELETE, &format!("/sandboxes/{}", target.id), None).await?;
        if response.status() != StatusCode::NO_CONTENT {
            bail!("kill answered {}", response.status());
        }
        Ok(())
    }

    /// Standbys of `template` that wait to be claimed.
    pub(super) async fn standbys(&self, template: &str) -> Result<u64> {
        let response = self.api(Method::GET, "/templates", None).await?;
        let templates: Vec<Value> = serde_json::from_slice(response.body()).context("answer to GET /templates")?;
        let found = templates.iter().find(|item| {
            item["templateID"] == template || item["names"].as_array().is_some_and(|names| names.contains(&template.into()))
        });
        found.with_context(|| format!("the node has no template {template:?}"))?["standbys"]
            .as_u64()
            .context("the node does not say how many standbys wait")
    }

    /// Runs a program in the guest and gives its standard output.
    pub(super) async fn run(&self, target: &Target, program: &str, arguments: &[&str]) -> Result<String> {
        let message = serde_json::json!({"process": {"cmd": program, "args": arguments}, "stdin": false}).to_string();
        let length = u32::try_from(message.len()).context("message too long")?;
        let mut envelope = vec![0];
        envelope.extend(length.to_be_bytes());
        envelope.extend(message.as_bytes());
        let mut request = Request::post(format!("{}/process.Process/Start", self.url))
            .header("content-type", "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("e2b-sandbox-id", &target.id)
            .header("e2b-sandbox-port", "49983");
        if let Some(token) = &target.token {
            request = request.header("x-access-token", token);
        }
        let response = self.send(request.body(Full::from(envelope))?).await.context("process.Process/Start")?;
        if response.status() != StatusCode::OK {
            bail!("Start answered {}: {}", response.status(), String::from_utf8_lossy(response.body()));
        }
        output_of(response.body())
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Bytes>> {
        let (head, body) = self.client.request(request).await?.into_parts();
        Ok(Response::from_parts(head, body.collect().await?.to_bytes()))
    }
}

/// Standard output of a finished process, from the envelopes of its event stream.
fn output_of(mut stream: &[u8]) -> Result<String> {
    let mut output = String::new();
    let mut ended = false;
    while let Some((head, rest)) = stream.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let (message, rest) = rest.split_at_checked(length).context("the event stream ends inside an event")?;
        stream = rest;
        let event: Value = serde_json::from_slice(message).context("event of a process")?;
        if let Some(error) = event.get("error") {
            bail!("the process failed: {error}");
        }
        if let Some(text) = event["event"]["data"]["stdout"].as_str() {
            output.push_str(&String::from_utf8_lossy(&decode_base64(text)?));
        }
        ended |= event["event"].get("end").is_some();
    }
    if !ended {
        bail!("the event stream has no end event");
    }
    Ok(output)
}

fn decode_base64(text: &str) -> Result<Vec<u8>> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(text).context("output is not base64")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(message: &str) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend((message.len() as u32).to_be_bytes());
        bytes.extend(message.as_bytes());
        bytes
    }

    #[test]
    fn output_is_gathered_from_events() {
        let stream = [
            envelope(r#"{"event":{"start":{"pid":7}}}"#),
            envelope(r#"{"event":{"data":{"stdout":"aGk="}}}"#),
            envelope(r#"{"event":{"end":{"exited":true}}}"#),
            envelope("{}"),
        ]
        .concat();
        assert_eq!(output_of(&stream).unwrap(), "hi");
    }

    #[test]
    fn a_broken_stream_is_an_error() {
        assert!(output_of(&envelope(r#"{"event":{"start":{"pid":7}}}"#)).is_err());
        assert!(output_of(&[0, 0, 0, 0, 9, b'{']).is_err());
        assert!(output_of(&envelope(r#"{"error":{"code":"unavailable"}}"#)).is_err());
    }
}
