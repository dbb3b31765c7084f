//! The block service: disks and memory images of all sandboxes, made of shared layers, handed to the kernel by ublk or FUSE.
//!
//! The one place where its environment and arguments are read. It may be killed at any moment: requests of guests wait in
//! the kernel, and the next process takes them over.

mod arguments;
mod block_service;
mod directories;
mod durable;
mod exports;
mod failure;
mod holder;
mod http;
mod layers;
mod locks;
mod numbers;
mod purge;
mod records;
mod serve;
mod waiting;

use arguments::{Arguments, Task};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    aenv_daemon::ending(run(Arguments::parse()))
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    match arguments.task {
        Task::Serve(options) => {
            let protected = serve::prepare_process();
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let served = runtime.block_on(serve::serve(options, protected));
            // Requests that are under way are not waited for: their callers ask again.
            runtime.shutdown_background();
            served
        }
        Task::Purge(options) => purge::purge(&options),
        Task::HoldFuse(options) => holder::hold(options),
    }
}
