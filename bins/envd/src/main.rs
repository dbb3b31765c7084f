//! The guest daemon. As PID 1 of a microVM it boots the guest and is its init; started as an ordinary process (tests, a
//! container) it only serves. Both serve E2B's envd protocol over HTTP and relay connections to the guest's loopback.
//!
//! ```text
//! envd [--port N] [--relay-port N] [--address A]     an ordinary process
//! /init                                             PID 1: see [`boot`]
//! ```
//! Reads arguments and environment; everything else gets them handed.

mod accounts;
mod boot;
mod daemon;
mod files;
mod filesystem;
mod freezer;
mod greeting;
mod http;
mod identity;
mod metrics;
mod paths;
mod process;
mod reaper;
mod relay;
mod rpc;
mod sync;

use aenv_protocol::envd::{ENVD_PORT, RELAY_PORT};
use anyhow::{Context as _, bail};
use axum::serve::ListenerExt as _;
use daemon::{Daemon, Machine};
use process::table::Processes;
use reaper::Reaper;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::net::TcpListener;

/// `PATH` of a system that says nothing else.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How long a thread for blocking work waits for more: in an emulated guest, starting one is what a request would feel.
const IDLE_THREAD: Duration = Duration::from_secs(3600);

/// Where to listen.
#[derive(Debug, PartialEq, Eq)]
struct Listening {
    address: IpAddr,
    port: u16,
    relay_port: u16,
}

fn main() {
    let is_init = std::process::id() == 1;
    let outcome = if is_init { run_as_init() } else { run_as_process() };
    let Err(error) = outcome else { return };
    if is_init {
        boot::give_up(&error);
    }
    tracing::error!("{error:#}");
    std::process::exit(1);
}

fn run_as_process() -> anyhow::Result<()> {
    start_logging();
    let listening = arguments(std::env::args().skip(1))?;
    let search_path = std::env::var("PATH").unwrap_or_else(|_| SEARCH_PATH.to_owned());
    runtime()?.block_on(serve(listening, Machine::Foreign, &search_path))
}

fn run_as_init() -> anyhow::Result<()> {
    boot::prepare_console();
    start_logging();
    boot::enter_root()?;
    runtime()?.block_on(async {
        boot::bring_up_network().await?;
        let listening =
            Listening { address: Ipv4Addr::UNSPECIFIED.into(), port: ENVD_PORT, relay_port: RELAY_PORT };
        serve(listening, Machine::Guest, SEARCH_PATH).await
    })
}

fn start_logging() {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_max_level(tracing::Level::INFO)
        .compact()
        .init();
}

/// One thread for events; what blocks runs beside it.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(IDLE_THREAD)
        .build()
        .context("cannot start the event loop")
}

async fn serve(listening: Listening, machine: Machine, search_path: &str) -> anyhow::Result<()> {
    let listen = |port| async move {
        let address = SocketAddr::new(listening.address, port);
        TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
    };
    let listener = listen(listening.port).await?;
    let relay_listener = listen(listening.relay_port).await?;
    let reaper = Reaper::default();
    let daemon = Daemon::new(Processes::new(reaper.clone()), machine, search_path);
    let reaping = tokio::spawn(reaper.run());
    tokio::spawn(relay::serve(relay_listener));
    let address = listener.local_addr().context("cannot tell the own address")?;
    tracing::info!(%address, version = env!("CARGO_PKG_VERSION"), "ready");
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "cannot switch off delays of a connection");
        }
    });
    tokio::select! {
        served = axum::serve(listener, http::routes(&daemon)).into_future() => served.context("cannot serve"),
        reaped = reaping => {
            reaped.context("the reaper failed")?.context("cannot learn of ended children")?;
            bail!("the reaper has ended")
        }
    }
}

fn arguments(mut given: impl Iterator<Item = String>) -> anyhow::Result<Listening> {
    let mut listening =
        Listening { address: Ipv4Addr::UNSPECIFIED.into(), port: ENVD_PORT, relay_port: RELAY_PORT };
    while let Some(name) = given.next() {
        let Some(value) = given.next() else { bail!("{name} needs a value") };
        let invalid = || format!("{name} {value}: not valid");
        match name.as_str() {
            "--port" => listening.port = value.parse().with_context(invalid)?,
            "--relay-port" => listening.relay_port = value.parse().with_context(invalid)?,
            "--address" => listening.address = value.parse().with_context(invalid)?,
            _ => bail!("{name} is unknown; usage: envd [--port N] [--relay-port N] [--address A]"),
        }
    }
    Ok(listening)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<Listening> {
        arguments(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn arguments_are_read_and_nonsense_is_refused() {
        let expected = Listening { address: Ipv4Addr::LOCALHOST.into(), port: 1, relay_port: 0 };
        assert_eq!(parse("--relay-port 0 --port 1 --address 127.0.0.1").expect("is fine"), expected);
        assert_eq!(parse("").expect("is fine").port, ENVD_PORT);
        for bad in ["--port", "--port x", "--port 70000", "--ports 1", "serve"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
