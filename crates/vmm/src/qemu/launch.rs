//! Starts a QEMU process and connects to it, or connects to one that runs; on failure nothing is left behind.
//!
//! Owns a process only until the machine takes it over: a dropped future ends what it started. The monitor's socket is
//! made and listening before the process starts and is inherited by it, so connecting needs no retry.

use super::command_line::{CommandLine, READ_ONLY_BACKEND, Start};
use super::ending::Evidence;
use super::jail::{self, Jail};
use super::monitor::{Event, Monitor, MonitorError};
use super::program_tree::ProgramTree;
use super::{QemuDriver, Settings};
use crate::confinement::Confined;
use crate::console::{self, Console};
use crate::driver::{CaptureFiles, Exit, MachineSpec, Placement, ProcessRecord, VmmError};
use crate::ending::last_lines;
use crate::host_disk::{DiskKind, HostDisk};
use crate::process::{OwnedProcess, blocking};
use aenv_sys::file::{ReflinkError, data_extents, reflink};
use aenv_sys::process::{Access, Detached, PidFd};
use serde_json::json;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::fchown;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast;

const MONITOR_SOCKET: &str = "monitor.sock";
/// How long the output of a process that failed to start is awaited.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);
/// What a guest's memory is a private mapping of, where that is no shared image: an empty sparse file for a boot, a copy
/// of the image that shares its blocks for a QEMU that opens such files for writing only.
const OWN_MEMORY: &str = "memory";
/// Room for whatever else than disk and memory QEMU writes.
const LEAST_FILE_LIMIT: u64 = 16 << 20;

/// The files a launch makes in the run directory that are of no use when the VM has ended. The log stays.
pub(super) fn scratch_files(placement: &Placement) -> [PathBuf; 4] {
    [
        console::scratch_file(&placement.run_dir),
        placement.run_dir.join(MONITOR_SOCKET),
        placement.run_dir.join(OWN_MEMORY),
        jail::state_file(placement),
    ]
}

/// A process we are connected to. Ends the process when dropped, unless it is to be kept.
#[derive(Debug)]
pub(super) struct Launched {
    process: OwnedProcess,
    monitor: Monitor,
    record: ProcessRecord,
    confined: Arc<Confined>,
    console: Console,
}

/// Everything of a launched VM but the process.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) monitor: Monitor,
    pub(super) record: ProcessRecord,
    pub(super) confined: Arc<Confined>,
    pub(super) console: Console,
}

impl Launched {
    /// Hands the parts over to who looks after the VM from now on. Dropping them leaves the process alone.
    pub(super) fn into_parts(self) -> (Arc<PidFd>, Parts) {
        self.confined.keep();
        let Self { process, monitor, record, confined, console } = self;
        (process.release(), Parts { monitor, record, confined, console })
    }
}

/// Starts a process that boots its guest.
pub(super) async fn boot(
    driver: &QemuDriver,
    spec: &MachineSpec,
    placement: &Placement,
) -> Result<Launched, VmmError> {
    start(driver, spec, placement, None, None).await
}

/// Device state that a process inherited and is to load.
#[derive(Debug)]
pub(super) struct Pending {
    /// Number of the descriptor in the process.
    fd: i32,
}

/// Starts a process that is ready to load a capture; its vCPUs are stopped.
pub(super) async fn prepare(
    driver: &QemuDriver,
    spec: &MachineSpec,
    capture: &CaptureFiles,
    placement: &Placement,
) -> Result<(Launched, Pending), VmmError> {
    let (files, bytes) = (capture.clone(), spec.memory_mib << 20);
    let context =
        || format!("cannot read capture {} and {}", capture.state.display(), capture.memory.display());
    let state = blocking(move || open_capture(&files, bytes), context).await?;
    let pending = Pending { fd: state.as_raw_fd() };
    let launched = start(driver, spec, placement, Some(&capture.memory), Some(state)).await?;
    Ok((launched, pending))
}

/// Checks the memory image and puts the device state into a pipe, from which every version of QEMU can load it.
fn open_capture(capture: &CaptureFiles, memory_bytes: u64) -> io::Result<OwnedFd> {
    let length = std::fs::metadata(&capture.memory)?.len();
    if length != memory_bytes {
        let what = format!("the memory image has {length} bytes, the machine {memory_bytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let state = std::fs::read(&capture.state)?;
    let flags = rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK;
    let (reader, writer) = rustix::pipe::pipe_with(flags)?;
    // The pipe holds all of it (some KiB per device), so nobody has to feed it while QEMU reads.
    rustix::pipe::fcntl_setpipe_size(&writer, state.len().max(1))?;
    io::Write::write_all(&mut File::from(writer), &state)?;
    Ok(reader)
}

/// Has a prepared process load what it inherited.
pub(super) async fn load_state(
    pending: Pending,
    placement: &Placement,
    monitor: &Monitor,
    process: &PidFd,
) -> Result<(), VmmError> {
    let Pending { fd } = pending;
    let name = &placement.name;
    let failed = |error: MonitorError| command_error(name, "restore", error);
    let mut events = monitor.subscribe();
    let capability = json!({"capabilities": [{"capability": "events", "state": true}]});
    monitor.execute("migrate-set-capabilities", capability).await.map_err(failed)?;
    monitor.execute("migrate-incoming", json!({"uri": format!("fd:{fd}")})).await.map_err(failed)?;
    let limit = monitor.command_limit();
    let loaded = async {
        tokio::select! {
            outcome = migration_outcome(&mut events) => outcome,
            _ = process.exited() => Err("the VMM ended".to_owned()),
        }
    };
    let outcome = tokio::time::timeout(limit, loaded).await;
    let outcome = outcome.map_err(|_| failed(MonitorError::Timeout(limit)))?;
    let refused =
        |reason: String| VmmError::Command { name: name.clone(), command: "restore".to_owned(), reason };
    let log = || {
        let path = console::log_path(&placement.run_dir);
        std::fs::read_to_string(path).map_or_else(|_| String::new(), |log| last_lines(&log))
    };
    outcome.map_err(|reason| refused(format!("{reason}: {}", log())))?;
    let status = monitor.execute("query-status", json!({})).await.map_err(failed)?;
    match status["status"].as_str() {
        Some("paused") => Ok(()),
        other => Err(refused(format!("the VM is {} after the load: {}", other.unwrap_or("unknown"), log()))),
    }
}

/// Waits until QEMU says that the incoming migration is complete.
async fn migration_outcome(events: &mut broadcast::Receiver<Event>) -> Result<(), String> {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(broadcast::error::RecvError::Lagged(_)) => continue,
            Err(broadcast::error::RecvError::Closed) => return Err("the monitor is gone".to_owned()),
        };
        if event.name == "MIGRATION" {
            match event.data["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed") => return Err("the device state does not fit".to_owned()),
                _ => {}
            }
        }
    }
}

/// Starts a process: with an image to restore from, or to boot.
async fn start(
    driver: &QemuDriver,
    spec: &MachineSpec,
    placement: &Placement,
    image: Option<&Path>,
    inherit: Option<OwnedFd>,
) -> Result<Launched, VmmError> {
    let socket = placement.run_dir.join(MONITOR_SOCKET);
    let program = driver.settings.program.clone();
    let plan = Plan {
        driver: driver.clone(),
        spec: spec.clone(),
        placement: placement.clone(),
        image: image.map(Path::to_owned),
        tree: driver.tree().await?,
    };
    let start_error = |reason: String| VmmError::Start { program: program.display().to_string(), reason };
    let Settings { confinement, overhead_mib, .. } = &driver.settings;
    let confined = Arc::new(confinement.make(&placement.name, spec, *overhead_mib).await?);
    let group = Arc::clone(&confined);
    let spawn = move || plan.spawn(inherit.as_ref(), &group);
    let (process, start_time, mut console) = match blocking(spawn, String::new).await {
        Err(VmmError::Io { source, .. }) => return Err(start_error(source.to_string())),
        spawned => spawned?,
    };
    let record = ProcessRecord { pid: process.handle().pid(), start_time, control_socket: socket };
    match connect(driver, &record.control_socket).await {
        Ok(monitor) => Ok(Launched { process, monitor, record, confined, console }),
        Err(error) => {
            crate::process::drain(&mut console, OUTPUT_GRACE).await;
            let log = last_lines(&console.tail());
            Err(start_error(if log.is_empty() { error.to_string() } else { log }))
        }
    }
}

/// All that the start of one process depends on.
struct Plan {
    driver: QemuDriver,
    spec: MachineSpec,
    placement: Placement,
    /// Memory image of the capture to restore.
    image: Option<PathBuf>,
    tree: Arc<ProgramTree>,
}

impl Plan {
    /// Makes the files and starts the process. Returns its owner, so that one that is started for nobody is ended.
    fn spawn(
        &self,
        inherit: Option<&OwnedFd>,
        confined: &Confined,
    ) -> io::Result<(OwnedProcess, u64, Console)> {
        let Self { driver, spec, placement, tree, .. } = self;
        let listener = listen(&placement.run_dir)?;
        let disk = HostDisk::examine(&placement.disk)?;
        let (memory, memory_access) = self.memory()?;
        let jail = Jail {
            tree,
            placement,
            accelerator: driver.choice.accelerator,
            disk: disk.kind,
            memory: &memory,
            memory_access,
            boots: self.image.is_none(),
            largest_file: disk.bytes.max(spec.memory_mib << 20).max(LEAST_FILE_LIMIT),
        };
        self.give_files(&disk)?;
        let process_name = crate::process::process_name(&placement.name);
        let command_line = CommandLine {
            version: driver.version,
            accelerator: driver.choice.accelerator,
            cpu_model: &driver.identity.cpu_model,
            tsc_khz: driver.tsc_khz,
            spec,
            placement,
            disk: disk.kind,
            limits: &driver.settings.limits,
            process_name: &process_name,
            monitor_fd: listener.as_raw_fd(),
            start: if self.image.is_some() { Start::Restore } else { Start::Boot },
        };
        let netns = File::open(&placement.netns).map_err(|error| on_path(&placement.netns, &error))?;
        let mut inherited = vec![listener.as_fd()];
        inherited.extend(inherit.map(AsFd::as_fd));
        let (output, console) = Console::create(&placement.run_dir)?;
        let process = Detached {
            program: tree.program(),
            arg0: &process_name,
            args: &command_line.build(),
            directory: Path::new("/"),
            netns: Some(netns.as_fd()),
            log: output,
            inherit: &inherited,
            oom_score_adj: Some(driver.settings.oom_score_adj),
            huge_pages: true,
            cgroup: confined.descriptor(),
            isolation: jail.isolation(),
        };
        let process = process.spawn()?;
        let pid = process.pid();
        let owner = OwnedProcess::new(process);
        Ok((owner, aenv_sys::process::start_time(pid)?, console))
    }

    /// The file behind the guest's memory.
    fn memory(&self) -> io::Result<(PathBuf, Access)> {
        let own = self.placement.run_dir.join(OWN_MEMORY);
        match &self.image {
            // Shared by all children, none of which can write it.
            Some(image) if self.driver.version >= READ_ONLY_BACKEND => Ok((image.clone(), Access::ReadOnly)),
            Some(image) => {
                copy_image(image, &self.own_file(&own)?, &own)?;
                Ok((own, Access::ReadWrite))
            }
            None => {
                self.own_file(&own)?.set_len(self.spec.memory_mib << 20)?;
                Ok((own, Access::ReadWrite))
            }
        }
    }

    /// Gives the process what it may write.
    fn give_files(&self, disk: &HostDisk) -> io::Result<()> {
        self.own_file(&jail::state_file(&self.placement))?;
        disk.give(&self.placement.disk, self.placement.user)
    }

    /// A new file that belongs to the process.
    fn own_file(&self, path: &Path) -> io::Result<File> {
        let file = File::create(path).map_err(|error| on_path(path, &error))?;
        let user = Some(self.placement.user);
        fchown(&file, user, user)?;
        Ok(file)
    }
}

/// Fills the empty file `own` with an image: by sharing its blocks or, of one that is exported through FUSE and has none of its own, by
/// a copy. Others may map the image, so it is never opened for writing.
fn copy_image(image: &Path, own: &File, path: &Path) -> io::Result<()> {
    let source = File::open(image).map_err(|error| on_path(image, &error))?;
    match reflink(&source, own, path) {
        Err(ReflinkError::Unsupported { .. }) if HostDisk::examine(image)?.kind == DiskKind::ExportedFile => {
            copy_data(&source, own)
        }
        shared => shared.map_err(io::Error::other),
    }
}

/// Copies all that is not in holes.
fn copy_data(source: &File, target: &File) -> io::Result<()> {
    target.set_len(source.metadata()?.len())?;
    for extent in data_extents(source)? {
        io::Seek::seek(&mut &*source, io::SeekFrom::Start(extent.start))?;
        io::Seek::seek(&mut &*target, io::SeekFrom::Start(extent.start))?;
        let length = extent.end - extent.start;
        if io::copy(&mut io::Read::take(source, length), &mut &*target)? != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

/// Connects to a process of an earlier owner.
pub(super) async fn adopt(
    driver: &QemuDriver,
    record: &ProcessRecord,
    placement: &Placement,
) -> Result<Launched, VmmError> {
    let name = &placement.name;
    let confined = Arc::new(driver.settings.confinement.open(name)?);
    let handle = match PidFd::open(record.pid, Some(record.start_time)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone(placement, &confined)?),
        opened => opened.map_err(|source| VmmError::Io {
            context: format!("cannot open process {}", record.pid),
            source,
        })?,
    };
    let process = OwnedProcess::foreign(handle);
    match connect(driver, &record.control_socket).await {
        Ok(monitor) => {
            let context = format!("cannot open the console of VMM {name}");
            let console =
                Console::open(&placement.run_dir).map_err(|source| VmmError::Io { context, source })?;
            Ok(Launched { process, monitor, record: record.clone(), confined, console })
        }
        Err(_) if process.handle().has_exited().unwrap_or(false) => Err(gone(placement, &confined)?),
        Err(error) => Err(command_error(name, "adopt", error)),
    }
}

/// Of a VM that ended while nobody watched: what its control group and its log tell.
fn gone(placement: &Placement, confined: &Confined) -> Result<VmmError, VmmError> {
    let evidence = Evidence {
        out_of_memory: confined.out_of_memory()?,
        log: console::last_words(&placement.run_dir),
        ..Evidence::default()
    };
    let Exit { cause, detail } = evidence.exit();
    Ok(VmmError::Gone { name: placement.name.clone(), cause, detail })
}

/// What a failed command means for the caller.
pub(super) fn command_error(name: &str, command: &str, error: MonitorError) -> VmmError {
    let (name, command) = (name.to_owned(), command.to_owned());
    match error {
        MonitorError::Timeout(limit) => VmmError::Timeout { name, command, limit },
        error => VmmError::Command { name, command, reason: error.to_string() },
    }
}

fn on_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// A socket's address holds 108 bytes, a path may be longer: so both ends go through the directory's descriptor.
fn through_descriptor(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{MONITOR_SOCKET}", directory.as_raw_fd()))
}

fn listen(run_dir: &Path) -> io::Result<UnixListener> {
    let directory = File::open(run_dir).map_err(|error| on_path(run_dir, &error))?;
    let path = through_descriptor(&directory);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(path)
}

async fn connect(driver: &QemuDriver, socket: &Path) -> Result<Monitor, MonitorError> {
    let directory = File::open(socket.parent().unwrap_or(Path::new("/")))?;
    let settings = &driver.settings;
    Monitor::connect(&through_descriptor(&directory), settings.start_limit, settings.command_limit).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    #[test]
    fn a_copy_has_the_data_and_the_holes_of_the_image() {
        let [source, target] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        source.set_len(1 << 30).unwrap();
        for (place, byte) in [(8192, 1), (1 << 20, 2), ((1 << 30) - 4096, 3)] {
            source.write_all_at(&[byte; 4096], place).unwrap();
        }
        copy_data(&source, &target).unwrap();
        let metadata = target.metadata().unwrap();
        assert_eq!(metadata.len(), 1 << 30);
        assert!(metadata.blocks() * 512 < 1 << 20, "holes stay holes");
        for (place, byte) in [(0, 0), (8192, 1), (1 << 20, 2), ((1 << 30) - 4096, 3)] {
            let mut page = [9; 4096];
            target.read_exact_at(&mut page, place).unwrap();
            assert_eq!(page, [byte; 4096], "{place}");
        }
    }

    #[test]
    fn an_image_of_an_ordinary_filesystem_is_shared_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (image, own) = (directory.path().join("image"), directory.path().join("own"));
        std::fs::write(&image, [7; 4096]).unwrap();
        let copied = copy_image(&image, &File::create(&own).unwrap(), &own);
        assert_eq!(copied.is_ok(), aenv_sys::file::supports_reflink(directory.path()).unwrap());
    }
}
