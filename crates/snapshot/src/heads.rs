//! Who owns a sandbox whose paused state is in the repository, and which state that is.
//!
//! ```text
//! node A: claim ─▶ generation 1 ── advance(1, s1) ── … is cut off …             advance(1, s3) ─▶ Fenced
//! node B:                                             claim ─▶ generation 3 ── advance(3, s2)
//! ```
//! A generation is the number of the change that claimed it, so a later one is always greater. Owns no state. Must not
//! decide who may take a sandbox over, nor touch snapshots.

use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::name::Name;
use crate::register::{self, Entry, Swap};
use crate::repository::Repository;
use serde::{Deserialize, Serialize};

/// What is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Head {
    owner: Name,
    /// Which claim of that node; none in a claim itself, whose own number it is.
    #[serde(default)]
    generation: Option<u64>,
    #[serde(default)]
    snapshot: Option<Name>,
}

/// What a head says, with the generation that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// The node.
    pub owner: Name,
    /// The claim that counts.
    pub generation: u64,
    /// The snapshot it can be resumed from, once there is one.
    pub snapshot: Option<Name>,
}

impl Repository {
    /// Makes `owner` the only one that may advance the head of `sandbox`: every earlier claim counts no more, the owner's
    /// own included. Answers what there is to go on from.
    ///
    /// # Errors
    /// [`RepositoryError::Conflict`] when others claim it all the time; [`RepositoryError::Unavailable`].
    pub async fn claim(&self, sandbox: &Name, owner: &Name) -> Result<Ownership> {
        let register = layout::head(sandbox);
        for _ in 0..Self::SWAPS {
            let seen = self.head_entry(sandbox).await?;
            let snapshot =
                seen.as_ref().and_then(|seen| seen.value.as_ref()).and_then(|head| head.snapshot.clone());
            let head = Head { owner: owner.clone(), generation: None, snapshot };
            let swap = register::swap(&self.objects, &register, seen.as_ref(), Some(head));
            if let Swap::Won(entry) = swap.await? {
                return ownership(&entry).ok_or_else(|| conflict(sandbox));
            }
        }
        Err(conflict(sandbox))
    }

    /// Sets the snapshot that `sandbox` can be resumed from, if `generation` is the claim that counts.
    ///
    /// # Errors
    /// [`RepositoryError::Fenced`] when another claim counts; [`RepositoryError::NotFound`] when the head was removed;
    /// [`RepositoryError::Unavailable`], after which it may have been set.
    pub async fn advance(&self, sandbox: &Name, generation: u64, snapshot: &Name) -> Result<()> {
        let change = |head: &Head| {
            Some(Head {
                owner: head.owner.clone(),
                generation: Some(generation),
                snapshot: Some(snapshot.clone()),
            })
        };
        self.change_head(sandbox, generation, change).await
    }

    /// Removes the head of `sandbox`, if `generation` is the claim that counts. The snapshots stay. Removed twice is removed.
    ///
    /// # Errors
    /// As [`Self::advance`], but that a head which is not there is no error.
    pub async fn remove_head(&self, sandbox: &Name, generation: u64) -> Result<()> {
        match self.change_head(sandbox, generation, |_| None).await {
            Err(RepositoryError::NotFound { .. }) => Ok(()),
            other => other,
        }
    }

    /// Who owns `sandbox`; none when there is no head.
    ///
    /// # Errors
    /// [`RepositoryError::Unavailable`], [`RepositoryError::Damaged`], [`RepositoryError::UnknownVersion`].
    pub async fn head(&self, sandbox: &Name) -> Result<Option<Ownership>> {
        Ok(self.head_entry(sandbox).await?.as_ref().and_then(ownership))
    }

    async fn change_head(
        &self,
        sandbox: &Name,
        generation: u64,
        change: impl Fn(&Head) -> Option<Head>,
    ) -> Result<()> {
        let register = layout::head(sandbox);
        for _ in 0..Self::SWAPS {
            let seen = self.head_entry(sandbox).await?;
            let Some((entry, head)) = seen.as_ref().and_then(|entry| Some((entry, entry.value.as_ref()?)))
            else {
                return Err(RepositoryError::NotFound { what: format!("the head of {sandbox}") });
            };
            let newer = head.generation.unwrap_or(entry.generation);
            if newer != generation {
                let owner = head.owner.to_string();
                return Err(RepositoryError::Fenced {
                    sandbox: sandbox.to_string(),
                    generation,
                    newer,
                    owner,
                });
            }
            let swap = register::swap(&self.objects, &register, Some(entry), change(head));
            if matches!(swap.await?, Swap::Won(_)) {
                return Ok(());
            }
        }
        Err(conflict(sandbox))
    }

    async fn head_entry(&self, sandbox: &Name) -> Result<Option<Entry<Head>>> {
        register::read(&self.objects, &layout::head(sandbox)).await
    }
}

fn ownership(entry: &Entry<Head>) -> Option<Ownership> {
    let head = entry.value.as_ref()?;
    Some(Ownership {
        owner: head.owner.clone(),
        generation: head.generation.unwrap_or(entry.generation),
        snapshot: head.snapshot.clone(),
    })
}

fn conflict(sandbox: &Name) -> RepositoryError {
    RepositoryError::Conflict { what: format!("the head of {sandbox}") }
}
