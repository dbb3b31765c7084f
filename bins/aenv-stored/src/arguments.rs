//! Arguments and environment variables of the block service. Values only.

use aenv_daemon::LogOptions;
use aenv_storage::block_service::Name;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Serves disks and memory images made of layers to the microVMs of this machine.
#[derive(Debug, Parser)]
#[command(name = "aenv-stored", version, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) task: Task,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Serve until SIGTERM or SIGINT; guests wait meanwhile for the next start
    Serve(ServeOptions),
    /// Remove every export and disk of this instance, and end the process that holds its mount; the service must not be running
    ///
    /// Images that are not exported stay, with the sealed tops that they are made of: they are what sandboxes are made of,
    /// not what a sandbox uses. Layer files always stay: they go with the data directory.
    Purge(PurgeOptions),
    /// Keep a FUSE mount alive for `serve`, which starts this by itself
    #[command(hide = true)]
    HoldFuse(HoldOptions),
}

/// Which block service on this host.
#[derive(Debug, Clone, Args)]
pub(crate) struct Instance {
    /// Directory with layers, disks and images, in its subdirectory `storage`
    #[arg(long, env = "AENV_DATA_DIR", default_value = "/var/lib/aenv")]
    pub(crate) data_dir: PathBuf,
    /// Directory for sockets and the FUSE mount, which the host forgets when it restarts; `/run/aenv/INSTANCE` by default
    #[arg(long, env = "AENV_RUN_DIR")]
    pub(crate) run_dir: Option<PathBuf>,
    /// Name of this instance on its host
    #[arg(long, env = "AENV_INSTANCE", default_value = "a")]
    pub(crate) instance: Name,
}

impl Instance {
    /// The directory for sockets and the mount.
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.run_dir.clone().unwrap_or_else(|| PathBuf::from(format!("/run/aenv/{}", self.instance)))
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct PurgeOptions {
    #[command(flatten)]
    pub(crate) instance: Instance,
    /// Remove images that are not exported, too
    #[arg(long)]
    pub(crate) all: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct ServeOptions {
    #[command(flatten)]
    pub(crate) instance: Instance,
    /// How disks are handed to the kernel; `auto` takes ublk where the kernel has it, else FUSE. Images are always FUSE files
    #[arg(long, env = "AENV_EXPORT", value_enum, default_value = "auto")]
    pub(crate) export: ExportChoice,
    /// Memory for decompressed blocks of layers, shared by all disks and images, in bytes
    #[arg(long, env = "AENV_CACHE_BYTES", default_value_t = 256 << 20, value_parser = clap::value_parser!(u64).range(1 << 20..=1 << 40))]
    pub(crate) cache_bytes: u64,
    /// Time between two looks for disks with so many sealed tops that they are to be merged, in seconds
    #[arg(long, env = "AENV_COMPACTION_SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) compaction_seconds: u64,
    #[command(flatten)]
    pub(crate) log: LogOptions,
}

/// Value of `--export`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportChoice {
    Auto,
    Ublk,
    Fuse,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct HoldOptions {
    /// Where the mount is asked for
    #[arg(long)]
    pub(crate) socket: PathBuf,
    /// Where it is mounted
    #[arg(long)]
    pub(crate) mount_point: PathBuf,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_bad_value_is_refused_by_its_name() {
        for (argument, value) in [
            ("--instance", "a/b"),
            ("--cache-bytes", "0"),
            ("--compaction-seconds", "0"),
            ("--export", "nbd"),
            ("--log", "xml"),
        ] {
            let error =
                Arguments::try_parse_from(["aenv-stored", "serve", argument, value]).unwrap_err().to_string();
            assert!(error.contains(argument), "{error}");
        }
    }
}
