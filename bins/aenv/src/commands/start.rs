//! `aenv start`: a new sandbox, and its end when it is attached.
//!
//! ```text
//! create ─▶ print id ─▶ detached: done
//!    │                └▶ attached: Ctrl-C ─▶ kill ─▶ done      ended by itself, or paused ─▶ done
//!    └ signal: wait for the answer, kill, done: a request that is under way cannot be taken back
//! ```

use crate::api_client::ApiClient;
use crate::arguments::{EndOfTime, StartArguments};
use crate::commands::{Context, Interrupts, pause, timeout::whole_seconds};
use crate::failure::{Exit, Failure};
use crate::output::human_duration;
use aenv_protocol::ids::SandboxId;
use aenv_protocol::rest::{AutoResume, NewSandbox, Sandbox};
use std::io::IsTerminal;
use std::time::Duration;

/// How often an attached start looks whether its sandbox is still there.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const SIGINT: u8 = 2;

/// Starts a sandbox.
pub(crate) async fn run(context: &Context, arguments: StartArguments) -> Result<Exit, Failure> {
    let api = context.api()?;
    let attached = !arguments.detach && std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let (timeout, end) = (arguments.timeout, arguments.on_timeout);
    if end == EndOfTime::PauseFilesystem && arguments.auto_resume {
        let why = "--auto-resume: what is paused without its memory has to boot, and requests never make it";
        return Err(Failure::new(why).with_hint("use --on-timeout pause").with_exit(Exit::USAGE));
    }
    let mut interrupts = Interrupts::catch()?;
    let sandbox = match create(context, &api, wish(arguments), &mut interrupts).await? {
        Creation::Done(sandbox) => sandbox,
        Creation::TakenBack(exit) => return Ok(exit),
    };
    let id = SandboxId::from_path(&sandbox.sandbox_id).map_err(|error| Failure::new(error.to_string()))?;
    if let Err(failure) = print(context, &sandbox) {
        // Nobody knows the id: nobody could use or kill it.
        api.kill(&id).await?;
        return Err(failure);
    }
    context.printer.note(&format!("run a command: aenv exec {id} -- uname -a"));
    if attached {
        let life = human_duration(timeout);
        let fate = fate(end);
        context.printer.note(&format!("attached: Ctrl-C kills the sandbox; by itself it {fate} in {life}"));
        stay(context, &api, &id, &mut interrupts).await
    } else {
        context.printer.note(&format!(
            "{} in {}; longer: aenv timeout {id} 1h; kill it now: aenv rm {id}",
            fate(end),
            human_duration(timeout)
        ));
        Ok(Exit::DONE)
    }
}

fn fate(end: EndOfTime) -> &'static str {
    match end {
        EndOfTime::Kill => "ends",
        EndOfTime::Pause | EndOfTime::PauseFilesystem => "is paused",
    }
}

fn wish(arguments: StartArguments) -> NewSandbox {
    let (auto_pause, auto_pause_memory) = match arguments.on_timeout {
        EndOfTime::Kill => (None, None),
        EndOfTime::Pause => (Some(true), None),
        EndOfTime::PauseFilesystem => (Some(true), Some(false)),
    };
    NewSandbox {
        template_id: arguments.template,
        timeout: Some(whole_seconds(arguments.timeout)),
        auto_pause,
        auto_pause_memory,
        auto_resume: arguments.auto_resume.then_some(AutoResume { enabled: true }),
        allow_internet_access: Some(!arguments.no_internet),
        metadata: Some(arguments.metadata.into_iter().collect()),
        env_vars: Some(arguments.environment.into_iter().collect()),
        ..NewSandbox::default()
    }
}

/// The id alone, for people and for `$(…)`; JSON only when it is asked for.
fn print(context: &Context, sandbox: &Sandbox) -> Result<(), Failure> {
    if !context.json_demanded {
        return context.printer.line(&sandbox.sandbox_id);
    }
    context.printer.json(&serde_json::json!({
        "sandboxID": sandbox.sandbox_id,
        "templateID": sandbox.template_id,
        "alias": sandbox.alias,
    }))
}

enum Creation {
    Done(Sandbox),
    TakenBack(Exit),
}

async fn create(
    context: &Context,
    api: &ApiClient,
    wish: NewSandbox,
    interrupts: &mut Interrupts,
) -> Result<Creation, Failure> {
    let spinner = context.printer.spinner(&format!("starting a sandbox from {}", wish.template_id));
    let mut creating = std::pin::pin!(api.create(&wish));
    let signal = tokio::select! {
        created = &mut creating => {
            drop(spinner);
            return created.map(Creation::Done).map_err(|error| {
                let not_found = error.is_not_found();
                let failure = Failure::from(error);
                if not_found { failure.with_hint("`aenv template ls` lists templates") } else { failure }
            });
        }
        signal = interrupts.next() => signal,
    };
    context.printer.note("the sandbox is being started and will be killed at once; Ctrl-C again leaves it");
    tokio::select! {
        created = &mut creating => {
            let id = SandboxId::from_path(&created?.sandbox_id).map_err(|error| Failure::new(error.to_string()))?;
            api.kill(&id).await?;
        }
        _again = interrupts.next() => {}
    }
    Ok(Creation::TakenBack(Exit::signalled(signal)))
}

/// Waits for a signal or for the sandbox's end.
async fn stay(
    context: &Context,
    api: &ApiClient,
    id: &SandboxId,
    interrupts: &mut Interrupts,
) -> Result<Exit, Failure> {
    loop {
        tokio::select! {
            signal = interrupts.next() => {
                let spinner = context.printer.spinner("killing the sandbox");
                match api.kill(id).await {
                    Err(error) if error.is_not_found() => context.printer.note("the sandbox had ended already"),
                    killed => {
                        killed.map_err(|error| {
                            Failure::from(error).while_doing(&format!("sandbox {id} was not killed"))
                        })?;
                        context.printer.note(&format!("killed {id}"));
                    }
                }
                drop(spinner);
                // Ctrl-C is how an attached start is meant to end.
                return Ok(if signal == SIGINT { Exit::DONE } else { Exit::signalled(signal) });
            }
            () = tokio::time::sleep(LOOK_AGAIN) => {
                // A node that restarts is away for a moment; only its word that the sandbox is gone counts.
                match api.sandbox(id).await {
                    Err(error) if error.is_not_found() => {
                        let reason = Failure::from(error).to_string();
                        context.printer.note(&format!("the sandbox has ended: {reason}"));
                        return Ok(Exit::DONE);
                    }
                    // Ctrl-C would throw away what was kept on purpose.
                    Ok(detail) if pause::is_paused(&detail.listed) => {
                        context.printer.note(&format!("the sandbox was paused; on with it: aenv resume {id}"));
                        return Ok(Exit::DONE);
                    }
                    _ => {}
                }
            }
        }
    }
}
