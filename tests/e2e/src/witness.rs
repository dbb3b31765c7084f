//! A program in a guest that can tell whether anything of it was lost: it counts, in memory and in a file that it keeps open,
//! and has a megabyte of random bytes that exist nowhere else. Owns no state; the program ends with its sandbox.

use aenv_testkit::client::{Client, Sandbox};
use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Where the program answers in the guest.
pub const PORT: u16 = 8123;
/// How long it may take to start in a machine that is emulated itself, on a host that has other things to do.
const PATIENCE: Duration = Duration::from_secs(240);

const PROGRAM: &str = r#"
import hashlib, http.server, json, os, threading, time
memory, count = os.urandom(1 << 20), 0
kept = open("/root/counted", "ab", buffering=0)
def tick():
    global count
    while True:
        kept.write(b"x")
        count += 1
        time.sleep(0.05)
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        told = {"realtime": time.time(), "monotonic": time.monotonic(), "pid": os.getpid(), "count": count,
                "written": os.stat("/root/counted").st_size, "memory": hashlib.sha256(memory).hexdigest()}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
threading.Thread(target=tick, daemon=True).start()
http.server.ThreadingHTTPServer(("", 8123), Handler).serve_forever()
"#;

/// What the program told last.
#[derive(Debug, Clone)]
pub struct Witness {
    told: Value,
    boot: String,
}

/// Which boot of a guest this is.
///
/// # Errors
/// When the guest does not say.
pub async fn boot_of(client: &Client, sandbox: &Sandbox) -> Result<String> {
    client.run(sandbox, "cat /proc/sys/kernel/random/boot_id").await
}

impl Witness {
    /// Starts the program.
    ///
    /// # Errors
    /// When it does not answer in time.
    pub async fn start(client: &Client, sandbox: &Sandbox) -> Result<Self> {
        let uploaded = client.upload("root", sandbox, "/root/witness.py", PROGRAM.into()).await?;
        ensure!(uploaded.status.is_success(), "upload: {} {}", uploaded.status, uploaded.text());
        client.run(sandbox, "nohup python3 /root/witness.py >/root/witness.log 2>&1 &").await?;
        let started = Instant::now();
        loop {
            match ask(client, sandbox).await {
                Ok(told) => return Ok(Self { told, boot: boot_of(client, sandbox).await? }),
                Err(error) if started.elapsed() > PATIENCE => {
                    let said = client.run(sandbox, "cat /root/witness.log; ps aux | tail -n 5").await;
                    return Err(
                        error.context(format!("the program does not answer; the guest says {said:?}"))
                    );
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Asks the program again, which must have gone on where it was: the same boot, process and memory, counting further
    /// from where it was, and nothing written to its open file lost.
    ///
    /// # Errors
    /// When anything is lost, or it does not count any more.
    pub async fn goes_on(&mut self, client: &Client, sandbox: &Sandbox) -> Result<()> {
        let first = ask(client, sandbox).await?;
        let told = ask_until(client, sandbox, number(&first, "count") + 2).await?;
        let before = &self.told;
        for field in ["pid", "memory"] {
            ensure!(told[field] == before[field], "another {field}: {before}, then {told}");
        }
        ensure!(number(&first, "count") >= number(before, "count"), "counted back: {before}, then {first}");
        ensure!(number(&told, "written") >= number(&told, "count"), "lost what was written: {told}");
        let boot = boot_of(client, sandbox).await?;
        ensure!(boot == self.boot, "it booted meanwhile: {} became {boot}", self.boot);
        self.told = told;
        Ok(())
    }

    /// Checks that the guest booted since: another boot, and the program is gone.
    ///
    /// # Errors
    /// When it did not.
    pub async fn is_gone(&self, client: &Client, sandbox: &Sandbox) -> Result<()> {
        let boot = boot_of(client, sandbox).await?;
        ensure!(boot != self.boot, "it did not boot: {boot}");
        ensure!(ask(client, sandbox).await.is_err(), "the program goes on after a boot");
        let written: u64 = client.run(sandbox, "stat -c %s /root/counted").await?.parse()?;
        ensure!(written >= number(&self.told, "count"), "{written} bytes are left of {}", self.told);
        Ok(())
    }
}

async fn ask(client: &Client, sandbox: &Sandbox) -> Result<Value> {
    let answer = client.guest_get(sandbox, PORT, "/").await?;
    ensure!(answer.status.is_success(), "{}: {}", answer.status, answer.text());
    serde_json::from_slice(&answer.body).context("the program told no JSON")
}

async fn ask_until(client: &Client, sandbox: &Sandbox, count: u64) -> Result<Value> {
    let started = Instant::now();
    loop {
        let told = ask(client, sandbox).await?;
        if number(&told, "count") >= count {
            return Ok(told);
        }
        ensure!(started.elapsed() < PATIENCE, "it does not count any more: {told}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn number(told: &Value, field: &str) -> u64 {
    told[field].as_u64().unwrap_or_default()
}
