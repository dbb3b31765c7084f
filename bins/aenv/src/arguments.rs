//! The shape of the command line: every command, option and help text, and nothing else.
//!
//! Owns no state. Values are checked here as far as that needs no I/O; what they mean is decided in `commands`.

mod snapshots;

pub(crate) use snapshots::{
    ForkArguments, SnapshotCommand, SnapshotCreateArguments, SnapshotListArguments, SnapshotRemoveArguments,
};

use aenv_protocol::ids::SandboxId;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed; standard error says what failed and how to fix it
  2    the command line or the settings are wrong
  124  exec: the command ran longer than --timeout and was killed
  125  exec: aenv itself failed (no such sandbox, the connection broke): the command's own exit
       code is unknown
  128+N  ended by signal N; for exec, the command in the sandbox ended by signal N
  otherwise exec ends with the exit code of its command

Settings, first found wins: options, environment (E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL),
the file .aenv/env of this directory or of a directory above it (`make up` writes it).";

/// Sandboxes for AI agents: start one, run commands in it, copy files, look after it.
#[derive(Debug, Parser)]
#[command(name = "aenv", version, after_help = EXIT_CODES, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: GlobalArguments,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub(crate) struct GlobalArguments {
    /// Key of the API; other users of this machine can see options, so prefer E2B_API_KEY
    #[arg(long, global = true, value_name = "KEY", help_heading = "Connection")]
    pub(crate) api_key: Option<String>,
    /// Address of the API [default: http://127.0.0.1:8000]
    #[arg(long, global = true, value_name = "URL", help_heading = "Connection")]
    pub(crate) api_url: Option<String>,
    /// Address of the sandboxes [default: the address of the API]
    #[arg(long, global = true, value_name = "URL", help_heading = "Connection")]
    pub(crate) sandbox_url: Option<String>,
    /// Print JSON, also on a terminal (piped output is JSON anyway)
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Look at templates
    #[command(subcommand, visible_alias = "templates")]
    Template(TemplateCommand),
    /// Start a sandbox
    ///
    /// Prints its id. Then stays attached: Ctrl-C kills the sandbox. With --detach, or when standard input or
    /// output is not a terminal, ends at once and leaves the sandbox running until its timeout.
    Start(StartArguments),
    /// Run a command in a sandbox
    ///
    /// The command's arguments are passed on as they are, no shell reads them (see -c). Its output streams are
    /// passed through byte by byte, its exit code becomes that of aenv. Ctrl-C ends the command, not the sandbox.
    Exec(ExecArguments),
    /// List sandboxes
    #[command(visible_alias = "list")]
    Ls(ListArguments),
    /// Kill sandboxes
    #[command(visible_alias = "kill")]
    Rm(RemoveArguments),
    /// Set how long a sandbox lives from now on
    Timeout(TimeoutArguments),
    /// Stop a sandbox and keep all it has: files, processes, memory
    ///
    /// A paused sandbox uses no processor, soon no memory, and has no life time. `aenv resume` lets it go on, `aenv rm`
    /// removes it.
    Pause(PauseArguments),
    /// Let a paused sandbox go on
    ///
    /// One that runs already gets the time only, and never less than it has.
    Resume(ResumeArguments),
    /// Keep states of sandboxes, to start others from
    #[command(subcommand, visible_alias = "snapshots")]
    Snapshot(SnapshotCommand),
    /// Start children that go on from the state that a sandbox has now
    ///
    /// Prints their ids. Files, memory and running processes are those of the parent, which goes on itself; id, hostname,
    /// random numbers of the kernel, access token and network connections are each child's own.
    Fork(ForkArguments),
    /// Show who was made from whom: sandboxes, snapshots and forks
    Tree,
    /// Copy one file into a sandbox
    Upload(UploadArguments),
    /// Copy one file out of a sandbox
    Download(DownloadArguments),
    /// Show what the API knows about a sandbox
    Inspect(InspectArguments),
    /// Examine this machine, the API and the key, and say what to do about what is wrong
    Doctor,
    /// Look at layer files of this machine, take images out of them, make new ones; only `gc` asks a node
    #[command(subcommand)]
    Layer(LayerCommand),
}

/// Commands about layers.
#[derive(Debug, Subcommand)]
pub(crate) enum LayerCommand {
    #[command(flatten)]
    Files(LayerFileCommand),
    /// Let the node remove stored layers that nothing is made of
    ///
    /// Layers of sandboxes, captures and templates stay, also of those that are being made. Ends with 1 on a node whose
    /// disks are no layers (AENV_DISKS=reflink).
    Gc,
}

/// Commands about layer files of this machine.
#[derive(Debug, Subcommand)]
pub(crate) enum LayerFileCommand {
    /// Show what layer files say of themselves
    Info(LayerInfoArguments),
    /// Read layer files to their end: every checksum and every mapping
    ///
    /// Prints one line per file. Ends with 1 if any is damaged, with the place of the damage. Without compression a
    /// layer has no checksums: then only what can be told from its structure is found.
    Verify(LayerVerifyArguments),
    /// Write the image that layers show together into a raw, sparse file
    ///
    /// Every checksum of every layer is looked at first, of data that other layers hide too. On any damage the command
    /// ends with 1 and leaves no file.
    Export(LayerExportArguments),
    /// Make a sealed layer of a raw image
    ///
    /// Holes and blocks of zeros are not stored. The layer can be read by overlaybd's tools too.
    Import(LayerImportArguments),
}

/// Arguments of `layer info`.
#[derive(Debug, Args)]
pub(crate) struct LayerInfoArguments {
    /// Layer files: plain, compressed, or in an archive
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
}

/// Arguments of `layer verify`.
#[derive(Debug, Args)]
pub(crate) struct LayerVerifyArguments {
    /// Layer files: plain, compressed, or in an archive
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
}

/// Arguments of `layer export`.
#[derive(Debug, Args)]
pub(crate) struct LayerExportArguments {
    /// File to write; replaced if it exists
    #[arg(long, short = 'o', value_name = "RAW")]
    pub(crate) output: PathBuf,
    /// Layer files, from the bottom of the stack to its top
    #[arg(required = true, value_name = "BOTTOM … TOP")]
    pub(crate) layers: Vec<PathBuf>,
    /// Stack them as they are named even if their ids say that they were made in another order
    #[arg(long)]
    pub(crate) any_order: bool,
}

/// Arguments of `layer import`.
#[derive(Debug, Args)]
pub(crate) struct LayerImportArguments {
    /// Raw image; may be sparse
    pub(crate) raw: PathBuf,
    /// Layer file to write; replaced if it exists
    #[arg(long, short = 'o', value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// How to compress it
    #[arg(long, value_enum, default_value_t = LayerCompression::Lz4)]
    pub(crate) compression: LayerCompression,
    /// Put it into a tar archive, as registries want it
    #[arg(long)]
    pub(crate) tar: bool,
}

/// Compression of a layer file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LayerCompression {
    /// Not at all: largest, read without a cache, no checksums
    None,
    /// Fast to read
    Lz4,
    /// Smallest
    Zstd,
}

/// Commands about templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    /// List templates
    #[command(visible_alias = "list")]
    Ls,
}

/// Arguments of `start`.
#[derive(Debug, Args)]
pub(crate) struct StartArguments {
    /// Template to start from, or snapshot
    #[arg(default_value = "base")]
    pub(crate) template: String,
    /// How long the sandbox lives: 300, 90s, 5m, 1h30m
    #[arg(long, default_value = "5m", value_parser = parse_duration, value_name = "DURATION")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) timeout: Duration,
    /// Environment variable of every process in the sandbox; may be repeated
    #[arg(long = "env", short = 'e', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) environment: Vec<(String, String)>,
    /// Label of the sandbox, `ls --metadata` finds it; may be repeated
    #[arg(long, short = 'm', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<(String, String)>,
    /// Let the sandbox reach nothing outside
    #[arg(long)]
    pub(crate) no_internet: bool,
    /// What becomes of the sandbox when its time is over
    #[arg(long, value_enum, default_value_t = EndOfTime::Kill, value_name = "WHAT")]
    pub(crate) on_timeout: EndOfTime,
    /// Let requests to the sandbox resume it when it is paused
    #[arg(long)]
    pub(crate) auto_resume: bool,
    /// Leave the sandbox running and end
    #[arg(long, short = 'd')]
    pub(crate) detach: bool,
}

/// What becomes of a sandbox when its time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndOfTime {
    /// It is gone
    Kill,
    /// It is paused, with its memory
    Pause,
    /// It is paused without its memory: it boots when it is resumed
    PauseFilesystem,
}

/// Arguments of `exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArguments {
    /// Sandbox to run in
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// User to run as [default: the sandbox's default user]
    #[arg(long, short = 'u')]
    pub(crate) user: Option<String>,
    /// Directory to run in
    #[arg(long, short = 'w', value_name = "DIRECTORY")]
    pub(crate) cwd: Option<String>,
    /// Environment variable of the command; may be repeated
    #[arg(long = "env", short = 'e', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) environment: Vec<(String, String)>,
    /// Kill the command when it runs longer
    #[arg(long, value_parser = parse_duration, value_name = "DURATION", allow_hyphen_values = true)]
    pub(crate) timeout: Option<Duration>,
    /// Forward standard input also when it is a terminal (piped input is always forwarded)
    #[arg(long, short = 'i')]
    pub(crate) interactive: bool,
    /// Do not read standard input: the command finds its own empty
    #[arg(long, short = 'n', conflicts_with = "interactive")]
    pub(crate) no_stdin: bool,
    /// Run STRING with `/bin/bash -l -c`; further arguments become $0, $1, …
    #[arg(short = 'c', long = "command", value_name = "STRING")]
    pub(crate) shell_command: Option<String>,
    /// Command and its arguments
    #[arg(trailing_var_arg = true, required_unless_present = "shell_command", value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// Arguments of `ls`.
#[derive(Debug, Args)]
pub(crate) struct ListArguments {
    /// Also list sandboxes that were lost, with the reason
    #[arg(long, short = 'a')]
    pub(crate) all: bool,
    /// Only sandboxes with this label; may be repeated, then all must match
    #[arg(long, short = 'm', value_parser = parse_pair, value_name = "KEY=VALUE")]
    pub(crate) metadata: Vec<(String, String)>,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub(crate) struct RemoveArguments {
    /// Sandboxes to kill
    #[arg(value_name = "ID", required_unless_present = "all", value_parser = parse_sandbox_id)]
    pub(crate) sandboxes: Vec<SandboxId>,
    /// Kill every sandbox
    #[arg(long, conflicts_with = "sandboxes")]
    pub(crate) all: bool,
}

/// Arguments of `timeout`.
#[derive(Debug, Args)]
pub(crate) struct TimeoutArguments {
    /// Sandbox to change
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// Time to live, counted from now: 300, 90s, 10m, 1h30m
    #[arg(value_parser = parse_duration)]
    pub(crate) duration: Duration,
}

/// Arguments of `pause`.
#[derive(Debug, Args)]
pub(crate) struct PauseArguments {
    /// Sandbox to pause
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// Keep the files only: processes end, and the sandbox boots when it is resumed
    #[arg(long)]
    pub(crate) filesystem: bool,
    /// Wait until what is kept survives this
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) durability: Option<DurabilityWish>,
    /// Do not pause a sandbox whose daemon does not answer
    #[arg(long)]
    pub(crate) require_healthy_guest: bool,
}

/// What a pause waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DurabilityWish {
    /// The end of every process of the node
    Process,
    /// A power cut of the node
    Local,
}

/// Arguments of `resume`.
#[derive(Debug, Args)]
pub(crate) struct ResumeArguments {
    /// Sandbox to resume
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// How long it lives at least from now: 300, 90s, 5m, 1h30m
    #[arg(long, default_value = "5m", value_parser = parse_duration, value_name = "DURATION")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) timeout: Duration,
    /// Boot from its disk, although its memory was kept: processes are lost, files are not
    #[arg(long)]
    pub(crate) reboot: bool,
}

/// Arguments of `upload`.
#[derive(Debug, Args)]
pub(crate) struct UploadArguments {
    /// Sandbox to copy into
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// File of this machine; `-` is standard input
    pub(crate) local: PathBuf,
    /// Path in the sandbox; relative to the user's home; with `/` at its end the local name is added
    pub(crate) remote: OsString,
    /// User who owns the file and whose home relative paths start at
    #[arg(long, short = 'u')]
    pub(crate) user: Option<String>,
}

/// Arguments of `download`.
#[derive(Debug, Args)]
pub(crate) struct DownloadArguments {
    /// Sandbox to copy from
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
    /// Path in the sandbox; relative to the user's home
    pub(crate) remote: OsString,
    /// File or directory of this machine; `-` is standard output
    pub(crate) local: PathBuf,
    /// User whose home relative paths start at and who must be able to read the file
    #[arg(long, short = 'u')]
    pub(crate) user: Option<String>,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub(crate) struct InspectArguments {
    /// Sandbox to show
    #[arg(value_name = "ID", value_parser = parse_sandbox_id)]
    pub(crate) sandbox: SandboxId,
}

/// Longest time to live that can be asked for; the node has its own, smaller, limit.
const MAX_DURATION_SECONDS: u64 = i32::MAX as u64;

/// Reads a duration: whole seconds, or numbers with units as in `1h30m`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let expected = "expected seconds or a duration such as 90s, 5m or 1h30m";
    let duration = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        Duration::from_secs(text.parse().map_err(|_| "is far too long".to_owned())?)
    } else {
        let signed: jiff::SignedDuration = text.parse().map_err(|_| expected.to_owned())?;
        Duration::try_from(signed).map_err(|_| "must not be negative".to_owned())?
    };
    if duration.is_zero() {
        return Err("must be longer than zero".to_owned());
    }
    if duration.as_secs() > MAX_DURATION_SECONDS {
        return Err("is far too long".to_owned());
    }
    Ok(duration)
}

/// Reads `KEY=VALUE`; the value may be empty and may contain `=`.
fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("the key before `=` is empty".to_owned()),
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err("expected KEY=VALUE".to_owned()),
    }
}

/// Reads a sandbox id, also in the longer form that older clients print.
fn parse_sandbox_id(text: &str) -> Result<SandboxId, String> {
    SandboxId::from_path(text).map_err(|_| "not a sandbox id; `aenv ls` lists them".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use proptest::prelude::*;

    #[test]
    fn the_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn durations_are_seconds_or_have_units() {
        for (text, seconds) in [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("2h", 7200)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        assert_eq!(parse_duration("1500ms"), Ok(Duration::from_millis(1500)));
        for text in
            ["", "0", "0s", "-5m", "-1", "abc", "5 parsecs", "99999999999999999999", "9999999999999h", "3y"]
        {
            assert!(parse_duration(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn exec_passes_options_of_the_command_on() {
        let parsed =
            Arguments::try_parse_from(["aenv", "exec", "i1", "-u", "root", "--", "ls", "-l", "--json"]);
        let Command::Exec(exec) = parsed.unwrap().command else { panic!("exec expected") };
        assert_eq!(exec.command, ["ls", "-l", "--json"]);
        assert_eq!(exec.user.as_deref(), Some("root"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_readers_panic(text in ".*") {
            let _ = parse_duration(&text);
            let _ = parse_pair(&text);
            let _ = parse_sandbox_id(&text);
        }
    }
}
