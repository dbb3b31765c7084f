//! What PID 1 does before it serves. Leaves behind: a root filesystem, kernel filesystems, a network.
//!
//! ```text
//! initramfs: /dev ─▶ /proc /sys ─▶ modules of /modules/order ─▶ wait for /dev/vda ─▶ ext4 at /newroot
//!            ─▶ move /dev /proc /sys over ─▶ remove what the initramfs held ─▶ newroot becomes /
//! root disk: grown to the size that the kernel's arguments tell ─▶ devpts, shm, run, cgroup ─▶ resolv.conf, hosts, /run/e2b ─▶ limits ─▶ lo, eth0, route ─▶ serve
//! ```
//! The process is never replaced: it was loaded from the initramfs and stays. Whatever fails ends the machine with one
//! line on the console that starts with `envd: boot failed:`.

mod growth;
mod modules;
mod mounts;
mod network;

pub(crate) use network::bring_up as bring_up_network;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit};
use std::path::Path;
use std::time::{Duration, Instant};

/// The disk that every guest has.
const ROOT_DISK: &str = "/dev/vda";
/// How long the disk may take to appear.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
/// Name servers of every guest.
const RESOLV_CONF: &str = "nameserver 8.8.8.8\n";
/// Open files: the soft limit is what programs start with, the hard one how far they may raise it.
const OPEN_FILES: (u64, u64) = (65_536, 1_048_576);

/// Makes `/dev` exist, and with it the console for what is logged.
pub(crate) fn prepare_console() {
    // A failure shows at the next step, which needs the same filesystem.
    if let Err(error) = mounts::device_filesystem(Path::new("/dev")) {
        report(&error);
    }
}

/// From the initramfs to the root disk.
///
/// # Errors
/// When there is no root filesystem to be had.
pub(crate) fn enter_root() -> anyhow::Result<()> {
    let started = Instant::now();
    mounts::kernel_filesystems(Path::new("/"))?;
    let loaded = modules::load(Path::new("/modules"))?;
    wait_for(Path::new(ROOT_DISK))?;
    mounts::root_disk(Path::new(ROOT_DISK), Path::new("/newroot"))?;
    mounts::switch_root(Path::new("/newroot"))?;
    growth::grow_root()?;
    mounts::runtime_filesystems();
    write_configuration();
    protect();
    tracing::info!(modules = loaded, elapsed = ?started.elapsed(), "root disk entered");
    Ok(())
}

/// Waits for a device node. The kernel probes devices beside us and tells nobody but by the node.
fn wait_for(device: &Path) -> anyhow::Result<()> {
    let deadline = Instant::now() + DISK_TIMEOUT;
    while !device.exists() {
        anyhow::ensure!(
            Instant::now() < deadline,
            "{} did not appear within {DISK_TIMEOUT:?}: is the disk attached and its module in /modules/order?",
            device.display()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Files without which names do not resolve; an image that brings its own keeps them.
fn write_configuration() {
    let mut results = vec![("/run/e2b", std::fs::create_dir_all("/run/e2b"))];
    results.push(("/etc", std::fs::create_dir_all("/etc")));
    let existing = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    if !names_a_server(&existing) {
        let replaced = match std::fs::remove_file("/etc/resolv.conf") {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => std::fs::write("/etc/resolv.conf", RESOLV_CONF),
        };
        results.push(("/etc/resolv.conf", replaced));
    }
    if std::fs::read_to_string("/etc/hosts").unwrap_or_default().trim().is_empty() {
        let hosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
        results.push(("/etc/hosts", std::fs::write("/etc/hosts", hosts)));
    }
    for (path, result) in results {
        if let Err(error) = result {
            tracing::warn!(path, %error, "cannot write configuration");
        }
    }
}

/// Whether a resolver configuration names a server outside of this machine: a stub that is not running is a placeholder.
fn names_a_server(configuration: &str) -> bool {
    configuration.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("nameserver")
            && words.next().is_some_and(|server| !server.starts_with("127.") && server != "::1")
    })
}

/// Keeps the daemon alive when memory runs out, and gives programs room for files.
fn protect() {
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
        tracing::warn!(%error, "cannot protect the daemon from the lack of memory");
    }
    let (soft, hard) = OPEN_FILES;
    let limit = Rlimit { current: Some(soft), maximum: Some(hard) };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

fn report(error: &anyhow::Error) {
    let line = format!("envd: boot failed: {error:#}\n");
    // The console may be missing; then nobody can be told.
    let _unseen = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
}

/// Says why on the console and powers the machine off.
pub(crate) fn give_up(error: &anyhow::Error) -> ! {
    report(error);
    rustix::fs::sync();
    for command in [rustix::system::RebootCommand::PowerOff, rustix::system::RebootCommand::Restart] {
        if let Err(error) = rustix::system::reboot(command) {
            report(&anyhow::Error::from(error).context("cannot power off"));
        }
    }
    // PID 1 that returns panics the kernel, which ends the machine as well.
    std::process::exit(1)
}

/// `context` of a path.
fn on<T, E>(result: Result<T, E>, doing: &str, path: &Path) -> anyhow::Result<T>
where
    Result<T, E>: anyhow::Context<T, E>,
{
    result.with_context(|| format!("cannot {doing} {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_the_resolver_are_told_from_servers() {
        for placeholder in
            ["", "# nothing\n", "nameserver 127.0.0.53\noptions edns0\n", "nameserver ::1", "nameserver"]
        {
            assert!(!names_a_server(placeholder), "{placeholder:?}");
        }
        assert!(names_a_server("search x\nnameserver  1.1.1.1\n"));
    }
}
