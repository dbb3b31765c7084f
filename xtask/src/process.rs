//! Runs programs: aloud, or quietly into a log whose end is shown on failure. Owns no state.

use anyhow::{Context, Result, anyhow, bail};
use std::fs::File;
use std::io::{IsTerminal, PipeReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// How much of a log is shown when something fails.
const TAIL_BYTES: u64 = 3000;
/// How much of the output of a program that ran aloud is shown again with its failure.
const SPOKEN_BYTES: usize = 12_000;
/// How long a descendant that outlives a program may keep its output open.
const OUTPUT_PATIENCE: Duration = Duration::from_secs(2);
/// How often the end of a running program is looked for while its last line is shown.
const POLL: Duration = Duration::from_millis(100);

/// A command line for people.
pub(crate) fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program()).to_string_lossy().into_owned();
    let arguments = command.get_args().map(|argument| argument.to_string_lossy().into_owned());
    std::iter::once(name).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// A program ran aloud and failed.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) what: String,
    /// The end of what it said, which has been shown already, but perhaps long ago.
    pub(crate) said: String,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.what)
    }
}

impl std::error::Error for Failed {}

/// Runs with our output; an unsuccessful end is an error. Where that is no terminal, on which one can look back, the error
/// carries the end of what was said.
pub(crate) fn run_aloud(command: &mut Command) -> Result<()> {
    let text = describe(command);
    command.stdin(Stdio::null());
    let (status, said) = if std::io::stdout().is_terminal() {
        (command.status().with_context(|| format!("cannot start `{text}`"))?, String::new())
    } else {
        run_listening(command).with_context(|| format!("cannot run `{text}`"))?
    };
    if !status.success() {
        return Err(Failed { what: format!("`{text}` failed: {status}"), said }.into());
    }
    Ok(())
}

/// Runs with our standard output for both of its own, and gives the end of what it said.
fn run_listening(command: &mut Command) -> Result<(ExitStatus, String)> {
    let (output, their_output) = std::io::pipe().context("cannot make a pipe")?;
    let their_errors = their_output.try_clone().context("cannot duplicate a pipe")?;
    let mut child = command.stdout(their_output).stderr(their_errors).spawn().context("cannot start it")?;
    // The command holds the pipe's other end, too.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let (sender, end) = channel();
    std::thread::spawn(move || {
        // Nobody waits any more when a descendant kept the output open for too long.
        let _nobody_waits = sender.send(repeat(output));
    });
    let status = child.wait().context("cannot wait for it")?;
    Ok((status, spoken(&end)?))
}

fn spoken(end: &Receiver<std::io::Result<Vec<u8>>>) -> Result<String> {
    match end.recv_timeout(OUTPUT_PATIENCE) {
        Ok(Ok(said)) => Ok(whole_lines(&said, said.len() >= SPOKEN_BYTES)),
        Ok(Err(error)) => Err(anyhow!(error).context("cannot pass on its output")),
        Err(_) => Ok("(a descendant keeps its output open)".to_owned()),
    }
}

/// Copies to our standard output, at once, until the end; gives the last bytes.
fn repeat(mut from: PipeReader) -> std::io::Result<Vec<u8>> {
    let mut to = std::io::stdout();
    let mut buffer = vec![0; 64 << 10];
    let mut said: Vec<u8> = Vec::new();
    loop {
        let length = from.read(&mut buffer)?;
        let Some(chunk) = buffer.get(..length).filter(|chunk| !chunk.is_empty()) else { return Ok(said) };
        to.write_all(chunk)?;
        to.flush()?;
        said.extend_from_slice(chunk);
        let excess = said.len().saturating_sub(SPOKEN_BYTES);
        said.drain(..excess);
    }
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
    whole_lines(&content, is_cut)
}

/// The text without the part of a line that was cut off at its beginning.
fn whole_lines(content: &[u8], is_cut: bool) -> String {
    let text = String::from_utf8_lossy(content).trim_end().to_owned();
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
    fn a_failure_repeats_the_end_of_what_was_said_aloud() {
        let mut command = Command::new("sh");
        command.args(["-c", "seq 100000; echo why >&2; exit 3"]);
        let (status, said) = run_listening(&mut command).unwrap();
        assert_eq!(status.code(), Some(3));
        assert!(said.ends_with("\n99999\n100000\nwhy") && said.len() <= SPOKEN_BYTES, "{said}");
        assert!(said.lines().all(|line| line == "why" || line.len() >= 5), "a line was cut: {said}");
        assert_eq!(run_listening(&mut Command::new("true")).unwrap().1, "");
    }

    #[test]
    fn an_output_that_a_descendant_keeps_open_is_not_waited_for() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 6 & exit 4"]);
        let (status, said) = run_listening(&mut command).unwrap();
        assert_eq!(status.code(), Some(4));
        assert!(said.contains("descendant"), "{said}");
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
