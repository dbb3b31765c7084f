//! What a real guest needs on the host: artifacts, a filesystem that shares blocks, a namespace with a tap, a disk.
//!
//! `AENV_TEST_DRIVER=firecracker` chooses the driver, which otherwise is QEMU.
//!
//! Owns everything it makes and removes it when dropped. The network is made with the `ip` command, which only tests may.

use aenv_sys::netns::{NetworkNamespace, remove_pinned};
use aenv_sys::{file, process};
use aenv_vmm::firecracker::FirecrackerDriver;
use aenv_vmm::qemu::QemuDriver;
use aenv_vmm::{BootSource, CaptureBase, CaptureFiles, MachineSpec, Placement, Vmm, firecracker, qemu};
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Port of the guest daemon.
const ENVD: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(169, 254, 0, 21)), 49983);
const NETWORK: &str = "ip link set lo up
ip link set tap0 address 02:fc:00:00:00:01 up
ip addr add 169.254.0.22/30 dev tap0
ip neigh replace 169.254.0.21 lladdr 02:fc:00:00:00:02 dev tap0 nud permanent";

pub(crate) fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub(crate) fn signal(pid: u32, name: &str) {
    run("kill", &["-s", name, &pid.to_string()]);
}

/// Whether the process is there, a zombie not counted.
pub(crate) fn process_exists(pid: u32) -> bool {
    process::args(pid).is_ok_and(|args| !args.is_empty())
}

/// Memory of a process, as text.
pub(crate) fn memory_kib(pid: u32) -> String {
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| {
        let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    format!("PSS {} KiB, private {} KiB", field("Pss:"), field("Private_Dirty:"))
}

/// Which driver is tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Qemu,
    Firecracker,
}

impl Kind {
    pub(crate) fn chosen() -> Self {
        match std::env::var("AENV_TEST_DRIVER").as_deref() {
            Err(_) | Ok("qemu") => Self::Qemu,
            Ok("firecracker") => Self::Firecracker,
            Ok(other) => panic!("AENV_TEST_DRIVER={other}: qemu or firecracker"),
        }
    }
}

async fn qemu(directory: PathBuf) -> Arc<dyn Vmm> {
    let mut settings = qemu::Settings::new(directory);
    if let Some(program) = std::env::var_os("AENV_TEST_QEMU") {
        settings.program = program.into();
    }
    Arc::new(QemuDriver::detect(settings).await.unwrap())
}

/// A prepared host.
pub(crate) struct Host {
    pub(crate) kind: Kind,
    pub(crate) driver: Arc<dyn Vmm>,
    pub(crate) spec: MachineSpec,
    prefix: String,
    boot: BootSource,
    data: PathBuf,
    mounted: bool,
    next_user: AtomicU32,
    _directory: tempfile::TempDir,
}

impl Host {
    /// `letter` keeps tests that run at the same time apart.
    pub(crate) async fn new(letter: &str) -> Self {
        Self::with_firecracker(letter, firecracker::Settings::default()).await
    }

    /// With these settings if the driver is Firecracker.
    pub(crate) async fn with_firecracker(letter: &str, settings: firecracker::Settings) -> Self {
        let kind = Kind::chosen();
        let guest = std::env::var_os("AENV_TEST_GUEST").map_or_else(
            || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.aenv/cache/guest"),
            PathBuf::from,
        );
        let kernel = match kind {
            Kind::Qemu => "kernel/vmlinuz",
            Kind::Firecracker => "kernel/vmlinux",
        };
        let boot = BootSource {
            kernel: guest.join(kernel),
            initramfs: guest.join("initramfs.cpio"),
            guest_arguments: Vec::new(),
        };
        for path in [&boot.kernel, &boot.initramfs] {
            assert!(
                path.exists(),
                "{} is missing: `make up` makes it, with the scripts in guest/",
                path.display()
            );
        }
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        std::fs::create_dir(&data).unwrap();
        let mounted = !file::supports_reflink(&data).unwrap();
        if mounted {
            let image = directory.path().join("xfs");
            File::create(&image).unwrap().set_len(4 << 30).unwrap();
            run("mkfs.xfs", &["-q", "-m", "reflink=1", image.to_str().unwrap()]);
            run("mount", &["-o", "loop", image.to_str().unwrap(), data.to_str().unwrap()]);
        }
        let driver: Arc<dyn Vmm> = match kind {
            Kind::Qemu => qemu(data.join("vmm")).await,
            Kind::Firecracker => Arc::new(FirecrackerDriver::detect(settings).await.unwrap()),
        };
        let prefix = format!("t{letter}{}-", std::process::id());
        // Firecracker is tested in a machine that is emulated itself.
        let memory_mib = if kind == Kind::Firecracker { 256 } else { 512 };
        let spec = MachineSpec { vcpus: 2, memory_mib };
        // Apart from those of other tests, which run at the same time in processes of their own.
        let next_user = AtomicU32::new(700_000_000 + std::process::id() * 16);
        Self { kind, driver, spec, prefix, boot, data, mounted, next_user, _directory: directory }
    }

    /// Name prefix of all its VMs.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.data.join(name)
    }

    pub(crate) fn capture_files(&self, name: &str) -> CaptureFiles {
        CaptureFiles {
            memory: self.path(&format!("{name}.memory")),
            state: self.path(&format!("{name}.state")),
        }
    }

    /// A slot with a small empty disk.
    pub(crate) fn slot(&self, name: &str) -> Slot {
        let slot = Slot::new(self, name);
        File::create(&slot.disk).unwrap().set_len(64 << 20).unwrap();
        run("mke2fs", &["-q", "-F", "-t", "ext4", slot.disk.to_str().unwrap()]);
        slot
    }

    /// A slot whose disk has a shell and `sync`, with what they need, and nothing else.
    pub(crate) fn slot_with_shell(&self, name: &str) -> Slot {
        let slot = Slot::new(self, name);
        let tree = self.path(&format!("tree-{name}"));
        let needed = Command::new("ldd").args(["/bin/sh", "/bin/sync"]).output().unwrap();
        let needed = String::from_utf8_lossy(&needed.stdout).into_owned();
        // Of several files each list is headed by the file's name and a colon.
        let is_library = |word: &&str| word.starts_with('/') && !word.ends_with(':');
        let libraries = needed.split_whitespace().filter(is_library);
        for file in libraries.chain(["/bin/sh", "/bin/sync"]) {
            let target = tree.join(&file[1..]);
            std::fs::create_dir_all(target.parent().unwrap()).unwrap();
            std::fs::copy(file, target).unwrap();
        }
        File::create(&slot.disk).unwrap().set_len(64 << 20).unwrap();
        let (tree, disk) = (tree.to_str().unwrap(), slot.disk.to_str().unwrap());
        run("mke2fs", &["-q", "-F", "-t", "ext4", "-d", tree, disk]);
        slot
    }

    /// Turns the slot's disk into a block device.
    pub(crate) fn onto_device(&self, mut slot: Slot) -> Slot {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&slot.disk).output().unwrap();
        assert!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        slot.disk = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        slot.is_device = true;
        slot
    }

    /// A slot with a copy of another one's disk.
    pub(crate) fn slot_with_disk(&self, name: &str, other: &Slot) -> Slot {
        let slot = Slot::new(self, name);
        file::reflink(&File::open(&other.disk).unwrap(), &File::create(&slot.disk).unwrap(), &slot.disk)
            .unwrap();
        slot
    }

    /// Hash of the data of a file.
    pub(crate) fn digest(&self, path: &Path) -> u64 {
        let file = File::open(path).unwrap();
        let mut hasher = DefaultHasher::new();
        for extent in file::data_extents(&file).unwrap() {
            let mut bytes = vec![0; usize::try_from(extent.end - extent.start).unwrap()];
            file.read_exact_at(&mut bytes, extent.start).unwrap();
            hasher.write_u64(extent.start);
            hasher.write(&bytes);
        }
        hasher.finish()
    }

    /// Numbers of the pages in which two files of the guest's memory differ.
    pub(crate) fn different_pages(&self, one: &Path, other: &Path) -> Vec<u64> {
        let files = [one, other].map(|path| File::open(path).unwrap());
        let mut pages = [[0; 4096]; 2];
        let mut differs = |number: &u64| {
            for (file, page) in files.iter().zip(&mut pages) {
                file.read_exact_at(page, number * 4096).unwrap();
            }
            pages[0] != pages[1]
        };
        (0..self.spec.memory_mib << 8).filter(|number| differs(number)).collect()
    }

    /// Lays captures over one another, as their bases say.
    pub(crate) fn compose(&self, chain: &[(CaptureBase, CaptureFiles)], target: &Path) {
        let target = File::create(target).unwrap();
        target.set_len(self.spec.memory_mib << 20).unwrap();
        // What is whole, or builds on the start, replaces everything since.
        let first = chain.iter().rposition(|(base, _)| *base != CaptureBase::PreviousCapture).unwrap_or(0);
        let on_start = chain[first].0 == CaptureBase::Start;
        let image = chain[..first].iter().filter(|(base, _)| on_start && *base == CaptureBase::Nothing);
        for (_, files) in image.chain(&chain[first..]) {
            let layer = File::open(&files.memory).unwrap();
            for extent in file::data_extents(&layer).unwrap() {
                let mut bytes = vec![0; usize::try_from(extent.end - extent.start).unwrap()];
                layer.read_exact_at(&mut bytes, extent.start).unwrap();
                target.write_all_at(&bytes, extent.start).unwrap();
            }
        }
    }

    /// Waits until a VM that nobody watches says that its guest is down.
    pub(crate) async fn until_guest_is_down(&self, control_socket: &Path, patience: Duration) {
        let started = Instant::now();
        loop {
            let mut socket = std::os::unix::net::UnixStream::connect(control_socket).unwrap();
            socket
                .write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"query-status\"}\n")
                .unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut answer = Vec::new();
            // Ends by the time limit: the VMM does not hang up.
            _ = socket.read_to_end(&mut answer);
            if String::from_utf8_lossy(&answer).contains("\"shutdown\"") {
                return;
            }
            assert!(started.elapsed() < patience, "the guest does not go down");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    fn processes(&self) -> Vec<process::Found> {
        // A jailed Firecracker has the name among its arguments, all else as its own.
        let process_prefix = format!("aenv-{}", self.prefix);
        process::find(|args| {
            let named = args.windows(2).any(|pair| pair[0] == "--id" && pair[1].starts_with(&self.prefix));
            named || args[0].starts_with(&process_prefix)
        })
        .unwrap()
    }

    /// Waits until there is none for a while: one that is just being started has no name yet.
    pub(crate) async fn until_no_process_is_left(&self, patience: Duration) {
        let started = Instant::now();
        let mut seen = Instant::now();
        while seen.elapsed() < Duration::from_secs(1) {
            let processes = self.processes();
            if !processes.is_empty() {
                seen = Instant::now();
                assert!(started.elapsed() < patience, "left behind: {processes:?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn leaves_nothing(&self) {
        assert!(self.processes().is_empty(), "left behind: {:?}", self.processes());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for process in self.processes() {
            signal(process.pid, "KILL");
        }
        if self.mounted {
            // Lazily: a VMM of a failed test may not have ended yet.
            run("umount", &["-l", self.data.to_str().unwrap()]);
        }
    }
}

/// Namespace, tap, run directory and disk of one VM.
pub(crate) struct Slot {
    name: String,
    directory: PathBuf,
    netns: PathBuf,
    namespace: NetworkNamespace,
    disk: PathBuf,
    is_device: bool,
    boot: BootSource,
    user: u32,
}

impl Slot {
    fn new(host: &Host, name: &str) -> Self {
        let name = format!("{}{name}", host.prefix);
        let directory = host.path(&format!("run-{name}"));
        std::fs::create_dir(&directory).unwrap();
        let netns = host.path(&format!("netns-{name}"));
        let namespace = NetworkNamespace::create_pinned(&netns).unwrap();
        let user = host.next_user.fetch_add(1, Ordering::Relaxed);
        let network = || {
            aenv_sys::tap::create_persistent("tap0", Some(user)).unwrap();
            run("sh", &["-ec", NETWORK]);
        };
        namespace.run(network).unwrap();
        let disk = host.path(&format!("disk-{name}"));
        Self { name, directory, netns, namespace, disk, is_device: false, boot: host.boot.clone(), user }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// A file of the disk of a VM that was killed, after the host's kernel replayed the journal; the filesystem is checked.
    pub(crate) fn file_on_disk(&self, name: &str) -> String {
        let (disk, mount_point) = (self.disk.to_str().unwrap(), self.directory.with_extension("mnt"));
        let target = mount_point.to_str().unwrap();
        std::fs::create_dir(&mount_point).unwrap();
        run("mount", &["-t", "ext4", disk, target]);
        let read = std::fs::read_to_string(mount_point.join(name));
        run("umount", &[target]);
        run("e2fsck", &["-f", "-n", disk]);
        read.unwrap_or_else(|error| panic!("{name} is not on the disk: {error}"))
    }

    /// The namespace the VMM is in.
    pub(crate) fn namespace(&self) -> &NetworkNamespace {
        &self.namespace
    }

    /// Its disk, and the user its VMM runs under.
    pub(crate) fn disk_and_user(&self) -> (&Path, u32) {
        (&self.disk, self.user)
    }

    pub(crate) fn placement(&self) -> Placement {
        Placement {
            name: self.name.clone(),
            run_dir: self.directory.clone(),
            netns: self.netns.clone(),
            tap: "tap0".to_owned(),
            disk: self.disk.clone(),
            boot: self.boot.clone(),
            user: self.user,
        }
    }

    /// With a disk of this size, on which the guest is to grow its root filesystem.
    pub(crate) fn placement_with_growth(&self, disk_bytes: u64, root_bytes: u64) -> Placement {
        OpenOptions::new().write(true).open(&self.disk).unwrap().set_len(disk_bytes).unwrap();
        let mut placement = self.placement();
        placement.boot.guest_arguments = vec![format!("aenv.root_bytes={root_bytes}")];
        placement
    }

    /// Size of the filesystem on the disk, as its superblock says.
    pub(crate) fn filesystem_bytes(&self) -> u64 {
        let output = Command::new("dumpe2fs").arg("-h").arg(&self.disk).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let number = |name: &str| -> u64 {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].trim().parse().unwrap()
        };
        number("Block count:") * number("Block size:")
    }

    pub(crate) fn placement_without_initramfs(&self) -> Placement {
        let mut placement = self.placement();
        placement.boot.initramfs = self.disk.with_extension("initramfs");
        // What is no archive is reported by the kernel and left out.
        OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(true)
            .open(&placement.boot.initramfs)
            .and_then(|mut file| file.write_all(b"nothing"))
            .unwrap();
        placement
    }

    /// Names of the files in the run directory.
    pub(crate) fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Asks the guest daemon for its health until it answers; returns the milliseconds that took.
    pub(crate) fn answer(&self, patience: Duration) -> f64 {
        let started = Instant::now();
        self.namespace
            .run(|| {
                while let Err(error) = ask_health() {
                    assert!(started.elapsed() < patience, "{}: no answer: {error}", self.name);
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
            .unwrap();
        started.elapsed().as_secs_f64() * 1e3
    }

    /// Sends the guest datagrams, each with other content, until the sender is dropped.
    pub(crate) fn send_datagrams(&self) -> Sender {
        let bind = || UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let socket = self.namespace.run(bind).unwrap();
        let goes_on = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&goes_on);
        let send = move || {
            for number in 0_u64.. {
                if !asked.load(Ordering::Relaxed) {
                    break;
                }
                // Refused, when what the guest answered is met; lost, when its card's queue is full.
                _ = socket.send_to(&number.to_le_bytes().repeat(170), (ENVD.ip(), 9));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        Sender { goes_on, thread: Some(std::thread::spawn(send)) }
    }

    /// Starts a shell in the guest and returns what is said of it until it ends, or until nothing is said for so long.
    pub(crate) fn shell(&self, script: &str, patience: Duration) -> String {
        let said = self.namespace.run(|| run_shell(script, patience)).unwrap();
        said.unwrap_or_else(|error| format!("(connection lost: {error})"))
    }
}

/// A thread that sends.
pub(crate) struct Sender {
    goes_on: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.goes_on.store(false, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A process of the guest daemon's RPC, in its JSON form.
fn run_shell(script: &str, patience: Duration) -> std::io::Result<String> {
    let script = script.replace('\\', "\\\\").replace('"', "\\\"");
    let message = format!("{{\"process\":{{\"cmd\":\"/bin/sh\",\"args\":[\"-c\",\"{script}\"]}}}}");
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    body.extend(message.as_bytes());
    let mut connection = TcpStream::connect_timeout(&ENVD, Duration::from_secs(2))?;
    connection.set_read_timeout(Some(patience))?;
    write!(
        connection,
        "POST /process.Process/Start HTTP/1.1\r\nHost: guest\r\nConnection: close\r\nAuthorization: Basic cm9vdDo=\r\n\
         Connect-Protocol-Version: 1\r\nContent-Type: application/connect+json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )?;
    connection.write_all(&body)?;
    let mut answer = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match connection.read(&mut chunk) {
            Ok(0) => break,
            Ok(length) => answer.extend(&chunk[..length]),
            Err(_) if !answer.is_empty() => break,
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

fn ask_health() -> std::io::Result<()> {
    let mut connection = TcpStream::connect_timeout(&ENVD, Duration::from_secs(2))?;
    connection.set_read_timeout(Some(Duration::from_secs(2)))?;
    connection.write_all(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")?;
    let mut head = [0; 12];
    connection.read_exact(&mut head)?;
    if head.starts_with(b"HTTP/1.") && head[9] == b'2' {
        return Ok(());
    }
    Err(std::io::Error::other(String::from_utf8_lossy(&head).into_owned()))
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.is_device {
            run("losetup", &["--detach", self.disk.to_str().unwrap()]);
        }
        remove_pinned(&self.netns).unwrap();
    }
}

/// Tries to take a tap of the calling thread's namespace as another user. The thread keeps that user: it must end.
pub(crate) fn attach_as(user: u32, tap: &str) -> std::io::Result<File> {
    // Opened before, so that the mode of the device is not what refuses.
    let device = OpenOptions::new().read(true).write(true).open(aenv_sys::tap::CONTROL_DEVICE)?;
    let user = rustix::process::Uid::from_raw(user);
    rustix::thread::set_thread_res_uid(user, user, user)?;
    aenv_sys::tap::attach_opened(device, tap)
}
