//! QEMU's own way to pause: `savevm` into the qcow2 file that is its disk, `loadvm` from it, without any of our code.
//!
//! Owns the QEMU process and the files it makes in a directory; both go with it. The guest stands still while either runs.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpStream, UnixStream};
use tokio::process::{Child, Command};

const PATIENCE: Duration = Duration::from_secs(180);
/// As it is in every guest, with room for the addresses of QEMU's emulated network.
const NETWORK: &str = "net=169.254.0.0/24,host=169.254.0.22,dns=169.254.0.23,dhcpstart=169.254.0.21";
const SNAPSHOT: &str = "all";
/// Devices are announced by ACPI alone, as by our driver.
const MACHINE: &str = "microvm,rtc=on,auto-kernel-cmdline=off";
/// How long the rate of this processor's time-stamp counter is measured.
const TSC_MEASUREMENT: Duration = Duration::from_millis(50);

/// A QEMU with a booted guest.
pub(crate) struct Qemu {
    process: Child,
    monitor: BufReader<UnixStream>,
    /// Where the guest daemon is reached.
    port: u16,
}

/// What is run, and on what.
pub(crate) struct Files<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) base_disk: &'a Path,
    pub(crate) directory: &'a Path,
}

/// Whether what it needs is installed: qcow2 files are made by `qemu-img`.
pub(crate) fn is_possible() -> bool {
    aenv_sys::process::is_installed(Path::new("qemu-img"))
}

impl Qemu {
    /// Boots a guest and waits until its daemon answers.
    pub(crate) async fn boot(
        files: &Files<'_>,
        memory_mib: u64,
        vcpus: u32,
        accelerator: &str,
    ) -> Result<Self> {
        std::fs::create_dir_all(files.directory)?;
        let disk = files.directory.join("disk.qcow2");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .args([files.base_disk, &disk])
            .status()
            .await
            .context("cannot run qemu-img")?;
        ensure!(made.success(), "qemu-img: {made}");
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let socket = files.directory.join("qmp");
        let process = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", MACHINE])
            .args(["-accel", accelerator, "-cpu", "max", "-smp", &vcpus.to_string()])
            .args(["-m", &format!("{memory_mib}M")])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .args(["-serial", "null"])
            .args(["-drive", &format!("if=none,id=disk,format=qcow2,file={}", disk.display())])
            .args(["-device", "virtio-blk-device,drive=disk"])
            .args([
                "-netdev",
                &format!("user,id=net,{NETWORK},hostfwd=tcp:127.0.0.1:{port}-169.254.0.21:49983"),
            ])
            .args(["-device", "virtio-net-device,netdev=net"])
            .arg("-kernel")
            .arg(files.kernel)
            .arg("-initrd")
            .arg(files.initramfs)
            .args(["-append", &kernel_arguments(accelerator)])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("cannot run QEMU")?;
        let mut qemu = Self { process, monitor: BufReader::new(connect(&socket).await?), port };
        qemu.execute("qmp_capabilities", json!({})).await?;
        qemu.answer().await?;
        Ok(qemu)
    }

    /// Saves memory, devices and disk; how long that takes.
    pub(crate) async fn save(&mut self) -> Result<Duration> {
        let started = Instant::now();
        self.person(&format!("savevm {SNAPSHOT}")).await?;
        Ok(started.elapsed())
    }

    /// Goes back to what was saved; how long it takes until the guest daemon answers.
    pub(crate) async fn load(&mut self) -> Result<Duration> {
        let started = Instant::now();
        self.person(&format!("loadvm {SNAPSHOT}")).await?;
        self.answer().await?;
        Ok(started.elapsed())
    }

    pub(crate) async fn end(mut self) -> Result<()> {
        Ok(self.process.kill().await?)
    }

    /// A command as people type it: its answer is empty unless it failed.
    async fn person(&mut self, line: &str) -> Result<()> {
        let said = self.execute("human-monitor-command", json!({ "command-line": line })).await?;
        ensure!(said == "", "{line}: {said}");
        Ok(())
    }

    async fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.monitor.write_all(line.as_bytes()).await?;
        loop {
            line.clear();
            ensure!(self.monitor.read_line(&mut line).await? > 0, "QEMU ended at {command}");
            let mut said: Value = serde_json::from_str(&line).context("QEMU said no JSON")?;
            ensure!(said["error"].is_null(), "{command}: {}", said["error"]);
            // Greetings and events come between.
            if let Some(answer) = said.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// Waits until the guest daemon answers, each time over a new connection.
    async fn answer(&self) -> Result<()> {
        let started = Instant::now();
        loop {
            let asked = tokio::time::timeout(Duration::from_secs(1), ask(self.port)).await;
            if let Ok(Ok(())) = asked {
                return Ok(());
            }
            ensure!(started.elapsed() < PATIENCE, "the guest does not answer: {asked:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// An emulated guest cannot calibrate its clock by itself: most boots would hang.
fn kernel_arguments(accelerator: &str) -> String {
    let mut arguments = "console=ttyS0 quiet panic=-1 reboot=t pci=off".to_owned();
    if accelerator == "tcg" {
        arguments.push_str(" no_timer_check tsc=reliable");
        if let Some(khz) = aenv_sys::tsc::measure_khz(TSC_MEASUREMENT) {
            arguments.push_str(&format!(" tsc_early_khz={khz}"));
        }
    }
    arguments
}

async fn connect(socket: &Path) -> Result<UnixStream> {
    let started = Instant::now();
    loop {
        match UnixStream::connect(socket).await {
            Ok(stream) => return Ok(stream),
            Err(error) if started.elapsed() > PATIENCE => return Err(error).context("QEMU opens no monitor"),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

async fn ask(port: u16) -> Result<()> {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
    connection.write_all(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n").await?;
    let mut head = [0; 12];
    connection.read_exact(&mut head).await?;
    ensure!(head.starts_with(b"HTTP/1.") && head[9] == b'2', "{}", String::from_utf8_lossy(&head));
    Ok(())
}
