//! Disks as layered disks of the block service.
//!
//! Owns, in the service, the disks that are called like VMs and the images that are called like captures or saves. All but those
//! of `memory_image` are never exported: they keep the layers of a disk or a memory stored.
//!
//! ```text
//! make          layers of the base + an empty top ─▶ disk VM                  (O(1), nothing is copied)
//! keep          top sealed ─▶ durable ─▶ image c-TEMPLATE-KEY of the layers   then the disk may go: its sealed top stays
//!
//! seal          top sealed                                                    (O(1), nothing is durable)
//! hold          disk flushed ─▶ image s-VM-NUMBER of the sealed top: the disk can go back to it, and may merge what is below
//! make_anew     tops after the sealed one dropped; the disk stays disk VM
//! store_memory  changes ─▶ layer file memory-VM-NUMBER ─▶ image k-VM-NUMBER of the flat file and all layers
//! memory_image  image m-VM-NUMBER of the same, exported
//! forget_save   the three images
//! forget_layer  the layer file, when neither the chains that the caller knows nor any record of the service name it
//!
//! hand_over        images n-SNAPSHOT of all layers of the disk, h-SNAPSHOT of the flat file and all layers of the memory
//! snapshot_memory  image x-SNAPSHOT of the latter, exported
//! forget_snapshot  the three images, then the layer files that no record of the service names any more
//! ```
//! Whatever is killed in between, each may be asked again. A save belongs to the disk of its VM: images of saves whose VM has no
//! disk any more, and layer files that no image names, are garbage. A layer file that was written and has no image yet is safe from
//! the collection since that waits for it; and whoever removes a save waits for what is being written for its VM, also when nobody
//! wants that any more: a thread that writes cannot be called back, and its file would be nobody's.

mod saves;
mod snapshots;

use super::{
    Base, CaptureName, Disks, ListSnapshots, MemoryChain, MemoryLayer, MemoryParts, Needed, SaveName,
    SealedDisk, SnapshotParts,
};
use crate::error::Shortage;
use crate::settings::StartError;
use crate::stage::Cause;
use crate::template::ImageForm;
use crate::view::{Collected, WaitCause, Waiting};
use aenv_protocol::ids::{SandboxId, TemplateId};
use aenv_storage::block_service::{
    Client, CollectGarbage, CreateDisk, CreateImage, DiskState, LayerRef, Name, ServiceError,
};
use async_trait::async_trait;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;
use tokio::sync::{OwnedMutexGuard, RwLock};

/// Virtual size of every disk, far more than any filesystem on it is meant to have: a filesystem can grow online, a disk
/// cannot. What was never written takes no room.
const DISK_BYTES: u64 = 256 << 30;
/// What a disk may store beyond its filesystem's size: room for what is overwritten and not yet compacted.
const QUOTA_SLACK: u64 = 256 << 20;
/// For an answer to somebody who only looks at a sandbox.
const GLANCE: Duration = Duration::from_secs(1);
/// First letters of the names of our images.
const CAPTURES: &str = "c-";

/// Makes disks in the block service.
pub(crate) struct ServiceDisks {
    client: Client,
    /// Where layer files lie.
    layers: PathBuf,
    /// Held shared by whoever writes a layer file until an image names it, alone by a collection.
    writing: Arc<RwLock<()>>,
    /// Of each VM whose saves are just being stored or removed: one after the other.
    turns: Mutex<BTreeMap<SandboxId, Weak<tokio::sync::Mutex<()>>>>,
}

impl ServiceDisks {
    pub(crate) fn new(client: Client, layers: PathBuf) -> Self {
        Self { client, layers, writing: Arc::default(), turns: Mutex::default() }
    }

    /// Waits until nobody else stores or removes saves of a VM.
    async fn turn(&self, vm: &SandboxId) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| turn.strong_count() > 0);
            let known = turns.get(vm).and_then(Weak::upgrade);
            known.unwrap_or_else(|| {
                let turn = Arc::default();
                turns.insert(vm.clone(), Arc::downgrade(&turn));
                turn
            })
        };
        turn.lock_owned().await
    }
}

#[async_trait]
impl Disks for ServiceDisks {
    fn kind(&self) -> &'static str {
        "service"
    }

    fn image_form(&self) -> ImageForm {
        ImageForm::Layers
    }

    async fn check(&self) -> Result<(), StartError> {
        let status = self.client.status().await.map_err(|error| StartError::Disks(error.to_string()))?;
        tracing::info!(pid = status.pid, version = %status.version, way = %status.disks_by.way, reason = %status.disks_by.reason, "disks by the block service");
        for (name, reason) in &status.failed {
            tracing::warn!(%name, reason, "the block service cannot use a disk or an image");
        }
        Ok(())
    }

    async fn make(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause> {
        let layers = match base {
            Base::File(path) => vec![LayerRef::Raw { raw: path.clone() }],
            Base::Layers(layers) => layers.clone(),
        };
        let quota = bytes
            .checked_add(bytes / 8)
            .and_then(|quota| quota.checked_add(QUOTA_SLACK))
            .ok_or_else(|| Cause::Unexpected(format!("a disk of {bytes} bytes is too large")))?;
        let size = DISK_BYTES.max(bytes.next_multiple_of(4096));
        let disk = CreateDisk { name: disk_name(vm)?, layers, size, quota: Some(quota), owner: 0 };
        let made = self.client.create_disk(&disk).await?;
        made.path.ok_or_else(|| Cause::Unexpected(format!("the block service does not export disk {vm}")))
    }

    async fn keep(&self, vm: &SandboxId, capture: &CaptureName, _: &Path) -> Result<Base, Cause> {
        let name = disk_name(vm)?;
        let sealed = self.client.seal_disk(&name, None).await?;
        self.client.make_disk_durable(&name).await?;
        let image = CreateImage {
            name: capture_name(capture)?,
            layers: sealed.layers.clone(),
            owner: 0,
            exported: false,
        };
        // As the service keeps them: old tops of what was sealed may have been merged meanwhile.
        Ok(Base::Layers(self.client.create_image(&image).await?.layers))
    }

    async fn knows(&self, capture: &CaptureName) -> Result<bool, Cause> {
        match self.client.image(&capture_name(capture)?).await {
            Ok(image) => Ok(image.state == DiskState::Ready),
            Err(ServiceError::NotFound(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn remove(&self, vm: &SandboxId) -> Result<(), Cause> {
        Ok(self.client.delete_disk(&disk_name(vm)?).await?)
    }

    async fn forget_capture(&self, capture: &CaptureName) -> Result<(), Cause> {
        Ok(self.client.delete_image(&capture_name(capture)?).await?)
    }

    async fn seal(&self, save: &SaveName) -> Result<SealedDisk, Cause> {
        self.seal_disk(save).await
    }

    async fn hold(&self, save: &SaveName, base: &Base) -> Result<(), Cause> {
        self.hold_disk(save, base).await
    }

    async fn make_anew(&self, vm: &SandboxId, base: &Base, bytes: u64) -> Result<PathBuf, Cause> {
        self.rewind_or_make(vm, base, bytes).await
    }

    async fn store_memory(&self, save: &SaveName, parts: &MemoryParts) -> Result<MemoryLayer, Cause> {
        self.store_layer(save, parts).await
    }

    async fn memory_image(&self, save: &SaveName, chain: &MemoryChain, bytes: u64) -> Result<PathBuf, Cause> {
        self.export_memory(save, chain, bytes).await
    }

    async fn forget_save(&self, save: &SaveName) -> Result<(), Cause> {
        self.remove_save(save).await
    }

    async fn forget_layer(&self, save: &SaveName, used: &BTreeSet<PathBuf>) -> Result<bool, Cause> {
        self.remove_layer(save, used).await
    }

    async fn release_layer(&self, layer: &Path) -> Result<(), Cause> {
        self.release_file(layer).await
    }

    async fn hand_over(&self, snapshot: &TemplateId, parts: &SnapshotParts) -> Result<SnapshotParts, Cause> {
        self.keep_snapshot(snapshot, parts).await
    }

    async fn snapshot_memory(
        &self,
        snapshot: &TemplateId,
        chain: &MemoryChain,
        bytes: u64,
    ) -> Result<PathBuf, Cause> {
        self.export_snapshot(snapshot, chain, bytes).await
    }

    async fn forget_snapshot(
        &self,
        snapshot: &TemplateId,
        parts: Option<&SnapshotParts>,
    ) -> Result<(), Cause> {
        self.remove_snapshot(snapshot, parts).await
    }

    async fn waiting(&self, vm: &SandboxId) -> Result<Option<Waiting>, Cause> {
        match self.client.with_patience(GLANCE).disk(&disk_name(vm)?).await {
            Ok(disk) => Ok(disk.stalled.map(|stall| {
                let seconds = stall.for_millis / 1000;
                let detail = format!("{}; for {seconds} seconds until now", stall.reason);
                Waiting { cause: WaitCause::DiskWaitsForRoom, detail }
            })),
            // The sandbox is just being ended.
            Err(ServiceError::NotFound(_)) => Ok(None),
            Err(error @ ServiceError::Unavailable { .. }) => {
                Ok(Some(Waiting { cause: WaitCause::BlockServiceAway, detail: error.to_string() }))
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn sweep(&self, keep: &BTreeSet<SandboxId>) -> Result<Vec<String>, Cause> {
        let mut removed = Vec::new();
        for disk in self.client.disks().await?.disks {
            let is_known = keep.iter().any(|id| id.as_str() == disk.name.as_str());
            if disk.state != DiskState::Kept && !is_known {
                self.client.delete_disk(&disk.name).await?;
                removed.push(disk.name.to_string());
            }
        }
        let known = |vm: &str| keep.iter().any(|id| id.as_str() == vm);
        let images = self.client.images().await?.images;
        for image in images.iter().filter(|image| saves::vm_of(&image.name).is_some_and(|vm| !known(vm))) {
            self.client.delete_image(&image.name).await?;
            removed.push(image.name.to_string());
        }
        self.remove_half_written().await?;
        Ok(removed)
    }

    async fn collect(&self, needed: &Needed, snapshots: &ListSnapshots<'_>) -> Result<Collected, Cause> {
        let _alone = self.writing.write().await;
        let known = needed.captures.iter().map(capture_name).collect::<Result<BTreeSet<_>, _>>()?;
        let mut removed = 0;
        let images_there = self.client.images().await?.images;
        // Both are listed after the images: a snapshot may have come to be since this was begun, and a disk that had a save then is gone for good if it is not there now.
        let disks = self.client.disks().await?.disks;
        let snapshots = snapshots();
        let has_disk =
            |vm: &str| disks.iter().any(|it| it.name.as_str() == vm && it.state != DiskState::Kept);
        for image in images_there {
            if saves::vm_of(&image.name).is_some_and(|vm| !has_disk(vm)) {
                self.client.delete_image(&image.name).await?;
                tracing::info!(image = %image.name, "removed what was saved of a sandbox that is gone");
            }
            if image.name.as_str().starts_with(CAPTURES) && !known.contains(&image.name) {
                self.client.delete_image(&image.name).await?;
                tracing::info!(image = %image.name, "removed the disk of a capture that is gone");
                removed += 1;
            }
            if snapshots::snapshot_of(&image.name).is_some_and(|id| !snapshots.contains(&id)) {
                self.client.delete_image(&image.name).await?;
                tracing::info!(image = %image.name, "removed what was stored for a snapshot that is gone");
                removed += 1;
            }
        }
        let keep_layers = needed.images.iter().cloned().collect();
        let collected = self.client.collect_garbage(&CollectGarbage { keep_layers }).await?;
        let (layers, directories, bytes) = (collected.layers, collected.directories, collected.bytes);
        Ok(Collected { captures: removed, layers, directories, bytes })
    }
}

fn disk_name(vm: &SandboxId) -> Result<Name, Cause> {
    name(vm.as_str())
}

fn capture_name(capture: &CaptureName) -> Result<Name, Cause> {
    name(&format!("{CAPTURES}{}-{}", capture.template, capture.key))
}

fn name(text: &str) -> Result<Name, Cause> {
    text.parse()
        .map_err(|error| Cause::Unexpected(format!("the block service does not take {text:?}: {error}")))
}

impl From<ServiceError> for Cause {
    fn from(error: ServiceError) -> Self {
        match error {
            error @ ServiceError::NoSpace(_) => Self::NoCapacity(Shortage::Room(error.to_string())),
            error => Self::Service(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, Response};
    use http_body_util::BodyExt as _;
    use hyper::body::Incoming;
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::net::UnixListener;

    /// Answers at a socket by `answer`, which is given method, path and body; remembers what it was asked. The answer `404` is one.
    pub(super) fn service(
        directory: &Path,
        answer: impl Fn(&str, &str) -> String + Clone + Send + 'static,
    ) -> (ServiceDisks, Arc<Mutex<Vec<String>>>) {
        let socket = directory.join("stored.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answer, seen) = (answer.clone(), Arc::clone(&seen));
                let serve = service_fn(move |request: Request<Incoming>| {
                    let (answer, seen) = (answer.clone(), Arc::clone(&seen));
                    async move {
                        let what = format!("{} {}", request.method(), request.uri().path());
                        let body = request.into_body().collect().await?.to_bytes();
                        let body = String::from_utf8_lossy(&body).into_owned();
                        seen.lock().unwrap().push(format!("{what} {body}"));
                        let answer = match answer(&what, &body) {
                            missing if missing == "404" => {
                                let body = r#"{"code":"not_found","message":"there is none"}"#.to_owned();
                                Response::builder().status(404).body(body).unwrap()
                            }
                            body => Response::new(body),
                        };
                        Ok::<_, hyper::Error>(answer)
                    }
                });
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), serve));
            }
        });
        let client = Client::new(&socket, Duration::from_secs(20));
        (ServiceDisks::new(client, directory.join("layers")), asked)
    }

    #[tokio::test]
    async fn disks_of_captures_that_are_gone_are_collected_and_nothing_else() {
        let known = CaptureName { template: "t1".parse().unwrap(), key: "present".to_owned() };
        let directory = tempfile::tempdir().unwrap();
        let (disks, asked) = service(directory.path(), |what, _| match what {
            "GET /v1/images" => {
                let image = |name: &str| {
                    format!(
                        r#"{{"name":"{name}","state":"ready","failure":null,"path":null,"number":1,"size":4096,"owner":0,"layers":[]}}"#
                    )
                };
                let names = [
                    "c-t1-present",
                    "c-t1-old",
                    "memory",
                    "s-ikept-1",
                    "s-igone-7",
                    "m-igone-7",
                    "n-skept",
                    "x-sgone",
                ];
                format!(r#"{{"images":[{}]}}"#, names.map(image).join(","))
            }
            "GET /v1/disks" => {
                let disk = |name: &str, state: &str| {
                    format!(
                        r#"{{"name":"{name}","state":"{state}","number":1,"size":4096,"quota":4096,"stored_bytes":0,"owner":0,"layers":[],"tops":[]}}"#
                    )
                };
                format!(r#"{{"disks":[{},{}]}}"#, disk("ikept", "ready"), disk("igone", "kept"))
            }
            "POST /v1/gc" => r#"{"layers":2,"directories":1,"bytes":8192}"#.to_owned(),
            _ => "{}".to_owned(),
        });
        let images = BTreeSet::from([PathBuf::from("/data/storage/layers/image")]);
        let collected = disks
            .collect(&Needed { captures: BTreeSet::from([known]), images }, &|| {
                assert!(
                    asked.lock().unwrap().iter().any(|asked| asked.contains("/v1/images")),
                    "listed before"
                );
                BTreeSet::from(["skept".parse().unwrap()])
            })
            .await
            .unwrap();
        assert_eq!(collected, Collected { captures: 2, layers: 2, directories: 1, bytes: 8192 });
        assert_eq!(
            *asked.lock().unwrap(),
            [
                "GET /v1/images ",
                "GET /v1/disks ",
                "DELETE /v1/images/c-t1-old ",
                "DELETE /v1/images/s-igone-7 ",
                "DELETE /v1/images/m-igone-7 ",
                "DELETE /v1/images/x-sgone ",
                r#"POST /v1/gc {"keep_layers":["/data/storage/layers/image"]}"#
            ]
        );
    }

    #[tokio::test]
    async fn a_capture_is_made_of_what_its_image_keeps() {
        let directory = tempfile::tempdir().unwrap();
        let (disks, asked) = service(directory.path(), |what, _| {
            let layers = match what {
                "POST /v1/images" => r#"[{"disk":"ivm","top":"merged"},{"disk":"ivm","top":"t3"}]"#,
                _ => r#"[{"disk":"ivm","top":"t1"},{"disk":"ivm","top":"t2"},{"disk":"ivm","top":"t3"}]"#,
            };
            match what {
                "POST /v1/images" => format!(
                    r#"{{"name":"c-t1-k","state":"ready","number":1,"size":4096,"owner":0,"layers":{layers}}}"#
                ),
                "GET /v1/disks/ivm" => {
                    r#"{"name":"ivm","state":"ready","number":1,"size":4096,"quota":4096,"stored_bytes":0,"owner":0,"layers":[],"tops":[],"writable_top":"t3"}"#.to_owned()
                }
                "POST /v1/disks/ivm/seal" => {
                    format!(r#"{{"sealed":"t3","layers":{layers},"writable_top":"t4"}}"#)
                }
                _ => "{}".to_owned(),
            }
        });
        let capture = CaptureName { template: "t1".parse().unwrap(), key: "k".to_owned() };
        let kept = disks.keep(&"ivm".parse().unwrap(), &capture, Path::new("")).await.unwrap();
        let top = |top: &str| LayerRef::Top { disk: "ivm".parse().unwrap(), top: top.parse().unwrap() };
        assert_eq!(kept, Base::Layers(vec![top("merged"), top("t3")]));
        assert!(
            asked.lock().unwrap().last().unwrap().contains(r#""top":"t1""#),
            "the seal's layers are asked for"
        );
    }

    #[tokio::test]
    async fn a_guest_that_waits_is_told_with_the_reason() {
        let disk = |name: &str, stalled: &str| {
            format!(
                r#"{{"name":"{name}","state":"ready","number":1,"size":4096,"quota":4096,"stored_bytes":0,"owner":0,"layers":[],"tops":[]{stalled}}}"#
            )
        };
        let directory = tempfile::tempdir().unwrap();
        let (disks, _) = service(directory.path(), move |what, _| match what {
            "GET /v1/disks/ifull" => {
                disk("ifull", r#","stalled":{"name":"ifull","reason":"no room in /data","for_millis":2500}"#)
            }
            _ => disk("iwell", ""),
        });
        let full = disks.waiting(&"ifull".parse().unwrap()).await.unwrap().unwrap();
        assert_eq!(full.cause, WaitCause::DiskWaitsForRoom);
        assert!(full.detail.contains("no room in /data; for 2 seconds"), "{}", full.detail);
        assert_eq!(disks.waiting(&"iwell".parse().unwrap()).await.unwrap(), None);
        let client = Client::new(&directory.path().join("none"), Duration::from_secs(20));
        let away = ServiceDisks::new(client, directory.path().to_owned());
        let away = away.waiting(&"iwell".parse().unwrap()).await.unwrap().unwrap();
        assert_eq!(away.cause, WaitCause::BlockServiceAway);
    }

    #[test]
    fn names_of_captures_fit_and_are_told_apart() {
        let template = format!("t{}", "0".repeat(20)).parse().unwrap();
        let capture = CaptureName { template, key: "f".repeat(32) };
        let first = capture_name(&capture).unwrap();
        let other = CaptureName { key: "e".repeat(32), ..capture };
        assert_ne!(first, capture_name(&other).unwrap());
        assert!(first.as_str().starts_with(CAPTURES));
        let long = CaptureName { template: "t".repeat(64).parse().unwrap(), key: String::new() };
        assert!(capture_name(&long).is_err());
    }

    #[test]
    fn a_full_host_is_told_as_such() {
        assert!(matches!(Cause::from(ServiceError::NoSpace("x".to_owned())), Cause::NoCapacity(_)));
        assert!(matches!(Cause::from(ServiceError::NotFound("x".to_owned())), Cause::Service(_)));
    }
}
