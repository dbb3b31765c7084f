//! Feeding the kernel's random number generator with entropy from the host.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Most bytes taken in one call: the kernel's generator has a key of 32 bytes, more adds nothing.
const MAX_ENTROPY_BYTES: usize = 512;

/// Why the generator was not fed.
#[derive(Debug, thiserror::Error)]
pub enum RandomPoolError {
    /// Nothing, or far too much, was given.
    #[error("entropy must be 1 to {MAX_ENTROPY_BYTES} bytes, got {0}")]
    Size(usize),
    /// The kernel refused; the process needs `CAP_SYS_ADMIN`.
    #[error("cannot {step} the kernel's random number generator")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// `struct rand_pool_info` of `linux/random.h` with room for the bytes.
#[repr(C)]
struct PoolInfo {
    entropy_bits: libc::c_int,
    bytes: libc::c_int,
    buffer: [u8; MAX_ENTROPY_BYTES],
}

struct AddEntropy<'a>(&'a PoolInfo);

// SAFETY: RNDADDENTROPY reads a `rand_pool_info` (`_IOW('R', 0x03, int[2])`) and writes nothing back; `as_ptr` points
// to a whole `PoolInfo` whose `bytes` never exceeds its buffer.
unsafe impl rustix::ioctl::Ioctl for AddEntropy<'_> {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> rustix::ioctl::Opcode {
        rustix::ioctl::opcode::write::<[libc::c_int; 2]>(b'R', 0x03)
    }
    fn as_ptr(&mut self) -> *mut libc::c_void {
        std::ptr::from_ref(self.0).cast_mut().cast()
    }
    unsafe fn output_from_ptr(_: rustix::ioctl::IoctlOutput, _: *mut libc::c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Credits `entropy` to the kernel's random number generator and makes it draw a new key from it at once, so that
/// nothing read afterwards can be derived from the state before.
///
/// # Errors
/// When `entropy` is empty or longer than 512 bytes, or the kernel refuses.
pub fn feed_random_pool(entropy: &[u8]) -> Result<(), RandomPoolError> {
    let mut info = PoolInfo { entropy_bits: 0, bytes: 0, buffer: [0; MAX_ENTROPY_BYTES] };
    if entropy.is_empty() || entropy.len() > MAX_ENTROPY_BYTES {
        return Err(RandomPoolError::Size(entropy.len()));
    }
    info.buffer[..entropy.len()].copy_from_slice(entropy);
    info.bytes = entropy.len() as libc::c_int;
    info.entropy_bits = info.bytes * 8;
    let device = File::open("/dev/random")
        .map_err(|source| RandomPoolError::Kernel { step: "open the device of", source })?;
    let failed =
        |step| move |error: rustix::io::Errno| RandomPoolError::Kernel { step, source: error.into() };
    // SAFETY: `AddEntropy` describes this request of the random device exactly.
    unsafe { rustix::ioctl::ioctl(device.as_fd(), AddEntropy(&info)) }.map_err(failed("add entropy to"))?;
    // SAFETY: RNDRESEEDCRNG (`_IO('R', 0x07)`) takes no argument.
    let reseed = unsafe { rustix::ioctl::NoArg::<{ rustix::ioctl::opcode::none(b'R', 0x07) }>::new() };
    // SAFETY: as above.
    unsafe { rustix::ioctl::ioctl(device.as_fd(), reseed) }.map_err(failed("reseed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entropy_is_taken_and_bad_sizes_are_refused() {
        assert!(matches!(feed_random_pool(&[]), Err(RandomPoolError::Size(0))));
        assert!(matches!(feed_random_pool(&[0; 513]), Err(RandomPoolError::Size(513))));
        match feed_random_pool(&[7; 64]) {
            Ok(()) => {}
            Err(RandomPoolError::Kernel { source, .. }) => {
                assert_eq!(
                    source.kind(),
                    io::ErrorKind::PermissionDenied,
                    "only lack of privilege may stop it"
                );
            }
            Err(other) => panic!("{other}"),
        }
    }
}
