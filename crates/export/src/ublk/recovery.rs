//! Takes over a device whose server died. Owns nothing; what it takes over belongs to the exporter.
//!
//! ```text
//!  quiesced ─begin─▶ begun ─open, map─▶ mapped ─fetch─▶ fetched ─end─▶ live
//!      ▲               │ died here:        │ died here:     │ died here:
//!      │               └── go on           │                └── begin again
//!      └──────── a stand-in fetches ◀──────┘
//! ```
//! A recovery is begun only when all requests are with a server that died. Who died between the mapping and the fetching leaves
//! a device that cannot be mapped, since it is still that process's, and whose recovery cannot be begun. So a thread fetches
//! what that process did not, without the mapping, and ends.

use super::device::Device;
use super::machine::is;
use super::{LIMIT, MAX_IO_BYTES, PAUSE, UblkExporter, failed, hand_over};
use crate::{Export, ExportError};
use aenv_sys::ublk::{CharDevice, DeviceInfo, DeviceState, Queue, fetch_and_end};
use rustix::io::Errno;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Until the driver has noticed that the server before is gone: three times as long as it takes on a device whose settings
/// could not be made, when every request was with that server.
const DEATH_LIMIT: Duration = Duration::from_secs(90);

impl UblkExporter {
    /// Serves a device that waits in the kernel.
    pub(super) fn take_over(&self, export: &Export, device: &Arc<Device>) -> Result<PathBuf, ExportError> {
        let number = export.number;
        let lost = |reason: String| ExportError::Lost { name: export.name.clone(), reason };
        let info =
            self.info(number)?.ok_or_else(|| lost(format!("the kernel has no block device {number}")))?;
        if info.mark != self.mark(&export.name) {
            return Err(lost(format!("block device {number} belongs to something else")));
        }
        if info.state == DeviceState::Dead {
            // Its maker died before it was started, or while it was being removed: nobody can have used it since.
            self.delete(number)?;
            return Err(lost(format!("block device {number} was not running")));
        }
        let parameters =
            self.control.parameters(number).map_err(failed(format!("look at block device {number}")))?;
        let wanted = device.parameters();
        if (parameters.bytes, parameters.read_only) != (wanted.bytes, wanted.read_only) {
            return Err(lost(format!("block device {number} has {parameters:?}, not {wanted:?}")));
        }
        if info.queues != 1 || info.max_io_bytes > MAX_IO_BYTES {
            return Err(lost(format!("block device {number} is not served by this version: {info:?}")));
        }
        self.begin_recovery(number)?;
        let recovered = self.mapped(&info).and_then(|queue| self.attach(device, queue)).and_then(|()| {
            let ended = self.control.end_recovery(number, LIMIT);
            ended.map_err(failed(format!("recover block device {number}")))
        });
        if let Err(error) = recovered {
            let stuck =
                |source: &io::Error| is(source, Errno::INVAL) || source.kind() == io::ErrorKind::TimedOut;
            if !matches!(&error, ExportError::Io { source, .. } if stuck(source)) {
                return Err(error);
            }
            // The kernel remembers something of an earlier server that not even the stand-in has made it forget.
            device.end();
            self.delete(number)?;
            return Err(lost(format!(
                "an earlier recovery of block device {number} was interrupted: {error}"
            )));
        }
        hand_over(export, device)
    }

    /// Waits until the old server is gone for good.
    fn begin_recovery(&self, number: u32) -> Result<(), ExportError> {
        let started = Instant::now();
        loop {
            match self.control.begin_recovery(number, LIMIT) {
                Ok(()) => return Ok(()),
                Err(error) if is(&error, Errno::BUSY) && started.elapsed() < DEATH_LIMIT => {
                    std::thread::sleep(PAUSE);
                }
                // Begun by a process that died before it had fetched anything: as good as begun by us.
                Err(error) if is(&error, Errno::INVAL) => return Ok(()),
                Err(error) => return Err(failed(format!("begin to recover block device {number}"))(error)),
            }
        }
    }

    /// The requests of a device whose recovery has begun.
    fn mapped(&self, info: &DeviceInfo) -> Result<Queue, ExportError> {
        let number = info.number;
        let mapped = match map(info) {
            // It is another process's.
            Err(error) if is(&error, Errno::INVAL) => {
                tracing::info!(number, "an interrupted recovery is completed before the next one begins");
                let completed =
                    open(number).and_then(|char_device| fetch_and_end(char_device, 0, info.depth));
                completed
                    .map_err(failed(format!("complete an interrupted recovery of block device {number}")))?;
                self.begin_recovery(number)?;
                map(info)
            }
            mapped => mapped,
        };
        mapped.map_err(failed(format!("map requests of block device {number}")))
    }
}

/// Opens the serving side of a device, and maps its requests.
pub(super) fn map(info: &DeviceInfo) -> io::Result<Queue> {
    Queue::map(Arc::new(open(info.number)?), 0, info.depth)
}

/// Opens the serving side of a device; waits until a process that died has closed it, which it may do last of all.
fn open(number: u32) -> io::Result<CharDevice> {
    let started = Instant::now();
    loop {
        match CharDevice::open(number) {
            Err(error) if is(&error, Errno::BUSY) && started.elapsed() < DEATH_LIMIT => {
                std::thread::sleep(PAUSE);
            }
            opened => return opened,
        }
    }
}
