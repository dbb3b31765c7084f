//! One sandbox of `bench pause`, paused and resumed through the API. Owns the sandbox until [`Session::end`].

use super::super::{exec, id_of, kill, milliseconds, numbers, post_sandbox, tier_of, wait_for_standby};
use super::guest::Guest;
use crate::http::{Answer, Client};
use anyhow::{Context, Result, bail};
use http::{Method, StatusCode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Longest wait for a saved state to become durable, or for a node to see that a VMM is gone.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// What one pause took, in milliseconds, and left.
#[derive(Debug)]
pub(super) struct Pause {
    pub(super) answer: f64,
    /// From the call until the state is stored and survives a loss of power.
    pub(super) local: f64,
    /// How long the guest stood still.
    pub(super) stopped: f64,
    /// What the answer named.
    pub(super) durability: String,
    pub(super) stages: Vec<(String, f64)>,
    pub(super) number: u64,
    pub(super) memory_layers: u64,
    pub(super) memory_bytes: Option<u64>,
    pub(super) disk_bytes: Option<u64>,
}

/// What one resume took, in milliseconds.
#[derive(Debug)]
pub(super) struct Resume {
    pub(super) answer: f64,
    pub(super) tier: String,
    pub(super) stages: Vec<(String, f64)>,
}

pub(super) struct Session<'a> {
    client: &'a mut Client,
    instance: &'a str,
    id: String,
    token: String,
}

impl<'a> Session<'a> {
    pub(super) async fn start(client: &'a mut Client, instance: &'a str) -> Result<Self> {
        wait_for_standby(client).await?;
        let id = id_of(&post_sandbox(client).await?.success()?)?;
        let token = exec::access_token(client, &id).await?;
        Ok(Self { client, instance, id, token })
    }

    /// Pauses, and waits until nothing is left to do for it.
    pub(super) async fn pause(&mut self) -> Result<Pause> {
        let started = Instant::now();
        let answer = ask_pause(self.client, &self.id).await?;
        let time = milliseconds(started);
        let saved = wait_until_local(self.client, &self.id).await?;
        let number = |field: &str| saved[field].as_u64();
        Ok(Pause {
            answer: time,
            local: milliseconds(started),
            stopped: saved["stoppedMs"]
                .as_f64()
                .context("a saved state does not tell how long its guest stood still")?,
            durability: answer.header("x-aenv-durability").to_owned(),
            stages: numbers::server_timing(answer.header("server-timing")),
            number: number("number").unwrap_or_default(),
            memory_layers: number("memoryLayers").unwrap_or_default(),
            memory_bytes: number("memoryBytes"),
            disk_bytes: number("diskBytes"),
        })
    }

    /// Pauses; gives how long the answer took.
    pub(super) async fn pause_once(&mut self) -> Result<f64> {
        let started = Instant::now();
        ask_pause(self.client, &self.id).await?;
        Ok(milliseconds(started))
    }

    /// Waits until nothing is left to do for the saved state.
    pub(super) async fn settle(&mut self) -> Result<()> {
        wait_until_local(self.client, &self.id).await.map(drop)
    }

    /// Ends the stopped VMM of the paused sandbox, if the node kept it, and waits until the node knows.
    pub(super) async fn cool(&mut self) -> Result<()> {
        let saved = wait_until_local(self.client, &self.id).await?;
        if saved["tier"] != "cold" {
            let process = numbers::process_of(&format!("aenv-{}-{}", self.instance, self.id))?;
            let process = Pid::from_raw(process).context("no process")?;
            kill_process(process, Signal::KILL).context("cannot end a VMM")?;
        }
        wait_for(self.client, &self.id, |saved| saved["tier"] == "cold").await.map(drop)
    }

    pub(super) async fn resume(&mut self) -> Result<Resume> {
        let started = Instant::now();
        let answer = ask_resume(self.client, &self.id).await?;
        let time = milliseconds(started);
        let stages = numbers::server_timing(answer.header("server-timing"));
        Ok(Resume { answer: time, tier: tier_of(&answer), stages })
    }

    /// How long a command takes.
    pub(super) async fn command(&mut self) -> Result<f64> {
        let started = Instant::now();
        exec::run(self.client, &self.id, &self.token, "/bin/true", &[]).await?;
        Ok(milliseconds(started))
    }

    pub(super) async fn start_writer(&mut self, megabytes: usize) -> Result<()> {
        Guest { id: &self.id, token: &self.token }.start_writer(self.client, megabytes).await
    }

    pub(super) async fn write(&mut self, megabytes: usize) -> Result<()> {
        Guest { id: &self.id, token: &self.token }.write(self.client, megabytes).await
    }

    pub(super) async fn write_file(&mut self, megabytes: usize) -> Result<()> {
        Guest { id: &self.id, token: &self.token }.write_file(self.client, megabytes).await
    }

    pub(super) async fn end(self) -> Result<()> {
        kill(self.client, &self.id).await
    }
}

/// Pauses a sandbox; gives how long that took.
pub(super) async fn pause_once(mut client: Client, id: String) -> Result<f64> {
    let started = Instant::now();
    ask_pause(&mut client, &id).await?;
    Ok(milliseconds(started))
}

/// Resumes a sandbox; gives how long that took.
pub(super) async fn resume_once(mut client: Client, id: String) -> Result<f64> {
    let started = Instant::now();
    ask_resume(&mut client, &id).await?;
    Ok(milliseconds(started))
}

/// Waits until the saved state survives a loss of power and nothing is left to do for it; gives it.
pub(super) async fn wait_until_local(client: &mut Client, id: &str) -> Result<Value> {
    wait_for(client, id, |saved| saved["durability"] == "local" && saved["pending"].is_null()).await
}

async fn wait_for(client: &mut Client, id: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    let asked = Instant::now();
    loop {
        let detail = client.api(Method::GET, &format!("/sandboxes/{id}"), &Value::Null).await?.success()?;
        if wanted(&detail["saved"]) {
            return Ok(detail["saved"].clone());
        }
        if asked.elapsed() > PATIENCE {
            bail!("the saved state of {id} is not as it should be after {PATIENCE:?}: {}", detail["saved"]);
        }
        tokio::time::sleep(POLL).await;
    }
}

async fn ask_pause(client: &mut Client, id: &str) -> Result<Answer> {
    let answer = client.api(Method::POST, &format!("/sandboxes/{id}/pause"), &json!({})).await?;
    expect(answer, StatusCode::NO_CONTENT, "pause")
}

async fn ask_resume(client: &mut Client, id: &str) -> Result<Answer> {
    let path = format!("/v2/sandboxes/{id}/connect");
    expect(client.api(Method::POST, &path, &json!({ "timeout": 600 })).await?, StatusCode::CREATED, "resume")
}

fn expect(answer: Answer, status: StatusCode, what: &str) -> Result<Answer> {
    if answer.status != status {
        bail!("a {what} was answered with {}: {}", answer.status, String::from_utf8_lossy(&answer.body));
    }
    Ok(answer)
}
