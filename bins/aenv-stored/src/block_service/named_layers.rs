//! The layers that requests and records name: as they are remembered, and the image that they make.
//!
//! ```text
//! named by a client, as a seal told it     layers of D ─ D/t1 ─ … ─ D/t16 ─ D/t17 ─ … ─ D/t20
//! as D stands on them after a merge        layers of D ─ D/m  ───────────── D/t17 ─ … ─ D/t20
//! ```
//! Whoever was told of a seal may come when old tops are merged already. What a disk shows as of one of its tops is the same
//! before and after, so the merged top is remembered in the place of those that are gone.
//!
//! Owns nothing. Makes no layer and removes none.

use super::table::DiskLife;
use super::tops::{find, name_of};
use super::{Service, no_room};
use crate::failure::Failure;
use crate::layers::Resolved;
use crate::locks::lock;
use aenv_storage::Image;
use aenv_storage::block_service::{LayerRef, Name};
use aenv_storage::top::SealedTop;
use std::sync::Arc;

/// Layers as they are remembered.
#[derive(Debug)]
pub(super) struct NamedLayers {
    pub(super) layers: Vec<LayerRef>,
    /// Sealed tops among them. While these handles live no compaction takes a top away; kept until what is made of the layers
    /// is open, or known to fail.
    pub(super) held: Vec<Arc<SealedTop>>,
}

impl Service {
    /// Layers as a client names them, as they are remembered: files without links, inside of the data directory; tops that
    /// there are.
    pub(super) fn canonical(&self, layers: Vec<LayerRef>) -> Result<NamedLayers, Failure> {
        let canonical = |layer| {
            Ok(match layer {
                LayerRef::File { file } => LayerRef::File { file: self.directories.resolve(&file)? },
                LayerRef::Raw { raw } => LayerRef::Raw { raw: self.directories.resolve(&raw)? },
                top @ LayerRef::Top { .. } => top,
            })
        };
        let layers = layers.into_iter().map(canonical).collect::<Result<Vec<_>, Failure>>()?;
        Ok(self.as_they_stand(layers))
    }

    /// The same with a merged top in the place of those it was made of. Layers of which this cannot be said stay as they are.
    fn as_they_stand(&self, layers: Vec<LayerRef>) -> NamedLayers {
        let Some(LayerRef::Top { disk, .. }) = layers.last() else {
            return NamedLayers { layers, held: Vec::new() };
        };
        let Some(entry) = lock(&self.table).disks.get(disk).cloned() else {
            return NamedLayers { layers, held: Vec::new() };
        };
        // All at one moment, and held from then on.
        let held = match &*lock(&entry.life) {
            DiskLife::Live { disk, .. } => disk.sealed_tops(),
            DiskLife::Kept { tops } => tops.clone(),
            _ => Vec::new(),
        };
        let names: Vec<Name> = held.iter().filter_map(|top| name_of(top).ok()).collect();
        let merged = entry
            .record
            .as_ref()
            .and_then(|record| with_merged_top(&layers, &entry.name, &record.layers, &names));
        NamedLayers { layers: merged.unwrap_or(layers), held }
    }

    /// The image that layers make, of which the record that names them is in the table already: nothing of it is removed
    /// meanwhile.
    pub(super) fn compose(&self, layers: &[LayerRef]) -> Result<Option<Arc<dyn Image>>, Failure> {
        let resolved: Vec<Resolved> =
            layers.iter().map(|layer| self.resolve(layer)).collect::<Result<_, _>>()?;
        self.layers.compose(&resolved)
    }

    fn resolve(&self, layer: &LayerRef) -> Result<Resolved, Failure> {
        match layer {
            LayerRef::File { file } => Ok(Resolved::File(self.directories.resolve(file)?)),
            LayerRef::Raw { raw } => Ok(Resolved::Raw(self.directories.resolve(raw)?)),
            LayerRef::Top { disk, top } => {
                let entry = lock(&self.table).disks.get(disk).cloned();
                let entry = entry.ok_or_else(|| Failure::not_found(format!("there is no disk {disk}")))?;
                let found = match &*lock(&entry.life) {
                    DiskLife::Live { disk, .. } => find(&disk.sealed_tops(), top),
                    DiskLife::Kept { tops } => find(tops, top),
                    DiskLife::Failed { reason, .. } => {
                        return Err(Failure::unavailable(format!("disk {disk} cannot be used: {reason}")));
                    }
                    DiskLife::Waiting { .. } => return Err(no_room(disk)),
                    DiskLife::Making | DiskLife::Deleting | DiskLife::Gone => {
                        return Err(Failure::conflict(format!("disk {disk} is being made or removed")));
                    }
                };
                let missing = || Failure::not_found(format!("disk {disk} has no sealed top {top}"));
                found.map(Resolved::Top).ok_or_else(missing)
            }
        }
    }
}

/// What `disk`, made of `below`, stands on as of the last of the `named` layers, if that is what they name: all that is below
/// the disk, tops that are gone and tops that it has, one above the other. `sealed` are the tops that it has. Only the oldest
/// tops are ever merged, and always to one.
fn with_merged_top(
    named: &[LayerRef],
    disk: &Name,
    below: &[LayerRef],
    sealed: &[Name],
) -> Option<Vec<LayerRef>> {
    let own = named.strip_prefix(below)?.iter().map(|layer| match layer {
        LayerRef::Top { disk: of, top } if of == disk => Some(top),
        _ => None,
    });
    let own = own.collect::<Option<Vec<&Name>>>()?;
    let last = sealed.iter().position(|top| Some(&top) == own.last())?;
    let (merged, above) = sealed[..=last].split_first()?;
    let gone = own.len().checked_sub(above.len())?;
    let is_as_told = own[gone..].iter().copied().eq(above)
        && gone >= 2
        && own[..gone].iter().all(|top| !sealed.contains(top));
    is_as_told.then(|| {
        let tops = [merged].into_iter().chain(above);
        let tops = tops.map(|top| LayerRef::Top { disk: disk.clone(), top: top.clone() });
        below.iter().cloned().chain(tops).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tops(disk: &str, names: &[&str]) -> Vec<LayerRef> {
        let top = |name: &&str| LayerRef::Top { disk: disk.parse().unwrap(), top: name.parse().unwrap() };
        names.iter().map(top).collect()
    }

    #[test]
    fn only_the_whole_of_a_disk_is_told_with_its_merged_top() {
        let disk: Name = "d".parse().unwrap();
        let below = [vec![LayerRef::Raw { raw: "/r".into() }], tops("p", &["t1"])].concat();
        let sealed: Vec<Name> = ["m", "t4", "t5", "t6"].map(|name| name.parse().unwrap()).to_vec();
        let told = |names: &[&str]| {
            let named = [below.clone(), tops("d", names)].concat();
            with_merged_top(&named, &disk, &below, &sealed)
        };
        let merged = |names: &[&str]| Some([below.clone(), tops("d", names)].concat());
        assert_eq!(told(&["t1", "t2", "t3", "t4", "t5"]), merged(&["m", "t4", "t5"]));
        // A merged top that was merged again.
        assert_eq!(told(&["m1", "t3", "t4", "t5", "t6"]), merged(&["m", "t4", "t5", "t6"]));
        for other in [
            &["m", "t4"][..],
            &["t1", "t2", "t3"],
            &["t4", "t5"],
            &["t1", "t4"],
            &["t1", "t2", "t5"],
            &["t1", "t4", "t2", "t5"],
            &["m", "t1", "t4"],
            &[],
        ] {
            assert_eq!(told(other), None, "{other:?}");
        }
        let gone = ["t1", "t2", "t3", "t4"];
        for incomplete in [tops("d", &gone), [below[1..].to_vec(), tops("d", &gone)].concat()] {
            assert_eq!(with_merged_top(&incomplete, &disk, &below, &sealed), None);
        }
    }
}
