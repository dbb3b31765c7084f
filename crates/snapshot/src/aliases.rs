//! What `name:tag` means: one snapshot, moved by compare-and-swap.
//!
//! Owns no state. Must not write manifests.

use crate::error::{RepositoryError, Result};
use crate::layout;
use crate::manifest::Alias;
use crate::name::Name;
use crate::register::{self, Entry, Swap};
use crate::repository::Repository;
use serde::{Deserialize, Serialize};

/// What an alias means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Target {
    pub(crate) snapshot: Name,
}

impl std::fmt::Display for Alias {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}", self.name, self.tag)
    }
}

impl Repository {
    /// The snapshot that `alias` means; none when it means none.
    ///
    /// # Errors
    /// [`RepositoryError::Unavailable`], [`RepositoryError::Damaged`], [`RepositoryError::UnknownVersion`].
    pub async fn alias(&self, alias: &Alias) -> Result<Option<Name>> {
        let entry = self.alias_entry(alias).await?;
        Ok(entry.and_then(|entry| entry.value).map(|target| target.snapshot))
    }

    /// Lets `alias` mean `to`, or nothing, if it means `from` now. When it means `to` already, that is success too: so an
    /// answer that was lost is asked for again.
    ///
    /// # Errors
    /// [`RepositoryError::Conflict`] when it means something else; [`RepositoryError::Unavailable`], after which it may have
    /// been moved.
    pub async fn move_alias(&self, alias: &Alias, from: Option<&Name>, to: Option<&Name>) -> Result<()> {
        let seen = self.alias_entry(alias).await?;
        let now = seen.as_ref().and_then(|seen| seen.value.as_ref()).map(|target| &target.snapshot);
        if now == to {
            return Ok(());
        }
        if now != from {
            return Err(conflict(alias));
        }
        match self.swap_alias(alias, seen.as_ref(), to).await? {
            Swap::Won(_) => Ok(()),
            Swap::Lost => Err(conflict(alias)),
        }
    }

    /// Lets `alias` mean `to`, whatever it means now.
    pub(crate) async fn set_alias(&self, alias: &Alias, to: &Name) -> Result<()> {
        for _ in 0..Self::SWAPS {
            let seen = self.alias_entry(alias).await?;
            let now = seen.as_ref().and_then(|seen| seen.value.as_ref());
            if now.is_some_and(|target| target.snapshot == *to) {
                return Ok(());
            }
            if matches!(self.swap_alias(alias, seen.as_ref(), Some(to)).await?, Swap::Won(_)) {
                return Ok(());
            }
        }
        Err(conflict(alias))
    }

    /// Lets `alias` mean nothing, unless it means something else than `snapshot`.
    pub(crate) async fn clear_alias(&self, alias: &Alias, snapshot: &Name) -> Result<()> {
        match self.move_alias(alias, Some(snapshot), None).await {
            // It means another one by now, which is none of ours.
            Err(RepositoryError::Conflict { .. }) => Ok(()),
            other => other,
        }
    }

    async fn alias_entry(&self, alias: &Alias) -> Result<Option<Entry<Target>>> {
        register::read(&self.objects, &layout::alias(&alias.name, &alias.tag)).await
    }

    async fn swap_alias(
        &self,
        alias: &Alias,
        seen: Option<&Entry<Target>>,
        to: Option<&Name>,
    ) -> Result<Swap<Target>> {
        let target = to.map(|snapshot| Target { snapshot: snapshot.clone() });
        register::swap(&self.objects, &layout::alias(&alias.name, &alias.tag), seen, target).await
    }
}

fn conflict(alias: &Alias) -> RepositoryError {
    RepositoryError::Conflict { what: format!("the alias {alias}") }
}
