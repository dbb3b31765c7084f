//! Holds every program of the guest still, from the flush before the node stops the guest until the next greeting.
//!
//! ```text
//! POST /sync {freeze} ─▶ flushed ─▶ frozen ═══ stopped, captured, gone on, or restored as another sandbox ═══ POST /init ─▶ thawed
//!                                       └ no greeting for a while: thawed all the same
//! ```
//! So no program runs between a restore and the moment when clock, random numbers and identity are those of the new sandbox. All
//! programs are in control groups below the root of the hierarchy, as they are started in one; this daemon is in the root itself
//! and goes on. The kernel's freezer is not seen by programs, as signals would be.
//!
//! Owns the freeze flags of the groups.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Where the hierarchy of control groups is mounted.
pub(crate) const HIERARCHY: &str = "/sys/fs/cgroup";
/// Group of the programs that are started here.
pub(crate) const PROGRAMS: &str = "/sys/fs/cgroup/programs";
/// How long it is waited for programs that are in the middle of something in the kernel. They stop when they leave it.
const LIMIT: Duration = Duration::from_millis(200);
/// Between two looks at a group that is not frozen yet.
const LOOK: Duration = Duration::from_millis(1);
/// How long programs are held when no greeting comes: the node may have been killed.
const LEASE: Duration = Duration::from_secs(30);

/// The freezer of this guest. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Freezer {
    hierarchy: Arc<Path>,
    /// Odd while programs are held.
    turns: Arc<AtomicU64>,
    /// Held while flags are written: a greeting that comes in the middle of a freeze comes after all of it.
    writing: Arc<Mutex<()>>,
    /// How long they are held when no greeting comes.
    lease: Duration,
}

impl Default for Freezer {
    fn default() -> Self {
        Self {
            hierarchy: Path::new(HIERARCHY).into(),
            turns: Arc::default(),
            writing: Arc::default(),
            lease: LEASE,
        }
    }
}

impl Freezer {
    /// Holds all programs; tells whether all of them stand still by now. Blocks. They go on by themselves after a while.
    ///
    /// # Errors
    /// When the kernel has no control groups: no program is held then.
    pub(crate) fn freeze(&self) -> io::Result<bool> {
        let groups = self.groups()?;
        let written: io::Result<()> = {
            let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            self.turns.fetch_or(1, Ordering::SeqCst);
            groups.iter().try_for_each(|group| set(group, true))
        };
        if let Err(error) = written {
            self.thaw();
            return Err(error);
        }
        let deadline = Instant::now() + LIMIT;
        loop {
            if groups.iter().all(|group| is_frozen(group)) {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// As [`Self::freeze`], without blocking. That they go on by themselves does not depend on the caller, who may go away meanwhile.
    ///
    /// # Errors
    /// As of [`Self::freeze`].
    pub(crate) async fn hold(&self) -> io::Result<bool> {
        let freezer = self.clone();
        let held = tokio::spawn(async move {
            let blocking = freezer.clone();
            let frozen = tokio::task::spawn_blocking(move || blocking.freeze()).await;
            freezer.thaw_later();
            frozen
        });
        match held.await {
            Ok(Ok(frozen)) => frozen,
            Ok(Err(error)) | Err(error) => Err(io::Error::other(error)),
        }
    }

    /// Lets all programs go on, if they are held. What cannot be thawed is logged: there is nobody to tell.
    pub(crate) fn thaw(&self) {
        let _alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = self.turns.load(Ordering::SeqCst);
        if turn & 1 == 0
            || self.turns.compare_exchange(turn, turn + 1, Ordering::SeqCst, Ordering::SeqCst).is_err()
        {
            return;
        }
        match self.groups() {
            Ok(groups) => {
                for group in groups {
                    if let Err(error) = set(&group, false) {
                        tracing::error!(group = %group.display(), %error, "cannot let programs go on");
                    }
                }
            }
            Err(error) => tracing::error!(%error, "cannot let programs go on"),
        }
    }

    /// Lets programs go on by themselves when nobody does so in time.
    fn thaw_later(&self) {
        let (freezer, turn) = (self.clone(), self.turns.load(Ordering::SeqCst));
        tokio::spawn(async move {
            tokio::time::sleep(freezer.lease).await;
            if freezer.turns.load(Ordering::SeqCst) == turn && turn & 1 == 1 {
                tracing::warn!(lease = ?freezer.lease, "programs were held and nobody came; they go on");
                freezer.thaw();
            }
        });
    }

    /// The groups right below the root: what is below of them is frozen with them.
    fn groups(&self) -> io::Result<Vec<PathBuf>> {
        let mut groups = Vec::new();
        for entry in std::fs::read_dir(&*self.hierarchy)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                groups.push(entry.path());
            }
        }
        Ok(groups)
    }
}

/// A group that was removed meanwhile holds nobody.
fn set(group: &Path, frozen: bool) -> io::Result<()> {
    match std::fs::write(group.join("cgroup.freeze"), if frozen { "1" } else { "0" }) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_frozen(group: &Path) -> bool {
    match std::fs::read_to_string(group.join("cgroup.events")) {
        Ok(events) => events.lines().any(|line| line == "frozen 1"),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files as the kernel has them; `frozen` is what the group says of itself.
    fn hierarchy(frozen: &str) -> (tempfile::TempDir, Freezer) {
        let directory = tempfile::tempdir().expect("makes");
        for group in ["programs", "docker"] {
            let path = directory.path().join(group);
            std::fs::create_dir(&path).expect("makes");
            std::fs::write(path.join("cgroup.freeze"), "0").expect("writes");
            std::fs::write(path.join("cgroup.events"), format!("populated 1\nfrozen {frozen}\n"))
                .expect("writes");
        }
        std::fs::write(directory.path().join("cgroup.procs"), "1\n").expect("writes");
        let freezer = Freezer {
            hierarchy: directory.path().into(),
            turns: Arc::default(),
            writing: Arc::default(),
            lease: Duration::from_millis(400),
        };
        (directory, freezer)
    }

    fn flags(directory: &tempfile::TempDir) -> [String; 2] {
        ["programs", "docker"].map(|group| {
            std::fs::read_to_string(directory.path().join(group).join("cgroup.freeze")).expect("reads")
        })
    }

    #[test]
    fn all_groups_are_held_and_let_go() {
        let (directory, freezer) = hierarchy("1");
        assert!(freezer.freeze().expect("freezes"));
        assert_eq!(flags(&directory), ["1", "1"]);
        freezer.thaw();
        assert_eq!(flags(&directory), ["0", "0"]);
        // What nobody holds is not touched.
        std::fs::write(directory.path().join("docker/cgroup.freeze"), "1").expect("writes");
        freezer.thaw();
        assert_eq!(flags(&directory), ["0", "1"]);
    }

    #[test]
    fn programs_that_do_not_stop_are_not_waited_for_for_ever() {
        let (directory, freezer) = hierarchy("0");
        assert!(!freezer.freeze().expect("freezes"));
        assert_eq!(flags(&directory), ["1", "1"], "they stop when they can");
        freezer.thaw();
        assert_eq!(flags(&directory), ["0", "0"]);
    }

    #[test]
    fn without_control_groups_it_is_an_error() {
        let freezer = Freezer { hierarchy: Path::new("/nowhere").into(), ..Freezer::default() };
        freezer.freeze().expect_err("there are none");
    }

    async fn wait_until_thawed(directory: &tempfile::TempDir) {
        let begin = Instant::now();
        while flags(directory) != ["0", "0"] {
            assert!(begin.elapsed() < Duration::from_secs(20), "they are held for ever");
            tokio::time::sleep(LOOK).await;
        }
    }

    #[tokio::test]
    async fn what_nobody_greets_goes_on() {
        let (directory, freezer) = hierarchy("1");
        assert!(freezer.freeze().expect("freezes"));
        freezer.thaw_later();
        assert_eq!(flags(&directory), ["1", "1"]);
        wait_until_thawed(&directory).await;
    }

    #[tokio::test]
    async fn what_a_caller_held_who_went_away_goes_on() {
        // They do not stop at once: the caller goes away in the middle.
        let (directory, freezer) = hierarchy("0");
        assert!(tokio::time::timeout(LOOK, freezer.hold()).await.is_err());
        let begin = Instant::now();
        while freezer.turns.load(Ordering::SeqCst) < 2 {
            assert!(begin.elapsed() < Duration::from_secs(20), "they are held for ever");
            tokio::time::sleep(LOOK).await;
        }
        wait_until_thawed(&directory).await;
    }

    #[tokio::test]
    async fn a_later_freeze_has_its_own_time() {
        let (directory, freezer) = hierarchy("1");
        let begin = Instant::now();
        freezer.freeze().expect("freezes");
        freezer.thaw_later();
        freezer.thaw();
        tokio::time::sleep(freezer.lease / 2).await;
        freezer.freeze().expect("freezes");
        freezer.thaw_later();
        wait_until_thawed(&directory).await;
        assert!(begin.elapsed() >= freezer.lease * 3 / 2, "the first one's end is not the second one's");
    }
}
