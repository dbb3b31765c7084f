//! How the block service is spoken to: the messages of its control interface, and a client for it.
//!
//! ```text
//! node ──Client──▶ HTTP/1.1 with JSON on the unix socket <run>/stored.sock ──▶ aenv-stored
//!        messages: the same types on both sides
//! ```
//! Owns nothing but the client's connections. Knows no disk and no layer: `aenv-stored` does.

mod client;
mod messages;
mod name;
mod written_back;

pub use client::{Client, ServiceError};
pub use messages::{
    CacheView, CollectGarbage, Collected, CreateDisk, CreateImage, DiskList, DiskState, DiskView, ErrorBody,
    ErrorCode, ExportView, ImageList, ImageView, LayerRef, ReleaseLayer, Released, RewindDisk, SealDisk,
    Sealed, StalledView, Status, TopView,
};
pub use name::{InvalidName, Name};
pub use written_back::write_back;
