//! A node and its sandboxes, made of answers that a test writes down; and a way to run the program against it.

#![expect(dead_code, reason = "each test binary uses its own part")]

use aenv_protocol::envd::process::{ProcessEvent, StartResponse, process_event};
use buffa::Message;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc;

/// An id that is accepted everywhere.
pub(crate) const ID: &str = "i0123456789abcdefghij";
/// The key the fake node is asked with.
pub(crate) const KEY: &str = "e2b_0123";

pub(crate) type Body = BoxBody<Bytes, std::io::Error>;

/// One request as it came in.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Asked {
    pub(crate) fn is(&self, method: &str, path: &str) -> bool {
        self.method == method && self.path == path
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    pub(crate) fn message<M: Message>(&self) -> M {
        M::decode_from_slice(&self.body).unwrap()
    }

    /// The message of a streaming call, which has an envelope.
    pub(crate) fn enveloped<M: Message>(&self) -> M {
        M::decode_from_slice(&self.body[5..]).unwrap()
    }
}

/// A node that answers with what `answer` says, and remembers what it was asked.
pub(crate) struct FakeNode {
    pub(crate) url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    _runtime: tokio::runtime::Runtime,
}

impl FakeNode {
    pub(crate) fn start(answer: impl Fn(&Asked) -> Response<Body> + Send + Sync + 'static) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answer = Arc::new(answer);
        let log = asked.clone();
        runtime.spawn(async move {
            loop {
                let (connection, _) = listener.accept().await.unwrap();
                let (answer, log) = (answer.clone(), log.clone());
                let service = service_fn(move |request: Request<Incoming>| {
                    let (answer, log) = (answer.clone(), log.clone());
                    async move {
                        let (head, body) = request.into_parts();
                        let asked = Asked {
                            method: head.method.to_string(),
                            path: head.uri.path().to_owned(),
                            query: head.uri.query().unwrap_or_default().to_owned(),
                            headers: head.headers,
                            body: body.collect().await?.to_bytes(),
                        };
                        log.lock().unwrap().push(asked.clone());
                        Ok::<_, hyper::Error>(answer(&asked))
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(connection), service),
                );
            }
        });
        Self { url, asked, _runtime: runtime }
    }

    /// What was asked so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// The program, pointed at this node, in an empty environment and directory.
    pub(crate) fn command<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Command {
        let mut command = bare_command(arguments);
        command.env("E2B_API_KEY", KEY).env("E2B_API_URL", &self.url);
        command
    }

    pub(crate) fn run<I: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = I>) -> Ended {
        ended(self.command(arguments).output().unwrap())
    }
}

/// The program without any settings and without input.
pub(crate) fn bare_command<I: AsRef<OsStr>>(arguments: impl IntoIterator<Item = I>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aenv"));
    command.args(arguments).env_clear().current_dir("/").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The program on a terminal of 200 columns (that of util-linux's `script`), what it shows in `stdout`.
pub(crate) fn on_terminal(command: &Command) -> Ended {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let mut script = Command::new("/usr/bin/script");
    script.args(["-qefc", &format!("/bin/stty cols 200; {}", words.join(" ")), "/dev/null"]).env_clear();
    script.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("TERM", "xterm");
    script.current_dir("/").stdin(Stdio::null());
    ended(script.output().unwrap())
}

/// How the program ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) output: Output,
}

pub(crate) fn ended(output: Output) -> Ended {
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        output,
    }
}

pub(crate) fn answer(status: u16, body: impl Into<Bytes>) -> Response<Body> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed();
    Response::builder().status(status).body(body).unwrap()
}

pub(crate) fn json_answer(status: u16, body: &Value) -> Response<Body> {
    answer(status, body.to_string())
}

pub(crate) fn error_answer(status: u16, message: &str) -> Response<Body> {
    json_answer(status, &json!({ "code": status, "message": message }))
}

/// What the API tells of a sandbox.
pub(crate) fn sandbox(id: &str, state: &str) -> Value {
    let now = jiff::Timestamp::now();
    json!({
        "templateID": "t1", "sandboxID": id, "clientID": "c", "alias": "base", "envdVersion": "0.6.13",
        "startedAt": now.to_string(), "endAt": (now + jiff::SignedDuration::from_mins(5)).to_string(),
        "cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": state, "metadata": {"who": "me"},
        "allowInternetAccess": true, "lifecycle": {"onTimeout": "kill", "autoResume": false},
        "envdAccessToken": "token-of-the-sandbox",
    })
}

/// A body that a test writes while it is read; `Err` breaks the connection.
pub(crate) type Pen = mpsc::UnboundedSender<std::io::Result<Bytes>>;

pub(crate) fn written_body() -> (Pen, Body) {
    let (pen, mut written) = mpsc::unbounded_channel::<std::io::Result<Bytes>>();
    let frames = futures_util::stream::poll_fn(move |context| {
        written.poll_recv(context).map(|part| part.map(|bytes| bytes.map(Frame::data)))
    });
    (pen, BodyExt::boxed(StreamBody::new(frames)))
}

pub(crate) fn broken() -> std::io::Result<Bytes> {
    Err(std::io::Error::other("broken by the test"))
}

/// An answer of the process service: one stream of events, written by the test.
pub(crate) fn process_answer() -> (Pen, Response<Body>) {
    let (pen, body) = written_body();
    (pen, Response::builder().header("content-type", "application/connect+proto").body(body).unwrap())
}

/// One event in its envelope.
pub(crate) fn event(event: impl Into<process_event::Event>) -> std::io::Result<Bytes> {
    let event = ProcessEvent { event: Some(event.into()), ..Default::default() };
    Ok(envelope(0, &StartResponse { event: event.into(), ..Default::default() }.encode_to_vec()))
}

pub(crate) fn started() -> std::io::Result<Bytes> {
    event(process_event::StartEvent { pid: 42, ..Default::default() })
}

pub(crate) fn stdout(bytes: &[u8]) -> std::io::Result<Bytes> {
    let output = Some(process_event::data_event::Output::Stdout(bytes.to_vec()));
    event(process_event::DataEvent { output, ..Default::default() })
}

pub(crate) fn stderr(bytes: &[u8]) -> std::io::Result<Bytes> {
    let output = Some(process_event::data_event::Output::Stderr(bytes.to_vec()));
    event(process_event::DataEvent { output, ..Default::default() })
}

/// The end of a process that exited (`code >= 0`) or was ended by the signal of that name.
pub(crate) fn exited(code: i32, status: &str) -> std::io::Result<Bytes> {
    let end = process_event::EndEvent {
        exit_code: code,
        exited: code >= 0,
        status: status.to_owned(),
        ..Default::default()
    };
    event(end)
}

/// The last envelope of a stream.
pub(crate) fn end_of_stream(body: &Value) -> std::io::Result<Bytes> {
    Ok(envelope(2, body.to_string().as_bytes()))
}

fn envelope(flags: u8, payload: &[u8]) -> Bytes {
    let mut bytes = vec![flags];
    bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes.into()
}

/// The empty answer of a unary call.
pub(crate) fn unary_answer() -> Response<Body> {
    let mut response = answer(200, "");
    response.headers_mut().insert("content-type", "application/proto".parse().unwrap());
    response
}

/// Names in a directory.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}
