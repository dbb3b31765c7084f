//! Opens a node: settings checked, data directory taken, templates read, the last process's remains put in order,
//! background work started. Runs once.

use crate::admission::{Admission, Limits};
use crate::data_dir::DataDir;
use crate::disks::{self, Disks};
use crate::garbage;
use crate::giving_way;
use crate::journal::{Journal, MemoryBinding, VmRecord};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::recovery;
use crate::settings::{Parts, Settings, StartError};
use crate::snapshot::{self, Snapshots};
use crate::source::Source;
use crate::stage::timed;
use crate::standby::{self, Targets};
use crate::table::SandboxTable;
use crate::template::{self, Capture, Progress, Template};
use crate::view::Collected;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pauses between attempts at a template's capture: a boot makes an emulating host busy for long.
const CAPTURE_PAUSES: GrowingPause = GrowingPause::new(Duration::from_secs(2), Duration::from_secs(600));

/// Starts a node.
pub(crate) async fn start(settings: Settings, parts: Parts) -> Result<Arc<Node>, StartError> {
    check(&settings)?;
    let root = settings.data_dir.clone();
    let (dir, lock) = blocking(move || {
        let dir = DataDir::open(&root)?;
        let lock = dir.lock()?;
        dir.check_holes()?;
        Ok((dir, lock))
    })
    .await?;
    let disks = disks::open(&settings.disks, &dir);
    disks.check().await?;
    let journal = Journal::open(&dir.journal(), lock, parts.journal.clone()).await?;
    let result = assemble(settings, parts, dir, disks, journal.clone()).await;
    if result.is_err() {
        // Frees the directory before the error is seen.
        journal.close().await;
    }
    result
}

async fn assemble(
    settings: Settings,
    parts: Parts,
    dir: DataDir,
    disks: Arc<dyn Disks>,
    journal: Journal,
) -> Result<Arc<Node>, StartError> {
    let binding = digest(&settings, &parts).await?;
    let templates = read_templates(&settings, &binding, &dir, disks.as_ref()).await?;
    let unreadable = |error: crate::journal::JournalError| StartError::Journal {
        path: dir.journal(),
        reason: error.to_string(),
    };
    let records = journal.all().await.map_err(unreadable)?;
    let snapshots = journal.snapshots().await.map_err(unreadable)?;
    let last_boot = journal.replace_boot_id(&settings.host_boot_id).await.map_err(unreadable)?;
    let rebooted = last_boot.is_some_and(|boot| boot != settings.host_boot_id);
    let node = Arc::new(Node {
        admission: Admission::new(limits(&settings), settings.deadlines.queue, settings.min_free_bytes),
        settings,
        parts,
        dir,
        disks,
        journal,
        table: SandboxTable::default(),
        snapshots: Snapshots::new(snapshots),
        templates,
        binding,
        stopping: CancellationToken::new(),
        draining: CancellationToken::new(),
        tasks: TaskTracker::new(),
        lifecycles: AtomicU64::new(1),
    });
    remove_stale_captures(&node, &records).await?;
    forget_captures_without_disk(&node).await?;
    if let Err(error) = recovery::recover(&node, records, rebooted).await {
        node.stopping.cancel();
        return Err(error);
    }
    snapshot::settle(&node);
    collect(&node).await;
    node.tasks.spawn(giving_way::watch(Arc::clone(&node)));
    for template in &node.templates {
        node.tasks.spawn(make_ready(Arc::clone(&node), Arc::clone(template)));
    }
    Ok(node)
}

fn limits(settings: &Settings) -> Limits {
    Limits {
        places: settings.max_starting,
        bytes: settings.memory_limit_bytes,
        waiting: settings.max_waiting,
    }
}

/// Gives a template its capture, however many attempts that takes, then its standbys.
async fn make_ready(node: Arc<Node>, template: Arc<Template>) {
    let mut pauses = CAPTURE_PAUSES;
    loop {
        if let Progress::Ready(capture) = template.progress() {
            let until = node.stopping.clone();
            return standby::keep_filled(node, Source::Template { template, capture }, until).await;
        }
        template::prepare(&node, &template).await;
        if let Progress::Failed(_) = template.progress() {
            let pause = pauses.take();
            tracing::info!(template = %template.file.name, again_in = ?pause, "the template's capture will be tried again");
            if node.stopping.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }
}

fn check(settings: &Settings) -> Result<(), StartError> {
    let bad = |name, reason: &str| Err(StartError::Setting { name, reason: reason.to_owned() });
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if !(1..=4).contains(&settings.instance.len()) || !settings.instance.bytes().all(allowed) {
        return bad("instance", "must be 1 to 4 characters of a-z and 0-9");
    }
    if settings.max_starting == 0 {
        return bad("max_starting", "must be at least 1, or no sandbox can ever start");
    }
    if settings.memory_limit_bytes == 0 {
        return bad("memory_limit_bytes", "must not be 0, or no sandbox can ever start");
    }
    Ok(())
}

fn unusable(action: &'static str, path: &Path, error: &std::io::Error) -> StartError {
    StartError::DataDir { action, path: path.to_owned(), reason: error.to_string() }
}

/// What memory is made with on this node.
async fn digest(settings: &Settings, parts: &Parts) -> Result<MemoryBinding, StartError> {
    let (guest, vmm) = (settings.guest.clone(), parts.vmm.identity().clone());
    let sha256 = |path: &Path| template::sha256(path).map_err(|error| unusable("read", path, &error));
    blocking(move || {
        let (kernel_sha256, initramfs_sha256) = (sha256(&guest.kernel)?, sha256(&guest.initramfs)?);
        Ok(MemoryBinding { vmm, kernel_sha256, initramfs_sha256 })
    })
    .await
}

async fn read_templates(
    settings: &Settings,
    binding: &MemoryBinding,
    dir: &DataDir,
    disks: &dyn Disks,
) -> Result<Vec<Arc<Template>>, StartError> {
    let (dir, binding) = (dir.clone(), binding.clone());
    let (disks, form) = (disks.kind(), disks.image_form());
    let standbys = Targets { hot: settings.standbys, warm: settings.warm };
    blocking(move || {
        let MemoryBinding { vmm, kernel_sha256, initramfs_sha256 } = &binding;
        let fail = |action, path: &Path, error: std::io::Error| unusable(action, path, &error);
        let files = template::read_all(&dir).map_err(|error| fail("read", &dir.templates(), error))?;
        let mut templates = Vec::new();
        for file in files {
            let path = dir.template(&file.id);
            let key = template::capture_key(&file, vmm, disks, kernel_sha256, initramfs_sha256)
                .map_err(|error| fail("describe", &path, error))?;
            let image = template::find_image(&dir, &file, form)
                .map_err(|error| fail("read", &dir.image(&file.rootfs_sha256), error))?;
            let capture = Capture::find(dir.root(), &path, &key)
                .map_err(|error| fail("read a capture of", &path, error))?;
            let template = Template::new(file, path, image, key, standbys);
            template.measure();
            if let Some(capture) = capture {
                template.set_progress(Progress::Ready(Arc::new(capture)));
            }
            templates.push(Arc::new(template));
        }
        Ok(templates)
    })
    .await
}

/// Keys of captures that VMs map, or that saves and snapshots lie on.
fn captures_in_use(records: &[VmRecord], snapshots: &Snapshots) -> BTreeSet<String> {
    let mut used: BTreeSet<String> = records.iter().filter_map(|record| record.capture_key.clone()).collect();
    let saved = records.iter().flat_map(|record| record.saves.images(&record.present).cloned());
    let kept = snapshots
        .all()
        .into_iter()
        .filter_map(|snapshot| snapshot.read(|record| record.parts.as_ref()?.memory.as_ref()?.image.clone()));
    used.extend(saved.chain(kept).filter_map(|memory| template::key_of_memory(&memory)));
    used
}

/// Removes captures that can never be restored again and that no VM of the journal maps.
async fn remove_stale_captures(node: &Arc<Node>, records: &[VmRecord]) -> Result<(), StartError> {
    let used = captures_in_use(records, &node.snapshots);
    let templates = node.templates.clone();
    blocking(move || {
        for template in templates {
            let removed =
                template::remove_stale_captures(&template.dir, &template.key, &used).map_err(|error| {
                    StartError::DataDir {
                        action: "remove an old capture of",
                        path: template.dir.clone(),
                        reason: error.to_string(),
                    }
                })?;
            if !removed.is_empty() {
                tracing::info!(template = %template.file.name, captures = ?removed, "removed old captures");
            }
        }
        Ok(())
    })
    .await
}

/// Lets a template's capture be made anew when the store of disks has lost its disk, or never had it.
async fn forget_captures_without_disk(node: &Node) -> Result<(), StartError> {
    for template in &node.templates {
        if let Progress::Ready(_) = template.progress() {
            let name = template.capture_name();
            let known = timed(node.settings.deadlines.step, node.disks.knows(&name)).await.0;
            if !known.map_err(|error| StartError::Disks(error.to_string()))? {
                tracing::warn!(template = %template.file.name, "the disk of the template's capture is gone; capturing it anew");
                template.set_progress(Progress::Preparing);
            }
        }
    }
    Ok(())
}

/// Removes what the store of disks holds for captures and templates that are gone.
async fn collect(node: &Arc<Node>) {
    match garbage::collect(node).await {
        Ok(removed) if removed == Collected::default() => {}
        Ok(removed) => tracing::info!(?removed, "removed disks of captures and templates that are gone"),
        // They only take room; the next start tries again.
        Err(failure) => {
            tracing::warn!(%failure, "disks of captures and templates that are gone could not be removed");
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(StartError::Recovery {
            context: "opening the data directory".to_owned(),
            reason: error.to_string(),
        })
    })
}
