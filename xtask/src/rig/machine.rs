//! The QEMU process of one run, from its start to the job's exit code.
//!
//! ```text
//! start ─▶ booting ─"ready"─▶ running ─"ended CODE"─▶ code          job's output: QEMU's standard output
//!             │                  │                                   reports:      QEMU's standard error
//!             │                  ├─"cut"─▶ killed
//!             └──────────────────┴─▶ error: limit, kernel panic,     console:      a log file
//!                                    end without a report
//! ```
//! Owns the process, which also dies with the thread that started it. Makes no file but the console's log.

use super::Job;
use super::image::Image;
use crate::process::{create_log, tail};
use crate::stages::Voice;
use anyhow::{Context, Result, anyhow};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// All that QEMU emulates, with AMD's virtualisation and nested paging; but without page tables of five levels: with them
/// guests of guests, and the machine itself, now and then end in a triple fault (seen with QEMU 10.0.2).
const CPU: &str = "max,-la57,+svm,+npt";

/// How much of the console is shown when something fails.
const CONSOLE_BYTES: u64 = 3000;
/// How far back a panic is looked for: a trace of some length follows its first line.
const PANIC_BYTES: u64 = 64 << 10;
/// How often the console is looked at while the machine boots.
const POLL: Duration = Duration::from_millis(200);
/// From the report of the job's end to the end of QEMU.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(10);

/// A running machine; it is killed when dropped.
#[derive(Debug)]
pub(super) struct Machine {
    child: Child,
    reports: Receiver<Report>,
    output: Option<JoinHandle<std::io::Result<u64>>>,
    console: PathBuf,
    deadline: Instant,
    limit: Duration,
    /// What QEMU said that is no report.
    complaints: Vec<String>,
}

/// The machine ended without a word of its kernel or of QEMU: nothing that runs in it can do that, only its emulation.
#[derive(Debug)]
pub(super) struct EndedByItself(String);

impl std::fmt::Display for EndedByItself {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for EndedByItself {}

/// A line of the port `result`, or of QEMU itself.
#[derive(Debug, PartialEq, Eq)]
enum Report {
    Ready,
    /// The job wants the power to be cut now.
    Cut,
    Ended(u8),
    Complaint(String),
}

impl Report {
    fn parse(line: &str) -> Self {
        let line = line.trim_end();
        match line.strip_prefix("ended ").and_then(|code| code.parse().ok()) {
            Some(code) => Self::Ended(code),
            None if line == "ready" => Self::Ready,
            None if line == "cut" => Self::Cut,
            None => Self::Complaint(line.to_owned()),
        }
    }
}

impl Machine {
    /// Starts QEMU; `transport` is the archive with the job.
    pub(super) fn start(image: &Image, transport: File, job: &Job, console: &Path) -> Result<Self> {
        create_log(console)?;
        let mut child = command(image, job, console)
            // QEMU opens it as a disk by the name /dev/stdin: the archive has no name of its own.
            .stdin(Stdio::from(transport))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start QEMU by setpriv: run scripts/bootstrap.sh --tests")?;
        let output = child.stdout.take().context("QEMU has no standard output")?;
        let errors = child.stderr.take().context("QEMU has no standard error")?;
        let (sender, reports) = channel();
        std::thread::spawn(move || read_reports(errors, &sender));
        let output = std::thread::spawn(move || pass_on(output));
        Ok(Self {
            child,
            reports,
            output: Some(output),
            console: console.to_owned(),
            deadline: Instant::now() + job.limit,
            limit: job.limit,
            complaints: Vec::new(),
        })
    }

    /// Waits until the job runs.
    pub(super) fn boot(&mut self, voice: &Voice) -> Result<()> {
        loop {
            match self.next_report(POLL)? {
                Some(Report::Ready) => return Ok(()),
                Some(report) => return Err(self.failure(&format!("the rig began with {report:?}"))),
                None => {
                    if let Some(line) = tail(&self.console, 300).lines().last() {
                        voice.doing(line);
                    }
                }
            }
        }
    }

    /// Waits until the job wants it, then ends the machine at once.
    pub(super) fn cut(mut self) -> Result<()> {
        loop {
            match self.next_report(POLL)? {
                Some(Report::Cut) => break,
                Some(report) => return Err(self.failure(&format!("instead of a cut came {report:?}"))),
                None => {}
            }
        }
        self.child.kill().context("cannot kill QEMU")
    }

    /// Waits for the end of the job and of the machine; gives the job's exit code.
    pub(super) fn finish(mut self) -> Result<u8> {
        let code = loop {
            match self.next_report(POLL)? {
                Some(Report::Ended(code)) => break code,
                Some(report) => return Err(self.failure(&format!("unexpected {report:?}"))),
                None => {}
            }
        };
        let ended = Instant::now();
        while self.child.try_wait().context("cannot wait for QEMU")?.is_none() {
            if ended.elapsed() > POWER_OFF_LIMIT {
                return Err(self.failure("the rig does not power off"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(output) = self.output.take() {
            let passed_on =
                output.join().map_err(|_| anyhow!("the thread that passes on the output panicked"))?;
            passed_on.context("cannot pass on the output of the rig")?;
        }
        Ok(code)
    }

    /// The next report, or none within `patience`. The limit, and an end of QEMU that nothing announced, are errors.
    fn next_report(&mut self, patience: Duration) -> Result<Option<Report>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.failure(&format!(
                "the limit of {:?} is over: the rig was ended (--limit SECONDS sets another)",
                self.limit
            )));
        }
        match self.reports.recv_timeout(patience.min(left)) {
            Ok(Report::Complaint(line)) => {
                self.complaints.push(line);
                Ok(None)
            }
            Ok(report) => Ok(Some(report)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().context("cannot wait for QEMU")?;
                if tail(&self.console, PANIC_BYTES).contains("Kernel panic") {
                    return Err(self.failure(&format!("the rig's kernel panicked; QEMU: {status}")));
                }
                let ended = self.failure(&format!("the rig ended without a result; QEMU: {status}"));
                // Only a reset of the processor ends QEMU like this.
                let by_itself = status.success() && self.complaints.is_empty();
                Err(if by_itself { EndedByItself(ended.to_string()).into() } else { ended })
            }
        }
    }

    fn failure(&self, what: &str) -> anyhow::Error {
        anyhow!(
            "{what}\n{}\n{}\n(all of the console: {})",
            self.complaints.join("\n"),
            tail(&self.console, CONSOLE_BYTES),
            self.console.display()
        )
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // An error means that it has ended already, which is what is wanted.
        let _already_ended = self.child.kill();
        let _already_reaped = self.child.wait();
        if let Some(output) = self.output.take() {
            // What the job printed before is shown; that it failed is known and reported already.
            let _reported_already = output.join();
        }
    }
}

fn read_reports(errors: impl Read, sender: &Sender<Report>) {
    for line in BufReader::new(errors).lines() {
        // A receiver that is gone, as a line that cannot be read, means that the machine is being ended.
        let Ok(line) = line else { return };
        if sender.send(Report::parse(&line)).is_err() {
            return;
        }
    }
}

/// Copies to our standard output, at once.
fn pass_on(mut from: impl Read) -> std::io::Result<u64> {
    let mut to = std::io::stdout();
    let mut buffer = vec![0; 64 << 10];
    let mut total = 0;
    loop {
        let length = from.read(&mut buffer)?;
        let Some(chunk) = buffer.get(..length).filter(|chunk| !chunk.is_empty()) else { return Ok(total) };
        to.write_all(chunk)?;
        to.flush()?;
        total += u64::try_from(length).unwrap_or_default();
    }
}

/// QEMU's command line. `setpriv` lets the kernel kill it when our thread ends, however that happens.
fn command(image: &Image, job: &Job, console: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        // Where `snapshot=on` puts its files, which have no name.
        .env("TMPDIR", &image.scratch)
        .args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-display", "none", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU])
        .args(["-smp", &job.processors.to_string(), "-m", &job.memory_mib.to_string()])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initramfs)
        .args(["-append", "console=ttyS0 panic=-1 loglevel=4 mitigations=off random.trust_cpu=on"])
        .args(["-serial", &format!("file:{}", option_value(console))])
        .args(["-device", "virtio-rng-pci", "-device", "virtio-serial-pci"]);
    for (port, path) in [("output", "/dev/stdout"), ("result", "/dev/stderr")] {
        command
            .args(["-chardev", &format!("file,id={port},path={path}")])
            .args(["-device", &format!("virtserialport,chardev={port},name={port}")]);
    }
    let area = match &job.kept_area {
        // A flush is one here.
        Some(area) => (area.as_path(), "cache=writeback,discard=unmap"),
        None => (image.area.as_path(), "snapshot=on,cache=unsafe,discard=unmap"),
    };
    let disks = [
        ("root", image.root.as_path(), "snapshot=on,cache=unsafe"),
        ("transport", Path::new("/dev/stdin"), "readonly=on"),
        ("area", area.0, area.1),
        ("guest", image.guest.as_path(), "readonly=on"),
    ];
    for (name, path, how) in disks {
        let path = option_value(path);
        command
            .args(["-drive", &format!("if=none,id={name},format=raw,{how},file={path}")])
            .args(["-device", &format!("virtio-blk-pci,drive={name},serial={name}")]);
    }
    command
}

/// A path inside of one of QEMU's options, where a comma ends the value unless it is doubled.
fn option_value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_told_from_what_qemu_says() {
        assert_eq!(Report::parse("ready\n"), Report::Ready);
        assert_eq!(Report::parse("cut\n"), Report::Cut);
        assert_eq!(Report::parse("ended 137\n"), Report::Ended(137));
        for other in ["ended", "ended 256", "ended x", "qemu: ended 1", "ready?"] {
            assert_eq!(Report::parse(other), Report::Complaint(other.to_owned()));
        }
    }

    #[test]
    fn a_comma_in_a_path_does_not_end_it() {
        assert_eq!(option_value(Path::new("/a,b")), "/a,,b");
    }
}
