//! How long a sandbox takes in the ways that need no AgentENV, beside ours, on this host and with one VMM driver: the baseline
//! of `cargo xtask bench create` and `bench pause`.
//!
//! ```text
//! boot          copy of the disk, boot, first answer of the guest daemon
//! eager copy    full copy of memory image and disk, new VMM, load, resume, first answer
//! whole pause   stop, whole memory written, full copy of the disk; of a guest that was made by an eager copy
//! savevm        QEMU's own pause: memory, devices and disk into one qcow2 file; where `qemu-img` is installed
//! loadvm        QEMU's own resume from it, first answer
//! shared        disk that shares blocks, memory image mapped privately, new VMM, load, resume, first answer
//! shared, warm  the same, counted from the load on: the VMM was started before
//! ```
//!
//! Prints one JSON object: milliseconds of every run, by way. Owns the VMs and networks it makes (instance `n`), and removes
//! them. Settings come from the environment: AENV_DRIVER (`qemu`, `firecracker`, `auto`), AENV_GUEST_DIR, AENV_BENCH_DIR (a directory on a
//! file system with reflinks), AENV_BENCH_RUNS, AENV_BENCH_OF (`create`: all but the whole pause; `pause`: it, `savevm`, the eager copy and the boot).
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the result of the program, and what it leaves out"
)]

mod internal_snapshots;

use aenv_network::{LinuxSlots, Slot, SlotSettings, Slots as _};
use aenv_vmm::firecracker::{self, FirecrackerDriver};
use aenv_vmm::probe::{Accelerator, Kvm};
use aenv_vmm::qemu::{self, QemuDriver};
use aenv_vmm::{BootSource, CaptureFiles, Machine, MachineSpec, Placement, Vmm};
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const SPEC: MachineSpec = MachineSpec { vcpus: 2, memory_mib: 512 };
const ENVD_PORT: u16 = 49983;
const PATIENCE: Duration = Duration::from_secs(180);
/// How long a booted guest is left alone before it is captured.
const SETTLE: Duration = Duration::from_millis(500);

struct Bench {
    vmm: Arc<dyn Vmm>,
    slots: LinuxSlots,
    boot: BootSource,
    base_disk: PathBuf,
    directory: PathBuf,
}

/// One VM with what was made for it.
struct Started {
    machine: Box<dyn Machine>,
    slot: Slot,
    directory: PathBuf,
}

/// Milliseconds of every run, by way.
type Times = BTreeMap<&'static str, Vec<f64>>;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Copies {
    /// Blocks are shared.
    Reflink,
    /// Every byte is copied.
    Full,
}

#[tokio::main]
async fn main() -> Result<()> {
    let setting = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set"));
    let guest = PathBuf::from(setting("AENV_GUEST_DIR")?);
    let directory = PathBuf::from(setting("AENV_BENCH_DIR")?).join("naive-starts");
    let runs: usize = std::env::var("AENV_BENCH_RUNS").unwrap_or_else(|_| "5".to_owned()).parse()?;
    let of_pause = match std::env::var("AENV_BENCH_OF").as_deref().unwrap_or("create") {
        "create" => false,
        "pause" => true,
        other => bail!("AENV_BENCH_OF={other}: create or pause"),
    };
    std::fs::create_dir_all(&directory)?;
    let kvm = Kvm::detect()?.choose(None).accelerator == Accelerator::Kvm;
    let firecracker_is_there = aenv_sys::process::is_installed(Path::new("firecracker"));
    let driver = match setting("AENV_DRIVER")?.as_str() {
        "auto" if kvm && firecracker_is_there => "firecracker".to_owned(),
        "auto" => "qemu".to_owned(),
        other => other.to_owned(),
    };
    let (vmm, kernel): (Arc<dyn Vmm>, _) = match driver.as_str() {
        "qemu" => {
            let settings = qemu::Settings::new(directory.join("vmm"));
            (Arc::new(QemuDriver::detect(settings).await?), "kernel/vmlinuz")
        }
        "firecracker" => {
            let settings = firecracker::Settings::default();
            (Arc::new(FirecrackerDriver::detect(settings).await?), "kernel/vmlinux")
        }
        other => bail!("AENV_DRIVER={other}: qemu, firecracker or auto"),
    };
    let mut settings = SlotSettings::new("n".parse()?, "100.126.0.0/24".parse()?);
    settings.pool_size = 2;
    let bench = Bench {
        vmm,
        slots: LinuxSlots::start(settings).await?,
        boot: BootSource {
            kernel: guest.join(kernel),
            initramfs: guest.join("initramfs.cpio"),
            guest_arguments: Vec::new(),
        },
        base_disk: directory.join("base.ext4"),
        directory: directory.clone(),
    };
    copy(&guest.join("base-rootfs.ext4"), &bench.base_disk, Copies::Full)?;
    let mut times = bench.measure(runs, of_pause).await;
    if let Ok(times) = &mut times
        && of_pause
        && driver == "qemu"
    {
        if internal_snapshots::is_possible() {
            bench.internal_snapshots(runs, if kvm { "kvm" } else { "tcg" }, times).await?;
        } else {
            eprintln!("savevm and loadvm are left out: install qemu-utils");
        }
    }
    // A run that failed half-way left its VM.
    aenv_vmm::end_strays("n-", &[]).await?;
    bench.slots.shutdown().await?;
    aenv_network::purge(&"n".parse()?, Path::new(aenv_network::settings::FORWARDING_RECORD)).await?;
    std::fs::remove_dir_all(&directory)?;
    println!("{}", serde_json::to_string(&times?)?);
    Ok(())
}

impl Bench {
    async fn measure(&self, runs: usize, of_pause: bool) -> Result<Times> {
        let mut times = Times::new();
        let mut note = |way, time: Duration| times.entry(way).or_default().push(time.as_secs_f64() * 1e3);
        let capture = self.capture().await?;
        for _ in 0..runs {
            let started = Instant::now();
            let vm = self.boot(Copies::Full).await?;
            note("boot", started.elapsed());
            self.remove(vm).await?;

            let started = Instant::now();
            let image = self.directory.join("image-copy");
            copy(&capture.memory, &image, Copies::Full)?;
            let own = CaptureFiles { memory: image.clone(), state: capture.state.clone() };
            let (vm, _) = self.restore(&own, Copies::Full).await?;
            note("eager copy", started.elapsed());
            if of_pause {
                note("whole pause", self.pause_whole(&vm).await?);
            }
            self.remove(vm).await?;
            std::fs::remove_file(image)?;

            if !of_pause {
                let started = Instant::now();
                let (vm, warm) = self.restore(&capture, Copies::Reflink).await?;
                note("shared", started.elapsed());
                note("shared, warm", warm);
                self.remove(vm).await?;
            }
        }
        Ok(times)
    }

    async fn internal_snapshots(&self, runs: usize, accelerator: &str, times: &mut Times) -> Result<()> {
        let files = internal_snapshots::Files {
            kernel: &self.boot.kernel,
            initramfs: &self.boot.initramfs,
            base_disk: &self.base_disk,
            directory: &self.directory.join("own"),
        };
        let mut qemu =
            internal_snapshots::Qemu::boot(&files, SPEC.memory_mib, SPEC.vcpus, accelerator).await?;
        for _ in 0..runs {
            tokio::time::sleep(SETTLE).await;
            for (way, time) in [("savevm", qemu.save().await?), ("loadvm", qemu.load().await?)] {
                times.entry(way).or_default().push(time.as_secs_f64() * 1e3);
            }
        }
        qemu.end().await
    }

    /// How long it takes to stop a guest and to write all of it to files, which go with the VM's directory.
    async fn pause_whole(&self, vm: &Started) -> Result<Duration> {
        let started = Instant::now();
        vm.machine.stop().await?;
        let files = CaptureFiles { memory: vm.directory.join("memory"), state: vm.directory.join("state") };
        vm.machine.capture(&files).await?;
        copy(&vm.directory.join("disk"), &vm.directory.join("disk-copy"), Copies::Full)?;
        Ok(started.elapsed())
    }

    async fn capture(&self) -> Result<CaptureFiles> {
        let vm = self.boot(Copies::Reflink).await?;
        tokio::time::sleep(SETTLE).await;
        vm.machine.stop().await?;
        let files =
            CaptureFiles { memory: self.directory.join("memory"), state: self.directory.join("state") };
        vm.machine.capture(&files).await?;
        // The disk as it was at that moment is what children start from.
        vm.machine.kill().await?;
        std::fs::rename(vm.directory.join("disk"), &self.base_disk)?;
        self.remove(vm).await?;
        Ok(files)
    }

    async fn boot(&self, copies: Copies) -> Result<Started> {
        let (slot, directory, placement) = self.place(copies).await?;
        let machine = self.vmm.boot(&SPEC, placement).await?;
        answer(&slot).await?;
        Ok(Started { machine, slot, directory })
    }

    /// Also tells how long it took from the load on.
    async fn restore(&self, capture: &CaptureFiles, copies: Copies) -> Result<(Started, Duration)> {
        let (slot, directory, placement) = self.place(copies).await?;
        let machine = self.vmm.prepare(&SPEC, capture, placement).await?;
        let started = Instant::now();
        machine.load().await?;
        machine.resume().await?;
        answer(&slot).await?;
        Ok((Started { machine, slot, directory }, started.elapsed()))
    }

    async fn place(&self, copies: Copies) -> Result<(Slot, PathBuf, Placement)> {
        let slot = self.slots.acquire().await?;
        let directory = self.directory.join(&slot.name.0);
        let run_dir = directory.join("run");
        std::fs::create_dir_all(&run_dir)?;
        let disk = directory.join("disk");
        copy(&self.base_disk, &disk, copies)?;
        let placement = Placement {
            name: format!("n-{}", slot.name.0),
            run_dir,
            netns: slot.netns.clone(),
            tap: slot.tap.clone(),
            disk,
            boot: self.boot.clone(),
            user: slot.user,
        };
        Ok((slot, directory, placement))
    }

    async fn remove(&self, vm: Started) -> Result<()> {
        vm.machine.kill().await?;
        self.slots.release(&vm.slot.name).await?;
        std::fs::remove_dir_all(vm.directory)?;
        Ok(())
    }
}

fn copy(from: &Path, to: &Path, copies: Copies) -> Result<()> {
    let options: &[&str] = match copies {
        Copies::Reflink => &["--reflink=always"],
        Copies::Full => &["--reflink=never", "--sparse=always"],
    };
    let status = Command::new("cp").args(options).arg(from).arg(to).status()?;
    ensure!(status.success(), "cp {} {}: {status}", from.display(), to.display());
    Ok(())
}

/// Asks the guest daemon for its health until it answers.
async fn answer(slot: &Slot) -> Result<()> {
    let address = SocketAddr::new(slot.guest_address.into(), ENVD_PORT);
    let started = Instant::now();
    loop {
        let asked = tokio::time::timeout(Duration::from_secs(1), ask(slot, address)).await;
        if let Ok(Ok(())) = asked {
            return Ok(());
        }
        ensure!(started.elapsed() < PATIENCE, "the guest does not answer: {asked:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn ask(slot: &Slot, address: SocketAddr) -> Result<()> {
    let mut connection = slot.dialer.connect(address).await?;
    connection.write_all(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n").await?;
    let mut head = [0; 12];
    connection.read_exact(&mut head).await?;
    ensure!(head.starts_with(b"HTTP/1.") && head[9] == b'2', "{}", String::from_utf8_lossy(&head));
    Ok(())
}
