//! Snapshots to publish, and what must be true of a repository afterwards.
//!
//! Owns the local files.

use aenv_snapshot::{
    Alias, CollectOptions, Compatibility, Content, Disk, Draft, Form, Guest, Layer, Machine, Manifest,
    Memory, Name, Progress, PublishOptions, Repository, RepositoryError,
};
use aenv_storage::digest::Digest;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::watch;

/// More than one part of the smallest size that S3 takes.
pub(crate) const LARGE: usize = (5 << 20) + (1 << 20);
pub(crate) const SMALL: usize = 1000;

pub(crate) fn name(text: &str) -> Name {
    text.parse().unwrap()
}

/// Local files.
#[derive(Debug)]
pub(crate) struct Files {
    directory: TempDir,
}

impl Files {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A file of `bytes` bytes that `seed` decides about.
    pub(crate) fn write(&self, name: &str, seed: u64, bytes: usize) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content(seed, bytes)).unwrap();
        path
    }

    /// A snapshot `id` of a large and a small layer, memory, and devices. Its layers are those of all with this `seed`.
    pub(crate) fn draft(&self, id: &str, seed: u64) -> Draft {
        let file = |what: &str, seed: u64, bytes: usize| {
            Content::File(self.write(&format!("{what}-{seed}"), seed, bytes))
        };
        let layer = |form, blob| Layer { form, blob };
        Draft {
            memory: Some(Memory {
                layers: vec![layer(Form::Layer, file("memory", seed + 1, 600_000))],
                size: 1 << 20,
                devices: file("devices", seed + 2, SMALL),
            }),
            disk: Disk {
                layers: vec![
                    layer(Form::Layer, file("base", seed, LARGE)),
                    layer(Form::Layer, file("top", seed + 3, SMALL)),
                ],
                size: 1 << 30,
                quota: Some(1 << 29),
            },
            ..small_draft(id, file("top", seed + 3, SMALL))
        }
    }
}

/// A snapshot of one small file.
pub(crate) fn small_draft(id: &str, top: Content) -> Draft {
    Draft {
        id: name(id),
        alias: None,
        created_at: "2026-12-01T10:00:00Z".parse().unwrap(),
        source: name("isource"),
        parent: Some(name("base")),
        disk: Disk { layers: vec![Layer { form: Form::Layer, blob: top }], size: 1 << 30, quota: None },
        memory: None,
        machine: Machine { vcpus: 2, memory_bytes: 1 << 20 },
        guest: Guest { kernel: Digest::of(b"kernel"), initramfs: Digest::of(b"initramfs") },
        compatibility: Compatibility {
            driver: "fake".to_owned(),
            version: "1".to_owned(),
            accelerator: "tcg".to_owned(),
            cpu_model: "max".to_owned(),
        },
        extension: serde_json::json!({"node": {"root_bytes": 5}}).as_object().unwrap().clone(),
    }
}

pub(crate) fn named(draft: Draft, alias: &str) -> Draft {
    let (alias, tag) = alias.split_once(':').unwrap();
    Draft { alias: Some(Alias { name: name(alias), tag: name(tag) }), ..draft }
}

pub(crate) fn content(seed: u64, bytes: usize) -> Vec<u8> {
    // Any numbers that differ by the seed and do not repeat within a chunk.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Parts as small as they may be.
pub(crate) fn options() -> PublishOptions {
    PublishOptions { part_bytes: 5 << 20, ..PublishOptions::default() }
}

pub(crate) async fn publish(repository: &Repository, draft: &Draft) -> Result<Manifest, RepositoryError> {
    repository.publish(draft, &options(), &watch::Sender::new(Progress::default())).await
}

/// Everything is old enough at once, but for publications: no collection of a test takes a live one for dead by chance.
pub(crate) fn at_once() -> CollectOptions {
    CollectOptions {
        expiry: Duration::from_secs(3600),
        grace: Duration::ZERO,
        keep_tombstones: Duration::ZERO,
    }
}

/// As if everybody who publishes had died long ago.
pub(crate) fn all_dead() -> CollectOptions {
    CollectOptions { expiry: Duration::ZERO, ..at_once() }
}

/// Collects until everything that may go is gone.
pub(crate) async fn collect_all(repository: &Repository) {
    for _ in 0..4 {
        repository.collect(&all_dead()).await.unwrap();
    }
}

/// Every byte that the manifest names is there, whole, and every chunk of it can be verified.
pub(crate) async fn check_whole(repository: &Repository, manifest: &Manifest) {
    let read = async |object: &aenv_snapshot::Object| {
        let found = repository.store().objects().get_opts(&object.key(), Default::default()).await;
        let found = found.unwrap_or_else(|error| panic!("{} of {}: {error}", object.key(), manifest.id));
        let bytes = found.bytes().await.unwrap();
        assert_eq!(
            (bytes.len() as u64, Digest::of(&bytes)),
            (object.size, object.digest),
            "{}",
            object.key()
        );
        bytes
    };
    for blob in manifest.contents() {
        let bytes = read(&blob.object).await;
        let list = match &blob.chunks {
            Some(chunks) => read(chunks).await,
            None => Default::default(),
        };
        let list = blob.chunk_list(&list).unwrap();
        assert_eq!(list.blob_bytes(), bytes.len() as u64);
        for index in 0..list.chunks().len() as u64 {
            let range = list.range(index).unwrap();
            list.verify(index, &bytes[range.start as usize..range.end as usize]).unwrap();
        }
    }
}

/// The keys of a repository that has these snapshots and nothing else, but for registers.
pub(crate) fn expected_keys(manifests: &[&Manifest]) -> std::collections::BTreeSet<String> {
    let objects = manifests.iter().flat_map(|manifest| manifest.contents()).flat_map(|blob| blob.objects());
    objects.map(|object| object.key().to_string()).collect()
}
