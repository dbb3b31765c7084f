//! The node: wires the API, the orchestrator, the VMM driver and the network together.
//!
//! The one place where environment and arguments of the node are read. Owns nothing that outlives it: VMs run on when it
//! ends, and the next process adopts them.

mod arguments;
mod doctor;
mod host_memory;
mod instance_lock;
mod purge;
mod serve;
mod stored;
mod template;
mod vmm;

use arguments::{Arguments, Task};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    aenv_daemon::ending(run(Arguments::parse()))
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    match arguments.task {
        Task::Serve(options) => {
            let ended = runtime.block_on(serve::serve(options));
            // Whoever wants the end at once does not wait for a file to be written.
            runtime.shutdown_background();
            ended
        }
        Task::Purge(options) => runtime.block_on(purge::purge(&options)),
        Task::Template(arguments::TemplateTask::Import(options)) => template::import(&options),
        Task::Doctor(options) => runtime.block_on(doctor::doctor(&options)),
    }
}
