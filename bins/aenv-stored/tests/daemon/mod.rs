//! A block service of its own for each test: real program, real FUSE mount, all in one temporary directory.
//!
//! Owns the processes and the directory; dropped, it purges and checks that nothing is left.
#![allow(dead_code, reason = "each test program uses its part")]

use aenv_storage::block_service::{Client, CreateDisk, DiskView, LayerRef, Name};
use aenv_storage::commit::{LayerOptions, Source, write_layer_file};
use aenv_storage::{BLOCK_BYTES, RawImage};
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longer than anything takes here, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Size of the disks, in bytes.
pub(crate) const DISK_BYTES: u64 = 64 << 20;

pub(crate) struct Stored {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) client: Client,
    process: Mutex<Option<Child>>,
    instance: &'static str,
    export: &'static str,
    limits: Option<Limits>,
}

/// What a service must do with.
pub(crate) struct Limits {
    /// List of the processes of the control group that it starts in.
    pub(crate) group: PathBuf,
    /// Bytes of its cache.
    pub(crate) cache_bytes: u64,
}

/// A program that starts in a control group, given by the list of its processes, and is never outside of it.
pub(crate) fn within(group: &Path, program: &Path, arguments: &[impl AsRef<OsStr>]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(group).arg(program).args(arguments);
    command
}

impl Stored {
    pub(crate) async fn start() -> Self {
        Self::start_as("test", "fuse").await
    }

    /// The same, of another instance whose disks are exported so.
    pub(crate) async fn start_as(instance: &'static str, export: &'static str) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), instance, export, None).await
    }

    /// The same, limited. Its files are in the area for tests, if there is one: those of a file system in memory could not give way.
    pub(crate) async fn start_limited(instance: &'static str, export: &'static str, limits: Limits) -> Self {
        let area = std::env::var_os("AENV_TEST_AREA").map_or_else(std::env::temp_dir, PathBuf::from);
        Self::start_in(tempfile::tempdir_in(area).unwrap(), instance, export, Some(limits)).await
    }

    /// The same, with its data in another directory.
    pub(crate) async fn start_on(data: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(data, directory.path().join("data")).unwrap();
        Self::start_in(directory, "test", "fuse", None).await
    }

    async fn start_in(
        directory: tempfile::TempDir,
        instance: &'static str,
        export: &'static str,
        limits: Option<Limits>,
    ) -> Self {
        let client = Client::new(&directory.path().join("run/stored.sock"), PATIENCE);
        let stored = Self { directory, client, process: Mutex::new(None), instance, export, limits };
        std::fs::create_dir_all(stored.layers()).unwrap();
        stored.restart();
        stored.client.status().await.unwrap_or_else(|error| panic!("{error}\n{}", stored.log()));
        stored
    }

    /// Starts the service, and does not wait for it.
    pub(crate) fn restart(&self) {
        let mut running = self.process.lock().unwrap();
        assert!(running.is_none());
        let log = File::options().create(true).append(true).open(self.directory.path().join("log")).unwrap();
        let mut process = self.command("serve");
        process.args(["--export", self.export, "--compaction-seconds", "1"]);
        if let Some(limits) = &self.limits {
            process.args(["--cache-bytes", &limits.cache_bytes.to_string()]);
            let arguments: Vec<_> = process.get_args().collect();
            process = within(&limits.group, Path::new(process.get_program()), &arguments);
        }
        *running = Some(process.stderr(log).spawn().unwrap());
    }

    pub(crate) fn command(&self, task: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-stored"));
        command.arg(task).args(["--instance", self.instance]);
        command.arg("--data-dir").arg(self.data()).arg("--run-dir").arg(self.run());
        command
    }

    pub(crate) fn kill(&self) {
        let mut process = self.process.lock().unwrap().take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// How it ended, which it does by itself.
    pub(crate) fn ended(&self) -> ExitStatus {
        self.process.lock().unwrap().take().unwrap().wait().unwrap()
    }

    /// Ends it by SIGTERM; fails when it does not end well.
    pub(crate) fn terminate(&self) {
        let mut process = self.process.lock().unwrap().take().unwrap();
        let pid = rustix::process::Pid::from_child(&process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match process.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(Instant::now() < deadline, "it does not end: {}", self.log()),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(status.success());
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.lock().unwrap().as_ref().unwrap().id()
    }

    /// Whether the process that was started last runs.
    pub(crate) fn is_running(&self) -> bool {
        self.process.lock().unwrap().as_mut().is_some_and(|process| process.try_wait().unwrap().is_none())
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.directory.path().join("data")
    }

    pub(crate) fn run(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    pub(crate) fn layers(&self) -> PathBuf {
        self.data().join("storage/layers")
    }

    pub(crate) fn disks(&self) -> PathBuf {
        self.data().join("storage/disks")
    }

    pub(crate) fn log(&self) -> String {
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        read(self.directory.path().join("log")) + &read(self.run().join("holder.log"))
    }

    /// A raw layer whose block `n` is filled by `content(n)`.
    pub(crate) fn raw_layer(&self, file_name: &str) -> LayerRef {
        let raw = self.layers().join(file_name);
        let file = File::create(&raw).unwrap();
        file.set_len(DISK_BYTES).unwrap();
        // Half of it is a hole.
        for block in 0..DISK_BYTES / BLOCK_BYTES / 2 {
            file.write_all_at(&content(block, 0), block * BLOCK_BYTES).unwrap();
        }
        LayerRef::Raw { raw }
    }

    /// The same, as an LSMT layer.
    pub(crate) fn committed_layer(&self, file_name: &str) -> LayerRef {
        let LayerRef::Raw { raw } = self.raw_layer("raw-of-committed") else { unreachable!() };
        let image = RawImage::open(&raw).unwrap();
        let file = self.layers().join(file_name);
        write_layer_file(Source::Image(&image), &LayerOptions::default(), &file).unwrap();
        std::fs::remove_file(raw).unwrap();
        LayerRef::File { file }
    }

    pub(crate) async fn disk(&self, disk: &str, layers: &[LayerRef]) -> DiskView {
        self.client.create_disk(&request(disk, layers)).await.unwrap_or_else(|error| {
            panic!("{error}\n{}", self.log());
        })
    }
}

impl Drop for Stored {
    #[expect(clippy::print_stdout, reason = "shown with the failure of the test")]
    fn drop(&mut self) {
        let running = self.process.lock().unwrap().is_some();
        if running {
            self.kill();
        }
        let purged = self.command("purge").arg("--all").output().unwrap();
        let leftovers = self.leftovers();
        if std::thread::panicking() {
            println!("{}\n{leftovers:?}", self.log());
        } else {
            assert!(purged.status.success(), "{}", String::from_utf8_lossy(&purged.stderr));
            assert_eq!(leftovers, Vec::<String>::new());
        }
    }
}

impl Stored {
    /// Mounts, processes and files that a purge should not leave.
    fn leftovers(&self) -> Vec<String> {
        let directory = self.directory.path().to_str().unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut left: Vec<String> =
            mounts.lines().filter(|line| line.contains(directory)).map(str::to_owned).collect();
        // Whoever was just told to end may need a moment.
        let deadline = Instant::now() + PATIENCE;
        let processes =
            || aenv_sys::process::find(|args| args.iter().any(|arg| arg.contains(directory))).unwrap();
        while !processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        left.extend(processes().into_iter().map(|found| format!("{found:?}")));
        for path in [self.run(), self.disks(), self.data().join("storage/images")] {
            left.extend(path.exists().then(|| path.display().to_string()));
        }
        left
    }
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

pub(crate) fn request(disk: &str, layers: &[LayerRef]) -> CreateDisk {
    CreateDisk { name: name(disk), layers: layers.to_vec(), size: DISK_BYTES, quota: None, owner: 0 }
}

/// What block `block` has in generation `generation`: different everywhere.
pub(crate) fn content(block: u64, generation: u64) -> [u8; BLOCK_BYTES as usize] {
    let mut bytes = [0; BLOCK_BYTES as usize];
    for (position, word) in bytes.chunks_exact_mut(8).enumerate() {
        let mixed = (block << 32 ^ generation << 16 ^ position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&mixed.to_le_bytes());
    }
    bytes
}

/// A file of a disk, read and written around the page cache.
pub(crate) struct Direct {
    file: File,
    memory: Vec<u8>,
}

impl Direct {
    pub(crate) fn open(path: &Path) -> Self {
        let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        let file = File::options().read(true).write(true).custom_flags(flags).open(path).unwrap();
        Self { file, memory: vec![0; 2 * BLOCK_BYTES as usize] }
    }

    fn buffer(memory: &mut [u8]) -> &mut [u8] {
        let start = memory.as_ptr().align_offset(BLOCK_BYTES as usize);
        &mut memory[start..start + BLOCK_BYTES as usize]
    }

    pub(crate) fn write(&mut self, block: u64, bytes: &[u8]) -> std::io::Result<()> {
        let buffer = Self::buffer(&mut self.memory);
        buffer.copy_from_slice(bytes);
        self.file.write_all_at(buffer, block * BLOCK_BYTES)
    }

    pub(crate) fn read(&mut self, block: u64) -> std::io::Result<&[u8]> {
        let buffer = Self::buffer(&mut self.memory);
        self.file.read_exact_at(buffer, block * BLOCK_BYTES)?;
        Ok(buffer)
    }

    pub(crate) fn flush(&self) -> std::io::Result<()> {
        self.file.sync_all()
    }
}

/// Bytes that the file system stores below a directory.
pub(crate) fn stored_bytes(path: &Path) -> u64 {
    let metadata = std::fs::symlink_metadata(path).unwrap();
    let below: u64 = match metadata.is_dir() {
        true => std::fs::read_dir(path).unwrap().map(|entry| stored_bytes(&entry.unwrap().path())).sum(),
        false => 0,
    };
    metadata.blocks() * 512 + below
}
