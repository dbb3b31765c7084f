//! The command line for people: start sandboxes, run commands in them, copy files, look after them.
//!
//! ```text
//! arguments ─▶ settings ─▶ commands/* ─▶ { api_client (the node's API), envd_client (one sandbox) } ─▶ transport
//!                              ├──▶ the storage engine (`layer …`: files of this machine)
//!                              └──▶ output (results, words)        failure ─▶ exit code
//! ```
//!
//! This file puts the parts together and turns what a command returns into an exit code; it decides nothing else.

mod api_client;
mod arguments;
mod commands;
mod envd_client;
mod failure;
mod output;
mod settings;
mod transport;

use arguments::{Arguments, Command, LayerCommand};
use clap::Parser;
use commands::Context;
use failure::{Exit, Failure};
use output::Printer;
use settings::{Overrides, Settings};
use std::process::ExitCode;
use transport::Transport;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let printer = Printer::new(arguments.global.json);
    let ended = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => {
            let ended = runtime.block_on(run(arguments, printer));
            // A read of standard input that is under way cannot be cancelled and must not hold us.
            runtime.shutdown_background();
            ended
        }
        Err(error) => {
            let failure = Failure::new(format!("the program cannot start its threads: {error}"));
            printer.failure(&failure);
            failure.exit()
        }
    };
    ExitCode::from(ended.0)
}

/// Runs one command and tells how it failed, if it did.
async fn run(arguments: Arguments, printer: Printer) -> Exit {
    match dispatch(arguments, printer).await {
        Ok(exit) => exit,
        Err(failure) => {
            printer.failure(&failure);
            failure.exit()
        }
    }
}

async fn dispatch(arguments: Arguments, printer: Printer) -> Result<Exit, Failure> {
    let Arguments { global, command } = arguments;
    // Files of this machine need no node, no key and no settings.
    let command = match command {
        Command::Layer(LayerCommand::Files(command)) => {
            return commands::layer::run(printer, command).await;
        }
        command => command,
    };
    let overrides =
        Overrides { api_key: global.api_key, api_url: global.api_url, sandbox_url: global.sandbox_url };
    let context = Context {
        printer,
        json_demanded: global.json,
        settings: Settings::load(overrides)?,
        transport: Transport::new(),
    };
    match command {
        Command::Template(command) => commands::template::run(&context, command).await,
        Command::Start(arguments) => commands::start::run(&context, arguments).await,
        Command::Exec(arguments) => commands::exec::run(&context, arguments).await,
        Command::Ls(arguments) => commands::list::run(&context, arguments).await,
        Command::Rm(arguments) => commands::remove::run(&context, arguments).await,
        Command::Pause(arguments) => commands::pause::pause(&context, arguments).await,
        Command::Resume(arguments) => commands::pause::resume(&context, arguments).await,
        Command::Snapshot(command) => commands::snapshot::run(&context, command).await,
        Command::Fork(arguments) => commands::fork::run(&context, arguments).await,
        Command::Tree => commands::tree::run(&context).await,
        Command::Timeout(arguments) => commands::timeout::run(&context, arguments).await,
        Command::Upload(arguments) => commands::files::upload(&context, arguments).await,
        Command::Download(arguments) => commands::files::download(&context, arguments).await,
        Command::Inspect(arguments) => commands::inspect::run(&context, arguments).await,
        Command::Doctor => commands::doctor::run(&context).await,
        Command::Layer(LayerCommand::Files(command)) => commands::layer::run(printer, command).await,
        Command::Layer(LayerCommand::Gc) => commands::layer::collect_garbage(&context).await,
    }
}
