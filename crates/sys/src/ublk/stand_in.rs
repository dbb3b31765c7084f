//! A server that fetches all requests of a queue and ends, so that the driver has a server that died. Owns nothing.

use super::abi;
use super::ring::CharDevice;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use std::io;

/// Does it, on a thread of its own, which has ended when this returns: the driver takes a recovery that was completed that far
/// for one of a server that died, and lets the next one begin. Closes the device.
///
/// # Errors
/// EINVAL and EBUSY when the driver does not wait for a server to fetch; the system's error.
pub fn fetch_and_end(device: CharDevice, queue: u16, depth: u16) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("ublk-stand-in".to_owned());
    let fetching = thread.spawn(move || fetch(&device, queue, depth))?;
    fetching.join().map_err(|_| io::Error::other("the thread that fetches has panicked"))?
}

fn fetch(device: &CharDevice, queue: u16, depth: u16) -> io::Result<()> {
    let mut ring = IoUring::new(u32::from(depth).next_power_of_two())?;
    for tag in 0..depth {
        let command = abi::io_command(queue, tag, 0);
        let entry = opcode::UringCmd16::new(Fd(device.descriptor()), abi::FETCH).cmd(command).build();
        // SAFETY: the command points to no memory, and the descriptor is open until the ring is dropped.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    }
    while !ring.submission().is_empty() {
        ring.submit()?;
    }
    // What was taken stays under way until the ring is dropped; what was not is answered at once.
    match ring.completion().map(|entry| entry.result()).find(|result| *result < 0) {
        Some(refused) => Err(io::Error::from_raw_os_error(refused.saturating_neg())),
        None => Ok(()),
    }
}
