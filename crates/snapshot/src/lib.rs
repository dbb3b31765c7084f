//! The repository of snapshots: a directory or a bucket that nodes share. A snapshot is published into it once, and started
//! from by any of them.
//!
//! | what | file | written |
//! |---|---|---|
//! | blobs, chunk lists | `publish/` | first, under a key that is used once |
//! | manifest | `manifest.rs`, `publish.rs` | last, unless it is there; never changed, but for its deletion |
//! | alias, head | `register.rs`, `aliases.rs`, `heads.rs` | by compare-and-swap |
//! | removal | `collect.rs` | by any node, at any time |
//!
//! Owns what lies below its location, as `layout.rs` draws it. Knows no sandbox, VMM or node; must not read the environment.
//! How it is sound: `docs/decisions/2026-12-01-repository.md`.

mod aliases;
mod collect;
mod document;
mod error;
#[cfg(test)]
mod golden;
mod heads;
mod hold;
mod layout;
mod manifest;
mod name;
mod objects;
mod publication;
mod publish;
mod register;
mod repository;

pub use collect::{CollectOptions, Collected};
pub use error::RepositoryError;
pub use heads::Ownership;
pub use hold::Hold;
pub use manifest::{
    Alias, Blob, Compatibility, Content, Disk, Draft, Form, Guest, Layer, Machine, Manifest, Memory, Object,
    Snapshot,
};
pub use name::Name;
pub use publish::{Progress, PublishOptions};
pub use repository::{DEFAULT_TAG, Page, Repository};
