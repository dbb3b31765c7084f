//! One node in the background: start, find again, ask, end, purge.
//!
//! Owns the record of the node it started (`node.json`: pid, start time, what it was started with), by which a later call
//! finds it again. A pid alone is not trusted: the start time tells whether it still names the same process.
//! The VMs are not this module's: they survive the node and are adopted or purged by `aenv-node` itself.

use crate::http::Client;
use crate::process::{create_log, output_of, tail};
use crate::settings::Settings;
use crate::stages::Voice;
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// From the start of the process to its first answer; adoption of many VMs included.
const START_LIMIT: Duration = Duration::from_secs(60);
/// From the start to a ready template: a boot without virtualisation, several times over.
const READY_LIMIT: Duration = Duration::from_secs(300);
/// From SIGTERM to the end, beyond the time in which the node may pause its sandboxes.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// That time, when the settings do not say.
const PAUSING_LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Where a node's files lie and what it is told.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) settings: Settings,
    pub(crate) program: PathBuf,
    pub(crate) guest_dir: PathBuf,
    /// Root filesystem of the template `base`.
    pub(crate) rootfs: PathBuf,
    pub(crate) record: PathBuf,
    pub(crate) log: PathBuf,
    pub(crate) key: String,
}

/// What is remembered of a started node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) pid: i32,
    start_time: u64,
    /// Of the program, the guest's files and the settings: another one means that a restart is due.
    fingerprint: String,
    pub(crate) listen: String,
    pub(crate) data_dir: PathBuf,
    pub(crate) instance: String,
    pub(crate) program: PathBuf,
    pub(crate) passed_on: Vec<(String, String)>,
}

/// What `up` found and did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Started {
    Kept,
    Fresh,
    /// It ran with an older program or other settings.
    Replaced,
}

impl Record {
    /// Reads a record; absent and unreadable count as none, since a node can always be started anew.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    /// Whether the process it names still runs.
    pub(crate) fn is_alive(&self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }

    /// How long its end may take.
    fn stop_limit(&self) -> Duration {
        let set = |wanted: &str| {
            self.passed_on.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
        };
        if set("AENV_ON_STOP").is_none_or(|value| value != "pause") {
            return STOP_LIMIT;
        }
        let pausing = set("AENV_STOP_SECONDS").and_then(|value| value.parse().ok());
        STOP_LIMIT + pausing.map_or(PAUSING_LIMIT, Duration::from_secs)
    }

    /// Ends the node politely, then by force. VMs go on. Tells whether it ran.
    pub(crate) fn stop(&self) -> Result<bool> {
        if !self.is_alive() {
            return Ok(false);
        }
        let pid = Pid::from_raw(self.pid).context("the record names no process")?;
        kill_process(pid, Signal::TERM).with_context(|| format!("cannot end process {}", self.pid))?;
        let asked = Instant::now();
        let limit = self.stop_limit();
        while self.is_alive() {
            if asked.elapsed() > limit {
                kill_process(pid, Signal::KILL)
                    .with_context(|| format!("cannot kill process {}", self.pid))?;
            }
            if asked.elapsed() > limit + STOP_LIMIT {
                bail!("process {} does not end", self.pid);
            }
            std::thread::sleep(POLL);
        }
        Ok(true)
    }
}

impl Node {
    /// Puts the root filesystem into the data directory as template `base`, unless that very one is there.
    pub(crate) fn import_template(&self) -> Result<()> {
        let wanted = format!("{}{:?}\n", self.rootfs_digest()?, self.settings.of_template());
        let stamp = self.settings.data_dir.join("base.imported");
        if std::fs::read_to_string(&stamp).is_ok_and(|present| present == wanted) {
            return Ok(());
        }
        if let Some(record) = Record::read(&self.record) {
            record.stop()?;
        }
        std::fs::create_dir_all(&self.settings.data_dir)
            .with_context(|| format!("cannot make {}", self.settings.data_dir.display()))?;
        output_of(self.command(&["template", "import", "base"]).arg(&self.rootfs))?;
        std::fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))
    }

    /// Makes sure a node runs with exactly this program, these files and these settings.
    pub(crate) fn ensure(&self) -> Result<Started> {
        let fingerprint = self.fingerprint()?;
        let mut started = Started::Fresh;
        if let Some(record) = Record::read(&self.record).filter(Record::is_alive) {
            if record.fingerprint == fingerprint {
                return Ok(Started::Kept);
            }
            record.stop()?;
            started = Started::Replaced;
        }
        self.refuse_taken_address()?;
        self.start(fingerprint)?;
        Ok(started)
    }

    fn start(&self, fingerprint: String) -> Result<()> {
        if self.log.exists() {
            let older = self.log.with_extension("log.1");
            std::fs::rename(&self.log, older).context("cannot rotate the node's log")?;
        }
        let output = create_log(&self.log)?;
        let errors = output.try_clone().context("cannot duplicate the log's handle")?;
        let serve = self.command(&["serve"]);
        // A session of its own, so that no signal of this terminal reaches it; the process id stays the same.
        let mut command = Command::new("setsid");
        command.arg(serve.get_program()).args(serve.get_args());
        for (name, value) in serve.get_envs().filter_map(|(name, value)| Some((name, value?))) {
            command.env(name, value);
        }
        command.current_dir("/").stdin(Stdio::null()).stdout(output).stderr(errors);
        let child = command.spawn().context("cannot start the node")?;
        let pid = i32::try_from(child.id()).context("the process id is out of range")?;
        let start_time =
            start_time(pid).with_context(|| format!("the node ended at once: {}", tail(&self.log, 2000)))?;
        let record = Record {
            pid,
            start_time,
            fingerprint,
            listen: self.settings.listen.clone(),
            data_dir: self.settings.data_dir.clone(),
            instance: self.settings.instance.clone(),
            program: self.program.clone(),
            passed_on: self.settings.passed_on.clone(),
        };
        write_private(
            &self.record,
            &serde_json::to_vec_pretty(&record).context("cannot encode the node's record")?,
        )
    }

    /// Ends what is left of an instance: VMs, namespaces, taps, rules. The node must not run.
    pub(crate) fn purge(&self) -> Result<String> {
        output_of(&mut self.command(&["purge"]))
    }

    /// The node's program with everything it must be told.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("AENV_LISTEN", &self.settings.listen)
            .env("AENV_DATA_DIR", &self.settings.data_dir)
            .env("AENV_GUEST_DIR", &self.guest_dir)
            .env("AENV_INSTANCE", &self.settings.instance)
            .env("AENV_API_KEY", &self.key)
            .envs(self.settings.passed_on.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Waits until the node answers and its template is ready.
    pub(crate) async fn wait_ready(&self, voice: &Voice) -> Result<()> {
        let started = Instant::now();
        let mut client = Client::new(self.settings.reachable().as_str(), &self.key);
        loop {
            let waited = started.elapsed();
            let state = match client.api(http::Method::GET, "/templates", &serde_json::Value::Null).await {
                Ok(answer) => base_state(&answer.success()?),
                Err(error) if waited > START_LIMIT => {
                    return Err(self.with_log(&format!("no answer: {error:#}")));
                }
                Err(_) => BaseState::Unknown,
            };
            match state {
                BaseState::Ready => return Ok(()),
                BaseState::Failed(reason) => {
                    return Err(self.with_log(&format!("template base failed: {reason}")));
                }
                BaseState::Unknown if waited > START_LIMIT => {
                    return Err(self.with_log("the template base is not there"));
                }
                BaseState::Preparing | BaseState::Unknown => {}
            }
            if !Record::read(&self.record).is_some_and(|record| record.is_alive()) {
                return Err(self.with_log("the node ended"));
            }
            if waited > READY_LIMIT {
                return Err(self.with_log(&format!("the template base is not ready after {READY_LIMIT:?}")));
            }
            voice.doing("booting the template's guest once, and capturing it");
            tokio::time::sleep(POLL).await;
        }
    }

    fn with_log(&self, what: &str) -> anyhow::Error {
        anyhow::anyhow!("{what}\n{}\n(all of it: {})", tail(&self.log, 3000), self.log.display())
    }

    fn refuse_taken_address(&self) -> Result<()> {
        match std::net::TcpListener::bind(&self.settings.listen) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => bail!(
                "{} is in use by another program: end it, or choose another port with AENV_PORT=8001 make up",
                self.settings.listen
            ),
            Err(error) => Err(error).with_context(|| format!("cannot listen on {}", self.settings.listen)),
        }
    }

    fn rootfs_digest(&self) -> Result<String> {
        let path = self.rootfs.with_extension("ext4.sha256");
        std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    fn fingerprint(&self) -> Result<String> {
        let mut digest = Sha256::new();
        for path in [
            self.program.clone(),
            self.guest_dir.join("initramfs.cpio"),
            self.guest_dir.join("kernel/vmlinuz"),
        ] {
            digest.update(std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
        }
        digest.update(self.rootfs_digest()?);
        digest.update(format!("{:?} {}", self.settings, self.key));
        Ok(hex::encode(digest.finalize()))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum BaseState {
    Unknown,
    Preparing,
    Ready,
    Failed(String),
}

/// State of the template `base` in a list of templates.
fn base_state(templates: &serde_json::Value) -> BaseState {
    let list = templates.as_array().map(Vec::as_slice).unwrap_or_default();
    let named_base =
        |names: &serde_json::Value| names.as_array().is_some_and(|names| names.iter().any(|n| n == "base"));
    let Some(base) =
        list.iter().find(|template| named_base(&template["names"]) || named_base(&template["aliases"]))
    else {
        return BaseState::Unknown;
    };
    match base["buildStatus"].as_str() {
        Some("ready") => BaseState::Ready,
        Some("error") => BaseState::Failed(base["failure"].as_str().unwrap_or("no reason given").to_owned()),
        _ => BaseState::Preparing,
    }
}

/// Start time of a process in clock ticks since boot; none when it does not exist or has ended and waits to be reaped.
pub(crate) fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and brackets: fields are counted behind its last bracket.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    if matches!(fields.next(), Some("Z" | "X")) {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Writes a file that only its owner may read, as a whole.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    let unfinished = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file =
            std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&unfinished)?;
        file.write_all(content)?;
        std::fs::rename(&unfinished, path)
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_state_of_base_is_found_among_templates() {
        let list =
            |status: &str| json!([{ "names": ["other"] }, { "names": ["base"], "buildStatus": status }]);
        assert_eq!(base_state(&list("ready")), BaseState::Ready);
        assert_eq!(base_state(&list("building")), BaseState::Preparing);
        assert_eq!(base_state(&list("error")), BaseState::Failed("no reason given".to_owned()));
        assert_eq!(base_state(&json!([])), BaseState::Unknown);
    }

    #[test]
    fn a_process_is_known_by_its_start_time() {
        let start_time = start_time(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(record(start_time, &[]).is_alive());
        assert!(!record(start_time + 1, &[]).is_alive());
        assert!(!record(start_time + 1, &[]).stop().unwrap());
    }

    #[test]
    fn a_node_that_pauses_first_is_given_the_time_for_that() {
        let limit = |settings: &[(&str, &str)]| record(0, settings).stop_limit();
        assert_eq!(limit(&[]), STOP_LIMIT);
        assert_eq!(limit(&[("AENV_ON_STOP", "leave"), ("AENV_STOP_SECONDS", "600")]), STOP_LIMIT);
        let pauses = ("AENV_ON_STOP", "pause");
        assert_eq!(limit(&[pauses]), STOP_LIMIT + PAUSING_LIMIT);
        assert_eq!(limit(&[pauses, ("AENV_STOP_SECONDS", "600")]), STOP_LIMIT + Duration::from_secs(600));
    }

    /// Of this very process, if it started then.
    fn record(start_time: u64, settings: &[(&str, &str)]) -> Record {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Record {
            pid: i32::try_from(std::process::id()).unwrap(),
            start_time,
            fingerprint: String::new(),
            listen: String::new(),
            data_dir: PathBuf::new(),
            instance: String::new(),
            program: PathBuf::new(),
            passed_on: settings.iter().map(owned).collect(),
        }
    }
}
