//! Memory is short: the service, who writes to its disks and who maps its images share a control group whose limit is a fraction of
//! what they touch. All of them go on, nobody is killed for memory, and what is read is what was written.
//!
//! Needs root and control groups with a memory controller, of either version; elsewhere each test prints a line and does nothing,
//! unless AENV_MUST_TEST says that it must.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, in its helping functions too")]

mod daemon;

use aenv_export::ublk::UblkExporter;
use aenv_storage::BLOCK_BYTES;
use aenv_storage::block_service::CreateImage;
use daemon::{DISK_BYTES, Limits, PATIENCE, Stored, content, name};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// What the whole group may have: less than one image, one disk, or what one writer leaves to be written. The service alone has half
/// of it: its cache, and 1 MiB for each thread that copies.
const LIMIT_BYTES: u64 = 48 << 20;
const CACHE_BYTES: u64 = 8 << 20;
/// Until a program that never waits for itself has surely ended, in a machine that is emulated and has other things to do, too.
const HANG: Duration = Duration::from_secs(600);
const ROLE: &str = "AENV_TEST_MEMORY_ROLE";
/// Blocks that a writer writes, by way of the kernel's cache where the disk has one, in rounds.
const BLOCKS: u64 = DISK_BYTES / BLOCK_BYTES;
const ROUNDS: u64 = 2;

/// Reads every other page of a mapped image, in an order that no reading ahead helps, and checks the first word of each.
const MAPPER: &str = r#"
import mmap, os, random, struct, sys
path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = os.open(path, os.O_RDONLY)
size = os.fstat(file).st_size
memory = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
order, written = list(range(0, size // 4096, 2)), size // 8192
random.seed(seed)
for _ in range(rounds):
    random.shuffle(order)
    for page in order:
        found = struct.unpack_from("<Q", memory, page * 4096)[0]
        wanted = ((page << 32) * 0x9e3779b97f4a7c15) % (1 << 64) if page < written else 0
        assert found == wanted, (page, found, wanted)
"#;

/// A control group with that limit, removed when dropped.
struct Group {
    directory: PathBuf,
    is_unified: bool,
}

impl Group {
    /// Nothing where groups of memory cannot be made.
    fn make(name: &str) -> Option<Self> {
        let root = Path::new("/sys/fs/cgroup");
        let is_unified = root.join("cgroup.controllers").exists();
        let parent = if is_unified { root.to_owned() } else { root.join("memory") };
        let directory = parent.join(format!("aenv-test-{name}-{}", std::process::id()));
        std::fs::create_dir(&directory).ok()?;
        let group = Self { directory, is_unified };
        let (limit, with_swap) = match is_unified {
            true => ("memory.max", ("memory.swap.max", 0)),
            false => ("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", LIMIT_BYTES)),
        };
        std::fs::write(group.directory.join(limit), LIMIT_BYTES.to_string()).ok()?;
        let swap = group.directory.join(with_swap.0);
        if swap.exists() {
            std::fs::write(swap, with_swap.1.to_string()).unwrap();
        }
        Some(group)
    }

    fn processes(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.directory.join(file)).unwrap()
    }

    /// Whether the limit was met, so that memory had to be taken from somebody.
    fn was_short(&self) -> bool {
        if self.is_unified {
            return self.value("memory.events", "max") > 0;
        }
        // Memory is counted in portions; that portions were refused is not counted by every kernel.
        let most: u64 = self.read("memory.max_usage_in_bytes").trim().parse().unwrap();
        most + (1 << 20) > LIMIT_BYTES
    }

    /// How many were killed for memory.
    fn kills(&self) -> u64 {
        self.value(if self.is_unified { "memory.events" } else { "memory.oom_control" }, "oom_kill")
    }

    fn value(&self, file: &str, key: &str) -> u64 {
        let text = self.read(file);
        let mut pairs = text.lines().filter_map(|line| line.split_once(' '));
        pairs.find(|(name, _)| *name == key).unwrap().1.trim().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        // Processes that were told to end are in it for a moment.
        while let Err(error) = std::fs::remove_dir(&self.directory) {
            assert!(Instant::now() < deadline || std::thread::panicking(), "{error}");
            if std::thread::panicking() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A child in the group, which ends by itself.
struct Actor {
    what: String,
    process: Child,
}

impl Actor {
    fn start(group: &Group, what: String, program: &Path, arguments: &[&str], role: &str) -> Self {
        let mut command = daemon::within(&group.processes(), program, arguments);
        let process = command.env(ROLE, role).stdin(Stdio::null()).spawn().unwrap();
        Self { what, process }
    }

    fn writer(group: &Group, disk: &Path, seed: u64) -> Self {
        let arguments = ["--exact", "role", "--ignored", "--nocapture", "--test-threads=1"];
        let program = std::env::current_exe().unwrap();
        let role = format!("{seed} {}", disk.display());
        Self::start(group, format!("writer {seed}"), &program, &arguments, &role)
    }

    fn mapper(group: &Group, image: &Path, seed: u64) -> Self {
        let (seed_text, image) = (seed.to_string(), image.to_str().unwrap());
        let arguments = ["-c", MAPPER, image, &seed_text, "1"];
        Self::start(group, format!("mapper {seed}"), Path::new("python3"), &arguments, "")
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// Waits for its end, which is a good one.
    fn end(mut self, deadline: Instant, stored: &Stored) {
        while Instant::now() < deadline && stored.is_running() {
            if let Some(status) = self.process.try_wait().unwrap() {
                assert!(status.success(), "{}: {status}\n{}", self.what, stored.log());
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.process.kill().unwrap();
        let service = if stored.is_running() { "runs" } else { "was killed" };
        panic!("{} waits for ever, and the service {service}\n{}", self.what, stored.log());
    }
}

/// Not a test: what a writer does.
#[test]
#[ignore = "the part of a child, run by the other tests"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (seed, path) = role.split_once(' ').unwrap();
    let mut random = StdRng::seed_from_u64(seed.parse().unwrap());
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut block = [0; BLOCK_BYTES as usize];
    let mut generations = vec![0; BLOCKS as usize];
    let read = |file: &File, at: u64, wanted: u64, block: &mut [u8]| {
        file.read_exact_at(block, at * BLOCK_BYTES).unwrap();
        assert_eq!(block, content(at, wanted), "block {at}");
    };
    for generation in 1..=ROUNDS {
        for _ in 0..BLOCKS / 8 {
            let (written, checked) = (random.random_range(0..BLOCKS), random.random_range(0..BLOCKS));
            file.write_all_at(&content(written, generation), written * BLOCK_BYTES).unwrap();
            generations[written as usize] = generation;
            let wanted = generations[checked as usize];
            if wanted > 0 || checked < BLOCKS / 2 {
                read(&file, checked, wanted, &mut block);
            }
        }
        file.sync_all().unwrap();
    }
    for (at, wanted) in (0..).zip(&generations) {
        if *wanted > 0 {
            read(&file, at, *wanted, &mut block);
        }
    }
}

/// Everything at once, with the service killed and started again in the middle.
async fn all_go_on(instance: &'static str, export: &'static str) {
    let Some(group) = Group::make(instance) else {
        // Written past the capture of the test runner, which hides what a passing test prints.
        std::io::stderr()
            .write_all(b"SKIPPED, short memory is NOT tested: no control groups of memory\n")
            .unwrap();
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        return;
    };
    let limits = Limits { group: group.processes(), cache_bytes: CACHE_BYTES };
    let stored = Stored::start_limited(instance, export, limits).await;
    let base = stored.committed_layer("layer.lsmt");
    let image = CreateImage { name: name("memory"), layers: vec![base.clone()], owner: 0, exported: true };
    let image = stored.client.create_image(&image).await.unwrap().path.unwrap();
    let mut disks = Vec::new();
    for disk in ["one", "two"] {
        disks.push(stored.disk(disk, std::slice::from_ref(&base)).await.path.unwrap());
    }
    let mut actors: Vec<_> =
        (1..).zip(&disks).map(|(seed, disk)| Actor::writer(&group, disk, seed)).collect();
    actors.extend((3..5).map(|seed| Actor::mapper(&group, &image, seed)));
    let deadline = Instant::now() + HANG;
    while !group.was_short() {
        let is_over = actors.iter_mut().all(Actor::has_ended) || Instant::now() > deadline;
        assert!(!is_over, "memory does not get short: {}", stored.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    stored.kill();
    stored.restart();
    stored.client.seal_disk(&name("one"), None).await.unwrap();
    for actor in actors {
        actor.end(deadline, &stored);
    }
    assert_eq!(group.kills(), 0, "somebody was killed for memory: {}", stored.log());
    assert!(stored.is_running(), "{}", stored.log());
    drop(stored);
    drop(group);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_files_of_a_mount_everybody_goes_on_while_memory_is_short() {
    all_go_on("short-fuse", "fuse").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_block_devices_everybody_goes_on_while_memory_is_short() {
    if let Err(error) = UblkExporter::probe() {
        let line = format!("SKIPPED, ublk is NOT tested: {error}\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        assert!(std::env::var_os("AENV_MUST_TEST").is_none(), "here it must be tested");
        return;
    }
    all_go_on("short-ublk", "ublk").await;
}
