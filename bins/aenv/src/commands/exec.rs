//! `aenv exec`: runs one command in a sandbox as if it ran here.
//!
//! Owns the local ends: standard streams, signals, the deadline. Three tasks work side by side:
//!
//! ```text
//!  reader thread ─chunks─▶ feed ─SendInput, CloseStdin─▶ sandbox ─events─▶ follow ─▶ standard output and error
//!                                    ▲ SendSignal
//!  signals, deadline ─▶ supervise ───┘   Running ─▶ Terminating ─▶ Killing ─▶ given up
//! ```
//!
//! Must not end before the command has, unless the command cannot be reached any more.

use crate::arguments::ExecArguments;
use crate::commands::{Context, Interrupts, explain};
use crate::envd_client::{
    EnvdClient, EnvdError, ProcessEnd, ProcessEvent, ProcessSignal, ProcessStart, ProcessStream,
};
use crate::failure::{Exit, Failure};
use crate::output::output_failure;
use bytes::{Bytes, BytesMut};
use std::io::{IsTerminal, Read};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// What a command may take to end after SIGTERM, before it gets SIGKILL.
const TERMINATION_GRACE: Duration = Duration::from_secs(5);
/// What a killed command may take to be reported as ended.
const KILL_GRACE: Duration = Duration::from_secs(10);
/// Bytes read from standard input at once: what a pipe holds.
const INPUT_CHUNK: usize = 64 << 10;
/// Bytes of input in one request at most.
const INPUT_REQUEST: usize = 1 << 20;
/// Chunks read ahead.
const INPUT_BACKLOG: usize = 16;

/// Runs the command; the exit code is that of the command.
pub(crate) async fn run(context: &Context, arguments: ExecArguments) -> Result<Exit, Failure> {
    run_in_sandbox(context, arguments).await.map_err(|failure| match failure.exit() {
        // 1 would look like the command's own exit code.
        Exit::FAILED => failure.with_exit(Exit::TRANSPORT),
        _ => failure,
    })
}

async fn run_in_sandbox(context: &Context, arguments: ExecArguments) -> Result<Exit, Failure> {
    let id = arguments.sandbox.clone();
    let envd = context.envd(&id).await?;
    match run_attached(&envd, arguments).await {
        Ok(exit) => Ok(exit),
        Err(failure) => Err(explain(context, &envd, &id, failure).await),
    }
}

async fn run_attached(envd: &EnvdClient, arguments: ExecArguments) -> Result<Exit, Failure> {
    let with_stdin = !arguments.no_stdin && (arguments.interactive || !std::io::stdin().is_terminal());
    let limit = arguments.timeout;
    let start = process_start(arguments, with_stdin)?;
    let interrupts = Interrupts::catch()?;
    let stream = envd.start(start).await?;
    let (started, pid) = watch::channel(None);
    let feeding = with_stdin.then(|| tokio::spawn(feed(envd.clone(), pid.clone())));
    let mut supervisor = Supervisor { envd: envd.clone(), pid, stage: Stage::Running, verdict: None };
    let followed = supervisor.supervise(follow(stream, started), interrupts, limit, feeding).await;
    match followed {
        Ok(end) => supervisor.exit_of(&end, limit),
        Err(failure) => {
            if failure.exit() != Exit::TRANSPORT {
                supervisor.kill_unheard().await;
            }
            Err(failure)
        }
    }
}

fn process_start(arguments: ExecArguments, stdin: bool) -> Result<ProcessStart, Failure> {
    let (program, words) = match arguments.shell_command {
        Some(script) => {
            let mut words = vec!["-l".to_owned(), "-c".to_owned(), script];
            words.extend(arguments.command);
            ("/bin/bash".to_owned(), words)
        }
        None => {
            let mut words = arguments.command.into_iter();
            let program =
                words.next().ok_or_else(|| Failure::new("no command given").with_exit(Exit::USAGE))?;
            (program, words.collect())
        }
    };
    Ok(ProcessStart {
        program,
        arguments: words,
        environment: arguments.environment,
        cwd: arguments.cwd,
        user: arguments.user,
        stdin,
    })
}

/// Carries the command's output until it ends.
async fn follow(
    mut stream: ProcessStream,
    started: watch::Sender<Option<u32>>,
) -> Result<ProcessEnd, Failure> {
    let mut output = tokio::io::stdout();
    let mut errors = tokio::io::stderr();
    loop {
        let written = match stream.next().await? {
            ProcessEvent::Started(pid) => {
                started.send_replace(Some(pid));
                Ok(())
            }
            ProcessEvent::Stdout(bytes) => write(&mut output, &bytes).await,
            ProcessEvent::Stderr(bytes) => write(&mut errors, &bytes).await,
            ProcessEvent::Ended(end) => return Ok(end),
        };
        written.map_err(|error| output_failure(&error))?;
    }
}

async fn write(output: &mut (impl AsyncWriteExt + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    output.write_all(bytes).await?;
    output.flush().await
}

/// How far the command is from being ended by us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    /// Asked to end; killed at that time.
    Terminating(Instant),
    /// Killed; no longer waited for at that time.
    Killing(Instant),
}

/// Why we ended the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Interrupted(u8),
    TimedOut,
}

struct Supervisor {
    envd: EnvdClient,
    pid: watch::Receiver<Option<u32>>,
    stage: Stage,
    verdict: Option<Verdict>,
}

impl Supervisor {
    /// Waits for the end of the command, and brings it about on signals and at the deadline.
    async fn supervise(
        &mut self,
        follow: impl Future<Output = Result<ProcessEnd, Failure>> + Send + 'static,
        mut interrupts: Interrupts,
        limit: Option<Duration>,
        mut feeding: Option<tokio::task::JoinHandle<Result<(), Failure>>>,
    ) -> Result<ProcessEnd, Failure> {
        let mut following = tokio::spawn(follow);
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            let wake_at = match self.stage {
                Stage::Running => deadline,
                Stage::Terminating(at) | Stage::Killing(at) => Some(at),
            };
            tokio::select! {
                followed = &mut following => {
                    return followed.unwrap_or_else(|error| Err(Failure::new(format!("internal error: {error}"))));
                }
                signal = interrupts.next() => {
                    self.verdict.get_or_insert(Verdict::Interrupted(signal));
                    self.advance(false)?;
                }
                () = sleep_until(wake_at) => {
                    self.verdict.get_or_insert(Verdict::TimedOut);
                    self.advance(self.stage == Stage::Running)?;
                }
                fed = finished(&mut feeding) => fed?,
            }
        }
    }

    /// Goes one stage further; a deadline skips the friendly one.
    fn advance(&mut self, at_once: bool) -> Result<(), Failure> {
        let signal = match self.stage {
            Stage::Running if !at_once => {
                self.stage = Stage::Terminating(Instant::now() + TERMINATION_GRACE);
                ProcessSignal::Terminate
            }
            Stage::Running | Stage::Terminating(_) => {
                self.stage = Stage::Killing(Instant::now() + KILL_GRACE);
                ProcessSignal::Kill
            }
            Stage::Killing(_) => {
                return Err(Failure::new("the command was killed, but the sandbox does not report its end")
                    .with_exit(Exit::TRANSPORT)
                    .with_hint("the command may still run; `aenv rm` ends the whole sandbox"));
            }
        };
        let (envd, mut pid) = (self.envd.clone(), self.pid.clone());
        // Aside, so that further signals are heard. If it fails, the next stage follows at its time.
        tokio::spawn(async move {
            let known = pid.wait_for(Option::is_some).await.ok().and_then(|pid| *pid)?;
            envd.send_signal(known, signal).await.ok()
        });
        Ok(())
    }

    /// Ends a command that is in reach but has lost an end here, as a closed pipe would.
    async fn kill_unheard(&self) {
        let pid = *self.pid.borrow();
        if let Some(pid) = pid {
            let killing = self.envd.send_signal(pid, ProcessSignal::Kill);
            let _ended_already_or_out_of_reach = tokio::time::timeout(TERMINATION_GRACE, killing).await;
        }
    }

    fn exit_of(&self, end: &ProcessEnd, limit: Option<Duration>) -> Result<Exit, Failure> {
        match self.verdict {
            Some(Verdict::TimedOut) => {
                let seconds = limit.unwrap_or_default().as_secs_f64();
                Err(Failure::new(format!("the command ran longer than {seconds} s and was killed"))
                    .with_exit(Exit::TIMED_OUT)
                    .with_hint("--timeout sets the limit"))
            }
            Some(Verdict::Interrupted(signal)) => Ok(Exit::signalled(signal)),
            None => exit_of_command(end),
        }
    }
}

/// Maps the end of a command to what a shell would report.
fn exit_of_command(end: &ProcessEnd) -> Result<Exit, Failure> {
    let unclear = || {
        Failure::new(format!("the command ended in an unknown way: {:?}, code {}", end.status, end.code))
            .with_exit(Exit::TRANSPORT)
    };
    if end.exited {
        // Exit codes have eight bits.
        return u8::try_from(end.code & 0xff).map(Exit).map_err(|_| unclear());
    }
    let name = end.status.strip_prefix("signal: ").ok_or_else(unclear)?;
    signal_number(name).map(Exit::signalled).ok_or_else(unclear)
}

/// The number of a signal by the name that the daemon gives it. Source of the names: E2B's daemon, that is Go's.
fn signal_number(name: &str) -> Option<u8> {
    let name = name.strip_suffix(" (core dumped)").unwrap_or(name);
    let number = match name {
        "hangup" => 1,
        "interrupt" => 2,
        "quit" => 3,
        "illegal instruction" => 4,
        "trace/breakpoint trap" => 5,
        "aborted" => 6,
        "bus error" => 7,
        "floating point exception" => 8,
        "killed" => 9,
        "user defined signal 1" => 10,
        "segmentation fault" => 11,
        "user defined signal 2" => 12,
        "broken pipe" => 13,
        "alarm clock" => 14,
        "terminated" => 15,
        "stack fault" => 16,
        "child exited" => 17,
        "continued" => 18,
        "stopped (signal)" => 19,
        "stopped" => 20,
        "stopped (tty input)" => 21,
        "stopped (tty output)" => 22,
        "urgent I/O condition" => 23,
        "CPU time limit exceeded" => 24,
        "file size limit exceeded" => 25,
        "virtual timer expired" => 26,
        "profiling timer expired" => 27,
        "window changed" => 28,
        "I/O possible" => 29,
        "power failure" => 30,
        "bad system call" => 31,
        other => {
            return other.strip_prefix("signal ")?.parse().ok().filter(|number| (1..=64).contains(number));
        }
    };
    Some(number)
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Waits for the feeding to be over, once. Cancel safe.
async fn finished(feeding: &mut Option<tokio::task::JoinHandle<Result<(), Failure>>>) -> Result<(), Failure> {
    let Some(task) = feeding else { return std::future::pending().await };
    let fed = task.await;
    *feeding = None;
    fed.unwrap_or_else(|error| Err(Failure::new(format!("internal error: {error}"))))
}

/// Carries standard input to the command until its end, or until the command wants no more.
async fn feed(envd: EnvdClient, mut pid: watch::Receiver<Option<u32>>) -> Result<(), Failure> {
    let mut chunks = read_standard_input();
    let Some(pid) = pid.wait_for(Option::is_some).await.ok().and_then(|pid| *pid) else {
        return Ok(());
    };
    while let Some(chunk) = chunks.recv().await {
        let mut input = BytesMut::from(chunk?);
        while input.len() < INPUT_REQUEST {
            match chunks.try_recv() {
                Ok(more) => input.extend_from_slice(&more?),
                Err(_nothing_at_hand) => break,
            }
        }
        match envd.send_input(pid, input.freeze()).await {
            Ok(()) => {}
            Err(EnvdError::Broken { reason }) => return Err(not_fed(&reason)),
            // The command has ended or closed its input: nobody wants the rest, as with a pipe.
            Err(_unwanted) => return Ok(()),
        }
    }
    match envd.close_stdin(pid).await {
        Err(EnvdError::Broken { reason }) => Err(not_fed(&reason)),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn not_fed(reason: &str) -> Failure {
    Failure::connection_broke(reason)
        .while_doing("standard input could not be carried to the command")
        .with_exit(Exit::TRANSPORT)
}

/// Reads standard input on a thread of its own: a read cannot be cancelled, and must not keep the process alive.
fn read_standard_input() -> mpsc::Receiver<Result<Bytes, Failure>> {
    let (sender, receiver) = mpsc::channel(INPUT_BACKLOG);
    std::thread::spawn(move || {
        let mut input = std::io::stdin().lock();
        let mut buffer = vec![0; INPUT_CHUNK];
        loop {
            let chunk = match input.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => Ok(Bytes::copy_from_slice(&buffer[..length])),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => Err(Failure::new(format!("standard input cannot be read: {error}"))
                    .with_hint("-n runs the command without standard input")),
            };
            let is_last = chunk.is_err();
            if sender.blocking_send(chunk).is_err() || is_last {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: i32, exited: bool, status: &str) -> Result<u8, u8> {
        exit_of_command(&ProcessEnd { code, exited, status: status.to_owned() })
            .map(|exit| exit.0)
            .map_err(|failure| failure.exit().0)
    }

    #[test]
    fn ends_map_to_what_a_shell_reports() {
        assert_eq!(ended(0, true, "exit status 0"), Ok(0));
        assert_eq!(ended(77, true, "exit status 77"), Ok(77));
        assert_eq!(ended(256 + 3, true, ""), Ok(3));
        assert_eq!(ended(-1, false, "signal: killed"), Ok(137));
        assert_eq!(ended(-1, false, "signal: segmentation fault (core dumped)"), Ok(139));
        assert_eq!(ended(-1, false, "signal: signal 34"), Ok(162));
        for status in ["", "signal: ", "signal: signal 0", "signal: signal 99", "signal: signal -1", "lost"] {
            assert_eq!(ended(-1, false, status), Err(125), "{status}");
        }
    }
}
