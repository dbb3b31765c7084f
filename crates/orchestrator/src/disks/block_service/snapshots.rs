//! What is stored for snapshots: images that keep the layers of a disk and of a memory, by the snapshot's own name.
//!
//! Owns nothing but the rule how they are called. No byte is copied: the layers are those of the save that a snapshot was made of,
//! and of whatever that stands on.

use super::saves::layers_of;
use super::{ServiceDisks, name};
use crate::disks::{Base, MemoryChain, SnapshotParts};
use crate::stage::Cause;
use aenv_protocol::ids::TemplateId;
use aenv_storage::block_service::{LayerRef, Name, ServiceError};
use std::path::PathBuf;

/// First letters of the names of our images: the disk, the files of the memory, the same to be mapped.
const DISK: &str = "n-";
const MEMORY: &str = "h-";
const MAPPED: &str = "x-";

/// The snapshot that an image belongs to, when it is one of a snapshot.
pub(super) fn snapshot_of(image: &Name) -> Option<TemplateId> {
    let id = [DISK, MEMORY, MAPPED].iter().find_map(|kind| image.as_str().strip_prefix(kind))?;
    id.parse().ok()
}

fn image_name(kind: &str, snapshot: &TemplateId) -> Result<Name, Cause> {
    name(&format!("{kind}{snapshot}"))
}

impl ServiceDisks {
    pub(super) async fn keep_snapshot(
        &self,
        snapshot: &TemplateId,
        parts: &SnapshotParts,
    ) -> Result<SnapshotParts, Cause> {
        let Base::Layers(layers) = &parts.disk else {
            return Err(Cause::Unexpected(format!("the disk of {snapshot} is no chain of layers")));
        };
        if let Some(LayerRef::Top { disk, .. }) = layers.last() {
            // An image keeps tops, but the record of the disk that they are of has to survive a power cut as well.
            self.client.make_disk_durable(disk).await?;
        }
        let disk = self.keep_layers(image_name(DISK, snapshot)?, layers.clone()).await?;
        if let Some(chain) = &parts.memory {
            let layers = layers_of(chain);
            if !layers.is_empty() {
                self.keep_layers(image_name(MEMORY, snapshot)?, layers).await?;
            }
        }
        // As the service keeps them: old tops may have been merged meanwhile.
        Ok(SnapshotParts { disk: Base::Layers(disk.layers), memory: parts.memory.clone() })
    }

    pub(super) async fn export_snapshot(
        &self,
        snapshot: &TemplateId,
        chain: &MemoryChain,
        bytes: u64,
    ) -> Result<PathBuf, Cause> {
        self.export_chain(image_name(MAPPED, snapshot)?, snapshot.as_str(), chain, bytes).await
    }

    pub(super) async fn remove_snapshot(
        &self,
        snapshot: &TemplateId,
        parts: Option<&SnapshotParts>,
    ) -> Result<(), Cause> {
        let layers = match parts {
            Some(parts) => parts.memory.iter().flat_map(|chain| chain.layers.clone()).collect(),
            // Withdrawn while it was handed something: what its memory was to be lies in the image alone.
            None => self.files_of(&image_name(MEMORY, snapshot)?).await?,
        };
        for kind in [MAPPED, MEMORY, DISK] {
            self.client.delete_image(&image_name(kind, snapshot)?).await?;
        }
        for layer in &layers {
            self.release_file(layer).await?;
        }
        Ok(())
    }

    /// The layer files that an image is made of; none when there is no image.
    async fn files_of(&self, image: &Name) -> Result<Vec<PathBuf>, Cause> {
        let file = |layer| match layer {
            LayerRef::File { file } => Some(file),
            LayerRef::Raw { .. } | LayerRef::Top { .. } => None,
        };
        match self.client.image(image).await {
            Ok(image) => Ok(image.layers.into_iter().filter_map(file).collect()),
            Err(ServiceError::NotFound(_)) => Ok(Vec::new()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::service;

    #[tokio::test]
    async fn what_a_withdrawn_snapshot_was_handed_goes_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let (disks, asked) = service(directory.path(), |what, _| match what {
            "GET /v1/images/h-sone" => {
                let layers = r#"[{"raw":"/flat"},{"file":"/layers/memory-isource-1"}]"#;
                format!(
                    r#"{{"name":"h-sone","state":"ready","failure":null,"path":null,"number":1,"size":4096,"owner":0,"layers":{layers}}}"#
                )
            }
            "GET /v1/images/h-stwo" => "404".to_owned(),
            "POST /v1/layers/release" => r#"{"removed":true}"#.to_owned(),
            _ => "{}".to_owned(),
        });
        disks.remove_snapshot(&"sone".parse().unwrap(), None).await.unwrap();
        let released =
            |asked: &[String]| asked.iter().filter(|it| it.starts_with("POST /v1/layers/release")).count();
        let seen = asked.lock().unwrap().clone();
        assert_eq!(released(&seen), 1, "{seen:?}");
        assert!(seen.last().unwrap().contains("/layers/memory-isource-1"), "after the images: {seen:?}");
        disks.remove_snapshot(&"stwo".parse().unwrap(), None).await.unwrap();
        assert_eq!(released(&asked.lock().unwrap()), 1);
    }
}
