//! Arguments of the commands that make more of a sandbox: snapshots, forks, the tree of them.

use super::{parse_duration, parse_pair, parse_sandbox_id};
use aenv_protocol::ids::SandboxId;
use clap::{Args, Subcommand};
use std::time::Duration;

/// Commands about snapshots.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Keep the state of a sandbox, which goes on
    ///
    /// Prints the snapshot's id when sandboxes can be started from it: `aenv start ID`. It stays when the sandbox is gone.
    #[command(visible_alias = "new")]
    Create(SnapshotCreateArguments),
    /// List snapshots, the newest first
    #[command(visible_alias = "list")]
    Ls(SnapshotListArguments),
    /// Delete snapshots
    ///
    /// Sandboxes that were started from them are not touched.
    #[command(visible_alias = "delete")]
    Rm(SnapshotRemoveArguments),
}

/// Arguments of `snapshot create`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotCreateArguments {
    /// Sandbox whose state is kept; it may run or be paused
    #[arg(value_name = "SANDBOX", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// Name by which it can be started; a snapshot that had it before loses it
    #[arg(long, value_name = "NAME[:TAG]")]
    pub(crate) name: Option<String>,
    /// Keep the files only: what is started from it boots
    #[arg(long)]
    pub(crate) filesystem: bool,
}

/// Arguments of `snapshot ls`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotListArguments {
    /// Only those of this sandbox
    #[arg(long, value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: Option<SandboxId>,
    /// Only those of this name
    #[arg(long, value_name = "NAME[:TAG]")]
    pub(crate) name: Option<String>,
}

/// Arguments of `snapshot rm`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotRemoveArguments {
    /// Ids or names of the snapshots
    #[arg(value_name = "SNAPSHOT", required = true)]
    pub(crate) snapshots: Vec<String>,
}

/// Arguments of `fork`.
#[derive(Debug, Args)]
pub(crate) struct ForkArguments {
    /// Sandbox to fork; it may run or be paused, and goes on as it was
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// How many children
    #[arg(long, short = 'n', default_value_t = 1, value_parser = clap::value_parser!(i64).range(1..=100))]
    pub(crate) count: i64,
    /// How long each child lives: 300, 90s, 5m, 1h30m
    #[arg(long, default_value = "5m", value_parser = parse_duration, value_name = "DURATION")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) timeout: Duration,
    /// Label of the children, instead of their parent's; may be repeated
    #[arg(long, short = 'm', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<(String, String)>,
    /// Environment variable of processes that are started in the children; may be repeated
    #[arg(long = "env", short = 'e', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) environment: Vec<(String, String)>,
}
