//! What is being published, or held for somebody who reads it, just now: a collector leaves alone what it names.
//!
//! ```text
//! begin ── renewed now and then ──┬── the manifest is there ── ended
//!                                 └── not renewed for long: a collector makes sure that it never gets one, and ends it
//! ```
//! Owns the document of one publication. Must not upload anything.

use crate::document;
use crate::error::Result;
use crate::layout;
use crate::name::Name;
use crate::objects::Objects;
use aenv_storage::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Whoever lives renews its publication as often. Far below the time after which it is taken for dead.
pub(crate) const RENEWAL: Duration = Duration::from_secs(15 * 60);

/// The document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Publication {
    /// The snapshot it becomes; none for contents that are only held.
    #[serde(default)]
    pub(crate) snapshot: Option<Name>,
    /// Every content it needs, whichever copy it is going to take.
    pub(crate) contents: BTreeSet<Digest>,
}

/// A publication that was begun.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) name: Name,
    document: Vec<u8>,
    written: Mutex<Instant>,
}

impl Begun {
    /// Writes the document: from now on, no collection that begins condemns what it names, nor removes what was not condemned
    /// yet.
    pub(crate) async fn begin(objects: &Objects, publication: &Publication) -> Result<Self> {
        let name = Name::random();
        let key = layout::publication(&name);
        let begun =
            Self { document: document::write(&key, publication)?, name, written: Mutex::new(Instant::now()) };
        begun.write(objects).await?;
        Ok(begun)
    }

    /// Renews it when it is time to.
    pub(crate) async fn renew_if_due(&self, objects: &Objects) -> Result<()> {
        let is_due = self.written().elapsed() >= RENEWAL;
        if is_due { self.write(objects).await } else { Ok(()) }
    }

    /// Ends it.
    pub(crate) async fn end(&self, objects: &Objects) -> Result<()> {
        objects.remove(&layout::publication(&self.name)).await
    }

    async fn write(&self, objects: &Objects) -> Result<()> {
        objects.write(&layout::publication(&self.name), self.document.clone()).await?;
        *self.written() = Instant::now();
        Ok(())
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
