//! The QMP connection to one QEMU process.
//!
//! Owns the socket and the task that reads it. Commands may be sent by several tasks at once; each answer goes to who
//! asked. Events go to all who subscribed. Must not know what the commands mean.
//!
//! ```text
//! ──▶ {"execute": "stop", "id": 7}            ◀── {"QMP": …}             greeting, once
//!                                             ◀── {"return": {}, "id": 7} or {"error": {"class", "desc"}, "id": 7}
//!                                             ◀── {"event": "STOP", "data": {…}, "timestamp": …}   at any time
//! ```

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{broadcast, oneshot};
use tokio_util::task::AbortOnDropHandle;

/// Longest line accepted: a VMM that a guest took over must not fill our memory.
const MAX_LINE: u64 = 1 << 20;
/// Events kept for a subscriber that is slow.
const EVENT_BACKLOG: usize = 256;

/// What a command can end with.
#[derive(Debug, thiserror::Error)]
pub(super) enum MonitorError {
    #[error("{class}: {description}")]
    Refused { class: String, description: String },
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    #[error("the monitor connection is closed")]
    Closed,
    #[error("the monitor cannot be reached: {0}")]
    Io(#[from] io::Error),
    #[error("the monitor said something unexpected: {0}")]
    Protocol(String),
}

/// Something the VMM tells by itself.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) data: Value,
}

/// One line of the VMM.
#[derive(Debug, PartialEq)]
enum Message {
    Greeting,
    Event(Event),
    Answer { id: Option<u64>, result: Result<Value, Refusal> },
}

#[derive(Debug, PartialEq, Deserialize)]
struct Refusal {
    class: String,
    desc: String,
}

fn parse(line: &[u8]) -> Result<Message, String> {
    #[derive(Deserialize)]
    struct Raw {
        #[serde(rename = "QMP")]
        greeting: Option<Value>,
        event: Option<String>,
        #[serde(default)]
        data: Value,
        #[serde(rename = "return")]
        returned: Option<Value>,
        error: Option<Refusal>,
        id: Option<u64>,
    }
    let unexpected = || String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
    let raw: Raw = serde_json::from_slice(line).map_err(|_| unexpected())?;
    match raw {
        Raw { greeting: Some(_), .. } => Ok(Message::Greeting),
        Raw { event: Some(name), data, .. } => Ok(Message::Event(Event { name, data })),
        Raw { error: Some(refusal), id, .. } => Ok(Message::Answer { id, result: Err(refusal) }),
        Raw { returned: Some(value), id, .. } => Ok(Message::Answer { id, result: Ok(value) }),
        _ => Err(unexpected()),
    }
}

type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Result<Value, Refusal>>>>>>;

/// A connection that has been greeted and accepts commands. Dropping it closes it; the VM goes on.
#[derive(Debug)]
pub(super) struct Monitor {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// Who waits for which answer; `None` once the connection is closed.
    waiting: Waiting,
    events: broadcast::Sender<Event>,
    next_id: AtomicU64,
    limit: Duration,
    _reader: AbortOnDropHandle<()>,
}

impl Monitor {
    /// The limit of each command.
    pub(super) fn command_limit(&self) -> Duration {
        self.limit
    }

    /// Connects and negotiates; `start_limit` bounds that, `limit` each command later.
    pub(super) async fn connect(
        path: &Path,
        start_limit: Duration,
        limit: Duration,
    ) -> Result<Self, MonitorError> {
        let connect = async {
            let (reader, writer) = UnixStream::connect(path).await?.into_split();
            let mut lines = Lines(BufReader::new(reader));
            match lines.next().await?.map(|line| parse(&line)) {
                Some(Ok(Message::Greeting)) => {}
                Some(Ok(other)) => {
                    return Err(MonitorError::Protocol(format!("{other:?} instead of a greeting")));
                }
                Some(Err(line)) => return Err(MonitorError::Protocol(line)),
                None => return Err(MonitorError::Closed),
            }
            let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
            let events = broadcast::Sender::new(EVENT_BACKLOG);
            let task = tokio::spawn(read(lines, Arc::clone(&waiting), events.clone()));
            let writer = tokio::sync::Mutex::new(writer);
            let _reader = AbortOnDropHandle::new(task);
            let monitor = Self { writer, waiting, events, next_id: AtomicU64::new(1), limit, _reader };
            monitor.execute("qmp_capabilities", json!({})).await?;
            Ok(monitor)
        };
        tokio::time::timeout(start_limit, connect).await.unwrap_or(Err(MonitorError::Timeout(start_limit)))
    }

    /// Events from now on.
    pub(super) fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// Sends one command and waits for its answer.
    pub(super) async fn execute(&self, command: &str, arguments: Value) -> Result<Value, MonitorError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        match self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            Some(waiting) => drop(waiting.insert(id, sender)),
            None => return Err(MonitorError::Closed),
        }
        // Forgets the question when this future is dropped or runs into its limit.
        let _forget = Forget { id, waiting: &self.waiting };
        let exchange = async {
            let mut line = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
            line.push('\n');
            self.writer.lock().await.write_all(line.as_bytes()).await?;
            match receiver.await {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(Refusal { class, desc })) => Err(MonitorError::Refused { class, description: desc }),
                Err(_) => Err(MonitorError::Closed),
            }
        };
        tokio::time::timeout(self.limit, exchange).await.unwrap_or(Err(MonitorError::Timeout(self.limit)))
    }
}

struct Forget<'a> {
    id: u64,
    waiting: &'a Waiting,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        if let Some(waiting) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            waiting.remove(&self.id);
        }
    }
}

struct Lines(BufReader<OwnedReadHalf>);

impl Lines {
    async fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        let read = (&mut self.0).take(MAX_LINE).read_until(b'\n', &mut line).await?;
        if read == 0 {
            return Ok(None);
        }
        if line.last() != Some(&b'\n') {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the monitor sent a cut or endless line"));
        }
        Ok(Some(line))
    }
}

async fn read(mut lines: Lines, waiting: Waiting, events: broadcast::Sender<Event>) {
    loop {
        let line = match lines.next().await {
            Ok(Some(line)) => line,
            // The end of the VMM; its process handle tells how.
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "monitor connection ended");
                break;
            }
        };
        match parse(&line) {
            // An error means that nobody is subscribed.
            Ok(Message::Event(event)) => drop(events.send(event)),
            Ok(Message::Answer { id, result }) => {
                let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
                let sender = id.zip(waiting.as_mut()).and_then(|(id, waiting)| waiting.remove(&id));
                // None, or gone meanwhile: who asked does not wait any more.
                if let Some(sender) = sender {
                    drop(sender.send(result));
                }
            }
            Ok(Message::Greeting) => {}
            Err(line) => tracing::warn!(line, "the monitor said something unexpected"),
        }
    }
    waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
}

#[cfg(test)]
mod tests;
