//! Persistent TAP devices: Ethernet interfaces whose other end is a program, here the VMM.
//!
//! Owns nothing: a persistent device lives in its namespace until it is removed or the namespace ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

/// The character device that makes TAP devices.
pub const CONTROL_DEVICE: &str = "/dev/net/tun";

/// Makes the persistent TAP device `name` in the calling thread's network namespace. Frames carry a virtio-net header and
/// no protocol prefix, as VMMs want them. With `owner`, only that user may attach (besides those with `CAP_NET_ADMIN`).
///
/// # Errors
/// `InvalidInput` for a name that is empty or longer than 15 bytes; the system's error otherwise: `NotFound` without
/// [`CONTROL_DEVICE`], `EBUSY` when a process is attached to a device of that name.
pub fn create_persistent(name: &str, owner: Option<u32>) -> io::Result<()> {
    // The name was not taken before, or the device is already persistent: dropping the file keeps it.
    let device = attach(name)?;
    if let Some(owner) = owner {
        control(&device, libc::TUNSETOWNER, libc::c_ulong::from(owner))?;
    }
    control(&device, libc::TUNSETPERSIST, 1)
}

/// Attaches to the TAP device `name` of the calling thread's namespace, which is made when it does not exist. Each read
/// and write on the file is one frame, a virtio-net header first. Without persistence the device ends with the file.
///
/// # Errors
/// As for [`create_persistent`].
pub fn attach(name: &str) -> io::Result<File> {
    attach_opened(OpenOptions::new().read(true).write(true).open(CONTROL_DEVICE)?, name)
}

/// As [`attach`], through a control device that was opened before, possibly under another user.
///
/// # Errors
/// As for [`create_persistent`].
pub fn attach_opened(device: File, name: &str) -> io::Result<File> {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    let flags = libc::c_short::try_from(flags).map_err(io::Error::other)?;
    let mut request = libc::ifreq {
        ifr_name: interface_name(name)?,
        ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags },
    };
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which outlives the call; the descriptor is open.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(device) }
}

fn control(device: &File, request: libc::Ioctl, value: libc::c_ulong) -> io::Result<()> {
    // SAFETY: the TUNSET requests used here take their argument by value; no memory is passed.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), request, value) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn interface_name(name: &str) -> io::Result<[libc::c_char; libc::IFNAMSIZ]> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || !name.is_ascii() {
        let message = format!("{name:?} cannot name a network interface: 1 to 15 ASCII bytes are needed");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let mut field = [0; libc::IFNAMSIZ];
    for (to, from) in field.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    Ok(field)
}

#[cfg(test)]
mod tests {
    use super::{attach, create_persistent};
    use crate::netns::{interface_index, run_in_new};
    use std::io::ErrorKind;

    #[test]
    fn a_persistent_device_outlives_its_file_and_can_be_attached() {
        run_in_new(|| {
            create_persistent("tap0", Some(1000)).unwrap();
            interface_index("tap0").unwrap();
            let attached = attach("tap0").unwrap();
            assert_eq!(attach("tap0").unwrap_err().raw_os_error(), Some(libc::EBUSY));
            drop(attached);
            interface_index("tap0").unwrap();
        })
        .unwrap();
    }

    #[test]
    fn a_device_that_is_not_persistent_ends_with_its_file() {
        run_in_new(|| {
            drop(attach("tap1").unwrap());
            assert_eq!(interface_index("tap1").unwrap_err().kind(), ErrorKind::NotFound);
        })
        .unwrap();
    }

    #[test]
    fn names_the_kernel_would_cut_are_refused() {
        for name in ["", "sixteen-letters-", "täp"] {
            assert_eq!(create_persistent(name, None).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
}
