//! Makes a restored guest a machine of its own: clock, random pool, hostname, machine id, the files that tell who it is.
//!
//! Runs before any process of a user does. Kernel state that must differ between siblings (random pool, clock, hostname)
//! is a condition: its failure is an error. Files are best effort, as an image may be read-only or full: a failure is
//! logged and the guest works on. Files of `/etc` are overwritten in place: truncating one makes ext4 write it out.

use aenv_protocol::envd::Identity;
use aenv_sys::guest::{RandomPoolError, feed_random_pool};
use base64::Engine as _;
use rustix::time::{ClockId, Timespec};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// A clock that is behind by more is stepped, in nanoseconds. Source: E2B's daemon.
const MAX_BEHIND: i128 = 50_000_000;
/// A clock that is ahead by more is stepped; a little is forgiven, as time that jumps back confuses programs. E2B's daemon
/// forgives five seconds; ours is to be right within half a second, the way of the greeting included.
const MAX_AHEAD: i128 = 250_000_000;
/// Ends the line of `/etc/hosts` that is ours.
const HOSTS_MARK: &str = "# sandbox";

/// Where the files lie.
#[derive(Debug)]
pub(crate) struct Roots {
    /// Configuration, `/etc`.
    pub(crate) etc: PathBuf,
    /// What tells programs that they run in a sandbox, `/run/e2b`.
    pub(crate) run: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { etc: "/etc".into(), run: "/run/e2b".into() }
    }
}

/// Why the guest cannot take an identity.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IdentityError {
    /// Not base64.
    #[error("entropy is not base64")]
    Entropy(#[from] base64::DecodeError),
    /// The random pool refused.
    #[error("cannot make the random numbers of this guest its own")]
    Random(#[from] RandomPoolError),
    /// The kernel refused.
    #[error("cannot set the {what}")]
    Kernel {
        /// What was to be set.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// What of the kernel's state makes a machine its own.
trait Kernel {
    /// The realtime clock, in nanoseconds since the epoch.
    fn clock(&self) -> i128;
    /// Sets the realtime clock alone: monotonic time goes on where it stood, so that no timer of a program jumps.
    fn set_clock(&mut self, time: jiff::Timestamp) -> io::Result<()>;
    /// Feeds the random pool.
    fn feed(&mut self, entropy: &[u8]) -> Result<(), RandomPoolError>;
    /// Sets the hostname.
    fn set_hostname(&mut self, name: &str) -> io::Result<()>;
}

/// The kernel that runs this process.
struct Own;

impl Kernel for Own {
    fn clock(&self) -> i128 {
        let time = rustix::time::clock_gettime(ClockId::Realtime);
        i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
    }

    fn set_clock(&mut self, time: jiff::Timestamp) -> io::Result<()> {
        let time = Timespec { tv_sec: time.as_second(), tv_nsec: i64::from(time.subsec_nanosecond()) };
        Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
    }

    fn feed(&mut self, entropy: &[u8]) -> Result<(), RandomPoolError> {
        feed_random_pool(entropy)
    }

    fn set_hostname(&mut self, name: &str) -> io::Result<()> {
        Ok(rustix::system::sethostname(name.as_bytes())?)
    }
}

/// Gives the running machine the host's time and the identity.
///
/// # Errors
/// When kernel state cannot be set.
pub(crate) fn apply(
    roots: &Roots,
    identity: Option<&Identity>,
    time: Option<jiff::Timestamp>,
) -> Result<(), IdentityError> {
    set_kernel_state(&mut Own, identity, time)?;
    if let Some(identity) = identity {
        write_files(roots, identity);
    }
    Ok(())
}

/// The clock before anything else: every moment later, a program that went on may read it.
fn set_kernel_state(
    kernel: &mut impl Kernel,
    identity: Option<&Identity>,
    time: Option<jiff::Timestamp>,
) -> Result<(), IdentityError> {
    if let Some(time) = time
        && must_step(kernel.clock(), time.as_nanosecond())
    {
        kernel.set_clock(time).map_err(|source| IdentityError::Kernel { what: "clock", source })?;
    }
    if let Some(identity) = identity {
        kernel.feed(&base64::engine::general_purpose::STANDARD.decode(&identity.entropy)?)?;
        kernel
            .set_hostname(&identity.hostname)
            .map_err(|source| IdentityError::Kernel { what: "hostname", source })?;
    }
    Ok(())
}

fn must_step(own: i128, host: i128) -> bool {
    !(-MAX_BEHIND..=MAX_AHEAD).contains(&(own - host))
}

/// Writes what programs read about the machine they run on.
fn write_files(roots: &Roots, identity: &Identity) {
    let line = |text: &str| format!("{text}\n");
    let files = [
        (roots.etc.join("machine-id"), line(&identity.machine_id)),
        (roots.etc.join("hostname"), line(&identity.hostname)),
        (roots.run.join(".E2B_SANDBOX"), "true".to_owned()),
        (roots.run.join(".E2B_SANDBOX_ID"), identity.sandbox_id.clone()),
        (roots.run.join(".E2B_TEMPLATE_ID"), identity.template_id.clone()),
    ];
    let made = std::fs::create_dir_all(&roots.run);
    let mut results = vec![(roots.run.clone(), made)];
    for (path, content) in files {
        let written = write_in_place(&path, content.as_bytes());
        results.push((path, written));
    }
    let hosts = roots.etc.join("hosts");
    let written =
        read_or_empty(&hosts).and_then(|old| write_in_place(&hosts, &hosts_with(&old, &identity.hostname)));
    results.push((hosts, written));
    for (path, result) in results {
        if let Err(error) = result {
            tracing::warn!(path = %path.display(), %error, "cannot write a file of the guest's identity");
        }
    }
}

fn read_or_empty(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// `/etc/hosts` with the names of the loopback and of this host.
fn hosts_with(old: &[u8], hostname: &str) -> Vec<u8> {
    let mut new = Vec::with_capacity(old.len() + 128);
    let mut has_localhost = false;
    for line in old.split_inclusive(|byte| *byte == b'\n') {
        let text = String::from_utf8_lossy(line);
        if text.trim_end().ends_with(HOSTS_MARK) {
            continue;
        }
        has_localhost |= text.starts_with("127.0.0.1");
        new.extend_from_slice(line);
    }
    if new.last().is_some_and(|byte| *byte != b'\n') {
        new.push(b'\n');
    }
    if !has_localhost {
        new.extend_from_slice(b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    new.extend_from_slice(format!("127.0.1.1\t{hostname} {HOSTS_MARK}\n").as_bytes());
    new
}

/// Replaces the content of a file without truncating it first.
fn write_in_place(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
    file.write_all(content)?;
    let length = content.len() as u64;
    if file.metadata()?.len() != length {
        file.set_len(length)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(hostname: &str) -> Identity {
        Identity {
            sandbox_id: "i1".into(),
            template_id: "base".into(),
            hostname: hostname.into(),
            machine_id: "0123456789abcdef0123456789abcdef".into(),
            entropy: String::new(),
        }
    }

    #[test]
    fn files_tell_the_last_identity_alone() {
        let directory = tempfile::tempdir().expect("makes");
        let roots = Roots { etc: directory.path().join("etc"), run: directory.path().join("run/e2b") };
        std::fs::create_dir(&roots.etc).expect("makes");
        std::fs::write(roots.etc.join("hosts"), "127.0.0.1 localhost\n10.0.0.1 db").expect("writes");
        write_files(&roots, &identity("a-very-long-hostname"));
        write_files(&roots, &identity("short"));
        let read = |path: PathBuf| std::fs::read_to_string(path).expect("reads");
        assert_eq!(read(roots.etc.join("hostname")), "short\n");
        assert_eq!(read(roots.etc.join("machine-id")), "0123456789abcdef0123456789abcdef\n");
        let hosts = read(roots.etc.join("hosts"));
        assert_eq!(hosts, "127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1\tshort # sandbox\n");
        assert_eq!(read(roots.run.join(".E2B_SANDBOX")), "true");
        assert_eq!(read(roots.run.join(".E2B_SANDBOX_ID")), "i1");
    }

    #[test]
    fn an_image_without_hosts_gets_localhost() {
        let hosts = String::from_utf8(hosts_with(b"", "h")).expect("is text");
        assert!(hosts.starts_with("127.0.0.1\tlocalhost\n::1\t"), "{hosts}");
        assert!(hosts.ends_with("127.0.1.1\th # sandbox\n"), "{hosts}");
    }

    #[test]
    fn only_a_clock_that_is_off_is_stepped() {
        let host = 1_000_000_000_000;
        for (own, stepped) in [(host, false), (host - 40_000_000, false), (host - 60_000_000, true)] {
            assert_eq!(must_step(own, host), stepped, "{own}");
        }
        assert!(!must_step(host + 200_000_000, host));
        assert!(must_step(host + 400_000_000, host));
    }

    /// A kernel that only remembers what was asked of it, in order.
    struct Remembering {
        clock: i128,
        done: Vec<String>,
        refuses_entropy: bool,
    }

    impl Kernel for Remembering {
        fn clock(&self) -> i128 {
            self.clock
        }
        fn set_clock(&mut self, time: jiff::Timestamp) -> io::Result<()> {
            self.clock = time.as_nanosecond();
            self.done.push("clock".to_owned());
            Ok(())
        }
        fn feed(&mut self, entropy: &[u8]) -> Result<(), RandomPoolError> {
            if self.refuses_entropy {
                return Err(RandomPoolError::Size(entropy.len()));
            }
            self.done.push(format!("{} random bytes", entropy.len()));
            Ok(())
        }
        fn set_hostname(&mut self, name: &str) -> io::Result<()> {
            self.done.push(name.to_owned());
            Ok(())
        }
    }

    #[test]
    fn after_any_pause_the_clock_is_right_before_anything_else_is_done() {
        const HALF_A_SECOND: i128 = 500_000_000;
        let host: jiff::Timestamp = "2026-11-30T12:00:00.123456789Z".parse().expect("is a time");
        let named = Identity { entropy: "AAAA".to_owned(), ..identity("h") };
        // What the guest's clock shows after it stood still, or was restored where the clock is another one.
        for behind_ms in [-86_400_000, -4_000, -600, -300, 0, 40, 60, 40_000, 60_000, 31_536_000_000_i128] {
            let clock = host.as_nanosecond() - behind_ms * 1_000_000;
            let mut kernel = Remembering { clock, done: Vec::new(), refuses_entropy: false };
            set_kernel_state(&mut kernel, Some(&named), Some(host)).expect("is set");
            assert!((kernel.clock - host.as_nanosecond()).abs() <= HALF_A_SECOND, "{behind_ms}");
            let stepped = !(-250..=50).contains(&behind_ms);
            let expected: &[&str] =
                if stepped { &["clock", "3 random bytes", "h"] } else { &["3 random bytes", "h"] };
            assert_eq!(kernel.done, expected, "{behind_ms}");
            // A guest that keeps its identity gets the time all the same.
            let mut kernel = Remembering { clock, done: Vec::new(), refuses_entropy: false };
            set_kernel_state(&mut kernel, None, Some(host)).expect("is set");
            assert_eq!(kernel.done.len(), usize::from(stepped), "{behind_ms}");
        }
    }

    #[test]
    fn what_fails_later_does_not_keep_the_clock_wrong() {
        let host: jiff::Timestamp = "2026-11-30T12:00:00Z".parse().expect("is a time");
        let mut kernel = Remembering { clock: 0, done: Vec::new(), refuses_entropy: true };
        let named = Identity { entropy: "AAAA".to_owned(), ..identity("h") };
        set_kernel_state(&mut kernel, Some(&named), Some(host)).expect_err("the pool refuses");
        assert_eq!((kernel.clock, kernel.done), (host.as_nanosecond(), vec!["clock".to_owned()]));
    }
}
