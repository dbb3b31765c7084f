//! One index for a whole stack of layers: every sector is mapped by the topmost layer that maps it.
//!
//! To lay one index over another is associative, so a stack is halved again and again and every mapping is copied once a
//! level: the time is that of (mappings in all layers) × log2(layers), whatever they look like.
//! ```text
//! upper    ███   ░░░      ██          ░ zeroed: hides, like data
//! lower  ████████████   ████
//! merged █████████░░░   █████         pieces of the lower one fill the gaps
//! ```
//! Owns nothing. Must not read files.

#[cfg(test)]
mod tests;

use crate::index::{Index, IndexBuilder};
use crate::lsmt::{Mapping, SECTOR_LIMIT};

/// Mappings a merged index may have: 512 MiB of memory.
pub const MAXIMUM_MAPPINGS: usize = 1 << 25;
/// Layers a stack may have, for their positions are stored in a byte.
pub const MAXIMUM_LAYERS: usize = 255;

/// The index of a stack, bottom → top, up to sector `end`. Tags are positions in the stack.
///
/// # Errors
/// With the reason, when there are too many layers or mappings.
pub fn merge(layers: &[&Index], end: u64) -> Result<Index, String> {
    if layers.len() > MAXIMUM_LAYERS {
        return Err(format!("it has {} layers, more than {MAXIMUM_LAYERS}", layers.len()));
    }
    merge_from(layers, 0, end.min(SECTOR_LIMIT))
}

fn merge_from(layers: &[&Index], bottom: usize, end: u64) -> Result<Index, String> {
    match layers {
        [] => Ok(Index::default()),
        [layer] => {
            let tag = u8::try_from(bottom).map_err(|_| format!("layer {bottom} is one too many"))?;
            let mut builder = IndexBuilder::with_capacity(layer.len());
            for mapping in layer.iter().map_while(|mapping| mapping.clip(0, end)) {
                push(&mut builder, Mapping { tag, ..mapping })?;
            }
            Ok(builder.finish())
        }
        _ => {
            let (lower, upper) = layers.split_at(layers.len() / 2);
            let upper = merge_from(upper, bottom + lower.len(), end)?;
            let lower = merge_from(lower, bottom, end)?;
            lay_over(&upper, &lower)
        }
    }
}

/// All of `upper`, and of `lower` what `upper` does not hide.
fn lay_over(upper: &Index, lower: &Index) -> Result<Index, String> {
    if upper.is_empty() {
        return Ok(lower.clone());
    }
    let mut builder =
        IndexBuilder::with_capacity(upper.len().saturating_add(lower.len()).min(MAXIMUM_MAPPINGS));
    // The first mapping of `lower` of which something may still show, and the first sector that is not decided.
    let (mut number, mut position) = (0, 0);
    for hiding in upper.iter().map(Some).chain([None]) {
        let gap_end = hiding.map_or(SECTOR_LIMIT, |mapping| mapping.offset);
        while let Some(below) = lower.get(number).filter(|below| below.offset < gap_end) {
            if let Some(shown) = below.clip(position, gap_end) {
                push(&mut builder, shown)?;
            }
            if below.end() > gap_end {
                break;
            }
            number += 1;
        }
        if let Some(mapping) = hiding {
            push(&mut builder, mapping)?;
            position = mapping.end();
        }
    }
    Ok(builder.finish())
}

fn push(builder: &mut IndexBuilder, mapping: Mapping) -> Result<(), String> {
    if builder.len() >= MAXIMUM_MAPPINGS {
        return Err(format!("its layers together need more than {MAXIMUM_MAPPINGS} mappings"));
    }
    builder.push(mapping)
}
