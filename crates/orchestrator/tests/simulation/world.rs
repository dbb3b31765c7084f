//! A node on a fake host, for tests that look at it from outside.

use aenv_orchestrator::{
    CreateRequest, Deadlines, DiskCopies, DiskSettings, Durability, GuestArtifacts, HostMemory, OnTimeout,
    Orchestrator, Parts, Settings, StartError, TemplateState, import_template,
};
use aenv_protocol::ids::SandboxId;
use aenv_testkit::{Counts, FakeHost, FakeSlots, FakeStore, FakeVmm};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Patience for things that must happen.
pub(crate) const SOON: Duration = Duration::from_secs(20);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);
pub(crate) const NOTHING: Counts = Counts { vms: 0, slots: 0 };

/// A data directory with the template `base`, on a host of its own.
pub(crate) struct World {
    pub(crate) host: Arc<FakeHost>,
    /// Of the data directory, when that is a small one.
    _mounted: Option<Mounted>,
    directory: tempfile::TempDir,
    /// Whether its VMMs keep a log of writes.
    pub(crate) keeps_log: bool,
    /// None where disks are files of the data directory.
    pub(crate) store: Option<Arc<FakeStore>>,
}

/// A file system of few bytes, unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn new(path: PathBuf, bytes: u64) -> Self {
        std::fs::create_dir(&path).unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"]).arg(&path);
        assert!(mount.status().unwrap().success());
        Self(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status().unwrap();
        assert!(unmounted.success() || std::thread::panicking());
    }
}

impl World {
    pub(crate) fn new() -> Self {
        Self::on(None)
    }

    /// As [`Self::prepared`], with a data directory of so many bytes.
    pub(crate) async fn prepared_small(bytes: u64) -> Self {
        let world = Self::on(Some(bytes));
        world.start(0).await.shutdown().await;
        world
    }

    fn on(bytes: Option<u64>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mounted = bytes.map(|bytes| Mounted::new(directory.path().join("data"), bytes));
        let world =
            Self { host: FakeHost::new(), _mounted: mounted, directory, keeps_log: false, store: None };
        for (file, content) in [("kernel", "k"), ("initramfs", "i"), ("rootfs", "r")] {
            std::fs::write(world.path(file), content).unwrap();
        }
        import_template(&world.path("data"), "base", 2, 512, None, &world.path("rootfs")).unwrap();
        world
    }

    /// As [`Self::new`], with the capture of `base` made.
    pub(crate) async fn prepared() -> Self {
        let world = Self::new();
        world.start(0).await.shutdown().await;
        world
    }

    /// As [`Self::prepared`], with VMMs that keep a log of writes, or not.
    pub(crate) async fn prepared_with(keeps_log: bool) -> Self {
        Self { keeps_log, ..Self::prepared().await }
    }

    /// As [`Self::prepared_with`], with disks of a block service.
    pub(crate) async fn with_store(keeps_log: bool) -> Self {
        let world = Self::new();
        let store = FakeStore::start(&world.host, world.directory.path());
        let world = Self { keeps_log, store: Some(store), ..world };
        world.start(0).await.shutdown().await;
        world
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn settings(&self, standbys: usize) -> Settings {
        let guest = GuestArtifacts { kernel: self.path("kernel"), initramfs: self.path("initramfs") };
        Settings {
            standbys,
            warm: 0,
            min_free_bytes: 1,
            disks: match &self.store {
                None => DiskSettings::Reflink(DiskCopies::FullCopyAllowed),
                Some(store) => DiskSettings::Service(Box::new(store.client())),
            },
            deadlines: Deadlines { settle: Duration::ZERO, ..Deadlines::default() },
            ..Settings::new("t", self.path("data"), guest, "this boot".to_owned())
        }
    }

    pub(crate) fn parts(&self) -> Parts {
        let vmm = FakeVmm::new(Arc::clone(&self.host));
        Parts {
            vmm: Arc::new(if self.keeps_log { vmm.keeping_log() } else { vmm }),
            slots: Arc::new(FakeSlots::new(Arc::clone(&self.host))),
            journal: Some(self.host.journal_watch()),
            memory: Arc::clone(&self.host) as Arc<dyn HostMemory>,
        }
    }

    /// A node whose template is ready and whose pool is full.
    pub(crate) async fn start(&self, standbys: usize) -> Orchestrator {
        self.start_with(self.settings(standbys)).await.unwrap()
    }

    /// As [`Self::start`], with warm standbys too.
    pub(crate) async fn start_warm(&self, standbys: usize, warm: usize) -> Orchestrator {
        self.start_with(Settings { warm, ..self.settings(standbys) }).await.unwrap()
    }

    pub(crate) async fn start_with(&self, settings: Settings) -> Result<Orchestrator, StartError> {
        let (standbys, warm) = (settings.standbys, settings.warm);
        let node = self.open(settings).await?;
        eventually("the template is ready", || {
            node.templates().iter().all(|template| {
                template.state == TemplateState::Ready
                    && (template.standbys, template.warm) == (standbys, warm)
            })
        })
        .await;
        Ok(node)
    }

    /// Starts a node; waits for the lock of one that has just been dropped.
    pub(crate) async fn open(&self, settings: Settings) -> Result<Orchestrator, StartError> {
        let begin = Instant::now();
        loop {
            match Orchestrator::start(settings.clone(), self.parts()).await {
                Err(StartError::InUse(_)) if begin.elapsed() < SOON => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                other => return other,
            }
        }
    }

    pub(crate) fn sandbox_dirs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("data/sandboxes")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    pub(crate) fn snapshot_dirs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("data/snapshots")).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// How many VMs the journal knows. No node has it open.
    pub(crate) fn rows(&self) -> i64 {
        let journal = rusqlite::Connection::open(self.path("data/journal.sqlite")).unwrap();
        journal.query_row("SELECT COUNT(*) FROM vm", [], |row| row.get(0)).unwrap()
    }

    /// Numbers of the saves of a sandbox of which there are files.
    pub(crate) fn saves(&self, id: &SandboxId) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(self.path(&format!("data/sandboxes/{id}/captures"))) else {
            return Vec::new();
        };
        let mut numbers: Vec<u64> =
            entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Waits until nothing is left to be done for the last save of a sandbox.
    pub(crate) async fn settled(&self, node: &Orchestrator, id: &SandboxId) {
        eventually("the saved state is durable and nothing is left to do", || {
            let saved = node.get(id).unwrap().saved.expect("it was saved");
            saved.durability == Durability::Local && saved.pending.is_none()
        })
        .await;
    }

    /// What is stored for sandboxes that the node has forgotten, standbys included; to be looked at when there is none.
    pub(crate) fn stored_leftovers(&self) -> Vec<String> {
        let mut left = self.store.as_ref().map(|store| store.of_vms()).unwrap_or_default();
        let layers = std::fs::read_dir(self.path("data/storage/layers")).unwrap();
        let names = layers.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        left.extend(names.filter(|name| name.starts_with("memory-") || name.starts_with('.')));
        left
    }

    pub(crate) fn vm_name(id: &SandboxId) -> String {
        format!("t-{id}")
    }

    /// Nothing of any VM is left, but for `vms` of them.
    pub(crate) async fn only(&self, vms: usize) {
        let wanted = Counts { vms, slots: vms };
        let begin = Instant::now();
        loop {
            let (counts, directories) = (self.host.counts(), self.sandbox_dirs());
            if counts == wanted && directories.len() == vms {
                return;
            }
            assert!(begin.elapsed() < SOON, "not only {vms} VMs are left: {counts:?}, {directories:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

pub(crate) fn request() -> CreateRequest {
    CreateRequest {
        template: "base".to_owned(),
        timeout: Duration::from_secs(300),
        metadata: BTreeMap::from([("run".to_owned(), "7".to_owned())]),
        env_vars: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
        secure: true,
        internet_access: true,
        on_timeout: OnTimeout::Kill,
        auto_resume: false,
    }
}

pub(crate) async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < SOON, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
