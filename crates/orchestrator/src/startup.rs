//! Opens a node: settings checked, data directory taken, templates read, the last process's remains put in order,
//! background work started. Runs once.

use crate::admission::Admission;
use crate::data_dir::DataDir;
use crate::disk::clone_blocking;
use crate::journal::{Journal, VmRecord};
use crate::node::Node;
use crate::pause::GrowingPause;
use crate::recovery;
use crate::settings::{DiskCopies, Parts, Settings, StartError};
use crate::standby::{self, Targets};
use crate::table::SandboxTable;
use crate::template::{self, Capture, Progress, Template};
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
    let copies = settings.disk_copies;
    let (dir, lock) = blocking(move || {
        let dir = DataDir::open(&root)?;
        let lock = dir.lock()?;
        check_reflink(&dir, copies)?;
        Ok((dir, lock))
    })
    .await?;
    let journal = Journal::open(&dir.journal(), lock).await?;
    let result = assemble(settings, parts, dir, journal.clone()).await;
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
    journal: Journal,
) -> Result<Arc<Node>, StartError> {
    let templates = read_templates(&settings, &parts, &dir).await?;
    let unreadable = |error: crate::journal::JournalError| StartError::Journal {
        path: dir.journal(),
        reason: error.to_string(),
    };
    let records = journal.all().await.map_err(unreadable)?;
    let last_boot = journal.replace_boot_id(&settings.host_boot_id).await.map_err(unreadable)?;
    let rebooted = last_boot.is_some_and(|boot| boot != settings.host_boot_id);
    let node = Arc::new(Node {
        admission: Admission::new(settings.max_starting, settings.deadlines.queue, settings.min_free_bytes),
        settings,
        parts,
        dir,
        journal,
        table: SandboxTable::default(),
        templates,
        stopping: CancellationToken::new(),
        tasks: TaskTracker::new(),
        lifecycles: AtomicU64::new(1),
    });
    remove_stale_captures(&node, &records).await?;
    if let Err(error) = recovery::recover(&node, records, rebooted).await {
        node.stopping.cancel();
        return Err(error);
    }
    for template in &node.templates {
        node.tasks.spawn(make_ready(Arc::clone(&node), Arc::clone(template)));
    }
    Ok(node)
}

/// Gives a template its capture, however many attempts that takes, then its standbys.
async fn make_ready(node: Arc<Node>, template: Arc<Template>) {
    let mut pauses = CAPTURE_PAUSES;
    loop {
        if let Progress::Ready(capture) = template.progress() {
            return standby::keep_filled(node, template, capture).await;
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
    Ok(())
}

/// Finds out now, not at the first sandbox, whether disks can share their blocks.
fn check_reflink(dir: &DataDir, copies: DiskCopies) -> Result<(), StartError> {
    if copies == DiskCopies::FullCopyAllowed {
        return Ok(());
    }
    let (probe, copy) = (dir.root().join("reflink-probe"), dir.root().join("reflink-probe-copy"));
    let fail = |reason: String| StartError::DataDir { action: "use", path: dir.root().to_owned(), reason };
    std::fs::write(&probe, [0_u8; 4096]).map_err(|error| fail(error.to_string()))?;
    let result = match std::fs::remove_file(&copy) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(fail(error.to_string())),
        _ => clone_blocking(&probe, &copy, copies).map(drop).map_err(|error| fail(error.to_string())),
    };
    for path in [&probe, &copy] {
        if let Err(error) = std::fs::remove_file(path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            return Err(fail(error.to_string()));
        }
    }
    result
}

async fn read_templates(
    settings: &Settings,
    parts: &Parts,
    dir: &DataDir,
) -> Result<Vec<Arc<Template>>, StartError> {
    let (guest, dir) = (settings.guest.clone(), dir.clone());
    let standbys = Targets { hot: settings.standbys, warm: settings.warm };
    let identity = parts.vmm.identity().clone();
    blocking(move || {
        let fail = |action, path: &Path, error: std::io::Error| StartError::DataDir {
            action,
            path: path.to_owned(),
            reason: error.to_string(),
        };
        let files = template::read_all(&dir).map_err(|error| fail("read", &dir.templates(), error))?;
        let kernel = template::sha256(&guest.kernel).map_err(|error| fail("read", &guest.kernel, error))?;
        let initramfs =
            template::sha256(&guest.initramfs).map_err(|error| fail("read", &guest.initramfs, error))?;
        let mut templates = Vec::new();
        for file in files {
            let path = dir.template(&file.id);
            let key = template::capture_key(&file, &identity, &kernel, &initramfs)
                .map_err(|error| fail("describe", &path, error))?;
            let rootfs = path.join("rootfs.ext4");
            let size = std::fs::metadata(&rootfs).map_err(|error| fail("read", &rootfs, error))?.len();
            let capture =
                Capture::find(&path, &key).map_err(|error| fail("read a capture of", &path, error))?;
            let template = Template::new(file, path, size.div_ceil(1 << 20), key, standbys);
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

/// Removes captures that can never be restored again and that no VM of the journal maps.
async fn remove_stale_captures(node: &Arc<Node>, records: &[VmRecord]) -> Result<(), StartError> {
    let used: BTreeSet<String> = records.iter().filter_map(|record| record.capture_key.clone()).collect();
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
