//! Commands to /dev/ublk-control. Owns its descriptor.
//!
//! Calls do not wait for each other: each has a ring of its own, and those that may take long a thread of their own, too. The
//! kernel executes commands on behalf of the thread that gave them, only a few at once; so two that it cannot finish, which
//! not even their caller's giving up ends, would let no later one of that thread begin.

use super::abi::{self, DeviceInfo, Features, Parameters};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

type ControlRing = IoUring<squeue::Entry128, cqueue::Entry>;

/// Where devices are made, started, stopped and deleted.
#[derive(Debug)]
pub struct Control {
    device: File,
}

impl Control {
    /// Opens it.
    ///
    /// # Errors
    /// When the driver is not loaded, or we may not.
    pub fn open() -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/ublk-control")?;
        Ok(Self { device })
    }

    /// What the driver can do.
    ///
    /// # Errors
    /// Where io_uring may not be used; EOPNOTSUPP before Linux 6.5.
    pub fn features(&self) -> io::Result<Features> {
        let answer: [u8; 8] = self.exchange(abi::GET_FEATURES, 0, [0; 8])?;
        Ok(Features(u64::from_le_bytes(answer)))
    }

    /// Makes a device, and tells what became of the wishes.
    ///
    /// # Errors
    /// EEXIST when the number is taken.
    pub fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
        self.exchange(abi::ADD_DEVICE, wanted.number, wanted.encode()).map(|bytes| DeviceInfo::decode(&bytes))
    }

    /// What the driver knows of a device.
    ///
    /// # Errors
    /// ENODEV when there is none of that number.
    pub fn info(&self, number: u32) -> io::Result<DeviceInfo> {
        self.exchange(abi::GET_INFO, number, [0; abi::INFO_BYTES]).map(|bytes| DeviceInfo::decode(&bytes))
    }

    /// Shapes a device that was not started yet.
    ///
    /// # Errors
    /// EINVAL when the driver does not take them.
    pub fn set_parameters(&self, number: u32, parameters: &Parameters) -> io::Result<()> {
        self.exchange(abi::SET_PARAMETERS, number, parameters.encode()).map(drop)
    }

    /// The shape of a device.
    ///
    /// # Errors
    /// ENODEV when there is none of that number.
    pub fn parameters(&self, number: u32) -> io::Result<Parameters> {
        let mut room = [0; abi::PARAMETERS_ROOM];
        room[..4].copy_from_slice(&256_u32.to_le_bytes());
        self.exchange(abi::GET_PARAMETERS, number, room).map(|bytes| Parameters::decode(&bytes))
    }

    /// Makes the block device appear, once all requests of all queues were fetched by this process.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when they were not within `limit`.
    pub fn start(&self, number: u32, limit: Duration) -> io::Result<()> {
        self.order(abi::START_DEVICE, number, std::process::id().into(), limit)
    }

    /// Takes the block device away: requests that the server has are waited for, all others fail.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when the server has some for longer than `limit`: it is stopped when they are answered.
    pub fn stop(&self, number: u32, limit: Duration) -> io::Result<()> {
        self.order(abi::STOP_DEVICE, number, 0, limit)
    }

    /// Deletes a stopped device; its number is free when nobody has it open any more, which is not waited for.
    ///
    /// # Errors
    /// ENODEV when there is none of that number; EOPNOTSUPP before Linux 6.9.
    pub fn delete_later(&self, number: u32, limit: Duration) -> io::Result<()> {
        self.order(abi::DELETE_LATER, number, 0, limit)
    }

    /// Prepares a quiesced device for a new server.
    ///
    /// # Errors
    /// EBUSY while the old one is not quite gone.
    pub fn begin_recovery(&self, number: u32, limit: Duration) -> io::Result<()> {
        self.order(abi::BEGIN_RECOVERY, number, 0, limit)
    }

    /// Lets requests flow again, once all were fetched by this process.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] when they were not within `limit`.
    pub fn end_recovery(&self, number: u32, limit: Duration) -> io::Result<()> {
        self.order(abi::END_RECOVERY, number, std::process::id().into(), limit)
    }

    /// A command with a buffer in both directions. The driver answers these at once, so they have no limit.
    fn exchange<const N: usize>(&self, operation: u32, number: u32, buffer: [u8; N]) -> io::Result<[u8; N]> {
        let length = u16::try_from(N).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let mut buffer = Box::new(buffer);
        let address = buffer.as_mut_ptr().expose_provenance() as u64;
        let mut ring = submit(&self.device, operation, abi::control_command(number, address, length, 0))?;
        match wait(&mut ring, None) {
            Ok(result) => answer(result).map(|()| *buffer),
            Err(error) => {
                // The command may still be under way, so the driver may still write there.
                Box::leak(buffer);
                Err(error)
            }
        }
    }

    /// A command without a buffer, on a thread of its own. When the limit is over, the thread is left to the kernel: it ends
    /// with the command.
    fn order(&self, operation: u32, number: u32, data: u64, limit: Duration) -> io::Result<()> {
        let device = self.device.try_clone()?;
        let (sender, receiver) = sync_channel(1);
        std::thread::Builder::new().name("ublk-control".to_owned()).spawn(move || {
            let tell = |done| {
                // Whoever gave the command waits for this.
                let _heard = sender.send(done);
            };
            match submit(&device, operation, abi::control_command(number, 0, 0, data)) {
                // Told before the ring is dropped, for that may take as long as the command.
                Ok(mut ring) => tell(wait(&mut ring, Some(limit)).and_then(answer)),
                Err(error) => tell(Err(error)),
            }
        })?;
        receiver.recv().map_err(io::Error::other)?
    }
}

fn submit(device: &File, operation: u32, command: [u8; 80]) -> io::Result<ControlRing> {
    let mut ring = ControlRing::builder().build(2)?;
    let entry = opcode::UringCmd80::new(Fd(device.as_raw_fd()), operation).cmd(command).build();
    // SAFETY: the descriptor is open until `submit` has returned, after which the kernel holds the file itself. What
    // the command points to is the heap buffer of `exchange`, which is freed only after the completion, or nothing.
    unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    ring.submit()?;
    Ok(ring)
}

/// Waits for the one completion.
fn wait(ring: &mut ControlRing, limit: Option<Duration>) -> io::Result<i32> {
    let started = Instant::now();
    loop {
        if let Some(entry) = ring.completion().next() {
            return Ok(entry.result());
        }
        let waited = match limit {
            None => ring.submit_and_wait(1),
            Some(limit) => {
                let left = limit.saturating_sub(started.elapsed());
                if left.is_zero() {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let left = Timespec::from(left);
                ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&left))
            }
        };
        match waited.map_err(|error| Errno::from_io_error(&error).ok_or(error)) {
            Ok(_) | Err(Ok(Errno::INTR | Errno::TIME)) => {}
            Err(Ok(errno)) => return Err(errno.into()),
            Err(Err(error)) => return Err(error),
        }
    }
}

fn answer(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::from_raw_os_error(result.saturating_neg())) } else { Ok(()) }
}
