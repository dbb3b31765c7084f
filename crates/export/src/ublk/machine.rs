//! What this machine's kernel can do, and which ublk devices it has. Owns nothing.

use crate::ExportError;
use aenv_sys::ublk::{Control, Features};
use sha2::{Digest, Sha256};
use std::io;
use std::path::Path;

/// What every device must do.
pub(super) const FEATURES: Features = Features::USER_RECOVERY
    .and(Features::USER_RECOVERY_REISSUE)
    .and(Features::IOCTL_ENCODING)
    .and(Features::USER_COPY);
/// After which the driver looks whether the server of a request still lives: milliseconds.
const LOOK_AFTER_MS: u32 = 1000;

/// The driver's control device, when it can do all we need.
pub(super) fn usable_control() -> Result<Control, ExportError> {
    let unavailable = |reason: String| ExportError::Unavailable { way: "ublk", reason };
    let control = Control::open().map_err(|error| {
        let advice = match error.kind() {
            io::ErrorKind::NotFound => "load the driver: modprobe ublk_drv (Linux 6.9 or newer)",
            _ => "run as root",
        };
        unavailable(format!("/dev/ublk-control: {error}; {advice}"))
    })?;
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if !at_least(&release, (6, 9)) {
        return Err(unavailable(format!("this is Linux {release}; 6.9 or newer is needed")));
    }
    let features = control.features().map_err(|error| {
        unavailable(format!("the driver does not answer: {error}; see /proc/sys/kernel/io_uring_disabled"))
    })?;
    if !features.contains(FEATURES) {
        return Err(unavailable(format!(
            "the driver has features {:#x}, needed are {:#x}",
            features.0, FEATURES.0
        )));
    }
    Ok(control)
}

/// Whether a kernel's release, like `6.12.1-amd64`, is of that version or a later one. Not, when it cannot be read.
fn at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= wanted,
        _ => false,
    }
}

/// Numbers of all ublk devices of this machine.
pub(super) fn device_numbers() -> io::Result<Vec<u32>> {
    let entries = match std::fs::read_dir(Path::new("/sys/class/ublk-char")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse::<u32>().ok()));
    }
    Ok(numbers)
}

/// Has the driver notice soon that a server has died.
///
/// It notices by the commands that the server left in the kernel. While every request of a device is with the server there
/// is none, and it looks only when the time of a request is up, which is 30 s where nobody says otherwise. So one command
/// always stays in the kernel, and the time is shorter.
///
/// Each setting waits for all requests of the device, so this is for a device that has none that could wait for long: a
/// new one. The settings last as long as the device.
pub(super) fn notice_death_soon(number: u32, depth: u16) -> io::Result<()> {
    let set =
        |name: &str, value: &str| std::fs::write(format!("/sys/block/ublkb{number}/queue/{name}"), value);
    set("io_timeout", &LOOK_AFTER_MS.to_string())?;
    // A scheduler would count requests of its own. There is nothing to gain by one: the storage behind has its own order.
    set("scheduler", "none")?;
    // The kernel makes 4 of anything less.
    if depth > 4 { set("nr_requests", &(depth - 1).to_string()) } else { Ok(()) }
}

/// 32 bits that tell names apart.
pub(super) fn checksum(name: &str) -> u32 {
    let digest = Sha256::digest(name.as_bytes());
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}

pub(super) fn is(error: &io::Error, errno: rustix::io::Errno) -> bool {
    rustix::io::Errno::from_io_error(error) == Some(errno)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert!(
            at_least("6.9.0", (6, 9))
                && at_least("6.12.90+deb13-cloud-amd64", (6, 9))
                && at_least("7.0", (6, 9))
        );
        assert!(!at_least("6.1.0-39-amd64", (6, 9)) && !at_least("5.15", (6, 9)) && !at_least("", (6, 9)));
    }

    #[test]
    fn without_the_driver_it_says_what_to_do() {
        match usable_control() {
            Ok(_) => {}
            Err(ExportError::Unavailable { way, reason }) => {
                assert!(way == "ublk" && reason.len() > 20, "{reason}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
