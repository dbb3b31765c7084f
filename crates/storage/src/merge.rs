//! One index for a whole stack of layers: every sector is mapped by the topmost layer that maps it.
//!
//! To lay one index over another is associative, so a stack is halved again and again, by the number of mappings: a
//! mapping of a large layer is copied a few times, one of a small layer at most once a halving.
//! ```text
//! upper    ███   ░░░      ██          ░ zeroed: hides, like data
//! lower  ████████████   ████
//! merged █████████░░░   █████         pieces of the lower one fill the gaps
//! ```
//! Owns nothing. Must not read files.

#[cfg(test)]
mod tests;

use crate::index::{Index, IndexBuilder};
use crate::lsmt::SECTOR_LIMIT;

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
            Ok(layer.retagged(tag, end))
        }
        _ => {
            let (lower, upper) = layers.split_at(middle(layers));
            let upper = merge_from(upper, bottom + lower.len(), end)?;
            let lower = merge_from(lower, bottom, end)?;
            lay_over(&upper, &lower)
        }
    }
}

/// Where to split two layers or more, so that both parts have about as many mappings: a large one is copied seldom.
fn middle(layers: &[&Index]) -> usize {
    let total: usize = layers.iter().map(|layer| layer.len()).sum();
    let mut below = 0;
    let fits = |layer: &&&Index| {
        below += layer.len();
        // Half of the next layer at most may lie on the wrong side.
        2 * below <= total + layer.len()
    };
    layers.iter().take_while(fits).count().clamp(1, layers.len() - 1)
}

/// All of `upper`, and of `lower` what `upper` does not hide.
fn lay_over(upper: &Index, lower: &Index) -> Result<Index, String> {
    let mut builder =
        IndexBuilder::with_capacity(upper.len().saturating_add(lower.len()).min(MAXIMUM_MAPPINGS));
    // The first mapping of `lower` of which something may still show, and the first sector that is not decided.
    let (mut number, mut position) = (0, 0);
    for hiding in upper.iter().map(Some).chain([None]) {
        let gap_end = hiding.map_or(SECTOR_LIMIT, |mapping| mapping.offset);
        number = fill_gap(&mut builder, lower, number, position, gap_end)?;
        if let Some(mapping) = hiding {
            builder.push(mapping)?;
            position = mapping.end();
        }
        if builder.len() > MAXIMUM_MAPPINGS {
            return Err(format!("its layers together need more than {MAXIMUM_MAPPINGS} mappings"));
        }
    }
    Ok(builder.finish())
}

/// Adds what `lower` has from sector `start` to `end`, which begins with mapping `number` or later. Returns the first
/// mapping of which something lies behind `end`.
fn fill_gap(
    builder: &mut IndexBuilder,
    lower: &Index,
    mut number: usize,
    start: u64,
    end: u64,
) -> Result<usize, String> {
    while lower.get(number).is_some_and(|mapping| mapping.end() <= start) {
        number += 1;
    }
    let behind = lower.first_from(number, end);
    if behind == number {
        return Ok(number);
    }
    let last = behind - 1;
    // Only the first and the last one can reach over the ends.
    if let Some(shown) = lower.get(number).and_then(|mapping| mapping.clip(start, end)) {
        builder.push(shown)?;
    }
    if number < last {
        builder.extend(lower, number + 1..last)?;
        if let Some(shown) = lower.get(last).and_then(|mapping| mapping.clip(start, end)) {
            builder.push(shown)?;
        }
    }
    Ok(if lower.get(last).is_some_and(|mapping| mapping.end() > end) { last } else { behind })
}
