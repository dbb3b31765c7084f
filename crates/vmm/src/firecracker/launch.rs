//! Starts a jailed Firecracker and connects to it, or connects to one that runs; on failure nothing is left behind.
//!
//! Owns a process only until the machine takes it over: a dropped future ends what it started.
//!
//! ```text
//! jail built, directory watched, pipe made ─▶ jailer ─▶ Firecracker ─▶ socket appears ─▶ connected
//!                                                                        boot: configure, start    prepare: nothing more
//! ```

use super::FirecrackerDriver;
use super::api::{Api, ApiError};
use super::capture::{self, CaptureDirectory, Lineage};
use super::ending::Evidence;
use super::jail::{Jail, Origin, on_path};
use super::requests::{self, Boot, Request};
use crate::confinement::Confined;
use crate::console::Console;
use crate::driver::{CaptureFiles, Exit, MachineSpec, Placement, ProcessRecord, VmmError};
use crate::ending::last_lines;
use crate::host_disk::HostDisk;
use crate::process::{self, OwnedProcess, blocking, process_name};
use crate::strays::vm_of;
use aenv_sys::process::{Detached, Isolation, PidFd};
use aenv_sys::watch::DirectoryWatch;
use rustix::fs::FlockOperation;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Between the name of a socket and somebody who listens at it, of which nothing tells, lie two system calls.
const LISTEN_PAUSE: Duration = Duration::from_micros(200);
/// How long the output of a process that failed to start is awaited.
const OUTPUT_GRACE: Duration = Duration::from_millis(200);

/// A process we are connected to. Ends the process when dropped, unless it is to be kept.
#[derive(Debug)]
pub(super) struct Launched {
    process: OwnedProcess,
    pub(super) parts: Parts,
}

/// Everything of a launched VM but the process.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) api: Api,
    pub(super) console: Console,
    pub(super) record: ProcessRecord,
    pub(super) captures: CaptureDirectory,
    pub(super) lineage: Lineage,
    pub(super) confined: Arc<Confined>,
    /// Whether there is a capture in the jail that is still to be loaded.
    pub(super) prepared: bool,
}

impl Launched {
    /// Hands the parts over to who looks after the VM from now on. Dropping them leaves the process alone.
    pub(super) fn into_parts(self) -> (Arc<PidFd>, Parts) {
        self.parts.confined.keep();
        (self.process.release(), self.parts)
    }
}

/// Starts a process that boots its guest.
pub(super) async fn boot(
    driver: &FirecrackerDriver,
    spec: &MachineSpec,
    placement: &Placement,
) -> Result<Launched, VmmError> {
    let launched = start(driver, spec, placement, None).await?;
    let boot = Boot {
        version: driver.version,
        spec,
        tap: &placement.tap,
        guest_arguments: &placement.boot.guest_arguments,
        template: &driver.template,
        limits: &driver.settings.limits,
        balloon: driver.settings.balloon,
    };
    // One after the other: Firecracker serves them by one thread anyway.
    for request in boot.requests() {
        if let Err(error) = launched.parts.api.send(&request, driver.settings.command_limit).await {
            abandon(launched.process, driver, placement).await?;
            return Err(command_error(&placement.name, &describe(&request), error));
        }
    }
    Ok(launched)
}

/// Starts a process that is ready to load a capture.
pub(super) async fn prepare(
    driver: &FirecrackerDriver,
    spec: &MachineSpec,
    capture: &CaptureFiles,
    placement: &Placement,
) -> Result<Launched, VmmError> {
    let (files, bytes) = (capture.clone(), spec.memory_mib << 20);
    let context =
        || format!("cannot read capture {} and {}", capture.state.display(), capture.memory.display());
    let image = blocking(move || open_image(&files, bytes), context).await?;
    let mut launched = start(driver, spec, placement, Some(capture)).await?;
    launched.parts.lineage = Lineage::Started(Some(image));
    launched.parts.prepared = true;
    Ok(launched)
}

/// Opens the memory image, whose length Firecracker does not compare.
fn open_image(capture: &CaptureFiles, memory_bytes: u64) -> io::Result<File> {
    let image = File::open(&capture.memory)?;
    let length = image.metadata()?.len();
    if length != memory_bytes {
        let what = format!("the memory image has {length} bytes, the machine {memory_bytes}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(image)
}

/// A process that was started and does not answer yet.
struct Spawned {
    process: OwnedProcess,
    start_time: u64,
    watch: DirectoryWatch,
    console: Console,
    captures: CaptureDirectory,
}

async fn start(
    driver: &FirecrackerDriver,
    spec: &MachineSpec,
    placement: &Placement,
    capture: Option<&CaptureFiles>,
) -> Result<Launched, VmmError> {
    let start_error =
        |reason: String| VmmError::Start { program: driver.firecracker.display().to_string(), reason };
    let settings = &driver.settings;
    let confined = settings.confinement.make(&placement.name, spec, settings.overhead_mib).await?;
    let confined = Arc::new(confined);
    let plan = Plan {
        driver: driver.clone(),
        placement: placement.clone(),
        memory_bytes: spec.memory_mib << 20,
        capture: capture.cloned(),
        confined: Arc::clone(&confined),
    };
    // Returns the owner of the process, so that one that is started for nobody is ended.
    let spawn = move || plan.spawn();
    let spawned = match blocking(spawn, String::new).await {
        Err(VmmError::Io { source, .. }) => return Err(start_error(source.to_string())),
        spawned => spawned?,
    };
    let Spawned { process, start_time, watch, mut console, captures } = spawned;
    let pid = process.handle().pid();
    let jail = Jail::new(placement, &driver.firecracker);
    let limit = settings.start_limit;
    let socket = jail.socket();
    let connected = async {
        tokio::select! {
            connected = until_connected(watch, &socket, pid) => connected.map_err(|error| error.to_string()),
            _ = process.handle().exited() => Err("it ended".to_owned()),
        }
    };
    let connected = tokio::time::timeout(limit, connected).await;
    let connected = connected.unwrap_or_else(|_| Err(format!("it does not answer within {limit:?}")));
    let closed = connected.and_then(|api| match jail.close() {
        Ok(()) => Ok(api),
        Err(error) => Err(format!("its jail cannot be closed: {error}")),
    });
    match closed {
        Ok(api) => {
            let record = ProcessRecord { pid, start_time, control_socket: socket.clone() };
            let lineage = Lineage::Started(None);
            let parts = Parts { api, console, record, captures, lineage, confined, prepared: false };
            Ok(Launched { process, parts })
        }
        Err(reason) => {
            crate::process::drain(&mut console, OUTPUT_GRACE).await;
            let output = last_lines(&console.tail());
            abandon(process, driver, placement).await?;
            Err(start_error(if output.is_empty() { reason } else { format!("{reason}: {output}") }))
        }
    }
}

/// Everything a process is started from, to be used on a thread that may block.
struct Plan {
    driver: FirecrackerDriver,
    placement: Placement,
    memory_bytes: u64,
    capture: Option<CaptureFiles>,
    confined: Arc<Confined>,
}

impl Plan {
    fn spawn(&self) -> io::Result<Spawned> {
        let Self { driver, placement, memory_bytes, capture, confined } = self;
        // A start that was given up may still be at work on another thread, or its process not have ended.
        let directory =
            File::open(&placement.run_dir).map_err(|error| on_path(&placement.run_dir, &error))?;
        rustix::fs::flock(&directory, FlockOperation::LockExclusive)?;
        let jail = Jail::new(placement, &driver.firecracker);
        if jail.exists()? {
            end_earlier(&placement.name)?;
        }
        let disk = HostDisk::examine(&placement.disk)?;
        let origin = capture.as_ref().map_or(Origin::Boot, Origin::Capture);
        let steps = jail.build(placement, &disk, origin)?;
        capture::markers(&placement.run_dir).iter().try_for_each(|marker| remove(marker))?;
        let captures = CaptureDirectory::open(&jail.capture_directory())?;
        // Before the process starts, so that nothing happens unseen.
        let watch = DirectoryWatch::new(jail.root())?;
        let (output, console) = Console::create(&placement.run_dir)?;
        let netns = File::open(&placement.netns).map_err(|error| on_path(&placement.netns, &error))?;
        let largest_file = disk.bytes.max(*memory_bytes);
        let process = Detached {
            program: &driver.jailer,
            arg0: &process_name(&placement.name),
            args: &jail.arguments(placement, &driver.firecracker, largest_file),
            directory: &placement.run_dir,
            netns: Some(netns.as_fd()),
            log: output,
            inherit: &[],
            oom_score_adj: Some(driver.settings.oom_score_adj),
            // So that a capture is told of pages that were written, not of huge ones.
            huge_pages: false,
            // Jailer and Firecracker stay in what they are born in.
            cgroup: confined.descriptor(),
            isolation: Isolation {
                pid_namespace: true,
                steps,
                // The jailer changes the root and the user itself.
                root: None,
                user: None,
                no_new_privileges: true,
                limits: vec![(rustix::process::Resource::Core, 0)],
            },
        };
        let process = process.spawn()?;
        let pid = process.pid();
        let process = OwnedProcess::new(process);
        let start_time = aenv_sys::process::start_time(pid)?;
        Ok(Spawned { process, start_time, watch, console, captures })
    }
}

/// Ends what an earlier start of the VM left. Blocks.
fn end_earlier(vm_name: &str) -> io::Result<()> {
    let found = aenv_sys::process::find(|args| args.iter().any(|argument| argument == vm_name))?;
    for process in found.iter().filter(|process| vm_of(process) == Some(vm_name)) {
        tokio::runtime::Handle::current().block_on(process::end(process.pid, process.start_time))?;
    }
    Ok(())
}

/// Waits for Firecracker's socket to appear in the watched directory, and for somebody to listen at it.
async fn until_connected(mut watch: DirectoryWatch, socket: &Path, pid: u32) -> io::Result<Api> {
    loop {
        match Api::connect(socket, pid).await {
            Ok(api) => return Ok(api),
            Err(ApiError::Connect { source, .. }) if source.kind() == io::ErrorKind::ConnectionRefused => {
                tokio::time::sleep(LISTEN_PAUSE).await;
                continue;
            }
            Err(ApiError::Connect { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io::Error::other(error)),
        }
        watch.created().await?;
    }
}

/// Ends a process whose start failed, and removes what was made for it.
async fn abandon(
    process: OwnedProcess,
    driver: &FirecrackerDriver,
    placement: &Placement,
) -> Result<(), VmmError> {
    let failed = |source| VmmError::Io {
        context: format!("cannot end VMM {}, whose start failed", placement.name),
        source,
    };
    process.handle().kill().map_err(failed)?;
    process.handle().exited().await.map_err(failed)?;
    process.handle().reap().map_err(failed)?;
    process.release();
    clean_up(driver, placement).await
}

/// Removes what is of no use when the VM has ended. The log stays.
pub(super) async fn clean_up(driver: &FirecrackerDriver, placement: &Placement) -> Result<(), VmmError> {
    let jail = Jail::new(placement, &driver.firecracker);
    let markers = capture::markers(&placement.run_dir);
    let scratch = crate::console::scratch_file(&placement.run_dir);
    let remove_all = move || {
        for file in markers.iter().chain([&scratch]) {
            remove(file)?;
        }
        jail.remove()
    };
    blocking(remove_all, || format!("cannot remove what VMM {} leaves", placement.name)).await
}

fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(on_path(file, &error)),
        _ => Ok(()),
    }
}

/// Connects to a process of an earlier owner.
pub(super) async fn adopt(
    driver: &FirecrackerDriver,
    spec: &MachineSpec,
    record: &ProcessRecord,
    placement: &Placement,
) -> Result<Launched, VmmError> {
    let name = &placement.name;
    let confined = Arc::new(driver.settings.confinement.open(name)?);
    let io_error = |context: &str| {
        let context = format!("cannot {context} of VMM {name}");
        move |source| VmmError::Io { context, source }
    };
    let handle = match PidFd::open(record.pid, Some(record.start_time)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone(placement, &confined)?),
        opened => opened.map_err(io_error("open the process"))?,
    };
    let process = OwnedProcess::foreign(handle);
    let limit = driver.settings.command_limit;
    let connected = async {
        let api = Api::connect(&record.control_socket, record.pid).await?;
        let state = api.send(&requests::describe(), limit).await?;
        Ok((api, state))
    };
    let (api, state) = match connected.await {
        Ok(connected) => connected,
        Err(_) if process.handle().has_exited().unwrap_or(false) => {
            return Err(gone(placement, &confined)?);
        }
        Err(error) => return Err(command_error(name, "adopt", error)),
    };
    if state["state"] == "Not started" {
        let reason = "it has no guest: it was prepared, but its capture was never loaded".to_owned();
        return Err(VmmError::Command { name: name.clone(), command: "adopt".to_owned(), reason });
    }
    let console = Console::open(&placement.run_dir).map_err(io_error("open the console"))?;
    let jail = Jail::new(placement, &driver.firecracker);
    let captures = CaptureDirectory::open(&jail.capture_directory());
    let captures = captures.map_err(io_error("open the capture directory"))?;
    let (run_dir, pid, bytes) = (placement.run_dir.clone(), record.pid, spec.memory_mib << 20);
    let context = || format!("cannot find out what VMM {name} was started from");
    let lineage = blocking(move || Lineage::adopted(&run_dir, pid, bytes), context).await?;
    let record = record.clone();
    let parts = Parts { api, console, record, captures, lineage, confined, prepared: false };
    Ok(Launched { process, parts })
}

/// Of a VM that ended while nobody watched: what its control group and its log tell.
fn gone(placement: &Placement, confined: &Confined) -> Result<VmmError, VmmError> {
    let evidence = Evidence {
        out_of_memory: confined.out_of_memory()?,
        output: crate::console::last_words(&placement.run_dir),
        ..Evidence::default()
    };
    let Exit { cause, detail } = evidence.exit();
    Ok(VmmError::Gone { name: placement.name.clone(), cause, detail })
}

/// A request in a few words.
pub(super) fn describe(request: &Request) -> String {
    format!("{:?} {}", request.method, request.path).to_uppercase()
}

/// What a failed request means for the caller.
pub(super) fn command_error(name: &str, command: &str, error: ApiError) -> VmmError {
    let (name, command) = (name.to_owned(), command.to_owned());
    match error {
        ApiError::Timeout(limit) => VmmError::Timeout { name, command, limit },
        error => VmmError::Command { name, command, reason: error.to_string() },
    }
}
