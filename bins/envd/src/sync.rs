//! `POST /sync`: what programs have written is on the disk of the guest before the answer, and, if that is wished, they stand still
//! from then on until the next greeting. Ours alone; the node asks for it before it stops the guest.
//!
//! ```text
//!  call 1 ─▶ run 1 ───────▶ answer 1
//!  call 2    ─ waits for it ─▶ run 2 ──────▶ answer 2      run 1 began before call 2, so it may have missed what call 2
//!  call 3         ─ waits ────┴─────────────▶ answer 3      wants flushed; one run serves all calls that waited for it
//! ```
//! Owns the runs. One runs at a time, in a thread of its own: a file system that hangs holds that thread, and the calls get
//! their answer all the same.

use crate::daemon::{Daemon, Machine};
use crate::http::Refusal;
use aenv_protocol::envd::SyncRequest;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use bytes::Bytes;
use http::StatusCode;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long a call waits, for an earlier run included.
const LIMIT: Duration = Duration::from_secs(60);
/// The mounts of this process, one a line.
const MOUNTS: &str = "/proc/self/mountinfo";
/// File systems without a disk of their own, and `autofs`, which would mount another one when it is opened.
const WITHOUT_DISK: [&str; 23] = [
    "autofs",
    "bpf",
    "binfmt_misc",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "ramfs",
    "rootfs",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
    "tmpfs",
    "tracefs",
];

/// What came of a run: nothing, or what failed first.
type Outcome = Result<(), Arc<str>>;

/// Runs that flush, one after the other. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Flushes {
    /// Held by the run under way.
    turn: Arc<tokio::sync::Mutex<()>>,
    runs: Arc<Mutex<Runs>>,
}

#[derive(Debug, Default)]
struct Runs {
    begun: u64,
    /// The run that ended last and what came of it.
    ended: Option<(u64, Outcome)>,
}

impl Flushes {
    /// Returns when a run of `flush` that began after this call has ended.
    async fn after_now<F>(&self, flush: F) -> Outcome
    where
        F: FnOnce() -> Outcome + Send + 'static,
    {
        let wanted = self.runs().begun + 1;
        let turn = Arc::clone(&self.turn).lock_owned().await;
        if let Some((number, outcome)) = &self.runs().ended
            && *number >= wanted
        {
            return outcome.clone();
        }
        let runs = Arc::clone(&self.runs);
        let run = tokio::task::spawn_blocking(move || {
            let number = {
                let mut runs = runs.lock().unwrap_or_else(PoisonError::into_inner);
                runs.begun += 1;
                runs.begun
            };
            let outcome = flush();
            runs.lock().unwrap_or_else(PoisonError::into_inner).ended = Some((number, outcome.clone()));
            // Here and not in the caller, who may have given up: the next run must not pile up on this one.
            drop(turn);
            outcome
        });
        run.await.unwrap_or_else(|error| Err(format!("the flush failed: {error}").into()))
    }

    fn runs(&self) -> std::sync::MutexGuard<'_, Runs> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handler of `POST /sync`.
///
/// # Errors
/// 500 when a file system cannot be flushed, 503 when that takes too long.
pub(crate) async fn answer(
    State(daemon): State<Daemon>,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode, Refusal> {
    let body = body.map_err(|rejection| Refusal::new(rejection.status(), rejection.body_text()))?;
    let wish: SyncRequest = match body.is_empty() {
        true => SyncRequest::default(),
        false => serde_json::from_slice(&body)
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, format!("invalid body: {error}")))?,
    };
    let machine = daemon.machine;
    let flush = move || match machine {
        Machine::Guest => flush_all(Path::new(MOUNTS)),
        // Its disks are not ours to flush.
        Machine::Foreign => Ok(()),
    };
    match tokio::time::timeout(LIMIT, daemon.flushes.after_now(flush)).await {
        Ok(Ok(())) => {
            if wish.freeze && machine == Machine::Guest {
                freeze(&daemon).await;
            }
            Ok(StatusCode::NO_CONTENT)
        }
        Ok(Err(reason)) => Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, &*reason)),
        Err(_) => {
            let message = format!("the file systems were not flushed within {LIMIT:?}");
            Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, message))
        }
    }
}

/// Best effort: a kernel without control groups can be captured, too.
async fn freeze(daemon: &Daemon) {
    match daemon.freezer.hold().await {
        Ok(true) => {}
        Ok(false) => tracing::warn!("some programs are busy in the kernel and do not stand still yet"),
        Err(error) => tracing::warn!(%error, "programs cannot be held still"),
    }
}

/// Flushes every file system with a disk, the ones mounted last first: they may lie in files of the earlier ones. All are
/// tried, whatever fails.
fn flush_all(mounts: &Path) -> Outcome {
    let table =
        std::fs::read(mounts).map_err(|error| format!("cannot read {}: {error}", mounts.display()))?;
    let mut failed = None;
    for place in places(&String::from_utf8_lossy(&table)) {
        let opened = rustix::fs::open(
            &place,
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let flushed = match opened {
            Ok(file) => rustix::fs::syncfs(file),
            // A file system of a user in user space may be closed even to root, and one may have just been unmounted.
            Err(error) if place != Path::new("/") => {
                tracing::warn!(place = %place.display(), %error, "cannot open a file system to flush it");
                continue;
            }
            Err(error) => Err(error),
        };
        if let Err(error) = flushed {
            let error = io::Error::from(error);
            tracing::warn!(place = %place.display(), %error, "cannot flush a file system");
            failed.get_or_insert_with(|| format!("cannot flush {}: {error}", place.display()));
        }
    }
    failed.map_or(Ok(()), |reason| Err(reason.into()))
}

/// One place of each writable file system with a disk, the last mounted first and `/` last.
///
/// ```text
/// 36 25 254:16 / /mnt/data rw,noatime shared:1 - ext4 /dev/vdb rw
///         device ┘     └ place    └ options  kind ┘    options ┘
/// ```
fn places(table: &str) -> Vec<PathBuf> {
    let mut devices = std::collections::HashSet::new();
    let mut places: Vec<PathBuf> = Vec::new();
    for line in table.lines() {
        let Some((mount, filesystem)) = line.split_once(" - ") else { continue };
        let mut mount = mount.split(' ');
        let (Some(device), Some(place)) = (mount.nth(2), mount.nth(1)) else { continue };
        let mut filesystem = filesystem.split(' ');
        let (Some(kind), Some(options)) = (filesystem.next(), filesystem.nth(1)) else { continue };
        // A mount may be read-only where its file system is not: what counts is what may hold unwritten data.
        let writable = options.split(',').any(|option| option == "rw");
        if writable && !WITHOUT_DISK.contains(&kind) && devices.insert(device) {
            places.push(PathBuf::from(unescaped(place)));
        }
    }
    places.retain(|place| place != Path::new("/"));
    places.reverse();
    places.push(PathBuf::from("/"));
    places
}

/// The kernel writes space, tab, line end and backslash as three octal digits.
fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let code = after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                rest = &after[3..];
            }
            None => {
                plain.push('\\');
                rest = after;
            }
        }
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn every_writable_file_system_is_flushed_once_the_inner_ones_first() {
        let table = "\
25 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw
26 25 0:5 / /dev rw,nosuid - devtmpfs devtmpfs rw
27 25 0:22 / /proc rw - proc proc rw
28 25 254:16 / /mnt/with\\040space ro - ext4 /dev/vdb rw,errors=remount-ro
29 25 254:32 / /mnt/read-only ro - ext4 /dev/vdc ro
30 25 254:16 /sub /srv rw - ext4 /dev/vdb rw
31 28 7:0 / /mnt/with\\040space/loop rw master:2 propagate_from:3 - ext4 /dev/loop0 rw
32 25 0:40 / /home/user/remote rw - fuse.sshfs host: rw,user_id=1000
33 25 0:41 / /auto rw - autofs systemd-1 rw
34 25 254:0 /etc/hosts /run/hosts rw - ext4 /dev/vda rw
nonsense
";
        let expected =
            ["/home/user/remote", "/mnt/with space/loop", "/mnt/with space", "/"].map(PathBuf::from);
        assert_eq!(places(table), expected);
        assert_eq!(places(""), [PathBuf::from("/")]);
        assert_eq!(unescaped("a\\011b\\134c\\x\\"), "a\tb\\c\\x\\");
    }

    #[test]
    fn a_table_that_cannot_be_read_is_named() {
        let error = flush_all(Path::new("/absent/mountinfo")).expect_err("there is none");
        assert!(error.contains("/absent/mountinfo"), "{error}");
    }

    #[tokio::test]
    async fn calls_share_runs_but_none_gets_one_that_began_before_it() {
        let flushes = Flushes::default();
        let count = Arc::new(AtomicUsize::new(0));
        let (let_go, held) = mpsc::channel::<()>();
        let (has_begun, begun) = tokio::sync::oneshot::channel();
        let counter = Arc::clone(&count);
        let first = tokio::spawn({
            let flushes = flushes.clone();
            async move {
                flushes
                    .after_now(move || {
                        counter.fetch_add(1, Ordering::SeqCst);
                        has_begun.send(()).expect("is awaited");
                        held.recv().map_err(|error| error.to_string().into())
                    })
                    .await
            }
        });
        begun.await.expect("begins");
        let late: Vec<_> = (0..5)
            .map(|_| {
                let (flushes, counter) = (flushes.clone(), Arc::clone(&count));
                tokio::spawn(async move {
                    flushes
                        .after_now(move || {
                            counter.fetch_add(1, Ordering::SeqCst);
                            Err("the second run".into())
                        })
                        .await
                })
            })
            .collect();
        // All of them ask before the first run ends.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(count.load(Ordering::SeqCst), 1, "runs do not overlap");
        let_go.send(()).expect("is held");
        assert_eq!(first.await.expect("ends"), Ok(()));
        for call in late {
            assert_eq!(call.await.expect("ends"), Err("the second run".into()));
        }
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn a_run_whose_caller_gave_up_still_holds_the_next_one_back() {
        let flushes = Flushes::default();
        let (let_go, held) = mpsc::channel::<()>();
        let given_up = flushes.after_now(move || {
            held.recv().expect("is let go");
            Ok(())
        });
        assert!(tokio::time::timeout(Duration::from_millis(50), given_up).await.is_err());
        let next = flushes.after_now(|| Ok(()));
        let mut next = std::pin::pin!(next);
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut next).await.is_err());
        let_go.send(()).expect("is held");
        assert_eq!(next.await, Ok(()));
    }
}
