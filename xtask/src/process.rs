//! Runs programs: aloud, or quietly into a log whose end is shown on failure. Owns no state.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How much of a log is shown when something fails.
const TAIL_BYTES: u64 = 3000;
/// How often the end of a running program is looked for while its last line is shown.
const POLL: Duration = Duration::from_millis(100);

/// A command line for people.
pub(crate) fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned();
    let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    std::iter::once(name).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// Runs with this terminal's output; an unsuccessful end is an error.
pub(crate) fn run_aloud(command: &mut Command) -> Result<()> {
    let text = describe(command);
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot start `{text}`"))?;
    if !status.success() {
        bail!("`{text}` failed: {status}");
    }
    Ok(())
}

/// Runs with all output in `log`; on failure the error carries the end of it. `progress` gets the last line now and then.
pub(crate) fn run_quietly(command: &mut Command, log: &Path, mut progress: impl FnMut(&str)) -> Result<()> {
    let text = describe(command);
    let output = create_log(log)?;
    let errors = output.try_clone().context("cannot duplicate the log's handle")?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors)
        .spawn()
        .with_context(|| format!("cannot start `{text}`"))?;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("cannot wait for `{text}`"))? {
            break status;
        }
        if let Some(line) = tail(log, 300).lines().last() {
            progress(line);
        }
        std::thread::sleep(POLL);
    };
    if !status.success() {
        bail!("`{text}` failed: {status}\n{}\n(all of it: {})", tail(log, TAIL_BYTES), log.display());
    }
    Ok(())
}

/// Runs and gives standard output; on failure the error carries standard error.
pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let text = describe(command);
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{text}`"))?;
    if !output.status.success() {
        bail!("`{text}` failed: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Opens an empty log, directories included.
pub(crate) fn create_log(log: &Path) -> Result<File> {
    if let Some(directory) = log.parent() {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    }
    File::create(log).with_context(|| format!("cannot write {}", log.display()))
}

/// The last whole lines within `bytes` of the end of a file; empty when it cannot be read.
pub(crate) fn tail(path: &Path, bytes: u64) -> String {
    let read = || -> std::io::Result<(bool, Vec<u8>)> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(bytes)))?;
        let mut content = Vec::new();
        file.take(bytes).read_to_end(&mut content)?;
        Ok((length > bytes, content))
    };
    let (is_cut, content) = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&content).trim_end().to_owned();
    match text.split_once('\n') {
        Some((_, whole_lines)) if is_cut => whole_lines.to_owned(),
        _ => text,
    }
}

/// Fails unless run as root, which mounts, namespaces and taps need.
pub(crate) fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("must run as root: it mounts, and makes network namespaces and tap devices");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_shows_the_end_of_the_output() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("sub/log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo first; echo why >&2; exit 3"]);
        let error = run_quietly(&mut command, &log, |_| ()).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
    }

    #[test]
    fn a_tail_begins_at_a_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "aaaaaaaa\nbbbb\ncccc\n").unwrap();
        assert_eq!(tail(file.path(), 12), "bbbb\ncccc");
        assert_eq!(tail(file.path(), 100), "aaaaaaaa\nbbbb\ncccc");
        assert_eq!(tail(Path::new("/nonexistent"), 100), "");
    }
}
