//! Speaks to the guest daemon of one sandbox, through the node's sandbox proxy.
//!
//! Owns the routing headers and the token. Processes go through the generated Connect client, files through plain HTTP.
//! Nothing is retried: a command must not run twice.
//!
//! ```text
//! start ──▶ Started(pid) ─▶ { Stdout | Stderr | keepalive } ─▶ Ended      any other end is a broken stream
//! ```

use crate::api_client::ApiError;
use crate::failure::{Exit, Failure, chain};
use crate::settings::{BaseUrl, Settings};
use crate::transport::{
    CONNECT_TIMEOUT, RequestBody, Transport, TransportError, authority_of, empty_body, error_text, read_all,
};
use aenv_protocol::envd::process::{
    CloseStdinRequest, ProcessClient, ProcessConfig, ProcessInput, ProcessSelector, SendInputRequest,
    SendSignalRequest, Signal, StartRequest, StartResponseView, process_event, process_input,
    process_selector,
};
use aenv_protocol::envd::{ACCESS_TOKEN_HEADER, ENVD_PORT};
use aenv_protocol::ids::SandboxId;
use base64::Engine;
use bytes::Bytes;
use connectrpc::client::{CallOptions, ClientConfig, ClientTransport, HttpClient, ServerStream};
use connectrpc::{ConnectError, ErrorCode};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// How often the daemon must say that a silent process still runs, in seconds.
const KEEPALIVE_SECONDS: u16 = 20;
/// A stream without a word for this long is broken: three signs of life were missed, and more.
const SILENCE: Duration = Duration::from_secs(75);
/// A short request to the daemon.
const PATIENCE: Duration = Duration::from_secs(30);
/// Asking why something failed must not take long.
const DIAGNOSIS_PATIENCE: Duration = Duration::from_secs(5);
/// An upload is answered when the guest has written everything that was sent.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// Why the daemon did not do what it was asked.
#[derive(Debug)]
pub(crate) enum EnvdError {
    /// The sandbox cannot be reached, or the connection to it broke.
    Broken { reason: String },
    /// The daemon refused.
    Refused { code: ErrorCode, reason: String },
    /// A file request was refused.
    FileRefused { status: StatusCode, reason: String },
    /// No usable answer to a file request.
    Transport(TransportError),
    /// The request cannot be expressed.
    Unaskable { reason: String },
}

impl From<TransportError> for EnvdError {
    fn from(error: TransportError) -> Self {
        Self::Transport(error)
    }
}

impl From<ConnectError> for EnvdError {
    fn from(error: ConnectError) -> Self {
        let reason = match &error.message {
            Some(message) if !message.is_empty() => chain_without(&error, message),
            _ => error.code.as_str().to_owned(),
        };
        match error.code {
            ErrorCode::Unavailable | ErrorCode::DataLoss => Self::Broken { reason },
            code => Self::Refused { code, reason },
        }
    }
}

/// The message and what caused it, without the code that `Display` puts before it.
fn chain_without(error: &ConnectError, message: &str) -> String {
    match std::error::Error::source(error) {
        Some(source) if !message.contains(&source.to_string()) => format!("{message}: {}", chain(source)),
        _ => message.to_owned(),
    }
}

impl From<EnvdError> for Failure {
    fn from(error: EnvdError) -> Self {
        match error {
            EnvdError::Broken { reason } => Self::connection_broke(&reason),
            EnvdError::Refused { code, reason } => {
                let failure = Self::new(reason);
                match code {
                    ErrorCode::Unauthenticated => {
                        failure.with_hint("the sandbox has the users root and user")
                    }
                    _ => failure,
                }
            }
            EnvdError::FileRefused { status: StatusCode::BAD_GATEWAY, reason } => {
                Self::connection_broke(&reason)
            }
            EnvdError::FileRefused { status, reason } => {
                let failure = Self::new(reason);
                match status {
                    StatusCode::NOT_FOUND => {
                        failure.with_hint("relative paths start at the user's home directory")
                    }
                    StatusCode::UNAUTHORIZED => failure.with_hint("the sandbox has the users root and user"),
                    StatusCode::INSUFFICIENT_STORAGE => {
                        failure.with_hint("free room in the sandbox and try again")
                    }
                    _ => failure,
                }
            }
            EnvdError::Transport(error) => error.into(),
            EnvdError::Unaskable { reason } => Self::new(reason).with_exit(Exit::USAGE),
        }
    }
}

/// Signals that can be sent to a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessSignal {
    /// Asks it to end.
    Terminate,
    /// Ends it and its group.
    Kill,
}

/// What to run.
#[derive(Debug)]
pub(crate) struct ProcessStart {
    /// Program: a path, or a name found in the guest's PATH.
    pub(crate) program: String,
    /// What follows the program's name.
    pub(crate) arguments: Vec<String>,
    /// On top of the sandbox's environment.
    pub(crate) environment: Vec<(String, String)>,
    /// Working directory.
    pub(crate) cwd: Option<String>,
    /// User to run as.
    pub(crate) user: Option<String>,
    /// Whether its input will be fed.
    pub(crate) stdin: bool,
}

/// Something a process did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProcessEvent {
    /// It runs, under this id.
    Started(u32),
    /// It wrote to standard output.
    Stdout(Bytes),
    /// It wrote to standard error.
    Stderr(Bytes),
    /// It ended.
    Ended(ProcessEnd),
}

/// How a process ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProcessEnd {
    /// Exit code, if `exited`.
    pub(crate) code: i32,
    /// Whether it ended by itself, not by a signal.
    pub(crate) exited: bool,
    /// In the daemon's words, such as `signal: killed`.
    pub(crate) status: String,
}

/// The daemon of one sandbox.
#[derive(Clone)]
pub(crate) struct EnvdClient {
    processes: ProcessClient<HttpClient>,
    transport: Transport,
    base: BaseUrl,
    headers: HeaderMap,
}

impl EnvdClient {
    /// Prepares the way to the daemon of a sandbox, which demands `token`.
    ///
    /// # Errors
    /// When id, token or address cannot be sent.
    pub(crate) fn new(
        settings: &Settings,
        transport: &Transport,
        id: &SandboxId,
        token: Option<&str>,
    ) -> Result<Self, Failure> {
        let mut headers = HeaderMap::new();
        let unusable = |what: &str| ApiError::NotUnderstood {
            base: settings.api.clone(),
            reason: format!("{what} of the sandbox is unusable"),
        };
        let id_value = HeaderValue::from_str(id.as_str()).map_err(|_| unusable("the id"))?;
        headers.insert("e2b-sandbox-id", id_value);
        headers.insert("e2b-sandbox-port", HeaderValue::from(ENVD_PORT));
        if let Some(token) = token {
            let mut value = HeaderValue::from_str(token).map_err(|_| unusable("the access token"))?;
            value.set_sensitive(true);
            headers.insert(ACCESS_TOKEN_HEADER, value);
        }
        let base_uri = settings
            .sandboxes
            .join("")
            .map_err(|error| EnvdError::Unaskable { reason: error.to_string() })?;
        let config = ClientConfig::new(base_uri).with_default_headers(headers.clone());
        let http = HttpClient::builder().tcp_connect_timeout(CONNECT_TIMEOUT).plaintext();
        Ok(Self {
            processes: ProcessClient::new(http, config),
            transport: transport.clone(),
            base: settings.sandboxes.clone(),
            headers,
        })
    }

    /// What the proxy says of the sandbox when it cannot be reached; absent when it can, or when nobody answers.
    pub(crate) async fn why_unreachable(&self) -> Option<String> {
        let mut request = Request::get(self.base.join("/health").ok()?).body(empty_body()).ok()?;
        *request.headers_mut() = self.headers.clone();
        let answer = self.transport.ask(request, DIAGNOSIS_PATIENCE).await.ok()?;
        (!answer.status().is_success()).then(|| error_text(answer.status(), answer.body()))
    }

    /// Starts a process; its first event is its start.
    ///
    /// # Errors
    /// When the daemon cannot be reached or refuses.
    pub(crate) async fn start(&self, start: ProcessStart) -> Result<ProcessStream, Failure> {
        let keepalive = HeaderValue::from(KEEPALIVE_SECONDS);
        let mut options = CallOptions::default().with_header("keepalive-ping-interval", keepalive);
        if let Some(user) = &start.user {
            options = options.with_header(header::AUTHORIZATION, basic_user(user));
        }
        let request = StartRequest {
            process: ProcessConfig {
                cmd: start.program,
                args: start.arguments,
                envs: start.environment.into_iter().collect(),
                cwd: start.cwd,
                ..Default::default()
            }
            .into(),
            stdin: Some(start.stdin),
            ..Default::default()
        };
        let stream = within(SILENCE, self.processes.start_with_options(request, options)).await?;
        Ok(ProcessStream { stream })
    }

    /// Feeds a process.
    pub(crate) async fn send_input(&self, pid: u32, bytes: Bytes) -> Result<(), EnvdError> {
        let input =
            ProcessInput { input: Some(process_input::Input::Stdin(bytes.into())), ..Default::default() };
        let request =
            SendInputRequest { process: selector(pid).into(), input: input.into(), ..Default::default() };
        self.processes.send_input(request).await?;
        Ok(())
    }

    /// Lets a process see the end of its input.
    pub(crate) async fn close_stdin(&self, pid: u32) -> Result<(), EnvdError> {
        let request = CloseStdinRequest { process: selector(pid).into(), ..Default::default() };
        let options = CallOptions::default().with_timeout(PATIENCE);
        self.processes.close_stdin_with_options(request, options).await?;
        Ok(())
    }

    /// Signals a process.
    pub(crate) async fn send_signal(&self, pid: u32, signal: ProcessSignal) -> Result<(), EnvdError> {
        let signal = match signal {
            ProcessSignal::Terminate => Signal::SIGNAL_SIGTERM,
            ProcessSignal::Kill => Signal::SIGNAL_SIGKILL,
        };
        let request =
            SendSignalRequest { process: selector(pid).into(), signal: signal.into(), ..Default::default() };
        let options = CallOptions::default().with_timeout(PATIENCE);
        self.processes.send_signal_with_options(request, options).await?;
        Ok(())
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// When it cannot be read; the reason is the daemon's.
    pub(crate) async fn read_file(
        &self,
        path: &OsStr,
        user: Option<&str>,
    ) -> Result<Response<Incoming>, EnvdError> {
        let request = self.file_request("GET", path, user, empty_body())?;
        self.send_file_request(request, PATIENCE).await
    }

    /// Writes a file, with everything `body` yields; returns its absolute path if the daemon tells it.
    ///
    /// # Errors
    /// When it cannot be written; the reason is the daemon's.
    pub(crate) async fn write_file(
        &self,
        path: &OsStr,
        user: Option<&str>,
        body: RequestBody,
    ) -> Result<Option<String>, EnvdError> {
        let mut request = self.file_request("POST", path, user, body)?;
        request
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        let authority = authority_of(&request);
        let answer = self.send_file_request(request, UPLOAD_PATIENCE).await?;
        let body = read_all(answer.into_body(), &authority).await?;
        let written: Vec<aenv_protocol::envd::files::WrittenFile> =
            serde_json::from_slice(&body).map_err(|error| TransportError::Broken {
                authority,
                reason: format!("unexpected answer: {error}"),
            })?;
        Ok(written.into_iter().next().map(|file| file.path))
    }

    fn file_request(
        &self,
        method: &str,
        path: &OsStr,
        user: Option<&str>,
        body: RequestBody,
    ) -> Result<Request<RequestBody>, EnvdError> {
        let mut query = format!("/files?path={}", percent_encode(path.as_bytes(), NON_ALPHANUMERIC));
        if let Some(user) = user {
            query.push_str(&format!("&username={}", percent_encode(user.as_bytes(), NON_ALPHANUMERIC)));
        }
        let uri = self
            .base
            .join(&query)
            .map_err(|error| EnvdError::Unaskable { reason: format!("the path cannot be sent: {error}") })?;
        let mut request = Request::builder()
            .method(method)
            .uri(uri)
            .body(body)
            .map_err(|error| EnvdError::Unaskable { reason: error.to_string() })?;
        *request.headers_mut() = self.headers.clone();
        Ok(request)
    }

    async fn send_file_request(
        &self,
        request: Request<RequestBody>,
        patience: Duration,
    ) -> Result<Response<Incoming>, EnvdError> {
        let authority = authority_of(&request);
        let answer = self.transport.send(request, patience).await?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let body = read_all(answer.into_body(), &authority).await?;
        Err(EnvdError::FileRefused { status, reason: error_text(status, &body) })
    }
}

fn selector(pid: u32) -> ProcessSelector {
    ProcessSelector { selector: Some(process_selector::Selector::Pid(pid)), ..Default::default() }
}

/// E2B's way to say which user to run as: a user name without a password.
fn basic_user(user: &str) -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{user}:")))
}

/// What a process does, as it happens. Dropping it leaves the process alone.
pub(crate) struct ProcessStream {
    stream: ServerStream<<HttpClient as ClientTransport>::ResponseBody, StartResponseView<'static>>,
}

impl ProcessStream {
    /// The next event. Nothing follows the end.
    ///
    /// # Errors
    /// When the process could not be started, or the stream broke.
    pub(crate) async fn next(&mut self) -> Result<ProcessEvent, Failure> {
        loop {
            let Some(message) = within(SILENCE, self.stream.message()).await? else {
                return Err(broken("it ended before the command did"));
            };
            let event = message.to_owned_message().event.into_option().and_then(|event| event.event);
            if let Some(event) = event.and_then(understood) {
                return Ok(event);
            }
        }
    }
}

fn understood(event: process_event::Event) -> Option<ProcessEvent> {
    use process_event::data_event::Output;
    match event {
        process_event::Event::Start(start) => Some(ProcessEvent::Started(start.pid)),
        process_event::Event::Data(data) => match data.output? {
            Output::Stdout(bytes) | Output::Pty(bytes) => Some(ProcessEvent::Stdout(bytes.into())),
            Output::Stderr(bytes) => Some(ProcessEvent::Stderr(bytes.into())),
        },
        process_event::Event::End(end) => Some(ProcessEvent::Ended(ProcessEnd {
            code: end.exit_code,
            exited: end.exited,
            status: end.status,
        })),
        process_event::Event::Keepalive(_) => None,
    }
}

/// Waits for the next word of a stream; silence is a broken stream, and so is whatever the daemon did not decide.
async fn within<T>(
    limit: Duration,
    next: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, next).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => match EnvdError::from(error) {
            EnvdError::Broken { reason }
            | EnvdError::Refused { code: ErrorCode::Internal | ErrorCode::Unknown, reason } => {
                Err(broken(&reason))
            }
            refused => Err(refused.into()),
        },
        Err(_elapsed) => Err(broken(&format!("no sign of life for {} s", limit.as_secs()))),
    }
}

fn broken(reason: &str) -> Failure {
    Failure::connection_broke(reason).with_exit(Exit::TRANSPORT)
}
