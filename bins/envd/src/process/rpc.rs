//! The wire side of processes: requests in, events out.

use super::input::InputError;
use super::table::SelectError;
use super::{Event, Process, end_event};
use crate::daemon::{Daemon, Machine};
use crate::freezer::PROGRAMS;
use crate::reaper::SignalError;
use crate::rpc::{caller, internal};
use aenv_protocol::envd::process as wire;
use aenv_sys::guest::{Program, StandardInput};
use connectrpc::{
    ConnectError, Encodable, InboundStream, RequestContext, Response, ServiceRequest, ServiceResult,
    ServiceStream,
};
use futures_util::{Stream, StreamExt as _};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Badness of user processes when memory runs out: they go before the daemon. Source: E2B's daemon.
const OOM_SCORE: i16 = 100;
/// Silence after which a stream says that it is alive, when the client names none.
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);
/// Header with the client's wish, in seconds.
const KEEPALIVE_HEADER: &str = "keepalive-ping-interval";

impl From<SelectError> for ConnectError {
    fn from(error: SelectError) -> Self {
        match error {
            SelectError::Nothing => ConnectError::invalid_argument(error.to_string()),
            SelectError::Pid(_) | SelectError::Tag(_) => ConnectError::not_found(error.to_string()),
        }
    }
}

/// The process service of one daemon.
pub(crate) struct ProcessRpc(pub(crate) Daemon);

impl ProcessRpc {
    fn program(&self, ctx: &RequestContext, request: &wire::StartRequest) -> Result<Program, ConnectError> {
        let user = caller(&self.0, ctx)?;
        let config = &request.process;
        let cwd = config.cwd.as_deref().unwrap_or_default();
        let directory =
            self.0.path(OsStr::new(cwd), &user).map_err(|e| ConnectError::invalid_argument(e.to_string()))?;
        if !directory.is_dir() {
            let message = format!("cwd '{}' does not exist", directory.display());
            return Err(ConnectError::invalid_argument(message));
        }
        let envs = config.envs.iter().map(|(key, value)| (key.clone(), value.clone()));
        Ok(Program {
            command: config.cmd.clone().into(),
            arguments: config.args.iter().map(Into::into).collect(),
            environment: self.0.environment(&user, envs),
            directory,
            uid: user.uid,
            gid: user.gid,
            groups: user.groups,
            oom_score_adjustment: OOM_SCORE,
            control_group: match self.0.machine {
                Machine::Guest => Some(PROGRAMS.into()),
                // Its groups are not ours.
                Machine::Foreign => None,
            },
            input: if request.stdin.unwrap_or(true) { StandardInput::Pipe } else { StandardInput::Null },
        })
    }
}

impl wire::Process for ProcessRpc {
    async fn list<'a>(
        &'a self,
        ctx: RequestContext,
        _request: ServiceRequest<'_, wire::ListRequest>,
    ) -> ServiceResult<impl Encodable<wire::ListResponse> + Send + use<'a>> {
        caller(&self.0, &ctx)?;
        let describe = |process: Arc<Process>| wire::ProcessInfo {
            config: process.config.clone().into(),
            pid: process.pid.cast_unsigned(),
            tag: process.tag.clone(),
            ..Default::default()
        };
        let processes = self.0.processes.running().into_iter().map(describe).collect();
        Response::ok(wire::ListResponse { processes, ..Default::default() })
    }

    async fn connect(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::ConnectRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<wire::ConnectResponse> + Send + use<>>> {
        caller(&self.0, &ctx)?;
        let request = request.to_owned_message();
        let process = self.0.processes.select(request.process.as_option())?;
        let events = events(process.pid, process.follow(), keepalive(&ctx));
        Response::stream_ok(events.map(|event| {
            event.map(|event| wire::ConnectResponse { event: event.into(), ..Default::default() })
        }))
    }

    async fn start(
        &self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::StartRequest>,
    ) -> ServiceResult<ServiceStream<impl Encodable<wire::StartResponse> + Send + use<>>> {
        let request = request.to_owned_message();
        if request.pty.is_set() {
            return Err(ConnectError::unimplemented("terminals are not supported yet"));
        }
        let program = self.program(&ctx, &request)?;
        let config = request.process.as_option().cloned().unwrap_or_default();
        let started = self.0.processes.start(program, config, request.tag).await;
        let (process, followed) = started
            .map_err(|error| ConnectError::invalid_argument(format!("cannot start the process: {error}")))?;
        let events = events(process.pid, followed, keepalive(&ctx));
        Response::stream_ok(events.map(|event| {
            event.map(|event| wire::StartResponse { event: event.into(), ..Default::default() })
        }))
    }

    async fn update<'a>(
        &'a self,
        _ctx: RequestContext,
        _request: ServiceRequest<'_, wire::UpdateRequest>,
    ) -> ServiceResult<impl Encodable<wire::UpdateResponse> + Send + use<'a>> {
        Err::<Response<wire::UpdateResponse>, _>(ConnectError::unimplemented(
            "terminals are not supported yet",
        ))
    }

    async fn stream_input<'a>(
        &'a self,
        ctx: RequestContext,
        mut requests: InboundStream<wire::StreamInputRequest>,
    ) -> ServiceResult<impl Encodable<wire::StreamInputResponse> + Send + use<'a>> {
        use wire::stream_input_request::Event as Step;
        caller(&self.0, &ctx)?;
        let mut process: Option<Arc<Process>> = None;
        while let Some(message) = requests.next().await {
            match message?.to_owned_message().event {
                Some(Step::Start(start)) => {
                    process = Some(self.0.processes.select_running(start.process.as_option())?);
                }
                Some(Step::Data(data)) => {
                    let process = process.as_ref().ok_or_else(|| {
                        ConnectError::invalid_argument(
                            "the first message of the stream must select a process",
                        )
                    })?;
                    feed(process, data.input.as_option()).await?;
                }
                Some(Step::Keepalive(_)) | None => {}
            }
        }
        Response::ok(wire::StreamInputResponse::default())
    }

    async fn send_input<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::SendInputRequest>,
    ) -> ServiceResult<impl Encodable<wire::SendInputResponse> + Send + use<'a>> {
        caller(&self.0, &ctx)?;
        let request = request.to_owned_message();
        let process = self.0.processes.select_running(request.process.as_option())?;
        feed(&process, request.input.as_option()).await?;
        Response::ok(wire::SendInputResponse::default())
    }

    async fn send_signal<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::SendSignalRequest>,
    ) -> ServiceResult<impl Encodable<wire::SendSignalResponse> + Send + use<'a>> {
        caller(&self.0, &ctx)?;
        let request = request.to_owned_message();
        let process = self.0.processes.select_running(request.process.as_option())?;
        let signal = match request.signal.as_known() {
            Some(wire::Signal::SIGNAL_SIGTERM) => Signal::TERM,
            Some(wire::Signal::SIGNAL_SIGKILL) => Signal::KILL,
            Some(wire::Signal::SIGNAL_UNSPECIFIED) | None => {
                return Err(ConnectError::unimplemented("invalid signal"));
            }
        };
        self.0.processes.signal(&process, signal).await.map_err(|error| match error {
            SignalError::Ended(_) => ConnectError::not_found(error.to_string()),
            SignalError::Kernel(_) => internal(&error),
        })?;
        Response::ok(wire::SendSignalResponse::default())
    }

    async fn close_stdin<'a>(
        &'a self,
        ctx: RequestContext,
        request: ServiceRequest<'_, wire::CloseStdinRequest>,
    ) -> ServiceResult<impl Encodable<wire::CloseStdinResponse> + Send + use<'a>> {
        caller(&self.0, &ctx)?;
        let request = request.to_owned_message();
        self.0.processes.select_running(request.process.as_option())?.input.close().await;
        Response::ok(wire::CloseStdinResponse::default())
    }
}

async fn feed(process: &Process, input: Option<&wire::ProcessInput>) -> Result<(), ConnectError> {
    use wire::process_input::Input;
    match input.and_then(|input| input.input.as_ref()) {
        Some(Input::Stdin(bytes)) => process.input.write(bytes).await.map_err(|error| match error {
            InputError::Closed if process.input.is_enabled() => {
                ConnectError::failed_precondition(error.to_string())
            }
            InputError::Closed | InputError::Write(_) => internal(&error),
        }),
        Some(Input::Pty(_)) => Err(ConnectError::internal("the process has no terminal")),
        None => Err(ConnectError::invalid_argument("no input is given")),
    }
}

fn keepalive(ctx: &RequestContext) -> Duration {
    let wish = ctx.header(KEEPALIVE_HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    wish.filter(|seconds| *seconds > 0).map_or(DEFAULT_KEEPALIVE, Duration::from_secs)
}

/// Start, then what the process does, with a sign of life after each silence.
fn events(
    pid: i32,
    followed: mpsc::Receiver<Event>,
    keepalive: Duration,
) -> impl Stream<Item = Result<wire::ProcessEvent, ConnectError>> + Send + use<> {
    use wire::process_event::{DataEvent, Event as Told, KeepAlive, StartEvent, data_event::Output};
    enum Next {
        Start,
        Events,
        Nothing,
    }
    let told = |event: Told| Ok(wire::ProcessEvent { event: Some(event), ..Default::default() });
    let data = |output| DataEvent { output: Some(output), ..Default::default() };
    futures_util::stream::unfold((Next::Start, followed), move |(next, mut followed)| async move {
        match next {
            Next::Start => {
                let start = StartEvent { pid: pid.cast_unsigned(), ..Default::default() };
                return Some((told(start.into()), (Next::Events, followed)));
            }
            Next::Nothing => return None,
            Next::Events => {}
        }
        let (event, next) = match tokio::time::timeout(keepalive, followed.recv()).await {
            Err(_) => (told(KeepAlive::default().into()), Next::Events),
            Ok(Some(Event::Output(bytes))) => (told(data(Output::Stdout(bytes.into())).into()), Next::Events),
            Ok(Some(Event::Errors(bytes))) => (told(data(Output::Stderr(bytes.into())).into()), Next::Events),
            Ok(Some(Event::End(ending))) => (told(end_event(ending).into()), Next::Nothing),
            Ok(None) => {
                let error = ConnectError::resource_exhausted("the stream was read too slowly; connect again");
                (Err(error), Next::Nothing)
            }
        };
        Some((event, (next, followed)))
    })
}
