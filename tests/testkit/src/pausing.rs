//! Pauses and resumes through the API, and waits for what becomes of them.

use crate::client::{Answer, Client, Sandbox};
use anyhow::{Context, Result, bail, ensure};
use http::StatusCode;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

impl Client {
    /// What `GET /sandboxes/{id}` tells.
    ///
    /// # Errors
    /// When it is not 200.
    pub async fn detail(&self, sandbox: &Sandbox) -> Result<Value> {
        let answer = self.get(&format!("/sandboxes/{}", sandbox.id)).await?;
        ensure!(answer.status == StatusCode::OK, "show: {} {}", answer.status, answer.text());
        Ok(answer.json())
    }

    /// Asks for a pause; gives the raw answer.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn ask_pause(&self, sandbox: &Sandbox, body: &Value) -> Result<Answer> {
        self.post(&format!("/sandboxes/{}/pause", sandbox.id), body).await
    }

    /// Pauses a sandbox that runs; gives the durability that the answer names.
    ///
    /// # Errors
    /// When the answer is not 204.
    pub async fn pause(&self, sandbox: &Sandbox, body: &Value) -> Result<String> {
        let answer = self.ask_pause(sandbox, body).await?;
        ensure!(answer.status == StatusCode::NO_CONTENT, "pause: {} {}", answer.status, answer.text());
        Ok(header(&answer, "x-aenv-durability"))
    }

    /// Asks for a sandbox that runs, resumed if need be; gives the raw answer.
    ///
    /// # Errors
    /// As [`Client::send`].
    pub async fn connect(&self, sandbox: &Sandbox, body: &Value) -> Result<Answer> {
        self.post(&format!("/v2/sandboxes/{}/connect", sandbox.id), body).await
    }

    /// Resumes a paused sandbox; gives the tier that served it.
    ///
    /// # Errors
    /// When the answer is not 201, or names another sandbox or token.
    pub async fn resume(&self, sandbox: &Sandbox) -> Result<String> {
        self.resume_with(sandbox, &json!({ "timeout": 600 })).await
    }

    /// As [`Client::resume`], with any body.
    ///
    /// # Errors
    /// As there.
    pub async fn resume_with(&self, sandbox: &Sandbox, body: &Value) -> Result<String> {
        let answer = self.connect(sandbox, body).await?;
        ensure!(answer.status == StatusCode::CREATED, "resume: {} {}", answer.status, answer.text());
        let resumed = answer.json();
        ensure!(resumed["sandboxID"] == sandbox.id.as_str(), "another sandbox: {resumed}");
        ensure!(resumed["envdAccessToken"] == sandbox.token.as_str(), "another token: {resumed}");
        Ok(header(&answer, "x-aenv-tier"))
    }

    /// Asks until what GET tells of a sandbox is as wanted, and gives it.
    ///
    /// # Errors
    /// When it is not within `limit`.
    pub async fn until(
        &self,
        sandbox: &Sandbox,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        let asked = Instant::now();
        loop {
            let detail = self.detail(sandbox).await?;
            if wanted(&detail) {
                return Ok(detail);
            }
            if asked.elapsed() > limit {
                bail!("not as wanted after {limit:?}: {detail}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until the state that a sandbox was saved in survives a loss of power, and nothing is left to do for it.
    ///
    /// # Errors
    /// As [`Client::until`].
    pub async fn until_local(&self, sandbox: &Sandbox) -> Result<Value> {
        let saved =
            |detail: &Value| detail["saved"]["durability"] == "local" && detail["saved"]["pending"].is_null();
        self.until(sandbox, Duration::from_secs(60), saved).await.context("it does not become durable")
    }
}

fn header(answer: &Answer, name: &str) -> String {
    answer.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}
