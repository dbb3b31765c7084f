//! The process that keeps the FUSE mount: this program again, started by `serve` and outliving it.
//!
//! ```text
//! serve ──starts──▶ hold-fuse: lock taken? ─yes▶ ends: another one is there
//!                        └─no─▶ what is mounted is dead: unmounted ─▶ mounts, lends its descriptors to one serve after another
//! ```
//! Owns `<run>/holder.lock` in the holder, for as long as it lives.

use crate::arguments::HoldOptions;
use crate::directories::Directories;
use aenv_export::ExportError;
use aenv_export::fuse::holder::{HolderOptions, run};
use aenv_sys::process::{Detached, Isolation};
use anyhow::{Context as _, Result};
use rustix::mount::{UnmountFlags, unmount};
use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

/// Threads that a daemon serves the mount with.
const WORKERS: usize = 4;

/// What a holder mounts with.
const DEVICE: &str = "/dev/fuse";

/// Starts a holder, which ends at once when there is one. Panics outside of a tokio runtime.
pub(crate) fn ensure(directories: &Directories) -> Result<(), ExportError> {
    if !Path::new(DEVICE).exists() {
        let reason = format!("there is no {DEVICE}: `modprobe fuse`");
        return Err(ExportError::Unavailable { way: "FUSE", reason });
    }
    let failed = |action: &str| {
        let action = format!("{action} the process that keeps the FUSE mount");
        move |source: io::Error| ExportError::Io { action, source }
    };
    let log = File::options().create(true).append(true).open(directories.holder_log());
    let program = std::env::current_exe().map_err(failed("find the program of"))?;
    let text =
        |path: &Path| path.to_str().map(str::to_owned).ok_or_else(|| io::Error::other("a path is not UTF-8"));
    let socket = text(&directories.holder_socket()).map_err(failed("start"))?;
    let mount_point = text(&directories.mount_point()).map_err(failed("start"))?;
    let args = ["hold-fuse", "--socket", &socket, "--mount-point", &mount_point].map(str::to_owned);
    let started = Detached {
        program: &program,
        arg0: "aenv-stored",
        args: &args,
        directory: Path::new("/"),
        netns: None,
        log: log.map_err(failed("open the log of"))?,
        inherit: &[],
        oom_score_adj: None,
        huge_pages: true,
        cgroup: None,
        isolation: Isolation::default(),
    };
    let process = started.spawn().map_err(failed("start"))?;
    tokio::spawn(async move {
        // Most end at once, and must not stay in the process table until this process ends, too.
        let reaped = match process.exited().await {
            Ok(()) => process.reap().map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = reaped {
            tracing::warn!(%error, "the exit status of a holder cannot be read");
        }
    });
    Ok(())
}

/// Is the holder, until it is told to stop.
pub(crate) fn hold(options: HoldOptions) -> Result<()> {
    let path = options.socket.with_extension("lock");
    let lock = File::options().create(true).truncate(false).write(true).open(&path);
    let lock = lock.with_context(|| format!("cannot open {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => {}
        // The usual case: a daemon starts and its holder is there.
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    clear_mount_point(&options.mount_point)?;
    match std::fs::create_dir(&options.mount_point) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(error).with_context(|| format!("cannot make {}", options.mount_point.display()));
        }
        _ => {}
    }
    run(&HolderOptions { socket: options.socket, mount: options.mount_point, workers: WORKERS })?;
    drop(lock);
    Ok(())
}

/// Unmounts what a holder left that was killed: its files fail for ever. To be called when no holder lives.
pub(crate) fn clear_mount_point(mount_point: &Path) -> Result<()> {
    loop {
        match unmount(mount_point, UnmountFlags::DETACH) {
            Ok(()) => {}
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return Ok(()),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot unmount {}", mount_point.display()));
            }
        }
    }
}
