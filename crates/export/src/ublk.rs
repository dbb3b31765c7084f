//! Exports as block devices by ublk: one device, with one queue, per export.
//!
//! Owns the threads and, until it is dropped, the serving side of every device it added or recovered. The devices are the
//! kernel's: they outlive this process, and requests wait in them until [`UblkExporter::recover`](Exporter::recover).
//!
//! ```text
//!  VM ─▶ /dev/ublkbN ─▶ kernel ──fetch──▶ I/O thread ──▶ pool ──▶ worker: storage, data by pread and pwrite at /dev/ublkcN
//!                                             ▲                     │
//!                                             └───── commit ────────┘
//!  worker ── no room ──▶ held ── every RETRY, or when the export is removed ──▶ pool
//! ```
//!
//! * A queue belongs to the thread that fetched from it, so answers go back through it. Storage may block, so it is never
//!   called there. Data never passes through memory that lasts: a held request costs its place in a list.
//! * One queue per device: Linux 6.12 does not survive a second recovery when a server died after it had taken over one of
//!   several queues and not yet the others. Devices are spread over the I/O threads by their numbers.
//! * The device's `mark` says whose it is: a checksum of the instance, and one of the export's name. So a device of another
//!   program, or of another export, is neither taken over nor deleted.
//! * I/O threads have no CAP_SYS_ADMIN; for that reason the kernel does not look for partitions in what guests wrote.

mod device;
mod io_thread;
mod lines;
mod machine;
mod pool;
mod recovery;
mod serve;
mod turns;

use crate::{Content, Export, ExportError, Exporter, Stall};
use aenv_sys::ublk::{Control, DeviceInfo, DeviceState, MAX_NUMBER, Queue};
use device::Device;
use io_thread::IoThread;
use machine::{checksum, device_numbers, is, usable_control};
use pool::Pool;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Largest request, and so the size of each worker's buffer: bytes.
pub(crate) const MAX_IO_BYTES: u32 = 1 << 20;
/// For what the kernel does at once unless something is wrong.
const LIMIT: Duration = Duration::from_secs(20);
/// Between two looks at something that needs a moment.
const PAUSE: Duration = Duration::from_millis(5);

/// How devices are served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Whose devices these are; another exporter of the same name may recover and delete them.
    pub instance: String,
    /// Threads that fetch and commit.
    pub io_threads: usize,
    /// Threads that call storage.
    pub workers: usize,
    /// Requests that may be under way in each device; 1 to 4096.
    pub depth: u16,
    /// How long a removal waits for requests that storage is working on.
    pub stop_limit: Duration,
}

impl Settings {
    /// Two I/O threads, eight workers, 128 requests per device, a minute for a removal.
    #[must_use]
    pub fn new(instance: &str) -> Self {
        let stop_limit = Duration::from_secs(60);
        Self { instance: instance.to_owned(), io_threads: 2, workers: 8, depth: 128, stop_limit }
    }
}

/// Exports as block devices. Dropped, it leaves the devices with all requests waiting, for a successor to recover.
#[derive(Debug)]
pub struct UblkExporter {
    control: Control,
    depth: u16,
    stop_limit: Duration,
    instance: u32,
    devices: Mutex<BTreeMap<u32, Entry>>,
    threads: Vec<Arc<IoThread>>,
    pool: Arc<Pool>,
}

/// ```text
///  Busy ──made, taken over──▶ Served ──remove──▶ Busy ──▶ (gone)
///                                                ▲  └── failed ──▶ Ending
///                                                └───── remove ───────┘
/// ```
#[derive(Debug)]
enum Entry {
    /// Being made, taken over or removed.
    Busy {
        name: String,
    },
    Served(Arc<Device>),
    /// Its removal was begun and failed: requests that the kernel still gives are answered, and none is held.
    Ending(Arc<Device>),
}

impl Entry {
    fn name(&self) -> &str {
        match self {
            Self::Busy { name } => name,
            Self::Served(device) | Self::Ending(device) => device.name(),
        }
    }
}

impl UblkExporter {
    /// Whether this machine can do it.
    ///
    /// # Errors
    /// [`ExportError::Unavailable`], with what to do about it.
    pub fn probe() -> Result<(), ExportError> {
        usable_control().map(drop)
    }

    /// Starts the threads. Devices of an earlier process are left as they are until they are recovered.
    ///
    /// # Errors
    /// [`ExportError::Unavailable`] as [`UblkExporter::probe`]; the system's error when threads cannot be started.
    pub fn new(settings: &Settings) -> Result<Self, ExportError> {
        let control = usable_control()?;
        let threads = (0..settings.io_threads.max(1)).map(IoThread::start).collect::<io::Result<Vec<_>>>();
        let threads = threads.map_err(failed("start a thread for block requests"))?;
        let pool = Pool::start(settings.workers.max(2), threads.clone())
            .map_err(failed("start the threads that call storage"))?;
        Ok(Self {
            control,
            depth: settings.depth,
            stop_limit: settings.stop_limit,
            instance: checksum(&settings.instance),
            devices: Mutex::default(),
            threads,
            pool,
        })
    }

    /// Exports with requests that wait for room on the host.
    #[must_use]
    pub fn stalled(&self) -> Vec<Stall> {
        self.pool.stalled()
    }

    /// Numbers of devices of this instance that this exporter does not serve: of a process that died, and not recovered.
    ///
    /// # Errors
    /// The system's error.
    pub fn leftovers(&self) -> Result<Vec<u32>, ExportError> {
        let mut numbers = Vec::new();
        for number in device_numbers().map_err(failed("list block devices of ublk"))? {
            let ours = self.info(number)?.is_some_and(|info| info.mark >> 32 == u64::from(self.instance));
            if ours && !self.devices().contains_key(&number) {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Deletes one of the [`leftovers`](Self::leftovers). Any other number is left alone.
    ///
    /// # Errors
    /// The system's error.
    pub fn remove_leftover(&self, number: u32) -> Result<(), ExportError> {
        let Some(info) = self.info(number)? else { return Ok(()) };
        if info.mark >> 32 != u64::from(self.instance) || self.devices().contains_key(&number) {
            return Ok(());
        }
        self.delete(number)
    }

    fn devices(&self) -> MutexGuard<'_, BTreeMap<u32, Entry>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, name: &str) -> u64 {
        u64::from(self.instance) << 32 | u64::from(checksum(name))
    }

    /// What the kernel knows of a device, unless there is none.
    fn info(&self, number: u32) -> Result<Option<DeviceInfo>, ExportError> {
        match self.control.info(number) {
            Ok(info) => Ok(Some(info)),
            Err(error) if is(&error, rustix::io::Errno::NODEV) => Ok(None),
            Err(error) => Err(failed(format!("look at block device {number}"))(error)),
        }
    }

    /// Keeps number and name for one call.
    fn reserve(&self, export: &Export) -> Result<(), ExportError> {
        if export.number == 0 || export.number > MAX_NUMBER {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            let action = format!("export number {}: it must be 1 to {MAX_NUMBER}", export.number);
            return Err(ExportError::Io { action, source });
        }
        let mut devices = self.devices();
        let there = devices.get(&export.number);
        if matches!(there, Some(Entry::Ending(device)) if device.name() == export.name) {
            let action = format!("make or take over export {}: its removal is not complete", export.name);
            return Err(ExportError::Io { action, source: io::ErrorKind::ResourceBusy.into() });
        }
        if there.is_some() {
            return Err(ExportError::Taken { what: "number", value: export.number.to_string() });
        }
        if devices.values().any(|entry| entry.name() == export.name) {
            return Err(ExportError::Taken { what: "name", value: export.name.clone() });
        }
        devices.insert(export.number, Entry::Busy { name: export.name.clone() });
        Ok(())
    }

    /// Makes a new device in the kernel and serves it; when that fails, the caller deletes it.
    fn make(&self, export: &Export, device: &Arc<Device>) -> Result<PathBuf, ExportError> {
        let number = export.number;
        let failed_to = |what: &str| failed(format!("{what} block device {number}"));
        self.control.set_parameters(number, &device.parameters()).map_err(failed_to("shape"))?;
        let info = self.control.info(number).map_err(failed_to("look at"))?;
        let queue = recovery::map(&info).map_err(failed_to("map requests of"))?;
        self.attach(device, queue)?;
        self.control.start(number, LIMIT).map_err(failed_to("start"))?;
        if let Err(error) = machine::notice_death_soon(number, self.depth) {
            // It works without, only that a recovery may have to wait.
            tracing::warn!(
                number,
                "the death of a server may be noticed late: settings cannot be made: {error}"
            );
        }
        hand_over(export, device)
    }

    fn attach(&self, device: &Arc<Device>, queue: Queue) -> Result<(), ExportError> {
        let index = device.thread(self.threads.len());
        let attached = self.threads[index].attach(Arc::new(queue), Arc::clone(device));
        attached.map_err(failed(format!("fetch requests of block device {}", device.number())))
    }

    /// Stops and deletes a device, whoever has it open.
    fn delete(&self, number: u32) -> Result<(), ExportError> {
        let gone = |error: &io::Error| is(error, rustix::io::Errno::NODEV);
        // Stopping first: deleting holds a lock of the whole driver while it waits for requests.
        match self.control.stop(number, self.stop_limit) {
            Err(error) if !gone(&error) => return Err(failed(format!("stop block device {number}"))(error)),
            _ => {}
        }
        match self.control.delete_later(number, LIMIT) {
            Err(error) if !gone(&error) => Err(failed(format!("delete block device {number}"))(error)),
            _ => Ok(()),
        }
    }

    /// Ends a call that had reserved a number: with a device, or with none.
    fn settle<T>(
        &self,
        number: u32,
        served: Result<(T, Arc<Device>), ExportError>,
    ) -> Result<T, ExportError> {
        let mut devices = self.devices();
        match served {
            Ok((value, device)) => {
                devices.insert(number, Entry::Served(device));
                Ok(value)
            }
            Err(error) => {
                devices.remove(&number);
                Err(error)
            }
        }
    }
}

impl Exporter for UblkExporter {
    fn add(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError> {
        let device = Arc::new(Device::new(export, content)?);
        self.reserve(export)?;
        let info = DeviceInfo {
            number: export.number,
            queues: 1,
            depth: self.depth,
            state: DeviceState::Dead,
            max_io_bytes: MAX_IO_BYTES,
            server: 0,
            features: machine::FEATURES,
            mark: self.mark(&export.name),
        };
        let added = match self.control.add(&info) {
            Ok(_) => self.make(export, &device).map_err(|error| {
                device.end();
                match self.delete(export.number) {
                    Ok(()) => error,
                    Err(other) => {
                        failed(format!("{error}; and afterwards {other}"))(io::ErrorKind::Other.into())
                    }
                }
            }),
            Err(error) if is(&error, rustix::io::Errno::EXIST) => {
                Err(ExportError::Taken { what: "number", value: export.number.to_string() })
            }
            Err(error) => Err(failed(format!("add block device {}", export.number))(error)),
        };
        self.settle(export.number, added.map(|path| (path, device)))
    }

    /// As the trait says. It may be repeated at any time, also when whoever tried before died in the middle of it.
    fn recover(&self, export: &Export, content: Content) -> Result<PathBuf, ExportError> {
        let device = Arc::new(Device::new(export, content)?);
        self.reserve(export)?;
        let recovered = self.take_over(export, &device);
        self.settle(export.number, recovered.map(|path| (path, device)))
    }

    /// Nothing to do: each device is served from its recovery on.
    fn start(&self) -> Result<(), ExportError> {
        Ok(())
    }

    fn remove(&self, export: &Export) -> Result<(), ExportError> {
        let number = export.number;
        let served = {
            let mut devices = self.devices();
            match devices.get(&number) {
                Some(entry) if entry.name() != export.name => return Ok(()),
                Some(Entry::Busy { .. }) => {
                    let action = format!("remove export {}: something is being done with it", export.name);
                    return Err(ExportError::Io { action, source: io::ErrorKind::ResourceBusy.into() });
                }
                Some(Entry::Served(device) | Entry::Ending(device)) => {
                    let device = Arc::clone(device);
                    devices.insert(number, Entry::Busy { name: export.name.clone() });
                    Some(device)
                }
                None => {
                    devices.insert(number, Entry::Busy { name: export.name.clone() });
                    None
                }
            }
        };
        if let Some(device) = &served {
            device.end();
            self.pool.release(number);
        }
        let removed = self.info(number).and_then(|info| match info {
            Some(info) if info.mark == self.mark(&export.name) => self.delete(number),
            _ => Ok(()),
        });
        let mut devices = self.devices();
        match (&removed, served) {
            (Err(_), Some(device)) => drop(devices.insert(number, Entry::Ending(device))),
            _ => drop(devices.remove(&number)),
        }
        removed
    }
}

impl Drop for UblkExporter {
    fn drop(&mut self) {
        self.pool.stop();
        for thread in &self.threads {
            thread.stop();
        }
    }
}

/// Gives the block device to its owner.
fn hand_over(export: &Export, device: &Device) -> Result<PathBuf, ExportError> {
    let path = PathBuf::from(format!("/dev/ublkb{}", export.number));
    let started = Instant::now();
    while !path.exists() {
        if started.elapsed() > LIMIT {
            let action = format!("find {}: is devtmpfs mounted at /dev?", path.display());
            return Err(ExportError::Io { action, source: io::ErrorKind::NotFound.into() });
        }
        std::thread::sleep(PAUSE);
    }
    let (user, group) = (rustix::fs::Uid::from_raw(export.owner), rustix::fs::Gid::from_raw(export.owner));
    let mode = if device.read_only() { 0o400 } else { 0o600 };
    let action = format!("give {} to user {}", path.display(), export.owner);
    rustix::fs::chown(&path, Some(user), Some(group))
        .and_then(|()| rustix::fs::chmod(&path, rustix::fs::Mode::from_raw_mode(mode)))
        .map_err(|error| failed(action)(error.into()))?;
    Ok(path)
}

fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> ExportError {
    let action = action.into();
    move |source| ExportError::Io { action, source }
}
