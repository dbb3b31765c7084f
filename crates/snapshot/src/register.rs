//! A value that changes by compare-and-swap, made of objects that are only ever created.
//!
//! ```text
//! aliases/NAME/TAG/0000000000000001.json     superseded
//!                  0000000000000002.json     the one before: tells a writer whether its own was followed
//!                  0000000000000003.json     counts
//! swap from 3:  create 4 ─┬ is there: lost
//!                         └ made ─▶ list ─┬ 4 is the highest: won
//!                                         └ a higher one is: won only if 5 says that it follows this very 4
//! ```
//! Neither S3 nor a directory needs more for it than "create unless it is there". Why the list after the creation makes it
//! sound although superseded generations are removed: the highest one is never removed, so the highest never becomes
//! lower. If 4 is the highest after it was made, nothing higher was ever there, so no other 4 was ever removed, and this
//! one was the first. A writer that slept while others made 4 and 5 and removed 4 makes a second 4, finds 5, and has lost;
//! its 4 counts for nobody.
//!
//! A value is removed by a generation without one, which stays: the count goes on from there.
//! Owns no state. Must not know what the values mean.

use crate::document;
use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::name::Name;
use crate::objects::{Created, Objects};
use object_store::path::Path;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Times that a reader begins anew, since what it found in the list was removed when it came to read it.
const READS: usize = 16;

/// What a register holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry<T> {
    /// Counts every change.
    pub(crate) generation: u64,
    token: Name,
    /// None: it was removed.
    pub(crate) value: Option<T>,
}

/// What became of a swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Swap<T> {
    /// It took place.
    Won(Entry<T>),
    /// Somebody else's did.
    Lost,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Document<T> {
    /// Names the write: no other has the same bytes.
    token: Name,
    /// That of the generation before.
    #[serde(default)]
    previous: Option<Name>,
    #[serde(default = "Option::default")]
    value: Option<T>,
}

/// What the register holds; none when it never held anything.
pub(crate) async fn read<T: DeserializeOwned>(
    objects: &Objects,
    register: &Path,
) -> Result<Option<Entry<T>>> {
    for _ in 0..READS {
        let Some(generation) = highest(objects, register).await? else { return Ok(None) };
        if let Some(document) = read_generation(objects, register, generation).await? {
            return Ok(Some(Entry { generation, token: document.token, value: document.value }));
        }
    }
    // So many changes within one read: somebody else is always faster.
    Err(RepositoryError::Conflict { what: register.to_string() })
}

/// Puts `value` in the place of `seen`, which was read before, unless it was changed since.
pub(crate) async fn swap<T: Serialize + DeserializeOwned + Clone>(
    objects: &Objects,
    register: &Path,
    seen: Option<&Entry<T>>,
    value: Option<T>,
) -> Result<Swap<T>> {
    let generation = seen.map_or(0, |seen| seen.generation) + 1;
    let token = Name::random();
    let key = layout::generation(register, generation);
    let written = Document { token: token.clone(), previous: seen.map(|seen| seen.token.clone()), value };
    if objects.create(&key, document::write(&key, &written)?).await? != Created::New {
        return Ok(Swap::Lost);
    }
    let highest = highest(objects, register).await?.unwrap_or_default();
    if highest > generation {
        let next: Option<Document<T>> = read_generation(objects, register, generation + 1).await?;
        if next.and_then(|next| next.previous) != Some(token.clone()) {
            return Ok(Swap::Lost);
        }
    }
    // The one before stays, for a writer that was followed and does not know it yet.
    if let Err(error) = prune(objects, register).await {
        tracing::warn!(%register, %error, "superseded generations stay until the next collection");
    }
    Ok(Swap::Won(Entry { generation, token, value: written.value }))
}

/// Removes what counts no more: how many objects.
pub(crate) async fn prune(objects: &Objects, register: &Path) -> Result<u64> {
    let mut found: Vec<_> = objects
        .list(register)
        .await?
        .iter()
        .filter_map(|meta| layout::parse_generation(&meta.location))
        .collect();
    found.sort_unstable();
    let mut removed = 0;
    for generation in found.iter().rev().skip(1).filter(|generation| found.last() > Some(&(**generation + 1)))
    {
        objects.remove(&layout::generation(register, *generation)).await?;
        removed += 1;
    }
    Ok(removed)
}

async fn highest(objects: &Objects, register: &Path) -> Result<Option<u64>> {
    let found = objects.list(register).await?;
    Ok(found.iter().filter_map(|meta| layout::parse_generation(&meta.location)).max())
}

async fn read_generation<T: DeserializeOwned>(
    objects: &Objects,
    register: &Path,
    generation: u64,
) -> Result<Option<Document<T>>> {
    let key = layout::generation(register, generation);
    objects.read(&key).await?.map(|bytes| document::read(&key, &bytes)).transpose()
}
