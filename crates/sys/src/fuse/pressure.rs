//! What lets a server of files and disks go on working while the machine is short of memory.
//!
//! Owns nothing. Each step may be forbidden, in a container for example; the caller decides what this means.

use std::io;

/// `PR_SET_IO_FLUSHER` of `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Tells the kernel that this thread serves I/O: its allocations never wait for files or disks to be written, which could
/// wait for this thread. Threads that it starts afterwards inherit it.
///
/// # Errors
/// `PermissionDenied` without `CAP_SYS_RESOURCE`.
pub fn become_io_flusher() -> io::Result<()> {
    // SAFETY: takes numbers only.
    let done = unsafe {
        libc::prctl(
            PR_SET_IO_FLUSHER,
            1 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
            0 as libc::c_ulong,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sets the preference of the host's OOM killer for this process: -1000 (never) to 1000 (first).
///
/// # Errors
/// `PermissionDenied` when lowered without `CAP_SYS_RESOURCE`.
pub fn set_oom_score(score: i16) -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", score.to_string())
}
