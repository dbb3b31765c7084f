use super::{MAXIMUM_LAYERS, merge};
use crate::index::{Index, IndexBuilder};
use crate::lsmt::Mapping;
use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop_assert_eq, proptest};

const SECTORS: u64 = 400;

/// An index of at most that many sectors.
fn index() -> impl Strategy<Value = Index> {
    vec((0..12_u64, 1..20_u64, any::<bool>()), 0..30).prop_map(|parts| {
        let mut builder = IndexBuilder::default();
        let mut offset = 0;
        for (number, (gap, length, zeroed)) in parts.into_iter().enumerate() {
            offset += gap;
            let stored = 1000 * number as u64;
            if offset + length <= SECTORS {
                builder.push(Mapping { offset, length, stored, zeroed, tag: 77 }).unwrap();
            }
            offset += length;
        }
        builder.finish()
    })
}

/// The same by another way: walk the top layer, and ask the next one for every gap.
fn paint(layers: &[&Index], start: u64, end: u64, painted: &mut Vec<Mapping>) {
    let Some((top, lower)) = layers.split_last() else { return };
    let mut position = start;
    for mapping in top.iter().filter_map(|mapping| mapping.clip(start, end)) {
        paint(lower, position, mapping.offset, painted);
        painted.push(Mapping { tag: lower.len() as u8, ..mapping });
        position = mapping.end();
    }
    paint(lower, position, end, painted);
}

proptest! {
    #[test]
    fn a_merged_index_is_what_a_painter_makes(layers in vec(index(), 0..12), end in 0..SECTORS + 50) {
        let layers: Vec<&Index> = layers.iter().collect();
        let mut painted = Vec::new();
        paint(&layers, 0, end, &mut painted);
        prop_assert_eq!(merge(&layers, end).unwrap().iter().collect::<Vec<_>>(), painted);
    }

    #[test]
    fn every_sector_is_that_of_the_topmost_layer(layers in vec(index(), 1..8)) {
        let layers: Vec<&Index> = layers.iter().collect();
        let merged = merge(&layers, u64::MAX).unwrap();
        for sector in 0..SECTORS {
            let at = |index: &Index| index.get(index.find(sector)).and_then(|mapping| mapping.clip(sector, sector + 1));
            let expected = layers.iter().enumerate().rev()
                .find_map(|(tag, index)| at(index).map(|mapping| Mapping { tag: tag as u8, ..mapping }));
            prop_assert_eq!(at(&merged), expected, "sector {}", sector);
        }
    }
}

#[test]
fn as_many_layers_as_a_byte_can_tell_apart() {
    let layers: Vec<Index> = (0..=MAXIMUM_LAYERS as u64)
        .map(|number| {
            let mut builder = IndexBuilder::default();
            builder.push(Mapping { offset: number, length: 2, stored: 8, zeroed: false, tag: 0 }).unwrap();
            builder.finish()
        })
        .collect();
    let layers: Vec<&Index> = layers.iter().collect();
    let merged = merge(&layers[..MAXIMUM_LAYERS], u64::MAX).unwrap();
    let tags: Vec<u8> = merged.iter().map(|mapping| mapping.tag).collect();
    assert_eq!(tags, (0..=254).collect::<Vec<u8>>());
    let refused = merge(&layers, u64::MAX);
    assert!(refused.as_ref().is_err_and(|reason| reason.contains("256 layers")), "{refused:?}");
}

#[test]
fn nothing_over_or_under_something_changes_nothing() {
    let mut builder = IndexBuilder::default();
    builder.push(Mapping { offset: 5, length: 5, stored: 8, zeroed: false, tag: 0 }).unwrap();
    let (some, none) = (builder.finish(), Index::default());
    assert_eq!(merge(&[&some, &none, &none], u64::MAX).unwrap(), some);
    assert!(merge(&[], 10).unwrap().is_empty());
    let above = merge(&[&none, &some], u64::MAX).unwrap();
    assert_eq!(above.get(0), Some(Mapping { offset: 5, length: 5, stored: 8, zeroed: false, tag: 1 }));
}
